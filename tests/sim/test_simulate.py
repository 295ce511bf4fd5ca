"""Tasks on modelled clusters: what comes out where a pencil can say it, failures, and real gradients."""

import dataclasses
import json
import math
import os
import random
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall
from squall.protocol.effects import Compute, Payload, Send
from squall.protocol.messages import Stop
from squall.protocol.nodes import Node
from squall.report import Reader
from squall.runtime.snapshot import Snapshots
from squall.runtime.wire import Passage
from squall.settings import Settings
from squall.sim.cluster.costs import Costs, Workload
from squall.sim.cluster.forecast import Forecast
from squall.sim.cluster.jitter import LogNormal, Pareto
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import FailureLaw, Link, MachineKind, Preemption
from squall.sim.cluster.placement import Placement
from squall.sim.cluster.sharing import Transfer
from squall.sim.cluster.simulate import simulate
from squall.transports.lanes import FAST
from tests import deep
from tests.rehearsal import same

STEP_S = 0.01
NO_SNAPSHOTS = Settings(snapshot_every_s=None)
SERVERS = MachineKind(
    name="server", count=4, roles=("shard", "coordinator", "evaluator"), exchange=((1, 1e-9), (10, 1e-9))
)


def blobs(examples: int = 800) -> squall.Task:
    """Two classes that a line can tell apart."""
    chance = torch.Generator().manual_seed(3)
    labels = torch.arange(examples) % 2
    points = torch.randn(examples, 40, generator=chance) + 1.5 * (2.0 * labels[:, None] - 1)
    data = TensorDataset(points, labels)
    return squall.Task(
        model=nn.Linear(40, 2), loss=lambda m, b: nn.functional.cross_entropy(m(b[0]), b[1]), train=data, validate=data,
        batch_size=4, metrics={"accuracy": lambda m, b: (m(b[0]).argmax(1) == b[1]).float()},
    )  # fmt: skip


def untested() -> squall.Task:
    return dataclasses.replace(blobs(), validate=None, metrics={})


def workers(count: int, **changes: object) -> Cluster:
    """Replicas on machines of their own, and servers that take no time."""
    machine = MachineKind(name="worker", count=count, step_s=STEP_S, roles=("replica",), **changes)
    return Cluster(machines=(machine, SERVERS), between=Link(latency_s=0.0))


def losing(cluster: Cluster, every_s: float, for_s: float) -> Cluster:
    """Its servers go away together, again and again."""
    gone = Preemption(at_s=every_s, machine="server", count=SERVERS.count, for_s=for_s, every_s=every_s)
    return dataclasses.replace(cluster, preemptions=(*cluster.preemptions, gone))


def hollow(strategy: squall.Strategy, cluster: Cluster, **arguments: object) -> Forecast:
    arguments = {"epochs": 2, "settings": NO_SNAPSHOTS, **arguments}
    return simulate(untested, strategy, cluster, gradients="none", **arguments)


# ---------------------------------------------------------------- what a pencil can say


@pytest.mark.parametrize("replicas", [1, 5])
def test_without_any_cost_of_exchange_all_replicas_compute_all_the_time(replicas: int) -> None:
    found = hollow(squall.Downpour(replicas=replicas, shards=2), workers(replicas))
    assert found.examples == 1600
    assert found.examples_per_second == pytest.approx(4 * replicas / STEP_S, rel=0.05)
    assert found.idle < 0.05
    assert found.staleness_mean == pytest.approx(replicas - 1, rel=0.1)
    assert found.goodput == 1.0


def test_latency_is_waited_for_twice_a_step_and_overlap_hides_it() -> None:
    cluster = dataclasses.replace(workers(2), between=Link(latency_s=STEP_S / 4))
    plain = hollow(squall.Downpour(replicas=2), cluster)
    assert plain.examples_per_second == pytest.approx(2 * 4 / (1.5 * STEP_S), rel=0.05)
    assert plain.idle == pytest.approx(1 / 3, abs=0.03)
    assert hollow(squall.Downpour(replicas=2, overlap=True), cluster).idle < 0.05


def test_an_interface_limits_what_all_replicas_get_through_it() -> None:
    """Each exchange carries the vector in and out of the one server."""
    vector_bytes = 4 * 96  # 82 numbers, each tensor's start aligned to 16
    thin = dataclasses.replace(SERVERS, count=1, interface=20 * vector_bytes)  # bytes a second: 20 vectors each way
    cluster = Cluster(machines=(workers(8).machines[0], thin), between=Link(latency_s=0.0))
    found = hollow(squall.Downpour(replicas=8), cluster, epochs=1)
    assert found.updates / found.training_s < 20
    assert found.idle > 0.9
    assert found.bytes_per_second < 2 * 20 * vector_bytes * 1.05


