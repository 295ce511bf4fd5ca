"""A first machine's directory gets what it lacks, whatever comes from where its run has ended."""

from __future__ import annotations

import errno
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from squall.launchers.completing import complete, directory_of, give_directory, give_nothing, given
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.call import Call
from squall.record.rows import EventRow, StateRow
from squall.record.writer import Record
from squall.report import Reader
from squall.runtime.lock import hold
from tests.launchers.joining.head import Head

Give = Callable[[ControlPipe], object]


class Ended(Head):
    """The head of a run that is over, which gives in this way."""

    def __init__(self, give: Give) -> None:
        super().__init__()
        self._give = give

    def turn(self, timeout_s: float = 0.01) -> None:
        super().turn(timeout_s)
        for machine in self.joined:
            assert machine.hello.fetches
            self._give(ControlPipe(machine.pipe))
            machine.pipe.close()
        self.joined.clear()


@pytest.fixture
def first(tmp_path: Path) -> Path:
    """What a first machine has that was killed: the end of its record is in the log beside it."""
    directory = run(tmp_path / "lived", ["started"])
    with closing(Record(directory / "run.sqlite")) as record:
        record.add(EventRow(0.0, "joined", ""))
        record.commit(1.0, force=True)
        directory = shutil.copytree(directory, tmp_path / "first")
    assert (directory / "run.sqlite-wal").stat().st_size
    (directory / "token").write_text("its own")
    (directory / "snapshots" / "000001").mkdir(parents=True)
    (directory / "snapshots" / "000001" / "manifest").write_text("the first")
    return directory


@pytest.fixture
def second(tmp_path: Path) -> Path:
    directory = run(tmp_path / "second", ["started", "joined", "replaced", "finished"])
    (directory / "token").write_text("another")
    (directory / "snapshots" / "000002").mkdir(parents=True)
    (directory / "snapshots" / "000002" / "manifest").write_text("the second")
    (directory / "empty").touch()
    return directory


def run(directory: Path, kinds: list[str], plan: str = "{}") -> Path:
    directory.mkdir()
    (directory / "run.json").write_text(plan)
    record = Record(directory / "run.sqlite")
    record.add(StateRow("snapshot", "2"))
    for kind in kinds:
        record.add(EventRow(0.0, kind, ""))
    record.close()
    return directory


def kinds(directory: Path) -> list[str]:
    with closing(Reader(directory / "run.sqlite")) as reader:
        return [row.kind for row in reader.rows(EventRow)]


def completed(first: Path, give: Give) -> Path:
    """Where what was replaced is."""
    head = Ended(give)
    with closing(head), head.attended():
        return complete(Call(head.address, head.token, 60.0), first, 1)


def gives(directory: Path) -> Give:
    def give(machine: ControlPipe) -> None:
        try:
            with given(directory) as files:
                give_directory(machine, files)
        except ValueError as error:
            give_nothing(machine, str(error))

    return give


def files(directory: Path) -> Iterator[tuple[str, bytes]]:
    for path in sorted(directory.rglob("*")):
        if path.is_file() and path.name != "lock":
            yield str(path.relative_to(directory)), path.read_bytes()


