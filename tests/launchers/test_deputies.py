"""The coordinator's deputy: a run goes on from another machine when its first one is lost."""

from __future__ import annotations

import os
import signal
from collections.abc import Sequence
from contextlib import closing, suppress
from itertools import dropwhile
from multiprocessing.connection import Pipe
from pathlib import Path
from typing import Any

import pytest

from squall import following
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.leaving import LAUNCHER_GONE
from squall.launchers.nursery_channel import NurseryChannel
from squall.record.rows import EventRow, LossRow, MemberRow, ProgressRow
from squall.report import Reader
from squall.report.coverage import audit
from squall.runtime import running
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.processes import START_S, Started, alive, send, wait_for
from tests.launchers.test_copies import COPIED, role_of, wait_whole
from tests.launchers.test_machines import Cluster, Machine, children, cluster


class Second:
    """What the deputy of a run keeps on its machine."""

    def __init__(self, found: Cluster, machines: list[Machine], gone: Path | None = None) -> None:
        """When it is whole. `gone`: the directory of one before."""

        def there() -> list[Path]:
            return [path for path in (found.directory.parent / "runs").glob("*.machine-*") if path != gone]

        wait_for(lambda: len(there()) == 1 and any(map(self._is_there, machines)), START_S, "a deputy")
        (self.directory,) = there()
        self.machine = next(each for each in machines if self._is_there(each))
        wait_for(self.is_backed, START_S, "all that the coordinator is")

    def is_backed(self) -> bool:
        """There is a deputy that may lead: this one, or the next behind that."""
        return has_deputy(self.rows(MemberRow))

    @staticmethod
    def _is_there(machine: Machine) -> bool:
        return any("deputy" in role_of(pid) for pid in machine.pids())

    def rows(self, table: type[Any]) -> list[Any]:
        if not (self.directory / "run.sqlite").exists():
            return []
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return reader.rows(table)

    def told(self, text: str, since: str = "") -> bool:
        """The record has an event of this text, behind another one."""
        texts = dropwhile(lambda told: since not in told, [row.text for row in self.rows(EventRow)])
        return any(text in told for told in texts)

    def trained(self) -> int:
        return sum(row.examples for row in self.rows(ProgressRow))

    def leads(self) -> None:
        """Wait until it has taken over, and training goes on."""
        last = lambda: [row.text for row in self.rows(EventRow) if "by its deputy" in row.text]  # noqa: E731
        before = len(last())
        wait_for(lambda: len(last()) > before, START_S, "a takeover")
        trained = self.trained()
        wait_for(lambda: self.trained() > trained, START_S, "training to go on")

    def interrupt(self) -> str:
        """Ctrl-C at its machine ends the run; nothing of what it calls trained is missing. Returns what it said."""
        self.machine.process.send_signal(signal.SIGINT)
        _, said = self.machine.finish()
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            assert not any(part.missed for part in audit(reader).parts)
            assert not reader.rows(LossRow)
        return said


def has_deputy(rows: Sequence[Any]) -> bool:  # as a record has it
    return [row.change for row in rows if row.node.startswith("deputy")][-1:] == ["joined"]


def stop_first_machine(found: Cluster) -> list[int]:
    """All that is forked from the nursery, that, and the launching process: nobody sees the others stand still."""
    (nursery,) = children(found.run.process.pid)
    pids = [*children(nursery), nursery, found.run.process.pid]
    send(pids, signal.SIGSTOP)
    return pids


def lose_first_machine(found: Cluster) -> None:
    send(stop_first_machine(found), signal.SIGKILL)


def backed(found: Cluster) -> Second:
    """When it has all that may go on elsewhere."""
    found.event("started")
    wait_whole(found.run)
    return Second(found, found.machines)


def led_by_another(found: Cluster) -> Second:
    """Its first machine is lost, and training goes on."""
    second = backed(found)
    lose_first_machine(found)
    second.leads()
    return second


def lose_the_next(found: Cluster, second: Second) -> None:
    """The machine from which the run goes on, whose deputy goes on in turn."""
    wait_for(second.is_backed, START_S, "another deputy")
    others = [each for each in found.machines if each is not second.machine]
    third = Second(found, others, gone=second.directory)
    wait_whole(second)
    second.machine.signal(signal.SIGKILL)
    second.machine.finish()
    found.machines.remove(second.machine)
    third.leads()
    third.interrupt()


def test_a_run_outlives_its_first_machine(tmp_path: Path) -> None:
    """And is resumed from where its deputy has kept it."""
    with cluster(tmp_path, 3, *COPIED) as found:
        second = led_by_another(found)
        said = second.interrupt()
        assert f"the run goes on from this one, in {second.directory}" in said
        assert f"squall resume {second.directory} goes on with it" in said
    again = Started(second.directory, "resume", str(second.directory), "--machines", "1", "--copies", "1")
    goes_on(again)


def goes_on(again: Started) -> None:
    """And ends in order."""
    try:
        again.goes_on()
        again.process.send_signal(signal.SIGINT)
        assert again.finish()[0] == 130
    finally:
        again.process.kill()
        again.process.communicate()


def test_a_first_machine_without_its_launching_process_leaves_the_run_to_its_deputy(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *COPIED) as found:
        second = backed(found)
        wait_for(lambda: has_deputy(found.run.rows(MemberRow)), START_S, "the first machine to know")
        (nursery,) = children(found.run.process.pid)
        here = [nursery, *children(nursery)]
        found.run.process.kill()
        second.leads()
        wait_for(lambda: not any(map(alive, here)), START_S, "all of the first machine to end")
        second.interrupt()


