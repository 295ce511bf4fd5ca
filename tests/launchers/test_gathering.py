"""The machines of a run until all launch: together, and whatever else comes, goes, or is said meanwhile."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest

from squall import Downpour
from squall.errors import SquallError
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.gathering import Gathering
from squall.launchers.orders import Facts
from squall.launchers.roster import Gathered, Launched, Room, Step, Wanted
from squall.protocol.nodes import Node
from squall.transports.certificates import Identity
from squall.vector import Layout

LAYOUT = Layout((), (), (), 0, 0)
FACTS = {"kind": "built", "facts": msgspec.to_builtins(Facts(LAYOUT, 7))}
PORTS: list[dict[str, int]] = [{"coordinator-0.0": 70}, {"shard-0.0": 71}]  # of each machine


@dataclass
class Line:
    """The head's end of a pipe: what was said there."""

    said: list[dict[str, Any]] = field(default_factory=list)
    closed = False

    def send_bytes(self, message: bytes) -> None:
        if self.closed:
            raise OSError("the connection is over")
        if message.startswith(b"{"):
            self.said.append(msgspec.json.decode(message))

    def close(self) -> None:
        self.closed = True

    def fileno(self) -> int:
        raise OSError  # nothing can be handed over

    @property
    def kinds(self) -> list[str]:
        return [said["kind"] for said in self.said]


class Run:
    """Two machines are wanted, for a replica and a shard; `lines` lead to those that there are."""

    def __init__(self, directory: Path, replicas: int = 1) -> None:
        self.lines: list[Line] = []
        self.told: list[str] = []  # the user
        recipe = Downpour(replicas=replicas).recipe()
        self.gathering = Gathering(self._machine(), Wanted(2), recipe, Identity.new_root("squall"), self.told.append)
        (directory / "snapshots" / "000004").mkdir(parents=True)
        self.gathering.launch(Launched(directory, None, -1))
        self.join()

    def _machine(self) -> Gathered:
        self.lines.append(Line())
        number = len(self.lines) - 1
        return Gathered(number, f"host {number}", Room(1), ControlPipe(self.lines[-1]))

    def join(self) -> None:
        self.gathering.add(self._machine(), b"the task")

    def say(self, number: int, **said: Any) -> bool:
        return self.gathering.hear(number, said)

    def built(self, *numbers: int) -> None:
        for number in numbers:
            self.say(number, **FACTS)


@pytest.fixture
def run(tmp_path: Path) -> Run:
    return Run(tmp_path)


def test_replicas_on_gpus_are_spread_over_those(tmp_path: Path) -> None:
    told: list[str] = []
    wanted = Wanted(2, device="cuda")
    own = Gathered(0, "small", Room(64, gpus=1), ControlPipe(Line()))
    found = Gathering(own, wanted, Downpour(replicas=4).recipe(), Identity.new_root("squall"), told.append)
    found.launch(Launched(tmp_path, None, -1))
    found.add(Gathered(1, "large", Room(8, gpus=3), ControlPipe(Line())), b"the task")
    for number in (0, 1):
        found.hear(number, FACTS)
    assert [at for (role, _), at in found.seats.items() if role == "replica"] == [0, 1, 1, 1]
    assert told[0] == "machine 1 has joined: large, 8 cores, 3 GPUs; all are here"
    assert "0: small  64 cores, 1 GPU " in told[1]