def test_shards_work_off_pushes_one_after_another() -> None:
    slow = dataclasses.replace(SERVERS, count=1, exchange=((1, 1e-9), (96, STEP_S)))
    cluster = Cluster(machines=(workers(4).machines[0], slow), between=Link(latency_s=0.0))
    found = hollow(squall.Downpour(replicas=4), cluster)
    assert found.updates / found.training_s == pytest.approx(1 / STEP_S, rel=0.05)
    assert found.shard_busy > 0.9


def test_lock_step_waits_for_the_slowest_and_asynchrony_does_not() -> None:
    fast, slow = (MachineKind(name=name, count=n, step_s=s, roles=("replica",)) for name, n, s in
                  (("fast", 3, STEP_S), ("slow", 1, 4 * STEP_S)))  # fmt: skip
    cluster = Cluster(machines=(fast, slow, SERVERS), between=Link(latency_s=0.0))
    together = hollow(squall.Synchronous(replicas=4), cluster)
    apart = hollow(squall.Downpour(replicas=4), cluster)
    assert together.examples_per_second == pytest.approx(4 * 4 / (4 * STEP_S), rel=0.05)
    assert apart.examples_per_second == pytest.approx(3.25 * 4 / STEP_S, rel=0.1)
    assert together.idle == pytest.approx(9 / 16, abs=0.05)


def test_cores_are_shared_and_slow_each_other() -> None:
    crowd = MachineKind(name="box", cores=2, step_s=STEP_S, slowdown=(1.0, 1.5), exchange=((1, 1e-9), (10, 1e-9)))
    rates = {n: hollow(squall.Downpour(replicas=n), Cluster(machines=(crowd,))).examples_per_second for n in (1, 2, 4)}
    assert rates[1] == pytest.approx(4 / STEP_S, rel=0.05)
    assert rates[2] == pytest.approx(2 * 4 / (1.5 * STEP_S), rel=0.05)
    assert rates[4] == pytest.approx(rates[2], rel=0.1)


def test_jitter_costs_lock_step_more_than_asynchrony() -> None:
    for law in (LogNormal(0.5), Pareto(2.5)):
        cluster = workers(8, jitter=law)
        together, apart = (hollow(kind(replicas=8), cluster) for kind in (squall.Synchronous, squall.Downpour))
        assert together.examples_per_second < 0.8 * apart.examples_per_second


def test_a_slowed_replica_takes_less_of_the_work() -> None:
    found = hollow(squall.Downpour(replicas=2), workers(2), settings=Settings(snapshot_every_s=None, slow=0.25))
    assert found.examples_per_second == pytest.approx(1.25 * 4 / STEP_S, rel=0.1)


# ---------------------------------------------------------------- placement


def test_replicas_are_spread_over_cores_and_shards_over_what_is_left() -> None:
    cluster = Cluster(machines=(MachineKind(name="big", cores=4), MachineKind(name="small", count=2, cores=1)))
    placement = Placement(cluster, squall.Downpour(replicas=6, shards=2).recipe())
    replicas = [placement.of(Node("replica", index)).kind.name for index in range(6)]
    assert replicas.count("big") == 4
    assert replicas.count("small") == 2
    assert placement.of(Node("replica", 1, 3)) is placement.of(Node("replica", 1))


# ---------------------------------------------------------------- failures


def test_lost_replicas_are_replaced_and_all_is_trained() -> None:
    cluster = dataclasses.replace(workers(4), failures={"replica": FailureLaw(every_s=3.0, repair_s=0.5)})
    found = hollow(squall.Downpour(replicas=4), cluster, epochs=10)
    assert found.status == "finished"
    assert found.examples == 8000
    assert found.lost > 3
    assert found.restarts == 0
    calm = hollow(squall.Downpour(replicas=4), workers(4), epochs=10)
    assert found.examples_per_second < calm.examples_per_second


