"""Training on two machines with a link of 1 Gbit/s between them: samples a second, against peers on the same link."""

from __future__ import annotations

import dataclasses
import os
import statistics
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TypeVar

import squall
from benchmarks.links import RATE
from benchmarks.namespaces import Link, linked
from benchmarks.peers import ddp, ray_actor, rpc
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import STEADY_AFTER_S, downpour, steady, training_task
from benchmarks.workloads import Workload, speech_mlp
from squall.launchers.joining.token import VARIABLE, Token

SECONDS = 8.0
PORT = 7700  # nothing else is in the namespace
JOINS_WITHIN_S = 60.0
Found = TypeVar("Found")
RARE = "squall, every 32, overlap"  # what both cores compute when hardly anything is exchanged
PLAIN = ", in plain text"  # as DDP's is
BOUNDS = {"squall": 0.9, "squall, overlap": 1.0, "squall, every 8": 3.5, "squall, every 8, overlap": 6.0}


def measure(repeats: int = 3) -> Section:
    print("machines", flush=True)
    workload = speech_mlp()
    section = Section(
        "Training on two machines",
        "Samples a second of two replicas, 7.2 M parameters, SGD, batch 64, one thread each; two network namespaces of"
        " this machine with a link of 1 Gbit/s (tbf, both ways). Squall: a replica and a shard on each. DDP on Gloo, in"
        " plain text: a replica on each; both move 28.9 MB each way in a step that exchanges. Torch RPC and Ray: a"
        " server and a replica on one, a replica on the other, so that half of the replicas never use the link.",
    )
    with linked(RATE) as link:
        _compare(section, link, workload, repeats)
    return section


def _compare(section: Section, link: Link, workload: Workload, repeats: int) -> None:
    strategies = {
        "squall": on_both(workload), "squall, overlap": on_both(workload, overlap=True),
        "squall, every 8": on_both(workload, exchange_every=8),
        "squall, every 8, overlap": on_both(workload, exchange_every=8, overlap=True),
    }  # fmt: skip
    measures: dict[str, Callable[[], float]] = {
        "DDP on Gloo": partial(ddp.samples_per_second, workload, 2, SECONDS, link=link),
        **{name: partial(samples_per_second, link, workload, each) for name, each in strategies.items()},
        RARE: partial(samples_per_second, link, workload, on_both(workload, exchange_every=32, overlap=True)),
        **{
            name + PLAIN: partial(samples_per_second, link, workload, each, plaintext=True)
            for name, each in strategies.items()
        },
        "torch RPC": partial(rpc.samples_per_second, workload, 2, SECONDS, link=link),
        "Ray actor": partial(ray_actor.samples_per_second, workload, 2, SECONDS, link=link),
    }
    found = rounds(measures, repeats)
    for name, bound in BOUNDS.items():
        ratio = median_ratio(found[name], found["DDP on Gloo"])
        section.at_least(name, _rate(found[name]), f"DDP on Gloo {_rate(found['DDP on Gloo'])}", ratio, bound)
    for name in (RARE, *(name + PLAIN for name in strategies), "torch RPC", "Ray actor"):
        section.only(name, _rate(found[name]) if name in found else "not measured")


def samples_per_second(link: Link, workload: Workload, strategy: squall.Strategy, plaintext: bool = False) -> float:
    """Of both replicas once the run is steady."""
    return trained(link, workload, strategy, SECONDS, steady, plaintext)


def trained(
    link: Link, workload: Workload, strategy: squall.Strategy, seconds: float, look: Callable[[squall.Run], Found],
    plaintext: bool = False,
) -> Found:  # fmt: skip
    """What is seen of a run of so many seconds on both sides of the link, and a second to warm up."""
    settings = squall.Settings(
        threads=1, seconds=seconds + STEADY_AFTER_S, snapshot_every_s=None, progress=False, machines=2,
        listen=address(link), lost_after_s=30.0, plaintext=plaintext,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder, joined(link):
        return look(squall.fit(training_task(workload), strategy, run_dir=Path(folder) / "run", settings=settings))


@contextmanager
def joined(link: Link) -> Iterator[None]:
    """In here this thread is on one side, and on the other `squall join` waits for what it starts, and ends with it."""
    token = Token.for_all().text()
    joiner = threading.Thread(target=_join, args=(link, token, os.sched_getaffinity(0)))
    joiner.start()
    os.environ[VARIABLE] = token
    try:
        with link.inside(0):
            yield
    finally:
        joiner.join()


def address(link: Link) -> str:
    return f"{link.hosts[0]}:{PORT}"


def _join(link: Link, token: str, cores: set[int]) -> None:
    """On the other cores, if it may have any."""
    os.sched_setaffinity(0, set(range(os.cpu_count() or 1)) - cores or cores)
    command = [sys.executable, "-m", "squall", "join", address(link), "--wait", str(JOINS_WITHIN_S)]
    with link.inside(1):
        subprocess.run(command, check=True, env={**os.environ, VARIABLE: token})


def on_both(workload: Workload, exchange_every: int = 1, overlap: bool = False) -> squall.Downpour:
    return dataclasses.replace(downpour(workload, 2, exchange_every, overlap), shards=2)


def _rate(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s"


if __name__ == "__main__":
    print(measure().markdown())
