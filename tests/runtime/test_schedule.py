"""The file of a schedule, and what a replica's and a shard's hosts write into it."""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from squall.protocol.effects import Apply, Compute, End, Payload, PreparePush, Term, UseWeights, WriteSnapshot
from squall.protocol.events import GradientComputed
from squall.protocol.nodes import Node
from squall.runtime import schedule
from squall.runtime.driver import Host
from squall.runtime.recording import WRITTEN_EVERY_S, WRITTEN_TOGETHER, RecordedReplica, RecordedShard
from squall.runtime.records import (
    SEEN,
    Applied,
    Computed,
    Delivered,
    Fingerprint,
    ProcessEnded,
    Pushed,
    Saved,
    records,
    short,
)
from squall.runtime.schedule import Damaged, ScheduleWriter, packed, read

R0, R1_AGAIN = Node("replica", 0), Node("replica", 1, 2)


class Still(Host):
    """A host that does nothing; `finite` is what its next gradients are."""

    def __init__(self) -> None:
        self.finite = True
        self.store = SimpleNamespace(weights=torch.arange(1000.0))

    def perform(self, effect: Any, now: float) -> Any:
        return GradientComputed(0.0, self.finite, 0.0) if isinstance(effect, Compute) else None


# ---------------------------------------------------------------- the file


@pytest.mark.parametrize("count", [0, 1, 5000])  # more than the first reserve holds
def test_what_was_added_is_read_also_without_an_orderly_end(count: int, tmp_path: Path) -> None:
    log = ScheduleWriter(tmp_path / "log")
    added = [[number, "x" * (number % 700)] for number in range(count)]  # some are longer than a byte can say
    for record in added:
        log.add(record)
    assert list(read(tmp_path / "log")) == added
    log.close()
    log.close()
    assert list(read(tmp_path / "log")) == [*added, [schedule.ENDED]]
    assert (tmp_path / "log").stat().st_mode & 0o777 == 0o600
    assert (tmp_path / "log").read_bytes()[-1:] != b"\0"


def test_a_record_is_there_when_its_process_is_killed_behind_it(tmp_path: Path) -> None:
    child = os.fork()
    if not child:
        log = ScheduleWriter(tmp_path / "log")
        log.add([1, 2, 3])
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    assert list(read(tmp_path / "log")) == [[1, 2, 3]]


def test_a_record_that_its_process_was_killed_over_is_not_there(tmp_path: Path) -> None:
    log = ScheduleWriter(tmp_path / "log")
    log.add([1, 2, 3])
    written = bytearray((tmp_path / "log").read_bytes())
    begins = len(bytes(written).rstrip(b"\0"))
    log.add([4, 5, 6])
    torn = bytearray((tmp_path / "log").read_bytes())
    torn[begins] = 0  # its length, which is stored last
    assert torn != written
    (tmp_path / "log").write_bytes(torn)
    assert list(read(tmp_path / "log")) == [[1, 2, 3]]