@pytest.mark.parametrize("role", ["shard", "coordinator"])
def test_who_is_succeeded_costs_its_repair_and_nothing_is_lost(role: str) -> None:
    cluster = dataclasses.replace(workers(2), failures={role: FailureLaw(every_s=2.0, repair_s=0.5)})
    found = hollow(squall.Downpour(replicas=2), cluster, epochs=10)
    calm = hollow(squall.Downpour(replicas=2), workers(2), epochs=10)
    assert (found.status, found.examples, found.restarts, found.goodput) == ("finished", 8000, 0, 1.0)
    assert found.lost > 3
    assert found.training_s == pytest.approx(calm.training_s + found.lost * 0.5, rel=0.05)


@pytest.mark.parametrize("role", ["shard", "coordinator"])
def test_a_lost_machine_of_a_shard_or_the_coordinator_costs_what_was_trained_since_the_snapshot(role: str) -> None:
    others = tuple(other for other in SERVERS.roles if other != role)
    machines = [dataclasses.replace(SERVERS, name=name, count=1, roles=roles)
                for name, roles in (("gone", (role,)), ("stays", others))]  # fmt: skip
    gone = Preemption(at_s=3.0, machine="gone", count=1, for_s=1.0, every_s=4.0)
    cluster = dataclasses.replace(
        workers(2), machines=(workers(2).machines[0], *machines), preemptions=(gone,), lost_after_s=0.1
    )
    seldom, often = (
        hollow(squall.Downpour(replicas=2), cluster, epochs=10, settings=Settings(snapshot_every_s=seconds))
        for seconds in (0.5, 0.1)
    )
    assert (seldom.status, seldom.examples) == ("finished", 8000)
    assert seldom.restarts > 1
    assert 0.5 < seldom.goodput < often.goodput < 1.0


@pytest.mark.parametrize("gradients", ["real", "none"])
def test_the_time_given_is_what_passes_restarts_included(gradients: str, tmp_path: Path) -> None:
    cluster = losing(workers(2), every_s=1.0, for_s=0.2)
    settings = Settings(snapshot_every_s=0.25, seconds=6.0)
    found = simulate(
        untested, squall.Downpour(replicas=2), cluster, gradients=gradients, settings=settings, run_dir=tmp_path / "run"
    )  # fmt: skip
    assert found.restarts > 2
    assert found.training_s == pytest.approx(6.0, abs=1.0)


def test_machines_that_are_taken_away_come_back() -> None:
    gone = Preemption(at_s=0.5, machine="worker", count=3, for_s=2.0)
    found = hollow(squall.Downpour(replicas=4), dataclasses.replace(workers(4), preemptions=(gone,)), epochs=10)
    assert (found.status, found.lost, found.examples) == ("finished", 3, 8000)
    calm = hollow(squall.Downpour(replicas=4), workers(4), epochs=10)
    assert found.training_s == pytest.approx(calm.training_s + 2.0 * 3 / 4, rel=0.2)


def test_lock_step_waits_for_as_long_as_a_machine_is_not_missed() -> None:
    gone = dataclasses.replace(workers(4), preemptions=(Preemption(at_s=0.5, machine="worker", count=1, for_s=0.1),))
    soon, late = (
        hollow(squall.Synchronous(replicas=4), dataclasses.replace(gone, lost_after_s=seconds))
        for seconds in (1.0, 7.0)
    )
    assert late.training_s == pytest.approx(soon.training_s + 6.0, abs=0.2)


def test_a_restart_brings_nobody_back_whose_machine_is_gone() -> None:
    """Three of four workers are gone for good; that the shard's is lost as well makes nothing faster."""
    gone = Preemption(at_s=0.5, machine="worker", count=3, for_s=1e6)
    lonely = dataclasses.replace(workers(4), preemptions=(gone,))
    crashing = losing(lonely, every_s=5.0, for_s=0.1)
    settings = Settings(snapshot_every_s=0.5, seconds=20.0)
    calm, lost = (hollow(squall.Downpour(replicas=4), cluster, epochs=None, settings=settings)
                  for cluster in (lonely, crashing))  # fmt: skip
    assert lost.restarts > 0
    assert lost.examples < calm.examples


def test_a_machine_may_be_gone_from_the_beginning_and_go_again_and_again() -> None:
    gone = Preemption(at_s=0.0, machine="worker", count=4, for_s=1.0, every_s=2.0)
    found = hollow(squall.Downpour(replicas=4), dataclasses.replace(workers(4), preemptions=(gone,)), epochs=5)
    calm = hollow(squall.Downpour(replicas=4), workers(4), epochs=5)
    assert (found.status, found.examples) == ("finished", 4000)
    assert found.lost >= 8
    assert found.training_s > 1.3 * calm.training_s


