"""Chen et al., arXiv 1604.00981: a few backup replicas make a synchronous round short where delays have a long tail."""

from __future__ import annotations

from functools import partial

import torch

import squall
from benchmarks.papers.page import new_figure, spread, write
from benchmarks.papers.virtual import Outcome, train

REPLICAS = 20
BACKUPS = (0, 1, 2, 4, 6)
SEEDS = (0, 1, 2)
TARGET = 0.95
EPOCHS = 40
LR = 0.5


def measure() -> None:
    found = {b: [_run(b, seed) for seed in SEEDS] for b in BACKUPS}
    rounds = {b: [o.summary.training_s / (o.summary.updates or 1) for o in found[b]] for b in BACKUPS}
    reached = {b: [o.to(TARGET) for o in found[b]] for b in BACKUPS}
    times = {b: [r[0] for r in reached[b] if r is not None] for b in BACKUPS}
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for axes, values, label in ((left, rounds, "time of a round"), (right, times, "time to 95 %")):
        axes.plot(BACKUPS, [sum(values[b]) / max(1, len(values[b])) for b in BACKUPS], marker="o")
        axes.set(xlabel="backup replicas", title=label, xticks=BACKUPS)
        axes.set_ylim(bottom=0)
    rows = [
        [str(b), spread(rounds[b], 2), spread(times[b], 0) if len(times[b]) == len(SEEDS) else "not all"]
        for b in BACKUPS
    ]
    means = {b: sum(times[b]) / len(times[b]) for b in BACKUPS if len(times[b]) == len(SEEDS)}
    best = min(means, key=lambda b: means[b])
    text = f"""
{REPLICAS} replicas in all, SGD with rate {LR}; a step takes a Pareto time (shape 1.5, at least 1 s), so that one of
twenty is usually several times slower than the median. Without backup replicas a round lasts as long as the slowest.
The paper finds the best number of backups small and above 0; here {best} of {REPLICAS} reach 95 % first.
"""
    write("backup", "Backup replicas", figure, ["backup replicas", "time of a round, s", "time to 95 %, s"], rows, text)


def _run(backup: int, seed: int) -> Outcome:
    strategy = squall.Synchronous(replicas=REPLICAS, backup=backup, optimizer=partial(torch.optim.SGD, lr=LR))
    return train(strategy, epochs=EPOCHS, seed=seed, step_s=lambda chance: chance.paretovariate(1.5))