@given(st.data())
@settings(max_examples=60, derandomize=True)  # one change in 65,536 would pass
def test_any_byte_that_changed_ends_the_reading_at_its_record(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    log, added = ScheduleWriter(path), [[number, number * 1000] for number in range(20)]
    for record in added:
        log.add(record)
    log.close()
    whole = bytearray(path.read_bytes())
    place = data.draw(st.integers(0, len(whole) - 1))
    whole[place] ^= data.draw(st.integers(1, 255))
    path.write_bytes(whole)
    found, damage = up_to_the_damage(read(path))
    assert damage.startswith(f"{path} is")
    assert found == [*added, [schedule.ENDED]][: len(found)]


def up_to_the_damage(reading: Iterator[Any]) -> tuple[list[Any], str]:
    """What can be read, and why no more."""
    found: list[Any] = []
    with pytest.raises(Damaged) as caught:
        found.extend(reading)
    return found, str(caught.value)


@pytest.mark.parametrize("at", [0, 6])
def test_a_full_disk_ends_the_schedule_and_not_the_training(
    at: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    reserved = end = 0
    real = os.posix_fallocate

    def full(handle: int, offset: int, size: int) -> None:
        nonlocal reserved, end
        assert offset == end  # what is reserved is not asked for again
        reserved, end = reserved + 1, offset + size
        if reserved > at:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        real(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", full)
    log = ScheduleWriter(tmp_path / "log")
    for number in range(20_000):
        log.add([number, "x" * 50])
    log.close()
    warning = capfd.readouterr().err
    assert warning.count("warning") == 1
    assert "No space left on device" in warning
    if at:
        kept = list(read(tmp_path / "log"))
        assert kept == [[number, "x" * 50] for number in range(len(kept))]
        assert len(kept) > 1000


RECORDS = [[number, number % 7, "x" * (number % 3 * 200)] for number in range(2000)]


def grown(path: Path, at_most: float = math.inf) -> ScheduleWriter:
    log = ScheduleWriter(path, at_most)
    for record in RECORDS:
        log.add(record)
    return log


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schedule, "PIECE", 1 << 14)


def test_a_long_file_is_packed_piece_by_piece_and_read_as_one(tmp_path: Path, small_pieces: None) -> None:
    path = tmp_path / "log"
    log = grown(path)
    assert list(read(path)) == RECORDS
    log.close()
    assert list(read(path)) == [*RECORDS, [schedule.ENDED]]
    assert path.stat().st_size <= 1 << 14
    assert packed(path).stat().st_size < sum(len(str(record)) for record in RECORDS) / 20
    assert packed(path).stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("killed", ["while a piece is packed", "behind that", "while the file begins anew"])
def test_a_process_that_is_killed_while_it_packs_loses_nothing_and_doubles_nothing(
    tmp_path: Path, small_pieces: None, monkeypatch: pytest.MonkeyPatch, killed: str
) -> None:
    path = tmp_path / "log"
    whole: list[tuple[bytes, bytes]] = []
    pack = ScheduleWriter._pack

    def seen(log: ScheduleWriter) -> None:
        before = path.read_bytes()
        pack(log)
        whole.append((before, packed(path).read_bytes()))

    monkeypatch.setattr(ScheduleWriter, "_pack", seen)
    grown(path)
    before, pieces = whole[2]  # the file as it was when the third piece was packed, and all three
    said = [record for record in RECORDS if record[0] < 10_000]
    match killed:
        case "while a piece is packed":
            packed(path).write_bytes(pieces[:-10])
            path.write_bytes(before)
        case "behind that":
            packed(path).write_bytes(pieces)
            path.write_bytes(before)
        case _:
            packed(path).write_bytes(pieces)
            path.write_bytes(before[: schedule.BEGIN] + bytes(5000) + before[schedule.BEGIN + 5000 :])
    found = list(read(path))
    assert found == said[: len(found)]
    assert len(found) > 3 * (1 << 14) / 420
    successor = ScheduleWriter(path, goes_on=True)
    for record in RECORDS[len(found) :]:  # further pieces among them
        successor.add(record)
    assert list(read(path)) == RECORDS


def test_pieces_that_are_gone_or_damaged_are_named(tmp_path: Path, small_pieces: None) -> None:
    path = tmp_path / "log"
    grown(path).close()
    pieces = bytearray(packed(path).read_bytes())
    pieces[len(pieces) // 2] ^= 1
    packed(path).write_bytes(pieces)
    found, damage = up_to_the_damage(read(path))
    assert f"{packed(path)} is damaged" in damage
    assert 0 < len(found) < len(RECORDS)
    packed(path).unlink()
    assert "holds 0 of" in up_to_the_damage(read(path))[1]


def test_a_schedule_ends_at_the_size_that_it_may_have(
    tmp_path: Path, small_pieces: None, capfd: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "log"
    grown(path, at_most=20_000).close()
    assert "the size that --keep-schedule leaves it; a replay will end there" in capfd.readouterr().err
    assert path.stat().st_size + packed(path).stat().st_size <= 20_000
    found = list(read(path))
    assert found == RECORDS[: len(found)]
    assert found


# ---------------------------------------------------------------- a replica


EFFECTS = st.one_of(
    st.tuples(st.just("batch"), st.integers(0, 2), st.integers(0, 40), st.sampled_from([16, 16, 10]), st.booleans()),
    st.tuples(st.just("next"), st.booleans()),
    st.tuples(st.just("push"), st.booleans()),
    st.tuples(st.just("use"), st.integers(0, 1)),
    st.tuples(st.just("nan")),
    st.tuples(st.just("skip")),
)


@given(st.lists(EFFECTS, max_size=60))
@settings(max_examples=200)
def test_a_replicas_schedule_says_what_its_host_was_told(
    tmp_path_factory: pytest.TempPathFactory, story: list[tuple[Any, ...]]
) -> None:
    path = tmp_path_factory.mktemp("log") / "log"
    still, said = Still(), []
    host = RecordedReplica(still, ScheduleWriter(path))  # type: ignore[arg-type]
    clock = held = buffer = 0
    epoch, start, stop = 0, 0, 16

    def compute(local_step: bool, finite: bool = True) -> None:
        nonlocal held
        batch = Compute(epoch, start, stop, buffer, held > 0, local_step)
        held += finite
        still.finite = finite
        host.perform(batch, 0.0)
        said.append(Computed(batch, finite))

    for what, *more in story:
        match what:
            case "batch":
                epoch, start = more[0], more[1] * 16
                stop = start + more[2]
                compute(more[3])
            case "next":
                start, stop = stop, stop + (stop - start)
                compute(more[0])
            case "nan":
                compute(False, finite=False)
            case "skip":
                batch = Compute(epoch, start, stop, buffer, held > 0, local_step=False)
                host.computed(batch, finite=False, left_out=True)
                said.append(Computed(batch, finite=False, skipped=True))
            case "push":
                clock += 1
                if more[0]:
                    host.perform(PreparePush(buffer), 0.0)
                for _ in range(3):  # to three shards
                    host.attach(Payload("gradient", R0, buffer, clock, 0))
                said.append(Pushed(clock, buffer, more[0]))
                held, buffer = 0, 1 - buffer
            case "use":
                host.perform(UseWeights(more[0]), 0.0)
                said.append(UseWeights(more[0]))
    host.perform(End("finished"), 0.0)
    assert list(records(path, 4)) == [*said, ProcessEnded()]


def test_many_batches_behind_a_push_take_few_bytes(tmp_path: Path) -> None:
    host = RecordedReplica(Still(), ScheduleWriter(tmp_path / "log"))  # type: ignore[arg-type]
    for number in range(500):
        host.perform(Compute(0, 64 * number, 64 * number + 64, 0, number > 0, number < 499), 0.0)
    host.attach(Payload("gradient", R0, 0, 1, 0))
    host.perform(End("finished"), 0.0)
    assert (tmp_path / "log").stat().st_size < 50


# ---------------------------------------------------------------- a shard


def test_a_shards_schedule_says_what_it_applied_delivered_and_saved(tmp_path: Path) -> None:
    still = Still()
    host = RecordedShard(still, ScheduleWriter(tmp_path / "log"), 4)  # type: ignore[arg-type]
    one = Apply((Term(R0, 1, 1.0, 70_000),), 1 / 3, 70_000, 1 / 7)
    round_ = Apply((Term(R0, 0, 0.4, 3), Term(R1_AGAIN, 1, 0.6, 2)), 1.0, 3, 0.55)
    at_own_rates = Apply((Term(R0, 0, 1.0, 4),), 1.0, 4, 1.0, (0.25, None, 0.3))
    fingerprint = Fingerprint(still.store.weights)
    expected = []
    for update in (one, round_, at_own_rates):
        host.perform(update, 0.0)
        host.attach(Payload("weights", R1_AGAIN, 1, 5, 0))
        host.attach(Payload("weights", Node("evaluator", 4), 0, 0, 0))
        expected += [Applied(update, fingerprint() & SEEN), Delivered(R1_AGAIN, 1)]
    host.perform(WriteSnapshot(2, 71), 0.0)
    host.perform(End("finished"), 0.0)
    assert list(records(tmp_path / "log", 4)) == [*expected, Saved(2, 71), ProcessEnded()]


def test_a_shard_writes_when_it_would_wait_and_has_some_or_has_not_for_a_while(tmp_path: Path) -> None:
    host = RecordedShard(Still(), ScheduleWriter(tmp_path / "log"), 4)  # type: ignore[arg-type]

    def written(now: float) -> int:
        host.perform(Apply((Term(R0, 0, 1.0, 1),), 1.0, 1), now)
        host.rest()
        return len(list(records(tmp_path / "log", 4)))

    assert written(0.01) == 0
    assert written(0.02) == 0
    assert written(WRITTEN_EVERY_S) == 3
    assert {written(WRITTEN_EVERY_S) for _ in range(WRITTEN_TOGETHER - 1)} == {3}
    assert written(WRITTEN_EVERY_S) == 3 + WRITTEN_TOGETHER


def test_a_fingerprint_is_taken_before_the_next_update_changes_the_weights(tmp_path: Path) -> None:
    still = Still()
    host = RecordedShard(still, ScheduleWriter(tmp_path / "log"), 4)  # type: ignore[arg-type]
    wanted, fingerprint = [], Fingerprint(still.store.weights)
    still.perform = lambda effect, now: still.store.weights.add_(1)  # type: ignore[method-assign,assignment,return-value]
    for _ in range(5):
        host.perform(Apply((Term(R0, 0, 1.0, 1),), 1.0, 1), 0.0)
        wanted.append(fingerprint() & SEEN)
    host.write()
    found = [record.fingerprint for record in records(tmp_path / "log", 4) if isinstance(record, Applied)]
    assert found == wanted
    assert len(set(found)) == 5


@pytest.mark.parametrize("elements", [1, 64, 1024, 1025, 1027, 1600])
def test_every_element_is_in_a_fingerprint_before_long(elements: int) -> None:
    weights = torch.ones(elements)
    rounds = 1 if elements <= 1024 else -(-(elements // 4 + 3) // 16)
    for element in range(elements):
        other = weights.clone()
        other[element] += 1e-6
        before, after = Fingerprint(weights), Fingerprint(other)
        assert [before() for _ in range(rounds)] != [after() for _ in range(rounds)]


@given(st.floats(1e-6, 1.0) | st.integers(1).map(lambda n: 1 / n) | st.floats(allow_nan=False))
def test_a_share_is_written_short_only_where_it_comes_back_as_it_was(value: float) -> None:
    """Also what loops set, which may be anything."""
    written = msgspec.msgpack.decode(msgspec.msgpack.encode(short(value)))
    assert (1 / written if isinstance(written, int) else written) == value


def test_one_over_n_is_written_as_n() -> None:
    assert [short(1 / n) for n in range(1, 2000)] == list(range(1, 2000))


@pytest.mark.parametrize(
    "raw",
    [
        [99],
        [schedule.PUSHED, 1],
        [schedule.APPLIED, 1, 1, 1, 2, 0],
        [schedule.APPLIED, 1, 1, 1, 0, 0],
        ["x"],
        [schedule.USED],
        [schedule.COMPUTED, 5, 1 << 40, 0, 0, 16],
        [schedule.COMPUTED, 5, 1 << 40, 0, 0, 0],
        [schedule.COMPUTED, 5, 1, 0, -16, 16],
        [schedule.COMPUTED, 5, 0, 0, 0, 16],
        [schedule.COMPUTED, 5, 1, 0, 80, 16],
        [schedule.CONTINUED, 5, 1],
        [schedule.CALCULATED, 1, "x"],
    ],
)
def test_a_record_that_says_nothing_is_damage(raw: list[Any], tmp_path: Path) -> None:
    log = ScheduleWriter(tmp_path / "log")
    log.add([schedule.USED, 1])
    log.add(raw)
    found, damage = up_to_the_damage(records(tmp_path / "log", 4, examples=90))
    assert found == [UseWeights(1)]
    assert "is damaged at record 1: " in damage
