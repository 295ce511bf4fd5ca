"""Chaotic worlds: every strategy, every kind of fault, every invariant at every event; and what a failing one tells."""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import os
import random
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from squall.cli import main
from squall.protocol.effects import Send
from squall.protocol.messages import Stop as StopMessage
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberReplaced
from squall.protocol.replica import Replica
from squall.runtime.wire import Network
from squall.sim.proof import soak
from squall.sim.proof.broken import INVARIANTS, Broken
from squall.sim.proof.chaos import ALL_REDUCE, DIVIDED, STRATEGIES, Chaos, chaos
from squall.sim.proof.faults import Cut, Kill, Role, Weather
from squall.sim.proof.faulty_wire import FaultyWire
from squall.sim.proof.soak import flags, report, shrink, trace_of, verdict
from squall.sim.proof.trial import Seen, Trial
from squall.strategies import STRATEGIES as ALL
from squall.strategies import SingleProcess
from squall.strategies.work import Loop
from tests import deep

WORLDS = 60  # `make deep` runs 1,000 more, of the day
QUIET = dataclasses.replace(
    chaos(0), faults=(), machines=1, strategy="downpour", replicas=2, shards=2, paces=(0.01, 0.01)
)


@pytest.fixture(scope="module")
def found() -> list[soak.WorldVerdict]:
    return list(soak.soak(WORLDS))


def test_every_invariant_holds_in_some_worlds(found: list[soak.WorldVerdict]) -> None:
    broken = next((each for each in found if each.error), None)
    if broken is not None:
        pytest.fail(report(broken))


def test_they_are_of_every_strategy_and_every_fault(found: list[soak.WorldVerdict]) -> None:
    counts = Counter(each.chaos.strategy.replace(DIVIDED, ALL_REDUCE) for each in found)  # these two share a place
    assert min(counts[name] for name in STRATEGIES if name != DIVIDED) >= WORLDS // len(STRATEGIES)
    assert DIVIDED in {each.chaos.strategy for each in found}
    kinds = {type(make(3, 2)) for make in STRATEGIES.values()}
    assert kinds == set(ALL.values()) - {SingleProcess}
    happened = Counter[str]()
    for each in found:
        happened.update(each.faults)
    assert set(happened) == {
        "Weather", "Cut", "Pause", "Kill", "Skew", "Spoil", "Rot", "FullDisk", "UserStop", "Tear",
        "Partition", "MachineGone", "MachineLeaves", "MachineComes", "Jam", "Lie",
        "Hang", "Suspend",
    }  # fmt: skip
    assert min(happened.values()) > WORLDS // 20
    killed = {fault.part.role for each in found for fault in each.chaos.faults if isinstance(fault, Kill)}
    assert killed == {"coordinator", "shard", "replica", "part", "evaluator", "nursery"}


def test_the_invariants_are_those_of_the_design() -> None:
    design = (Path(__file__).parents[2] / "docs" / "design.md").read_text()
    for number, text in INVARIANTS.items():
        assert f"**{number}**" in design
        assert text in " ".join(design.split())


# ---------------------------------------------------------------- one seed, one world


def digest(seed: int) -> str:
    return hashlib.sha256("\n".join(trace_of(chaos(seed))).encode()).hexdigest()


@deep.only
def test_a_seed_is_one_world_whatever_the_interpreters_hash_seed() -> None:
    seeds = [3, 23, 24]
    program = "import sys; from tests.sim.test_chaos import digest; print(*map(digest, map(int, sys.argv[1:])))"
    environment = {**os.environ, "PYTHONHASHSEED": "77"}
    run = [sys.executable, "-c", program, *map(str, seeds)]
    here = Path(__file__).parents[2]
    there = subprocess.run(run, env=environment, cwd=here, capture_output=True, text=True, check=True).stdout.split()
    assert there == [digest(seed) for seed in seeds]
    assert len(set(there)) == len(seeds)


@deep.only
def test_processes_find_what_one_finds(found: list[soak.WorldVerdict]) -> None:
    assert list(soak.soak(45, first=5, processes=2)) == found[5:50]


# ---------------------------------------------------------------- lives


@pytest.mark.parametrize("strategy", ["downpour", "sandblaster, sampled"])
def test_without_who_is_not_succeeded_the_run_resumes_from_its_last_snapshot(strategy: str) -> None:
    fault = (Kill(120, Role("nursery")),)
    world = dataclasses.replace(QUIET, strategy=strategy, examples=40, snapshot_every_s=0.01, epochs=3, faults=fault)
    seen: list[Seen] = []
    trial = Trial(world, seen.append).go()
    assert trial.lives == 2
    begun = [str(what) for _, node, what in seen if node is None and "begins" in str(what)]
    assert begun[0] == "life 1 begins"
    assert begun[1].startswith("life 2 begins from snapshot")


@pytest.mark.parametrize("strategy", ["downpour", "sandblaster"])
def test_a_shard_that_dies_is_succeeded_in_the_same_life(strategy: str) -> None:
    seen: list[Seen] = []
    world = dataclasses.replace(QUIET, strategy=strategy, faults=(Kill(60, Role("shard", 1)),))
    trial = Trial(world, seen.append).go()
    assert trial.lives == 1
    assert [what for _, _, what in seen if isinstance(what, MemberReplaced)] == [MemberReplaced(Node("shard", 1), "")]


