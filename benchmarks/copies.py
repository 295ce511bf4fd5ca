"""What two copies of each shard cost: on one machine the time of an exchange, between two the bytes on their link."""

from __future__ import annotations

import statistics
import tempfile
from functools import partial
from pathlib import Path
from typing import NamedTuple

import squall
from benchmarks.links import RATE
from benchmarks.machines import address, joined, on_both
from benchmarks.namespaces import Link, linked
from benchmarks.peers.common import OptimizerName
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_exchange import exchange_seconds
from benchmarks.squall_training import training_task
from benchmarks.workloads import Workload, speech_mlp
from squall.report.words import size

SIZES = {1_000_000: 300, 10_000_000: 40}  # elements -> repeats
TIME_BOUND, BYTES_BOUND = 1.25, 1.03
SECONDS = 20.0
HEADERS = 66  # bytes of a packet: Ethernet, IP, and TCP with its time stamps


def measure(repeats: int = 5) -> Section:
    section = Section(
        "Two copies of each shard",
        "On one machine: the exchange of above with a backup of the shard, which makes the same update meanwhile,"
        " against one without; its replica waits meanwhile. Between two: bytes on the link of 1 Gbit/s in a whole run,"
        " without headers of TCP and below, against those of its pushes and fetches, those that go on to"
        " backups, the state that each backup gets at first, and the snapshot at the end. Two replicas, two shards,"
        " 7.2 M parameters.",
    )
    optimizers: tuple[OptimizerName, ...] = ("sgd", "adagrad")
    for optimizer in optimizers:
        for elements, count in SIZES.items():
            _exchange(section, elements, optimizer, count, repeats)
    with linked(RATE) as link:
        for copies in (1, 2):
            _between(section, link, speech_mlp(), copies)
    return section


def _exchange(section: Section, elements: int, optimizer: OptimizerName, count: int, repeats: int) -> None:
    print(f"copies, {elements:,} elements, {optimizer}", flush=True)
    ours = partial(exchange_seconds, elements, optimizer, count)
    found = rounds({"two": partial(ours, copied=True), "one": ours}, repeats)
    figure, against = (f"{statistics.median(found[name]) * 1e3:.3g} ms" for name in ("two", "one"))
    ratio = median_ratio(found["two"], found["one"])
    section.at_most(f"{elements:,} elements, {optimizer}", figure, f"one copy {against}", ratio, TIME_BOUND)


class _Bytes(NamedTuple):
    sent: int  # by both machines
    counted: int


def _between(section: Section, link: Link, workload: Workload, copies: int) -> None:
    print(f"copies, 1 Gbit/s, {copies}", flush=True)
    found = _bytes(link, workload, copies)
    what = f"1 Gbit/s, {copies} {'copies' if copies > 1 else 'copy'}"
    section.at_most(what, size(found.sent), size(found.counted), found.sent / found.counted, BYTES_BOUND)


def _bytes(link: Link, workload: Workload, copies: int) -> _Bytes:
    settings = squall.Settings(
        threads=1, seconds=SECONDS, snapshot_every_s=None, progress=False, machines=2,
        listen=address(link), lost_after_s=30.0, copies=copies,
    )  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder, joined(link):
        before = _payload(link)
        run = squall.fit(training_task(workload), on_both(workload), run_dir=Path(folder) / "run", settings=settings)
        sent = _payload(link) - before
        counted = sum(there for there, _ in run.summary().machines.values())
    vector = 4 * sum(parameter.numel() for parameter in workload.model().parameters())
    return _Bytes(
        sent, counted + (copies - 1) * vector + vector // 2
    )  # the last: shard 1's file of the snapshot at the end


def _payload(link: Link) -> int:
    return sum(link.sent_bytes(side) - HEADERS * link.sent_packets(side) for side in (0, 1))


if __name__ == "__main__":
    print(measure().markdown())
