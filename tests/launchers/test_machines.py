"""A run on several machines, each a nursery on loopback with an arena of its own: what is lost, comes and goes."""

from __future__ import annotations

import os
import re
import shutil
import signal
import tempfile
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest

from squall import replay
from squall.record.rows import EventRow, ProgressRow, StateRow
from squall.report import Reader, summarize
from squall.report.coverage import audit
from tests import deep
from tests.launchers.processes import FILE, START_S, Started, send, wait_for
from tests.warm import Warm


class Machine:
    """`squall join`, with all that is forked from it."""

    def __init__(self, address: str, token: Path, directory: Path, *flags: str) -> None:
        self.files = Path(tempfile.mkdtemp())  # all that it keeps while it takes part; not too long for sockets
        environment = {**os.environ, "TMPDIR": str(self.files)}
        self.process = Warm(["join", address, "--token-file", str(token), *flags], cwd=directory, env=environment)

    def pids(self) -> list[int]:
        """The nursery, and its processes."""
        (nursery,) = children(self.process.pid)
        return [nursery, *children(nursery)]

    def signal(self, number: int) -> None:
        send(self.pids() if self.process.poll() is None else (), number)

    def finish(self, within_s: float = START_S) -> tuple[int, str]:
        out, err = self.process.communicate(within_s)
        assert self.process.returncode is not None
        return self.process.returncode, out + err


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


class Cluster:
    """A run that wants `machines`, and those that join it; of a script, where that is given with its arguments."""

    def __init__(
        self, directory: Path, machines: int, *flags: str, file: Path = FILE, script: tuple[str, ...] = ()
    ) -> None:  # fmt: skip
        self.directory = directory / f"run-{uuid4().hex[:8]}"
        listen = ["--run-dir", str(self.directory), "--machines", str(machines), "--listen", "127.0.0.1:0"]
        what = ["run", *listen, *flags, *script] if script else ["train", str(file), *listen, *flags]
        self.run = Started(self.directory, *what)
        while "squall join" not in (line := self.run.process.stderr.readline()):
            assert line, "the run has ended"
        self.address = line.split()[2]
        self.machines = [self.join() for _ in range(machines - 1)]

    def join(self, *flags: str) -> Machine:
        return Machine(self.address, self.directory / "token", self.directory.parent, *flags)

    def event(self, kind: str, text: str = "") -> None:
        """Wait until the record tells of it."""
        wait_for(lambda: self.told(kind, text), START_S, f"the event {kind!r} {text!r}")

    def told(self, kind: str, text: str) -> bool:
        rows = self.run.rows(EventRow)
        return any(row.kind == kind and text in row.text for row in rows)  # type: ignore[attr-defined]


@contextmanager
def cluster(directory: Path, machines: int, *flags: str, **options: Any) -> Iterator[Cluster]:
    found = Cluster(directory, machines, *flags, **options)
    try:
        yield found
        for machine in found.machines:
            machine.finish()
        assert not found.run.processes()
    finally:
        for process in (found.run.process, *(machine.process for machine in found.machines)):
            process.kill()
        for machine in found.machines:
            shutil.rmtree(machine.files, ignore_errors=True)


SOON_S = 15.0  # half of what a machine waits for a coordinator that is silent
CORES = len(os.sched_getaffinity(0))
REPLICAS = 2 * CORES  # one machine alone has no room for them


def test_a_machine_that_is_lost_leaves_its_work_to_others(tmp_path: Path) -> None:
    """Or to one that comes later, where the others have no room; nothing is missed in the end."""
    with cluster(tmp_path, 2, "--replicas", str(REPLICAS), "--threads", "1", "--epochs", "100000") as found:
        found.event("started", "")
        first = found.machines[0]
        assert any("replica" in title for title in titles(first))
        assert list(first.files.iterdir())
        first.signal(signal.SIGKILL)
        found.event("lost", "machine 1 was lost: nothing was heard of it")
        found.event("warning", "waits: no machine has room for it")
        assert first.finish()[0] == 1
        first.files.rmdir()  # nothing is left there
        found.machines[0] = found.join()
        found.event("replaced", "on machine 2, which had room for")
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    reader = Reader(found.directory / "run.sqlite")
    assert audit(reader).complete
    reader.close()


