"""What the simulator says of two machines with a link between them, against what they then do, on three links.

Two network namespaces are the machines, each with a core of its own. One joins the other as by `squall join`, they are
measured as by `squall measure --cluster`, and train what was simulated on what that has found.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager

import squall
from benchmarks.forecast import Found, compare, found, predicted
from benchmarks.machines import address, joined, on_both, trained
from benchmarks.namespaces import Link, linked
from benchmarks.results import Section
from benchmarks.squall_training import training_task
from benchmarks.workloads import Workload, speech_mlp
from squall.sim.cluster.model import Cluster
from squall.survey.measured import measure_cluster
from squall.survey.survey import surveying
from squall.usercode.sources import Sources

RATES = {"100mbit": 40.0, "300mbit": 20.0, "1gbit": 10.0}  # and seconds of a run
MEASURED_S, JOIN_S = 12.0, 60.0


def measure(repeats: int = 3) -> Section:
    print("forecast of links", flush=True)
    section = Section(
        "Forecasts of links",
        "The network of the throughput benchmark on two machines with a replica and a shard each: two network"
        " namespaces with a core each, and a link between them (tbf, both ways). Simulated on a cluster file that was"
        " measured there just before, as by `squall measure --cluster`, and as it then ran. Ratio: simulated / real,"
        " the median of the rounds.",
    )
    workload = speech_mlp()
    with _one_core():
        for rate, seconds in RATES.items():
            with linked(rate) as link:
                _compare(section, rate, link, workload, seconds, repeats)
    return section


def _compare(section: Section, rate: str, link: Link, workload: Workload, seconds: float, repeats: int) -> None:
    said: dict[str, list[Found]] = defaultdict(list)
    done: dict[str, list[Found]] = defaultdict(list)
    for _ in range(repeats):
        cluster = measured(link, workload)
        for name, strategy in strategies(workload).items():
            said[name].append(predicted(workload, strategy, cluster, seconds=seconds))
            done[name].append(trained(link, workload, strategy, seconds, found))
            print(f"  {rate}, {name}: {said[name][-1]} said, {done[name][-1]}", flush=True)
    compare(section, said, done, f"{rate}, ")


def strategies(workload: Workload) -> dict[str, squall.Strategy]:
    return {
        "every step": on_both(workload), "overlap": on_both(workload, overlap=True),
        "every 8 steps": on_both(workload, exchange_every=8),
        "every 8 steps, overlap": on_both(workload, exchange_every=8, overlap=True),
        "synchronous": squall.Synchronous(replicas=2, shards=2, optimizer=on_both(workload).optimizer),
    }  # fmt: skip


def measured(link: Link, workload: Workload) -> Cluster:
    """Both sides of the link, and the link."""
    settings = squall.Settings(machines=2, listen=address(link))
    code = {"task": training_task(workload), "strategy": on_both(workload)}
    message = {"sources": Sources.now(), "threads": 1, "busy": True}
    with joined(link), surveying(settings, code, message) as survey:
        cluster = measure_cluster(survey, JOIN_S, MEASURED_S, "cluster").cluster
    print(cluster.to_toml(), flush=True)
    return cluster


@contextmanager
def _one_core() -> Iterator[None]:
    """This process has one, and what joins it the others."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {min(before)})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


if __name__ == "__main__":
    print(measure().markdown())
