"""Training on two machines with a link of 1 Gbit/s between them: samples a second, against peers on the same link."""

from __future__ import annotations

import dataclasses
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import squall
from benchmarks.links import RATE
from benchmarks.namespaces import Link, linked
from benchmarks.peers import ddp, ray_actor, rpc
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_training import STEADY_AFTER_S, downpour, steady, training_task
from benchmarks.workloads import Workload, speech_mlp

SECONDS = 8.0
PORT = 7700  # nothing else is in the namespace
JOINS_WITHIN_S = 60.0
BOUNDS = {"squall": 0.9, "squall, overlap": 1.0, "squall, every 8": 3.5, "squall, every 8, overlap": 6.0}


def measure(repeats: int = 3) -> Section:
    print("machines", flush=True)
    workload = speech_mlp()
    section = Section(
        "Training on two machines",
        "Samples a second of two replicas, 7.2 M parameters, SGD, batch 64, one thread each; two network namespaces of"
        " this machine with a link of 1 Gbit/s (tbf, both ways). Squall: a replica and a shard on each. DDP on Gloo: a"
        " replica on each; both move 28.9 MB each way in a step that exchanges. Torch RPC and Ray: a server and a"
        " replica on one, a replica on the other, so that half of the replicas never use the link.",
    )
    with linked(RATE) as link:
        _compare(section, link, workload, repeats)
    return section


def _compare(section: Section, link: Link, workload: Workload, repeats: int) -> None:
    strategies = {
        "squall": _downpour(workload), "squall, overlap": _downpour(workload, overlap=True),
        "squall, every 8": _downpour(workload, exchange_every=8),
        "squall, every 8, overlap": _downpour(workload, exchange_every=8, overlap=True),
    }  # fmt: skip
    measures: dict[str, Callable[[], float]] = {
        "DDP on Gloo": partial(ddp.samples_per_second, workload, 2, SECONDS, link=link),
        **{name: partial(samples_per_second, link, workload, each) for name, each in strategies.items()},
        "torch RPC": partial(rpc.samples_per_second, workload, 2, SECONDS, link=link),
        "Ray actor": partial(ray_actor.samples_per_second, workload, 2, SECONDS, link=link),
    }
    found = rounds(measures, repeats)
    for name, bound in BOUNDS.items():
        ratio = median_ratio(found[name], found["DDP on Gloo"])
        section.at_least(name, _rate(found[name]), f"DDP on Gloo {_rate(found['DDP on Gloo'])}", ratio, bound)
    for name in ("torch RPC", "Ray actor"):
        section.only(name, _rate(found[name]) if name in found else "not measured")


def samples_per_second(link: Link, workload: Workload, strategy: squall.Strategy) -> float:
    """Of both replicas once the run is steady."""
    settings = squall.Settings(
        threads=1, seconds=SECONDS + STEADY_AFTER_S, snapshot_every_s=None, progress=False, machines=2,
        listen=f"{link.hosts[0]}:{PORT}", lost_after_s=30.0,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        directory = Path(folder) / "run"
        joiner = threading.Thread(target=_join, args=(link, directory / "token"))
        joiner.start()
        with link.inside(0):
            run = squall.fit(training_task(workload), strategy, run_dir=directory, settings=settings)
        joiner.join()
        return steady(run)


def _join(link: Link, token: Path) -> None:
    deadline = time.monotonic() + JOINS_WITHIN_S
    while not token.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    address = f"{link.hosts[0]}:{PORT}"
    with link.inside(1):
        subprocess.run([sys.executable, "-m", "squall", "join", address, "--token-file", str(token)], check=True)


def _downpour(workload: Workload, exchange_every: int = 1, overlap: bool = False) -> squall.Downpour:
    return dataclasses.replace(downpour(workload, 2, exchange_every, overlap), shards=2)


def _rate(values: list[float]) -> str:
    return f"{statistics.median(values):,.0f}/s"


if __name__ == "__main__":
    print(measure().markdown())