WITH_SHARDS = [
    "--replicas",
    "3",
    "--shards",
    "3",
    "--threads",
    "1",
    "--epochs",
    "100000",
]  # on each of three machines one


def test_a_machine_that_leaves_hands_its_shards_over(tmp_path: Path) -> None:
    """The run goes on in the same terminals, with all that was trained; and is replayed as any other."""
    with cluster(tmp_path, 3, *WITH_SHARDS) as found:
        found.event("started")
        leaver, other = found.machines
        leaver.process.send_signal(signal.SIGINT)
        status, said = leaver.finish()
        assert status == 0
        assert "this machine has left the run, which goes on with its shards on others" in said
        found.event("started", "started again after")
        assert any("shard" in title for title in titles(other))
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
    reader = Reader(found.directory / "run.sqlite")
    assert not [span for part in audit(reader).parts for span in part.spans if span.times > 1]
    summary = summarize(reader)
    assert re.search(r"pause +\d.*: machine \d leaves", str(summary))
    assert sorted(summary.machines) == [0, 1, 2]
    reader.close()
    replayed = replay(found.directory, check=True)
    assert replayed.as_asked, replayed.stopped


@pytest.mark.parametrize("number", deep.sweep([signal.SIGKILL, signal.SIGSTOP], 1))
def test_a_run_goes_back_to_its_snapshot_when_a_machine_is_lost_with_a_shard(tmp_path: Path, number: int) -> None:
    with cluster(tmp_path, 3, *WITH_SHARDS, "--snapshot-every-s", "0.3") as found:
        found.event("snapshot", "snapshot 2 in")
        lost, other = found.machines
        lost.signal(number)
        found.event("lost", "was lost: nothing was heard of it for 2 s")
        found.event("started", "started again after")
        assert any("shard" in title for title in titles(other))
        found.run.goes_on()
        lost.signal(signal.SIGCONT)
        assert lost.finish()[0] == 1
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
        assert re.search(r"machine \d was lost: .*; it had shard \d; going on from snapshot \d+", err)
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        assert re.search(r"pause +\d.*: machine \d was lost", str(summarize(reader)))


@deep.only
def test_a_run_that_may_not_start_again_ends_with_its_machine(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, *WITH_SHARDS, "--restarts", "0") as found:
        found.event("started")
        found.machines[0].signal(signal.SIGKILL)
        status, _, err = found.run.finish()
        assert status == 1
        assert re.search(r"machine 1 was lost: .*; it had shard \d", err)
        assert found.machines[0].finish()[0] == 1


@deep.only
@pytest.mark.parametrize("fault", ["another leaves", "another is lost", "interrupted here"])
def test_what_comes_while_a_run_moves(fault: str, tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *WITH_SHARDS) as found:
        found.event("started")
        leaver, other = found.machines
        leaver.process.send_signal(signal.SIGTERM)
        found.run.wait_rows(StateRow, lambda row: (row.key, row.value) == ("status", "moved"))  # type: ignore[attr-defined]
        match fault:
            case "another leaves":
                other.process.send_signal(signal.SIGTERM)
                assert other.finish()[0] == 0
            case "another is lost":
                other.signal(signal.SIGKILL)
        assert leaver.finish()[0] == 0
        if fault != "interrupted here":
            found.event("started", "started again after")
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130
        assert re.search(r"go on from snapshot \d with: squall resume", err)