def test_a_replica_that_dies_is_replaced_in_the_same_life() -> None:
    trial = Trial(dataclasses.replace(QUIET, faults=(Kill(60, Role("replica", 1), 0.05),))).go()
    assert trial.lives == 1
    assert Node("replica", 1, 1) in trial.world.processes


def test_a_run_that_does_not_end_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Replica, "_leave", lambda replica, effects: None)
    with pytest.raises(Broken, match="I5"):
        Trial(QUIET).go()


# ---------------------------------------------------------------- the wire

REPLICA, SHARD = Node("replica", 0, 3), Node("shard", 1)
MESSAGE = Send(SHARD, StopMessage())


def test_a_cut_severs_one_pair_for_a_while() -> None:
    wire, chance = FaultyWire(Network(latency_s=0.5)), random.Random(0)
    wire.begin(Cut(0, 2.0, Role("replica", 0), Role("shard", 1), both_ways=False), now=10.0)
    assert list(wire.arrivals(REPLICA, MESSAGE, 11.0, chance)) == []
    assert list(wire.arrivals(SHARD, Send(REPLICA, StopMessage()), 11.0, chance)) == [11.5]
    assert list(wire.arrivals(REPLICA, Send(Node("shard", 0), StopMessage()), 11.0, chance)) == [11.5]
    assert list(wire.arrivals(REPLICA, MESSAGE, 12.0, chance)) == [12.5]


def test_weather_loses_doubles_and_delays() -> None:
    wire, chance = FaultyWire(Network()), random.Random(0)
    wire.begin(Weather(0, 1000.0, loss=0.25, duplication=0.5, jitter_s=0.1), now=0.0)
    frames = [list(wire.arrivals(REPLICA, MESSAGE, float(at), chance)) for at in range(999)]
    counts = Counter(map(len, frames))
    assert set(counts) == {0, 1, 2}
    assert sum(map(len, frames)) == pytest.approx(999 * 1.5 * 0.75, rel=0.1)
    assert max(at - now for now, times in enumerate(frames) for at in times) == pytest.approx(0.1, rel=0.1)
    assert list(wire.arrivals(REPLICA, MESSAGE, 1001.0, chance)) == [1001.0]


# ---------------------------------------------------------------- what a failing world tells


@pytest.fixture
def mistaken(monkeypatch: pytest.MonkeyPatch) -> soak.WorldVerdict:
    """A world that breaks because what is gathered when a replica is to leave counts, and is not pushed."""
    leave = Replica._leave

    def without_pushing(replica: Replica, now: float, effects: list[object]) -> None:
        if not replica._exchanges.missing:
            replica._reports.covers += replica._exchanges.gathered.covers
            leave(replica, effects)  # type: ignore[arg-type]

    monkeypatch.setattr(Replica, "_finish", without_pushing)
    gathering = (world for world in map(chaos, itertools.count()) if gathers(world))
    return next(each for each in map(verdict, gathering) if each.error and len(each.chaos.faults) > 1)


def gathers(world: Chaos) -> bool:
    """Its replicas push what several batches have given."""
    return isinstance(world.recipe.work, Loop) and world.recipe.loop.exchanges.cadence.push_every > 1


def test_a_failing_world_is_shrunk_and_can_be_seen_again(
    mistaken: soak.WorldVerdict, capsys: pytest.CaptureFixture[str]
) -> None:
    least = shrink(mistaken)
    assert least.invariant == mistaken.invariant
    assert len(least.chaos.faults) < len(mistaken.chaos.faults)
    assert least.events < 200
    assert flags(least.chaos) in report(mistaken)
    assert main(["simulate", *flags(least.chaos).split()]) == 1
    assert capsys.readouterr().out.strip() == str(least)
    assert main(["simulate", *flags(least.chaos).split(), "--trace"]) == 1
    lines = capsys.readouterr().out.splitlines()
    assert any("!!" in line for line in lines)
    assert any(line.startswith("BROKEN") for line in lines)


@deep.only
def test_soak_prints_the_seed_and_the_shortest_trace(
    mistaken: soak.WorldVerdict, capsys: pytest.CaptureFixture[str]
) -> None:
    seed = mistaken.chaos.seed
    assert soak.main(["--first", str(seed), "--count", "3", "--processes", "1"]) == 1
    out = capsys.readouterr().out
    assert f"world {seed}: " in out
    assert f"squall simulate --seed {seed}" in out
    assert "BROKEN" in out


def test_simulate_tells_that_a_world_held(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", "--seed", "7"]) == 0
    assert "held: " in capsys.readouterr().out


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (["--seed", "-1"], "--seed is -1"),
        (["--seed", "7", "--faults", "9"], "--faults has 9: world 7 has"),
        (["--replicas", "0"], "--replicas is 0"),
    ],
)
def test_what_is_wrong_with_the_flags_is_named(
    wrong: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *wrong]) == 1
    assert message in capsys.readouterr().err