def test_of_two_absences_the_longer_counts() -> None:
    long, short = (Preemption(at_s=at, machine="worker", count=2, for_s=s) for at, s in ((0.5, 4.0), (1.0, 0.1)))
    cluster = dataclasses.replace(workers(2), preemptions=(long, short))
    found = hollow(squall.Downpour(replicas=2), cluster, epochs=1)
    calm = hollow(squall.Downpour(replicas=2), workers(2), epochs=1)
    assert found.training_s > calm.training_s + 3.5


def test_a_run_that_never_gets_to_a_snapshot_is_given_up() -> None:
    cluster = losing(workers(2), every_s=0.5, for_s=0.1)
    found = hollow(squall.Downpour(replicas=2), cluster, epochs=200, settings=Settings(snapshot_every_s=60))
    assert found.status == "failed"
    assert "take more" in found.reason


def test_a_run_that_begins_again_finds_nothing_on_its_way() -> None:
    """Numbers that were cut off arrive never, so nothing waits behind them."""
    cluster = losing(workers(2, interface=2e3), every_s=10.0, for_s=0.5)
    found = hollow(squall.Downpour(replicas=2), cluster, epochs=1, settings=Settings(snapshot_every_s=2.0))
    assert (found.status, found.examples) == ("finished", 800)
    assert found.restarts > 0


def test_messages_of_a_link_stay_in_order_however_large() -> None:
    cluster = dataclasses.replace(workers(2), between=Link(latency_s=0.0, bandwidth=1000.0))
    recipe = squall.Downpour(replicas=2).recipe()
    workload = Workload(step_s=STEP_S, batch_size=4, elements=(1000,))
    costs = Costs(cluster, recipe, workload, Placement(cluster, recipe), random.Random(0))
    replica, shard = Node("replica", 0), Node("shard", 0)
    large = Send(shard, Stop(), Payload("gradient", replica, 0, 1, 0))
    arrivals = [costs.arrivals(replica, effect, 0.0, random.Random(0)) for effect in (large, Send(shard, Stop()))]
    assert arrivals[0][0] > 4.0
    assert arrivals[1][0] >= arrivals[0][0]


def test_long_transfers_share_an_interface_and_a_message_waits_for_those_of_its_link() -> None:
    cluster = dataclasses.replace(workers(3), between=Link(latency_s=0.0))
    recipe = squall.Downpour(replicas=3).recipe()
    elements = int(cluster.machines[0].interface / 4)  # a second's
    workload = Workload(step_s=STEP_S, batch_size=4, elements=(elements,))
    costs = Costs(cluster, recipe, workload, Placement(cluster, recipe), random.Random(0))
    shard = Node("shard", 0)
    away = [
        node
        for node in (Node("replica", i) for i in range(3))
        if costs.placement.of(node) is not costs.placement.of(shard)
    ]

    def sent(sender: Node, at: float, payload: bool) -> Passage:
        numbers = Payload("gradient", sender, 0, 1, 0) if payload else None
        (passage,) = costs.arrivals(sender, Send(shard, Stop(), numbers), at, random.Random(0))
        assert isinstance(passage, Passage)
        passage.arrives(at)  # as the world asks at once
        return passage

    first = sent(away[0], 0.0, payload=True)
    assert first.arrives(0.0) == pytest.approx(1.0)
    second = sent(away[1], 0.5, payload=True)
    message = sent(away[0], 0.5, payload=False)
    assert first.arrives(1.0) == pytest.approx(1.5)
    assert message.arrives(1.0) > first.arrives(1.0)
    assert second.arrives(1.0) == pytest.approx(2.0)


@pytest.mark.parametrize(("interface", "first_s"), [(0.4 * FAST, 1.0), (2 * FAST, 2.0)])
def test_over_a_slow_link_one_transfer_goes_after_the_other(interface: float, first_s: float) -> None:
    """Of those from one machine to the same other; over a fast one they share it."""
    machines = tuple(dataclasses.replace(kind, interface=interface, count=1) for kind in workers(1).machines)
    cluster = dataclasses.replace(workers(1), machines=machines, between=Link(latency_s=0.0))
    recipe = squall.Downpour(replicas=1, shards=2).recipe()
    workload = Workload(step_s=STEP_S, batch_size=4, elements=(int(interface / 4),) * 2)
    costs = Costs(cluster, recipe, workload, Placement(cluster, recipe), random.Random(0))
    replica = Node("replica", 0)
    pushes = [Send(Node("shard", index), Stop(), Payload("gradient", replica, 0, 1, 0)) for index in (0, 1)]
    passages = [costs.arrivals(replica, push, 0.0, random.Random(0))[0] for push in pushes]
    assert _arrivals(passages) == pytest.approx([first_s, 2.0], rel=1e-3)