@pytest.mark.parametrize("backed", [True, False])
def test_a_coordinator_whose_nursery_is_gone_has_no_last_word_for_its_deputy(backed: bool) -> None:
    """It would be a stop, which the deputy goes on with."""
    mine, theirs = Pipe()
    channel = NurseryChannel(ControlPipe(mine), backed=backed)
    theirs.close()
    assert (channel.take() is None) == backed
    assert channel.take() is None


@deep.only
@pytest.mark.parametrize("strategy", ["downpour", "synchronous", "elastic_averaging"])
def test_one_machine_after_the_other_may_be_lost(tmp_path: Path, strategy: str) -> None:
    """Each time the one with the coordinator: it has another deputy soon."""
    with cluster(tmp_path, 4, "--strategy", strategy, *COPIED) as found:
        second = led_by_another(found)
        lose_the_next(found, second)


@deep.only
def test_the_first_machine_joins_the_run_again_and_gets_what_its_directory_lacks(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *COPIED) as found:
        second = led_by_another(found)
        with closing(Reader(found.directory / "run.sqlite")) as reader:
            before = sum(row.examples for row in reader.rows(ProgressRow))
        found.machines.append(again := found.join("--complete", str(found.directory)))  # it listens where it did
        wait_for(lambda: second.told("machine 3, with room"), START_S, "the first machine to join again")
        second.interrupt()
        _, said = again.finish()
        assert f"{found.directory} has all of the run now" in said, said
        with closing(Reader(found.directory / "run.sqlite")) as reader:
            assert sum(row.examples for row in reader.rows(ProgressRow)) == second.trained() > before
        assert Snapshots(found.directory).numbers() == Snapshots(second.directory).numbers()
    again = Started(found.directory, "resume", str(found.directory), "--machines", "1", "--copies", "1")
    goes_on(again)


@deep.only
def test_who_has_joined_a_run_that_went_on_is_a_machine_like_others(tmp_path: Path) -> None:
    """With it there are three, of which the one with the coordinator may be lost."""
    with cluster(tmp_path, 3, *COPIED) as found:
        second = led_by_another(found)
        found.machines.append(found.join())
        wait_for(lambda: second.told("deputy 0", since="machine 3, with room"), START_S, "a deputy that has its vote")
        lose_the_next(found, second)


@deep.only
def test_a_run_that_goes_on_elsewhere_is_stopped_there(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *COPIED) as found:
        second = backed(found)
        assert second.directory not in running.running(second.directory.parent)
        with pytest.raises(ValueError, match="kept for a run that another machine leads"):
            following.stop(second.directory)
        lose_first_machine(found)
        second.leads()
        assert second.directory in running.running(second.directory.parent)
        assert f"{second.directory} is over (interrupted" in following.stop(second.directory)


@deep.only
def test_who_has_no_coordinator_any_more_leaves_the_run_to_its_deputy(tmp_path: Path) -> None:
    """It does not begin again beside that, though it could."""
    with cluster(tmp_path, 3, *COPIED) as found:
        second = backed(found)
        (nursery,) = children(found.run.process.pid)
        while found.run.process.poll() is None:  # one after the other, until it is not succeeded
            with suppress(OSError, ValueError):
                send((pid for pid in children(nursery) if role_of(pid) == "coordinator of"), signal.SIGKILL)
        status, _, err = found.run.finish()
        assert status == 1
        assert "the other machines go on with the run" in err
        wait_for(lambda: second.told("by its deputy"), START_S, "a takeover")
        second.interrupt()


@deep.only  # the old one asks for half a minute
def test_a_first_machine_that_comes_back_is_refused(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *COPIED) as found:
        second = backed(found)
        stopped = stop_first_machine(found)
        second.leads()
        send(stopped, signal.SIGCONT)
        status, _, err = found.run.finish()
        assert status == 1
        assert "others may go on with the run" in err
        trained = second.trained()
        wait_for(lambda: second.trained() > trained, START_S, "training to go on")
        second.interrupt()


@deep.only
def test_of_two_machines_the_other_saves_what_there_is(tmp_path: Path) -> None:
    """It cannot know whether the first one trains on."""
    with cluster(tmp_path, 2, *COPIED) as found:
        second = backed(found)
        lose_first_machine(found)
        _, said = second.machine.finish()
    assert "fewer than half of all machines are here" in said
    assert list((second.directory / "snapshots").iterdir())


@deep.only
def test_a_first_machine_of_two_without_its_launching_process_leaves_the_run_to_nobody(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, *COPIED) as found:
        backed(found)
        (nursery,) = children(found.run.process.pid)
        found.run.process.kill()
        wait_for(lambda: not alive(nursery), START_S, "the orderly end")
        assert following.recorded_end(found.directory).reason == LAUNCHER_GONE
        assert Snapshots(found.directory).numbers()


@deep.only
def test_a_first_machine_that_loses_its_nursery_leaves_the_run_to_the_others(tmp_path: Path) -> None:
    """It does not begin again beside them."""
    with cluster(tmp_path, 3, *COPIED) as found:
        second = backed(found)
        (nursery,) = children(found.run.process.pid)
        os.kill(nursery, signal.SIGKILL)
        second.leads()
        status, _, err = found.run.finish()
        assert status == 1
        assert "the other machines go on with the run" in err
        assert f"with --complete {found.directory}" in err
        assert "squall resume" not in err, "it would be another run"
        second.interrupt()


@deep.only
def test_a_run_goes_on_where_no_deputy_can_be(tmp_path: Path) -> None:
    """There is no directory for its record."""
    (tmp_path / "runs").touch()
    with cluster(tmp_path, 2, *COPIED) as found:
        found.event("warning", "the coordinator goes on without one")
        found.run.goes_on()
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