@deep.only
def test_machines_leave_one_after_the_other(tmp_path: Path) -> None:
    """Two at once, and the last as soon as the run goes on: it ends on the first machine alone."""
    flags = ["--replicas", "4", "--shards", "4", "--threads", "1", "--epochs", "100000"]
    with cluster(tmp_path, 4, *flags) as found:
        found.event("started")
        for machine in found.machines[:2]:
            machine.process.send_signal(signal.SIGINT)
        found.event("started", "started again after")
        found.machines[2].process.send_signal(signal.SIGINT)
        assert [machine.finish()[0] for machine in found.machines] == [0, 0, 0]
        found.run.wait_rows(StateRow, lambda row: row.key == "pauses" and row.value.count("leaves") == 2)  # type: ignore[attr-defined]
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130
    reader = Reader(found.directory / "run.sqlite")
    assert len(summarize(reader).pauses) == 2
    assert audit(reader).complete
    reader.close()


@deep.only
def test_when_the_first_machine_is_gone_whole_the_others_end_soon(tmp_path: Path) -> None:
    with cluster(tmp_path, 2, "--replicas", "2", "--shards", "2", "--epochs", "100000") as found:
        found.event("started", "")
        (nursery,) = children(found.run.process.pid)  # the other machine's has the same title
        for pid in [found.run.process.pid, nursery]:  # with whom the kernel kills what it has forked
            os.kill(pid, signal.SIGKILL)
        assert found.machines[0].finish(SOON_S)[0] == 1


@deep.only
def test_when_all_is_over_nobody_waits_for_a_machine_that_does_not_answer(tmp_path: Path) -> None:
    flags = ["--replicas", "3", "--threads", "1", "--epochs", "100000", "--restarts", "0"]
    with cluster(tmp_path, 2, *flags) as found:
        found.event("started", "")
        (other,) = found.machines
        assert any("shard" in title for title in titles(other))
        other.signal(signal.SIGSTOP)
        assert found.run.finish(SOON_S)[0] == 1
        other.signal(signal.SIGCONT)


def titles(machine: Machine) -> list[str]:
    return [Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode() for pid in machine.pids()]


@deep.only
def test_replicas_begin_as_machines_have_room_for_them(tmp_path: Path) -> None:
    flags = ["--replicas", f"1..{CORES + 1}", "--threads", "1", "--epochs", "100000"]
    with cluster(tmp_path, 1, *flags) as found:
        found.event("started", "")
        found.machines.append(found.join())
        found.event("replaced", f"replica {CORES}, on machine 1, which had room for")
        found.run.process.send_signal(signal.SIGINT)
        assert found.run.finish()[0] == 130


DIGITS = Path(__file__).parents[2] / "examples" / "digits.py"
MANY = 32
MANY_WITHIN_S = 300.0


@deep.only
def test_thirty_two_machines_train_to_the_end(tmp_path: Path) -> None:
    """A replica on each."""
    with cluster(tmp_path, MANY, "--replicas", str(MANY), "--shards", "2", "--threads", "1", file=DIGITS) as found:
        status, out, err = found.run.finish(MANY_WITHIN_S)
        assert status == 0, err
        assert "finished: all data is trained" in out
        for machine in found.machines:
            assert machine.finish()[0] == 0
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        assert not [row.text for row in reader.rows(EventRow) if row.kind in ("lost", "warning")]
        assert {row.replica for row in reader.rows(ProgressRow)} == set(range(MANY))


@deep.only
def test_the_first_machines_processes_are_lost_and_all_begin_again(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *WITH_SHARDS, "--snapshot-every-s", "0.3") as found:
        found.event("snapshot", "snapshot 2 in")
        (nursery,) = children(found.run.process.pid)
        os.kill(nursery, signal.SIGKILL)
        found.event("restarted", "was lost: killed by SIGKILL; starting again from snapshot ")
        found.run.goes_on()
        found.run.process.send_signal(signal.SIGINT)
        status, _, err = found.run.finish()
        assert status == 130, err
        assert [machine.finish()[0] for machine in found.machines] == [0, 0]
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert audit(reader).complete
        assert sorted(summarize(reader).machines) == [0, 1, 2]