def _arrivals(passages: Sequence[float | Passage]) -> list[float]:
    """When each arrives, asked as the world does."""
    now, found = 0.0, [0.0] * len(passages)
    while now < math.inf:
        for number, passage in enumerate(passages):
            assert isinstance(passage, Transfer)
            found[number] = found[number] if passage.arrived else passage.arrives(now)
        now = min((at for at in found if at > now), default=math.inf)
    return found


def test_adding_a_gradient_to_what_the_buffer_holds_is_a_pass_over_it() -> None:
    cluster, elements = workers(1), 10**6
    recipe = squall.Downpour(replicas=1, push_every=2).recipe()
    workload = Workload(step_s=STEP_S, batch_size=4, elements=(elements,))
    costs = Costs(cluster, recipe, workload, Placement(cluster, recipe), random.Random(0))
    first, more = (
        costs.prices[Compute](Node("replica", 0), Compute(0, 0, 4, 0, accumulate, local_step=False), float(accumulate))
        for accumulate in (False, True)
    )
    assert more - first == pytest.approx(4 * elements / cluster.machines[0].memory)


def test_lost_frames_are_sent_again() -> None:
    cluster = dataclasses.replace(workers(3), between=Link(latency_s=1e-4, jitter_s=1e-4, loss=0.02))
    found = hollow(squall.Downpour(replicas=3, shards=2), cluster)
    assert (found.status, found.examples) == ("finished", 1600)
    clean = hollow(squall.Downpour(replicas=3, shards=2), workers(3))
    assert found.training_s > clean.training_s


# ---------------------------------------------------------------- real gradients


def test_real_gradients_give_accuracy_over_virtual_time_and_a_run(tmp_path: Path) -> None:
    strategy = squall.Downpour(replicas=30, shards=3, optimizer=partial(torch.optim.SGD, lr=0.01))
    found = simulate(
        blobs, strategy, workers(30), until="accuracy=0.97", epochs=20, run_dir=tmp_path / "run", settings=NO_SNAPSHOTS
    )
    assert found.status == "finished"
    assert found.metrics["accuracy"] >= 0.97
    assert found.reached_s is not None
    assert found.reached_s <= found.training_s
    reader = Reader(tmp_path / "run" / "run.sqlite")
    summary = squall.Run(tmp_path / "run").summary()
    assert summary.training_s == pytest.approx(found.training_s)
    assert summary.examples == found.examples
    reader.close()
    assert (tmp_path / "run" / "report.html").exists()
    with pytest.raises(ValueError, match="a simulated run"):
        squall.resume(tmp_path / "run")
    model = squall.Run(tmp_path / "run", blobs).model
    task = blobs()
    batch = task.train[:]  # type: ignore[index]
    assert task.metrics["accuracy"](model, batch).mean().item() >= 0.97
    assert same(assert_replayed(tmp_path / "run").model, model)


def test_a_lost_machine_of_a_shard_of_real_numbers_goes_on_from_the_snapshot(tmp_path: Path) -> None:
    cluster = losing(workers(2), every_s=1.0, for_s=0.1)
    found = simulate(
        blobs, squall.Downpour(replicas=2), cluster, epochs=2, run_dir=tmp_path / "run",
        settings=Settings(snapshot_every_s=0.2),
    )  # fmt: skip
    assert (found.status, found.examples) == ("finished", 1600)
    assert found.restarts > 0
    assert squall.Run(tmp_path / "run").summary().examples == 1600
    assert max(Snapshots(tmp_path / "run").numbers()) > 2
    assert (tmp_path / "run" / "schedule" / str(found.restarts)).is_dir()
    assert_replayed(tmp_path / "run")