def unread(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """What is there; the record as it tells, wherever its rows lie."""
    return {name: data for name, data in files(directory) if "run.sqlite" not in name}, kinds(directory)


def test_it_has_all_that_was_given_and_what_that_replaced_is_aside(first: Path, second: Path) -> None:
    aside = completed(first, gives(second))
    assert kinds(aside) == ["started", "joined"]
    found, wanted = unread(first), unread(second)
    assert found[0].items() >= {**wanted[0], "token": b"its own"}.items()
    assert found[1] == wanted[1] == ["started", "joined", "replaced", "finished"]
    assert all(stat.S_IMODE(path.stat().st_mode) & 0o77 == 0 for path in (first / "snapshots").rglob("000002*"))


def test_what_lies_on_the_first_machine_alone_stays(first: Path, second: Path) -> None:
    """Snapshots that the run has made, the best weights, schedules; not a snapshot that it does not know."""
    shutil.rmtree(second / "snapshots")
    for name in ("best.safetensors", "schedule/0/shard-0.0", "snapshots/000009/manifest"):
        (first / name).parent.mkdir(parents=True, exist_ok=True)
        (first / name).write_text(name)
    aside = completed(first, gives(second))
    for name in ("best.safetensors", "schedule/0/shard-0.0", "snapshots/000001/manifest"):
        assert (first / name).exists()
    assert not (first / "snapshots" / "000009").exists()
    assert (aside / "snapshots" / "000009" / "manifest").exists()


def test_it_may_be_completed_twice(first: Path, second: Path) -> None:
    assert [completed(first, gives(second)).name for _ in range(2)] == ["before", "before-2"]
    assert kinds(first) == kinds(second)
    assert not list(first.glob("before-2/before*"))


def test_a_record_comes_whole_though_somebody_reads_it(first: Path, second: Path) -> None:
    record = Record(second / "run.sqlite")
    record.add(EventRow(1.0, "late", ""))
    record.commit(1.0, force=True)
    with closing(record), closing(Reader(second / "run.sqlite")) as reader:
        assert len(reader.rows(EventRow)) == 5
        completed(first, gives(second))
    assert kinds(first)[-1] == "late"


def names(*told: str) -> Give:
    return lambda machine: machine.say(kind="files", files=list(told))


def half(machine: ControlPipe) -> None:
    machine.say(kind="files", files=["run.json"])
    machine.send(b"{")


@pytest.mark.parametrize(
    ("give", "why"),
    [
        (names("../above"), "above"), (names("/root/file"), "/root/file"), (names("token"), "token"),
        (names("lock"), "lock"), (names("before/run.json"), "before"), (names(""), "''"), (half, "in the midst"),
        (lambda machine: None, "says nothing"), (lambda machine: give_nothing(machine, "it is busy"), "busy"),
    ],
)  # fmt: skip
def test_what_is_no_directory_changes_nothing(first: Path, give: Give, why: str) -> None:
    before = unread(first)
    with pytest.raises(ValueError, match=why):
        completed(first, give)
    assert unread(first) == before
    assert not (first / "coming").exists()


@pytest.mark.parametrize(
    ("fault", "why"),
    [
        ("another run", "is another run"), ("started again here", "was started again"),
        ("trained here", "is being trained"), ("trained there", "is being trained"),
    ],
)  # fmt: skip
def test_a_directory_that_is_another_one_by_now_is_left_alone(
    first: Path, second: Path, tmp_path: Path, fault: str, why: str
) -> None:
    if fault == "another run":
        second = run(tmp_path / "other", ["started"], plan='{"other": 1}')
    if fault == "started again here":
        with closing(Record(first / "run.sqlite")) as record:
            record.add(EventRow(2.0, "started", ""))
    before = unread(first)
    busy = {"trained here": first, "trained there": second}.get(fault)
    with hold(busy) if busy is not None else nullcontext(), pytest.raises(ValueError, match=why):
        completed(first, gives(second))
    assert unread(first) == before
    assert "coming" not in {path.name for path in first.iterdir()}


def test_where_something_cannot_be_moved_all_is_as_it_was(
    first: Path, second: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A mount point, for example."""
    rename = Path.rename

    def refuses(path: Path, to: Path) -> Path:
        if path == first / "snapshots":
            raise OSError(errno.EBUSY, "it is busy")
        return rename(path, to)

    before = unread(first)
    monkeypatch.setattr(Path, "rename", refuses)
    with pytest.raises(ValueError, match="it is busy"):
        completed(first, gives(second))
    assert unread(first) == before
    assert {path.name for path in first.iterdir()} == {"run.json", "run.sqlite", "snapshots", "token", "lock"}


def test_only_a_runs_directory_can_be_completed_while_nobody_trains_there(first: Path, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no run in it"):
        directory_of(str(tmp_path))
    with hold(first), pytest.raises(ValueError, match="is being trained"):
        directory_of(str(first))
    assert directory_of(str(first)) == first