def test_machines_without_room_for_the_least_of_a_range_are_told_that_more_have_to_join(tmp_path: Path) -> None:
    told: list[str] = []
    wanted = Wanted(1, least_replicas=6, threads=2)
    own = Gathered(0, "first", Room(3), ControlPipe(Line()))
    found = Gathering(own, wanted, Downpour(replicas=8).recipe(), Identity.new_root("squall"), told.append)
    assert found.waits == "there is room for 1 replicas, and training begins with 6: more have to join"
    found.launch(Launched(tmp_path, None, -1))
    found.hear(0, FACTS)
    for number, cores in ((1, 4), (2, 5)):
        found.add(Gathered(number, "another", Room(cores), ControlPipe(Line())), b"the task")
        found.hear(number, FACTS)
    assert told[0].endswith("; there is room for 3 replicas, and training begins with 6: more have to join")
    assert told[1].endswith("; there is room for 5 replicas, and training begins with 6: more have to join")
    assert not found.seats, "it waits, as long as the user does"
    found.add(Gathered(3, "the last", Room(2), ControlPipe(Line())), b"the task")
    found.hear(3, FACTS)
    assert told[2].endswith("; all are here")
    assert sum(role == "replica" for role, _ in found.seats) == 6


def of_parts(directory: Path, cores: tuple[int, ...], spread: bool = False, threads: int = 1) -> tuple[Gathering, str]:
    """Two replicas of two parts each on machines that have so many cores, and what the user is told of them."""
    told: list[str] = []
    wanted = Wanted(len(cores), threads=threads, parts=2, spread_parts=spread)
    first, *others = [Gathered(i, "host", Room(count), ControlPipe(Line())) for i, count in enumerate(cores)]
    recipe = Downpour(replicas=2).recipe()
    found = Gathering(first, wanted, recipe, Identity.new_root("squall"), told.append)
    found.launch(Launched(directory, None, -1))
    for machine in others:
        found.add(machine, b"the task")
    for number in range(len(cores)):
        found.hear(number, FACTS)
    return found, told[-1]


def test_parts_lie_together_where_a_machine_has_cores_for_all(tmp_path: Path) -> None:
    found, told = of_parts(tmp_path, (2, 2))
    assert {key: at for key, at in found.seats.items() if key[0] in ("replica", "part")} == {
        ("replica", 0): 0, ("replica", 1): 1,
    }  # fmt: skip
    assert "the 2 parts of a replica on one machine where that has cores for all" in told


def test_parts_lie_apart_where_no_machine_has_cores_for_all(tmp_path: Path) -> None:
    found, told = of_parts(tmp_path, (3, 1))
    seats = {key: at for key, at in found.seats.items() if key[0] in ("replica", "part")}
    assert seats == {("replica", 0): 0, ("replica", 1): 0, ("part", 3): 1}
    assert "part 1 of replica 1" in told.splitlines()[-1]


def test_parts_are_spread_on_purpose(tmp_path: Path) -> None:
    found, told = of_parts(tmp_path, (4, 4), spread=True)
    seats = {key: at for key, at in found.seats.items() if key[0] in ("replica", "part")}
    assert {seats["replica", 0], seats["part", 1]} == {seats["replica", 1], seats["part", 3]} == {0, 1}
    assert "the 2 parts of a replica on as many machines as possible" in told


def test_more_parts_than_cores_crowd_all_machines_alike(tmp_path: Path) -> None:
    found, _ = of_parts(tmp_path, (1, 1))
    on = sorted(at for (role, _), at in found.seats.items() if role in ("replica", "part"))
    assert on == [0, 0, 1, 1]


def test_a_replica_that_fits_on_no_machines_is_refused_with_the_remedy(tmp_path: Path) -> None:
    with pytest.raises(SquallError, match=r"a replica has 2 parts of 2 threads each.*: have more machines join"):
        of_parts(tmp_path, (3, 1), threads=2)


def test_machines_begin_when_all_are_ready(run: Run) -> None:
    """One that is slow, or has no room, is not awaited by processes that train already."""
    run.built(0, 1)
    for number in (0, 1):
        run.say(number, kind="placed", ports=PORTS[number])
    run.say(0, kind="ready")
    assert [line.kinds for line in run.lines] == [["place", "launch"]] * 2
    with pytest.raises(SquallError, match=r"on machine 1 \(host 1\): no room in shared memory"):
        run.say(1, kind="failed", error="no room in shared memory", task=False)
    run.say(1, kind="ready")
    assert [line.kinds for line in run.lines] == [["place", "launch", "begin"]] * 2


