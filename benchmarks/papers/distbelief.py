"""Dean et al., NIPS 2012: Downpour with Adagrad arrives at any number of replicas; with a fixed rate often never."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

import squall
from benchmarks.papers.page import new_figure, spread, write
from benchmarks.papers.virtual import Outcome, train

REPLICAS = (1, 4, 16, 64)
SEEDS = (0, 1, 2)
TARGET = 0.97
EPOCHS = 30
WARM_START = 720  # examples, half an epoch
RATES = {"fixed rate": (0.03, 0.1, 0.3, 1.0), "Adagrad": (0.003, 0.01, 0.03, 0.1)}
Key = tuple[str, int, int]  # optimizer, examples of warm start, replicas
METHODS = [(name, warm) for name in RATES for warm in (0, WARM_START)]
OPTIMIZERS: dict[str, Any] = {"fixed rate": torch.optim.SGD, "Adagrad": torch.optim.Adagrad}


def measure() -> None:
    rates = {name: _best_rate(name) for name in RATES}
    found: dict[Key, list[Outcome]] = {
        (name, warm, n): [_run(name, rates[name], n, seed, warm) for seed in SEEDS]
        for name, warm in METHODS
        for n in REPLICAS
        if n > 1 or not warm
    }
    times = {key: [r[0] for o in outcomes if (r := o.to(TARGET))] for key, outcomes in found.items()}
    updates = {key: [r[1] / 16 for o in outcomes if (r := o.to(TARGET))] for key, outcomes in found.items()}
    met = {key: len(arrived) == len(SEEDS) for key, arrived in times.items()}
    figure = new_figure()
    left, right = figure.subplots(1, 2)
    for axes, values, label in ((left, times, "time to 97 %, virtual s"), (right, updates, "updates to 97 %")):
        for name, warm in METHODS:
            points = [(n, sum(values[k]) / len(SEEDS)) for n in REPLICAS if met.get(k := (name, warm, n))]
            axes.plot(*zip(*points), marker="o", ls="--" if warm else "-", label=_label(name, warm))
        axes.set(xlabel="replicas", title=label, xscale="log", yscale="log", xticks=REPLICAS)
        axes.set_xticklabels([str(n) for n in REPLICAS])
        axes.minorticks_off()
    right.legend(frameon=False, fontsize=8)
    rows = [
        [
            str(n),
            _label(name, warm),
            f"{len(times[name, warm, n])} of {len(SEEDS)}",
            *(spread(v[name, warm, n], 0) if v[name, warm, n] else "-" for v in (updates, times)),
        ]
        for name, warm, n in sorted(found, key=lambda key: key[2])
    ]
    late = {method: [n for n in REPLICAS if not met.get((*method, n), True)] for method in METHODS}
    lost = "; ".join(f"{_label(*method)}: {', '.join(map(str, ns))}" for method, ns in late.items() if ns)
    first = "; ".join(f"{n}: {_first(times, met, n)}" for n in REPLICAS)
    tried = {name: f"{rates[name]:g} (of {', '.join(f'{rate:g}' for rate in RATES[name])})" for name in RATES}
    text = f"""
squall.Downpour for at most {EPOCHS} epochs, with the rate that brings one replica to 97 % soonest, and none tuned again
for more: fixed {tried["fixed rate"]}, Adagrad {tried["Adagrad"]}.
In a warm start one replica trains {WARM_START} examples alone. A step takes a log-normal time (sigma 0.25).
In the paper a fixed rate often never arrives; Adagrad, at ten times the fixed rate, arrives first whatever the number
of machines. Here the best Adagrad rate is {rates["Adagrad"] / rates["fixed rate"]:.2g} times the fixed one.
Replicas with which not every seed arrives: {lost or "none"}.
First to 97 %, by replicas: {first}.
"""
    columns = ["replicas", "optimizer", "arrived", "updates to 97 %", "time to 97 %, virtual s"]
    write("distbelief", "Downpour with a fixed rate, Adagrad and a warm start", figure, columns, rows, text)


def _first(times: dict[Key, list[float]], met: dict[Key, bool], replicas: int) -> str:
    arrived = [key for key in times if met[key] and key[2] == replicas]
    return _label(*min(arrived, key=lambda key: sum(times[key]))[:2]) if arrived else "none"


def _label(name: str, warm: int) -> str:
    return f"{name}, warm start" if warm else name


def _best_rate(name: str) -> float:
    """The one with which one replica arrives after the fewest examples; a run that does not counts as all of them."""

    def examples(rate: float) -> int:
        arrived = [_run(name, rate, 1, seed, 0).to(TARGET) for seed in SEEDS]
        return sum(a[1] if a is not None else EPOCHS * 1437 for a in arrived)

    return min(RATES[name], key=examples)


def _run(name: str, rate: float, replicas: int, seed: int, warm: int) -> Outcome:
    strategy = squall.Downpour(replicas=replicas, warm_start=warm, optimizer=partial(OPTIMIZERS[name], lr=rate))
    return train(strategy, epochs=EPOCHS, seed=seed, step_s=lambda chance: chance.lognormvariate(0, 0.25))
