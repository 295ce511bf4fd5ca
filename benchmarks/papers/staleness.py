"""Zhang et al., arXiv 1511.05950: a learning rate divided by staleness lets many replicas end where one does."""

from __future__ import annotations

from functools import partial

import torch

import squall
from benchmarks.papers.page import new_figure, spread, write
from benchmarks.papers.virtual import Outcome, train

REPLICAS = (1, 4, 15, 30)
SEEDS = (0, 1, 2)
EPOCHS = 30
LR = 0.3
MODES = {"ignore": "rate as it is", "scale": "rate / staleness"}


def measure() -> None:
    found = {(mode, n): [_run(mode, n, seed) for seed in SEEDS] for mode in MODES for n in REPLICAS}
    figure = new_figure()
    axes = figure.subplots()
    for mode, label in MODES.items():
        errors = [[o.error() for o in found[mode, n]] for n in REPLICAS]
        means = [sum(e) / len(e) for e in errors]
        bars = [[m - min(e) for m, e in zip(means, errors)], [max(e) - m for m, e in zip(means, errors)]]
        axes.errorbar(REPLICAS, means, yerr=bars, marker="o", capsize=3, label=label)
    axes.set(xlabel="replicas", ylabel="test error, %", xticks=REPLICAS, yscale="log")
    axes.legend(frameon=False)
    rows = [
        [str(n), *(spread([o.error() for o in found[mode, n]]) for mode in MODES), _staleness(found["scale", n])]
        for n in REPLICAS
    ]
    mean = {key: sum(o.error() for o in outcomes) / len(outcomes) for key, outcomes in found.items()}
    lost = " and ".join(str(n) for n in REPLICAS if mean["ignore", n] > 80)
    above = ", ".join(f"{mean['scale', n] - mean['scale', 1]:.1f} with {n}" for n in REPLICAS[1:])
    text = f"""
Error after {EPOCHS} epochs with SGD, rate {LR}. The paper has all settings up to 30 learners at the single learner's
error with rate / staleness, and 15 and 30 at chance without it; mean staleness about the number of learners. Here
{lost} replicas are at chance without it; with it the error is higher than one replica's by {above} points.
"""
    columns = ["replicas", *(f"error, {label}" for label in MODES.values()), "mean staleness"]
    write("staleness", "Rate divided by staleness", figure, columns, rows, text)


def _run(mode: str, replicas: int, seed: int) -> Outcome:
    strategy = squall.AsynchronousSGD(replicas=replicas, staleness=mode, optimizer=partial(torch.optim.SGD, lr=LR))  # type: ignore[arg-type]
    return train(strategy, epochs=EPOCHS, seed=seed, step_s=lambda chance: chance.lognormvariate(0, 0.25))


def _staleness(outcomes: list[Outcome]) -> str:
    return spread([o.summary.staleness_mean or 0.0 for o in outcomes])