@pytest.mark.parametrize("loss", deep.sweep([0.01, 0.0], 1))
def test_a_simulated_run_with_preempted_replicas_is_replayed(loss: float, tmp_path: Path) -> None:
    """With and without links, which change who performs what in which order."""
    cluster = workers(4, jitter=LogNormal(0.3))
    cluster = dataclasses.replace(
        cluster, between=Link(latency_s=0.002, loss=loss), failures={"replica": FailureLaw(every_s=2.0, repair_s=0.1)}
    )
    strategy = squall.Downpour(replicas=4, shards=2, overlap=True, push_every=2)
    found = simulate(blobs, strategy, cluster, epochs=4, run_dir=tmp_path / "run")
    assert (found.status, found.lost > 0) == ("finished", True)
    assert_replayed(tmp_path / "run")


def assert_replayed(directory: Path) -> squall.Replayed:
    """Its seed is enough to simulate a run again, but not to stop it at an update, or to look into it."""
    found = squall.replay(directory, check=True)
    assert found.as_asked, str(found)
    return found


def test_what_the_task_raises_passes_through_and_the_record_says_so(tmp_path: Path) -> None:
    def loss(model: nn.Module, batch: list[torch.Tensor]) -> torch.Tensor:
        if torch.equal(batch[0], points):
            raise RuntimeError("no loss today")
        return model(batch[0]).sum()

    def broken() -> squall.Task:
        return dataclasses.replace(untested(), loss=loss, shuffle=False)

    points = untested().train[8:12][0]  # type: ignore[index]

    with pytest.raises(RuntimeError, match="no loss today"):
        simulate(broken, squall.Downpour(replicas=2), workers(2), run_dir=tmp_path / "run")
    reader = Reader(tmp_path / "run" / "run.sqlite")
    assert reader.state()["status"] == "failed"
    reader.close()


def test_a_run_that_crashes_before_its_first_snapshot_ends_in_time_as_well() -> None:
    cluster = losing(workers(2), every_s=0.5, for_s=0.1)
    found = hollow(
        squall.Downpour(replicas=2), cluster, epochs=None, settings=Settings(snapshot_every_s=50, seconds=4.0)
    )
    assert found.restarts > 2
    assert found.training_s == pytest.approx(4.0, abs=1.0)


def test_both_kinds_of_gradients_take_the_same_virtual_time(tmp_path: Path) -> None:
    cluster = workers(3, jitter=LogNormal(0.3))
    real = simulate(
        untested, squall.Downpour(replicas=3), cluster, epochs=1, run_dir=tmp_path / "run", settings=NO_SNAPSHOTS
    )
    none = hollow(squall.Downpour(replicas=3), cluster, epochs=1)
    assert (none.training_s, none.staleness, none.bytes) == (real.training_s, real.staleness, real.bytes)


# ---------------------------------------------------------------- one seed, one forecast

_HASH = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.sim.test_simulate import forecast_of
print(forecast_of(5))
"""


def forecast_of(seed: int) -> str:
    cluster = dataclasses.replace(
        workers(4, jitter=Pareto(2.0)), between=Link(latency_s=1e-3, jitter_s=1e-3, loss=0.01),
        failures={"replica": FailureLaw(every_s=2.0, repair_s=0.1)},
    )  # fmt: skip
    found = hollow(squall.Downpour(replicas=4, shards=2), cluster, seed=seed)
    return json.dumps(dataclasses.replace(found, wall_s=0.0).to_json_dict(), sort_keys=True)


@deep.only
def test_a_seed_gives_one_forecast_whatever_the_interpreters_hash_seed() -> None:
    assert forecast_of(5) != forecast_of(6)
    here = str(Path(__file__).parent)
    other = str(1 + hash("squall") % 1000)  # and not this interpreter's
    environment = {**os.environ, "PYTHONHASHSEED": other}
    run = [sys.executable, "-c", _HASH, here]
    told = subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout
    assert told.strip() == forecast_of(5)


# ---------------------------------------------------------------- wrong input


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        ({"gradients": "some"}, "use one of real, none"),
        ({"gradients": "none", "until": "accuracy=0.9"}, "use gradients='real'"),
    ],
)
def test_what_cannot_be_simulated_is_refused(arguments: dict[str, str], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        simulate(blobs, squall.Downpour(), workers(2), **arguments)


def test_methods_that_need_numbers_and_those_without_exchanges_are_refused() -> None:
    with pytest.raises(ValueError, match="use gradients='real'"):
        hollow(squall.Sandblaster(batch="full", replicas=2), workers(2))
    with pytest.raises(ValueError, match="nothing to simulate"):
        hollow(squall.SingleProcess(), workers(2))