def test_a_machine_that_was_told_to_begin_leaves_when_it_has(run: Run) -> None:
    run.built(0, 1)
    for number in (0, 1):
        run.say(number, kind="placed", ports=PORTS[number])
    for kind in ("ready", "unready"):
        run.say(0, kind="ready")
        run.say(1, kind=kind)
    assert not run.lines[1].closed
    assert run.lines[1].kinds[-1] == "begin"


def test_a_machine_says_where_its_own_processes_listen_and_no_others(run: Run) -> None:
    for ports in ({"coordinator-0.0": 7}, {}):
        assert not run.say(1, kind="placed", ports={"shard-0.0": 7} | ports)  # nobody has asked
    run.built(0, 1)
    run.say(0, kind="placed", ports=PORTS[0])
    assert not run.say(1, kind="placed", ports=PORTS[0] | PORTS[1])
    assert not run.say(1, kind="placed", ports=PORTS[0])
    run.say(1, kind="placed", ports=PORTS[1])
    assert run.lines[0].said[-1]["addresses"] == {"coordinator-0.0": ["", 70], "shard-0.0": ["", 71]}


def test_machines_that_come_while_others_launch_are_told_of_when_they_are_ready(run: Run) -> None:
    run.built(0, 1)
    run.join()
    run.join()
    run.built(2)
    for number in (0, 1):
        run.say(number, kind="placed", ports=PORTS[number])
    run.say(2, kind="placed", ports={})
    run.say(2, kind="ready")
    assert [machine for machine, _ in run.lines[0].said[-1]["cores"]] == [0, 1]
    run.gathering.lose(3)
    for number in (0, 1):
        run.say(number, kind="ready")
    assert run.lines[0].said[-1] == {"kind": "joined", "machine": 2, "cores": 1}
    assert run.lines[2].kinds == ["place", "launch", "begin"]
    run.say(2, kind="ready")
    assert run.lines[0].kinds.count("joined") == 1


def test_a_machine_that_is_gone_before_it_is_noticed_costs_the_launch_its_name(run: Run) -> None:
    run.lines[1].closed = True
    run.built(0, 1)
    run.say(0, kind="placed", ports=PORTS[0])
    with pytest.raises(SquallError, match=r"machine 1 \(host 1\) was lost as the run was launched"):
        run.gathering.lose(1)


def test_one_that_has_another_task_costs_the_launch_and_is_told_why(run: Run) -> None:
    run.built(0)
    with pytest.raises(SquallError, match="8 examples in place of 7"):
        run.say(1, kind="built", facts=msgspec.to_builtins(Facts(LAYOUT, 8)))
    assert "8 examples in place of 7" in run.lines[1].said[-1]["reason"]


def test_one_that_has_another_task_is_sent_away_when_the_run_has_begun(run: Run) -> None:
    run.built(0, 1)
    for number in (0, 1):
        run.say(number, kind="placed", ports=PORTS[number])
        run.say(number, kind="ready")
    run.join()
    run.say(2, kind="built", facts=msgspec.to_builtins(Facts(LAYOUT, 8)))
    assert run.lines[2].said[-1]["reason"].count("8 examples in place of 7") == 1
    assert run.lines[2].closed
    assert 2 not in run.gathering.machines


# ---------------------------------------------------------------- a run that moves


def begin(run: Run) -> None:
    run.built(0, 1)
    ready(run, 0, 1, placing=0)
    assert run.gathering.over


def began(run: Run) -> Run:
    """On two machines, and one that came later."""
    begin(run)
    run.join()
    run.built(2)
    run.say(2, kind="placed", ports={})
    run.say(2, kind="ready")
    return run


def move(run: Run, *leave: int) -> None:
    for number, machine in run.gathering.machines.items():
        machine.step, machine.leaves = Step.ENDED, number in leave
    run.gathering.again(snapshot=4)


