"""What was measured of machines and links becomes a cluster file that says so again."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from squall.sim.cluster.measure import write
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import ROLES, Overhead
from squall.survey.measured import cluster_of
from squall.survey.messages import Called, Measured

EXCHANGE = ((1000, 1e-4), (10_000, 2e-4))


def measured(step_s: float, cores: int = 1) -> Measured:
    slowdown = tuple(1.0 + k / 10 for k in range(cores))
    times = (0.5 * step_s, 1.5 * step_s)
    return Measured(cores, step_s, slowdown, step_s, EXCHANGE, Overhead(), 1e10, times, 0.01)


def ways(speeds: dict[tuple[int, int], float], round_trip_s: float = 2e-4) -> dict[tuple[int, int], Called]:
    """Of each pair, as fast there as back."""
    one = {pair: Called("", round_trip_s, speed, 2e9) for pair, speed in speeds.items()}
    return one | {(there, here): way for (here, there), way in one.items()}


def cluster(speeds: dict[tuple[int, int], float], names: tuple[str, ...] = ("a", "b", "c")) -> Cluster:
    machines = {number: measured(0.01 * (number + 1)) for number in range(len(names))}
    roles = dict.fromkeys(machines, ROLES)
    return cluster_of(machines, ways(speeds), dict(enumerate(names)), roles, "mine")


def test_the_file_says_what_was_measured(tmp_path: Path) -> None:
    found = cluster({(0, 1): 1e8}, ("here", "there"))
    traces = write(found, tmp_path / "mine.toml", "two machines")
    assert [trace.name for trace in traces] == ["mine.0.steps.txt", "mine.1.steps.txt"]
    assert Cluster.load(tmp_path / "mine.toml") == found
    assert [machine.name for machine in found.machines] == ["here", "there"]
    assert [machine.step_s for machine in found.machines] == [0.01, 0.02]
    assert found.between.latency_s == 1e-4
    assert found.machines[0].carry == 2e9


def test_machines_of_one_name_are_told_apart() -> None:
    found = cluster({(0, 1): 1e8, (0, 2): 1e8, (1, 2): 1e8}, ("a b", "a b", "c"))
    assert [machine.name for machine in found.machines] == ["a-b-0", "a-b-1", "c"]


def test_an_interface_is_as_wide_as_its_widest_link() -> None:
    """Two machines with 10 Gbit/s, and one with 1: all links are explained by that."""
    found = cluster({(0, 1): 1.2e9, (0, 2): 1.2e8, (1, 2): 1.1e8})
    assert [machine.interface for machine in found.machines] == [1.2e9, 1.2e9, 1.2e8]
    assert found.between.bandwidth == math.inf


def test_a_link_that_is_slow_by_itself_makes_the_middle_count_for_all() -> None:
    found = cluster({(0, 1): 1e9, (1, 2): 1e9, (0, 2): 1e8})
    assert found.between.bandwidth == 1e9
    found = cluster({(0, 1): 1e9, (1, 2): 1e8, (0, 2): 1e8}, ("a", "b", "c"))
    assert found.between.bandwidth == math.inf


def test_the_slower_way_of_a_link_counts() -> None:
    machines = {number: measured(0.01) for number in range(2)}
    links = {(0, 1): Called("", 1e-3, 1e9), (1, 0): Called("", 1e-3, 1e7)}
    found = cluster_of(machines, links, {0: "a", 1: "b"}, dict.fromkeys(machines, ROLES), "mine")
    assert [machine.interface for machine in found.machines] == pytest.approx([1e7, 1e7])
