"""Douillard et al., arXiv 2311.08105: hundreds of local steps cost little, and so do half of the outer gradients."""

from __future__ import annotations

import dataclasses
import math
from functools import cache, partial
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import torch
from msgspec.structs import replace

import squall
from benchmarks.papers.page import new_figure, spread, write
from benchmarks.papers.virtual import Outcome, train

REPLICAS = 4
STEPS = 1500  # of each replica
INNER_STEPS = (10, 50, 100, 500)
SEEDS = (0, 1, 2)
BATCH = 8
LR = 0.003
INNER = partial(torch.optim.AdamW, lr=LR)


KINDS: dict[str, dict[str, Any]] = {
    "outer rate 0.7, momentum 0.9": {"heard": REPLICAS},
    "outer rate 1, no momentum": {"heard": REPLICAS, "outer_lr": 1.0, "outer_momentum": 0.0},
    "0.7, 0.9, half dropped": {"heard": REPLICAS // 2},
}
DROPPED_AT = (50, 500)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Heard(squall.DiLoCo):
    """A round takes the first `heard` pushes, and the others come to nothing.

    Also with all of them heard leases are whole pushes then, so that no short round is left at the end: it would move
    the weights by as much outer momentum as a full one.
    """

    heard: int

    def recipe(self) -> squall.Recipe:
        recipe = super().recipe()
        exchanges = recipe.loop.exchanges
        rules = replace(exchanges.rules, quorum=self.heard, late="drop")
        work = dataclasses.replace(recipe.loop, exchanges=replace(exchanges, rules=rules))
        return dataclasses.replace(recipe, work=work)


def measure() -> None:
    together = [_run(squall.Synchronous(replicas=REPLICAS, optimizer=INNER), seed) for seed in SEEDS]
    found = {
        (kind, h): [_diloco(kind, h, seed) for seed in SEEDS]
        for kind in KINDS
        for h in (DROPPED_AT if "dropped" in kind else INNER_STEPS)
    }
    figure = new_figure()
    axes = figure.subplots()
    for kind in KINDS:
        steps = [h for k, h in found if k == kind]
        values = [[_bits(o) for o in found[kind, h]] for h in steps]
        means = [sum(v) / len(v) for v in values]
        bars = [[m - min(v) for m, v in zip(means, values)], [max(v) - m for m, v in zip(means, values)]]
        axes.errorbar(steps, means, yerr=bars, marker="o", capsize=3, label=kind)
    axes.axhline(sum(map(_bits, together)) / len(SEEDS), color="0.5", ls="--", label="synchronous")
    axes.set(xlabel="inner steps", ylabel="held-out bits per byte", xscale="log", xticks=INNER_STEPS)
    axes.set_xticklabels([str(h) for h in INNER_STEPS])
    axes.minorticks_off()
    axes.legend(frameon=False)
    rows = [["-", "synchronous", *_figures(together, together)]]
    rows += [[str(h), kind, *_figures(outcomes, together)] for (kind, h), outcomes in found.items()]
    paper, plain, dropped = KINDS
    shares = [_dropped(o) for kind, h in found if kind == dropped for o in found[kind, h]]
    costs = ", ".join(f"{_more(found[dropped, h], found[paper, h]):+.1f} % at {h}" for h in DROPPED_AT)
    longer = {kind: f"{_more(found[kind, 500], found[kind, 50]):+.1f} %" for kind in (paper, plain)}
    text = f"""
Bytes of Python's standard library, a transformer of one layer (width 32, context 32), batches of {BATCH}, AdamW inside
everywhere, at a constant rate of {LR}; {REPLICAS} replicas of {STEPS} steps from random weights, so
{STEPS // 500} rounds of 500. The paper's 500 steps match synchronous training, 1000 cost 2.9 % of perplexity against
50, and half of the outer gradients dropped cost 2.1 %: after pretraining, and in over a hundred rounds. Here, in
perplexity of a byte, 500 steps against 50 cost {longer[paper]} with the paper's outer optimizer and {longer[plain]}
with plain averages. Dropped was {min(shares):.0f} to {max(shares):.0f} % of what was computed; for as much computed,
that costs {costs} inner steps. (The last round drops nothing, which with few rounds tells.) What is dropped differs:
in the paper a random half, whose replicas go on from their own weights; here the later half, which start again from
the shards', and whose data others train.
"""
    columns = ["inner steps", "outer", "updates", "exchanged, MB", "bits per byte", "perplexity, % above synchronous"]
    write("local_steps", "Hundreds of local steps", figure, columns, rows, text)


def _figures(outcomes: list[Outcome], against: list[Outcome]) -> list[str]:
    moved = sum(o.summary.exchanged_bytes for o in outcomes) / len(outcomes)
    above = [_above(o, a) for o, a in zip(outcomes, against)]
    return [str(outcomes[0].summary.updates), f"{moved / 1e6:,.1f}", spread([*map(_bits, outcomes)], 3), spread(above)]


def _more(outcomes: list[Outcome], against: list[Outcome]) -> float:
    return sum(map(_above, outcomes, against)) / len(outcomes)


def _above(ours: Outcome, theirs: Outcome) -> float:
    """How much higher the perplexity is, in percent."""
    return 100 * (2 ** (_bits(ours) - _bits(theirs)) - 1)


def _bits(outcome: Outcome) -> float:
    return outcome.curve[-1][2]


def _dropped(outcome: Outcome) -> float:
    """Percent of what was computed."""
    return 100 * (1 - outcome.summary.examples / BATCH / outcome.computed)


def _diloco(kind: str, inner_steps: int, seed: int) -> Outcome:
    strategy = Heard(replicas=REPLICAS, inner_steps=inner_steps, optimizer=INNER, **KINDS[kind])
    # With half of the pushes dropped, half of the data lasts for as many rounds, and as much is computed.
    return _run(strategy, seed, STEPS * strategy.heard)


def _run(strategy: squall.Strategy, seed: int, batches: int = STEPS * REPLICAS) -> Outcome:
    task = partial(_task, batches)
    return train(strategy, task=task, epochs=1, seed=seed, step_s=lambda chance: chance.lognormvariate(0, 0.25))


@cache
def _example() -> Any:
    """The language model of examples/, in a smaller size."""
    spec = spec_from_file_location("stdlib_lm", Path(__file__).parents[2] / "examples" / "stdlib_lm.py")
    assert spec is not None
    assert spec.loader is not None
    module: Any = module_from_spec(spec)
    spec.loader.exec_module(module)
    module.CONTEXT, module.WIDTH, module.HEADS, module.LAYERS, module.DROPOUT = 32, 32, 1, 1, 0.0
    return module


@cache
def _text(held_out: bool) -> Any:
    return _example().source(held_out)


def _task(batches: int) -> squall.Task:
    """For a run in which so many batches count: each window is seen once."""
    lm = _example()
    return squall.Task(
        model=lm.Transformer(),
        loss=lambda model, batch: lm.nats(model, batch).mean(),
        train=lm.windows(_text(held_out=False), batches * BATCH),
        validate=lm.windows(_text(held_out=True), 1000),
        batch_size=BATCH,
        metrics={"bits_per_byte": lambda model, batch: lm.nats(model, batch).mean(1) / math.log(2)},
        clip_norm=1.0,
    )
