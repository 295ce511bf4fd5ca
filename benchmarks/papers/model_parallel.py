"""Dean et al., NIPS 2012, figure 3: what a mini-batch gains from a model on several machines, by the simulator.

What the paper does not say is assumed here, and told on the page: the batch, what a core computes, the geometry of the
image network, and how unequal machines are.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall
from benchmarks.papers.page import new_figure, write
from squall.sim.cluster.jitter import LogNormal
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import Link, MachineKind
from squall.sim.cluster.simulate import simulate
from squall.sim.cluster.split_step import ParallelStep

BATCH, BATCHES = 100, 300  # examples of a mini-batch; and how many are simulated
SIGMA = 0.1  # of the log-normal law of a machine's time
FLOPS = 6  # of a weight that is used once: two forward, four backward
NOTHING = ((10**12, 1e-12),)
MACHINES = (1, 2, 4, 8, 16, 32, 64)
GRIDS = (1, 4, 9, 16, 25, 36, 49, 64, 81, 100, 144)


@dataclass(frozen=True)
class Era:
    """Machines and links: operations a second, bytes a second, and seconds of a message (network, and code)."""

    name: str
    flops: float
    interface: float
    latency_s: float
    send_s: float


ERAS = (
    Era("2012, 10 GFLOP/s a core", 20 * 10e9, 125e6, 100e-6, 50e-6),
    Era("2012, 5 GFLOP/s a core", 20 * 5e9, 125e6, 100e-6, 50e-6),
    Era("today", 2e12, 12.5e9, 20e-6, 20e-6),
    Era("today, 10 Gbit/s", 2e12, 1.25e9, 50e-6, 20e-6),
)


@dataclass(frozen=True)
class Network:
    """Weights that each example uses once, and what a part receives of a batch when so many share the work."""

    weights: float
    waits: Callable[[int], list[tuple[float, int]]]  # parts -> (elements, messages), each time that all wait
    tried: tuple[int, ...]


# ---------------------------------------------------------------- the two networks

SPEECH = (440, 2560, 2560, 2560, 2560, 8192)


def _speech_waits(parts: int) -> list[tuple[float, int]]:
    """Each machine has a part of every layer: it needs what the others have of the layer below, and gives as much back.

    The softmax needs one sum an example.
    """
    sizes = [*(2 * SPEECH[1:-1]), 1]
    return [((parts - 1) / parts * size * BATCH, parts - 1) for size in sizes]


STAGES = ((100, 8), (50, 24), (25, 36))  # side of a stage's filters' grid, and maps of it
PATCH, CLASSES = 10, 21_000


def _image_waits(parts: int) -> list[tuple[float, int]]:
    """A grid of machines, each with a square of every stage: a filter at its edge looks into the squares around it.

    The classifier sums what each has of the features, and gives the gradient of its outputs back.
    """
    across = math.isqrt(parts)
    halos = []
    for side, maps in STAGES:
        own = side / across
        seen = min(own + PATCH - 1, side)
        halos.append((maps * (seen**2 - own**2) * BATCH, min(8, parts - 1)))
    sums = ((parts - 1) / parts * CLASSES * BATCH, parts - 1)
    return [*halos, *halos, sums, sums]


NETWORKS = {
    "speech, 42 M": Network(sum(a * b for a, b in pairwise(SPEECH)), _speech_waits, MACHINES),
    "images, 1.7 G": Network(1.7e9, _image_waits, GRIDS),
}
CLAIMED = {"speech, 42 M": (8, "2.2"), "images, 1.7 G": (81, "more than 12")}

# ---------------------------------------------------------------- what the simulator says


def measure() -> None:
    gains = {
        (name, era): {n: _batch_s(network, era, 1) / _batch_s(network, era, n) for n in network.tried}
        for name, network in NETWORKS.items()
        for era in ERAS
    }
    one_s = _batch_s(NETWORKS["speech, 42 M"], ERAS[1], 1)
    at_once = {n: one_s / _batch_s(NETWORKS["speech, 42 M"], ERAS[1], n, at_once=True) for n in (8, 64)}
    figure = new_figure()
    for axes, name in zip(figure.subplots(1, 2), NETWORKS):
        for era in ERAS:
            axes.plot(*zip(*gains[name, era].items()), marker=".", label=era.name)
        axes.plot(CLAIMED[name][0], float(CLAIMED[name][1].split()[-1]), "k*", label="the paper")
        ticks = NETWORKS[name].tried[:: 1 if name == "speech, 42 M" else 2]
        axes.set(xlabel="machines", title=f"speed-up, {name}", xscale="log", xticks=ticks)
        axes.set_xticklabels([str(tick) for tick in ticks])
        axes.minorticks_off()
        axes.set_ylim(bottom=0)
    axes.legend(frameon=False, fontsize=7)
    rows = []
    for (name, era), found in gains.items():
        most = max(found, key=lambda n: found[n])
        at = CLAIMED[name][0]
        rows.append([name, era.name, f"{found[at]:.1f} on {at}", f"{found[most]:.1f} on {most}", _all(found)])
    columns = ["network", "machines and links", "speed-up", "the most", "machines: speed-up"]
    title = "Models on several machines"
    write("model_parallel", title, figure, columns, rows, _text(gains, at_once))


def _all(found: dict[int, float]) -> str:
    return ", ".join(f"{n}: {gain:.1f}" for n, gain in found.items())


def _batch_s(network: Network, era: Era, parts: int, at_once: bool = False) -> float:
    """`at_once`: a machine's messages cost as much time as one."""
    waits = [(size, 1 if at_once else messages) for size, messages in network.waits(parts)] if parts > 1 else []
    split = ParallelStep(shares=(1 / parts,) * parts, waits=tuple(waits))
    machine = MachineKind(
        name="machine", count=parts, step_s=FLOPS * network.weights * BATCH / era.flops, jitter=LogNormal(SIGMA),
        exchange=NOTHING, send=((1, era.send_s),), interface=era.interface,
    )  # fmt: skip
    between = Link(latency_s=era.latency_s)
    cluster = Cluster(machines=(machine,), between=between, split=split if parts > 1 else None)
    seldom = squall.Downpour(replicas=1, push_every=BATCHES, fetch_every=BATCHES)  # the paper times the batches alone
    settings = squall.Settings(snapshot_every_s=None, threads=1, parts=parts)
    return simulate(_stand_in, seldom, cluster, gradients="none", epochs=1, settings=settings).training_s / BATCHES


