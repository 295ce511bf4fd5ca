"""`squall measure --cluster`: machines and links as they were measured become a cluster that is simulated on."""

from __future__ import annotations

import math
import re
import statistics
from collections import Counter
from collections.abc import Mapping
from itertools import combinations
from typing import NamedTuple

from squall.errors import SquallError
from squall.launchers.head import tell
from squall.report.words import size
from squall.sim.cluster.jitter import Trace
from squall.sim.cluster.measure_steps import rounded
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import INTERFACE, Link, MachineKind
from squall.sim.cluster.units import write_time
from squall.survey.messages import MACHINE, Called, Measured, in_words
from squall.survey.survey import Survey

LINK_S = 1.0  # for each way
EXPLAINED = 0.7  # of the slower interface: a link that is slower is slow by itself

Ways = Mapping[tuple[int, int], Called]  # (from, to)


class MeasuredCluster(NamedTuple):
    cluster: Cluster
    machines: dict[int, Measured]  # in the order of the cluster's
    links: Ways

    def lines(self) -> list[tuple[str, str]]:
        """Each machine, and each pair of them."""
        found = []
        for (number, measured), kind in zip(self.machines.items(), self.cluster.machines):
            seen = f"a step {write_time(measured.step_s)}, memory {size(round(measured.memory))}/s copied by one core"
            others = f"other programs had {measured.others:.0%} of its cores"
            found.append((f"{number}: {kind.name}", f"{measured.cores} cores, {seen}; {others}"))
        for one, other in combinations(self.machines, 2):
            ways = (self.links[one, other], self.links[other, one])
            found.append((f"{one} - {other}", in_words(*ways)))
        return found


def measure_cluster(survey: Survey, wait_s: float, seconds: float, trace_stem: str) -> MeasuredCluster:
    """Of the machines that come within `wait_s`: all links, one by one, and all machines at once for so many seconds.

    In a run they compute at once as well, and some may be one computer.
    Raises `SquallError` if one does not come, is lost, or fails.
    """
    survey.gather(wait_s)
    if survey.refused or survey.missing:
        raise SquallError("; ".join(survey.refused) or f"{survey.missing}: {survey.remedy}")
    survey.clocks()
    links = survey.links(LINK_S)
    for (here, there), way in links.items():
        if way.why:
            raise SquallError(f"machine {there} is not reached from machine {here}: {way.why}; squall doctor --cluster")
    names = {number: machine.name for number, machine in survey.machines.items()}
    tell(f"measuring {len(names)} machines at once for about {seconds:g} s")
    cores = {number: max(1, machine.room.cores) for number, machine in survey.machines.items()}
    found = survey.ask(Measured, {n: {"kind": "measure", "cores": cores[n], "seconds": seconds} for n in cores})
    if survey.lost:
        raise SquallError(f"machines were lost: {', '.join(f'{n}: {name}' for n, name in survey.lost.items())}")
    roles = {number: machine.room.roles for number, machine in survey.machines.items()}
    return MeasuredCluster(cluster_of(found, links, names, roles, trace_stem), dict(sorted(found.items())), links)


def cluster_of(
    machines: Mapping[int, Measured], links: Ways, names: Mapping[int, str], roles: Mapping[int, tuple[str, ...]],
    trace_stem: str,
) -> Cluster:  # fmt: skip
    """A machine's interface is as wide as its widest link. Where that explains not all, the middle one counts."""
    speeds = {
        (here, there): min(way.bytes_s, links[there, here].bytes_s) for (here, there), way in links.items()
    }  # of each pair, twice
    interfaces = {n: max((s for (here, _), s in speeds.items() if here == n), default=INTERFACE) for n in machines}
    explained = all(
        speed >= EXPLAINED * min(interfaces[here], interfaces[there]) for (here, there), speed in speeds.items()
    )
    latencies = [way.round_trip_s / 2 for way in links.values()]
    between = Link(
        latency_s=rounded(statistics.median(latencies)),
        bandwidth=math.inf if explained else rounded(statistics.median(speeds.values())),
    )
    twice = Counter(names.values())
    kinds = []
    for number, measured in sorted(machines.items()):
        name = re.sub(r"[^\w.-]", "-", names[number])[:90]
        kinds.append(
            MachineKind(
                name=name if twice[names[number]] == 1 else f"{name}-{number}",
                jitter=Trace(f"{trace_stem}.{number}.steps.txt", measured.times),
                interface=rounded(interfaces[number]), roles=roles[number],
                carry=rounded(max((way.carry for (here, _), way in links.items() if here == number), default=math.inf)),
                **{field: getattr(measured, field) for field in MACHINE},
            )
        )  # fmt: skip
    return Cluster(machines=tuple(kinds), between=between)