def placed(run: Run, *numbers: int, placing: int) -> None:
    """They answer to what they were told."""
    seats = {(role, index): at for role, index, at in run.lines[numbers[0]].said[-1]["seats"]}
    for number in numbers:
        nodes = [Node(*each) for each, at in seats.items() if at == number]
        ports = {str(node): 80 for node in nodes if node.role in ("shard", "coordinator")}
        run.say(number, kind="placed", ports=ports, placing=placing)


def ready(run: Run, *numbers: int, placing: int) -> None:
    placed(run, *numbers, placing=placing)
    for number in numbers:
        run.say(number, kind="ready", placing=placing)


def test_a_run_that_moves_begins_again_on_those_that_stay(run: Run) -> None:
    move(began(run), 1)
    assert run.lines[1].closed
    assert {at for *_, at in run.lines[0].said[-1]["seats"]} == {0, 2}
    ready(run, 0, 2, placing=1)
    for number in (0, 2):
        assert run.lines[number].kinds[-3:] == ["place", "launch", "begin"]
    assert run.lines[0].said[-2]["snapshot"] == 4
    assert [machine for machine, _ in run.lines[0].said[-2]["cores"]] == [0, 2]


def test_a_machine_that_was_ready_and_leaves_is_done_without(run: Run) -> None:
    """Where it was not told to begin."""
    move(began(run))
    placed(run, 0, 1, 2, placing=1)
    run.say(1, kind="ready", placing=1)
    run.say(1, kind="unready")
    assert run.lines[1].closed
    assert {at for *_, at in run.lines[0].said[-1]["seats"]} == {0, 2}


def test_who_is_silent_at_the_end_is_left_behind(run: Run) -> None:
    began(run)
    run.gathering.machines[2].step = Step.ENDED
    run.gathering.again(snapshot=4)
    assert sorted(run.gathering.machines) == [0, 2]
    assert run.lines[1].said[-1]["kind"] == "kill"


def test_a_machine_that_is_lost_while_a_run_moves_is_done_without(run: Run) -> None:
    move(began(run))
    run.gathering.lose(1)
    assert {at for *_, at in run.lines[0].said[-1]["seats"]} == {0, 2}
    run.say(0, kind="placed", ports={"coordinator-0.0": 70}, placing=1)  # to what it was told first
    assert run.lines[0].kinds[-1] == "place"
    ready(run, 0, 2, placing=2)
    assert [line.kinds[-1] for line in (run.lines[0], run.lines[2])] == ["begin", "begin"]


def test_who_joins_while_a_run_moves_is_let_in_and_not_waited_for(run: Run) -> None:
    began(run)
    run.join()  # it builds the task yet
    move(run, 1)
    ready(run, 0, 2, placing=1)
    assert run.lines[0].kinds[-1] == "begin"
    run.built(3)
    run.say(3, kind="placed", ports={}, placing=1)
    run.say(3, kind="ready", placing=1)
    assert run.lines[0].said[-1] == {"kind": "joined", "machine": 3, "cores": 1}


def test_no_more_replicas_begin_again_than_machines_had_or_have_cores_for(tmp_path: Path) -> None:
    """The others wait for room, as where a machine leaves that has replicas alone."""
    run = Run(tmp_path, replicas=4)
    begin(run)
    move(run, 1)
    assert sorted(index for role, index, _ in run.lines[0].said[-1]["seats"] if role == "replica") == [0, 1]


def test_where_nobody_has_room_a_run_that_moves_waits_for_one(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.gathering.machines[0].room = Room(0, roles=("coordinator", "evaluator"))
    begin(run)
    move(run, 1)
    assert run.told[-1] == "no machine has room for a replica: more machines have to join"
    run.join()
    run.built(2)
    ready(run, 0, 2, placing=1)
    assert run.lines[0].kinds[-1] == "begin"