def _stand_in() -> squall.Task:
    """Batches of nothing: the cluster says what they take."""
    data = TensorDataset(torch.zeros(BATCHES, 1))
    return squall.Task(model=nn.Linear(1, 1), loss=lambda m, b: m(b[0]).mean(), train=data, batch_size=1)


def _text(gains: dict[tuple[str, Era], dict[int, float]], at_once: dict[int, float]) -> str:
    ideal, slower, today, ten = ERAS
    lines, most = [], {key: max(found, key=found.__getitem__) for key, found in gains.items()}
    for name, (at, claimed) in CLAIMED.items():
        found = {era: f"{gains[name, era][at]:.1f}" for era in ERAS}
        lines.append(
            f"{name} on {at} machines: the paper {claimed} times; here {found[ideal]} with machines of 2012 at"
            f" 10 GFLOP/s a core, {found[slower]} at 5, {found[today]} with those of today, {found[ten]} with 10 Gbit/s"
            " between them"
        )
    speech, images = ([f"{most[name, era]} ({era.name})" for era in ERAS] for name in NETWORKS)
    return f"""
The time of a mini-batch of one replica on one machine, by that on several; nothing is exchanged with shards. Assumed,
because the paper does not say it: batches of {BATCH}, {FLOPS} operations for each weight and example, all shared out
equally, and a log-normal time of each machine (sigma {SIGMA}), of which the slowest counts. Machines of 2012 have 20
cores (the paper's most) of 10 or 5 GFLOP/s, and 1 Gbit/s with {ideal.latency_s * 1e6:.0f} us; those of today compute
{today.flops / 1e12:g} TFLOP/s and have 100 Gbit/s with {today.latency_s * 1e6:.0f} us, or 10 Gbit/s with
{ten.latency_s * 1e6:.0f} us. A message costs {ideal.send_s * 1e6:.0f} us of code, today {today.send_s * 1e6:.0f} us,
and a machine's messages come one after the other, which is assumed as well.
The speech network is {"-".join(map(str, SPEECH))}, every layer in equal parts on all machines, so each needs the whole
layer below from the others. The image network's geometry is made up: locally connected stages of
{", ".join(f"{side} x {side} with {maps} maps" for side, maps in STAGES)} on a square grid of machines, patches of
{PATCH} x {PATCH}, and {CLASSES:,} classifiers; of its weights only their number is the paper's.

{". ".join(lines)}.
The most is gained by the speech network on {", ".join(speech)} machines, in the paper on 8; by the image network on
{", ".join(images)} of those tried, while the paper's largest figure is of 81.
That the speech network becomes slower again comes of messages one after the other: if all of a machine's cost as much
time as one, it gains, at 5 GFLOP/s, {at_once[8]:.1f} times on 8 machines and {at_once[64]:.1f} on 64.
What decides is how long a machine computes for each byte that it is sent. With 5 GFLOP/s a core the speech network
gains what the paper says, and with 10 the image network does; with this geometry no one figure gives both. On faster
machines the same network gains less, unless the links become faster by as much.
The speech network was trained as well, in one process and in two on the two cores of one machine, beside the
simulator's forecast from a measurement of that machine: `benchmarks/RESULTS.md`, Forecasts of parts, by
`python -m benchmarks forecast-parts`.
"""
