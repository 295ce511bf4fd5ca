"""Copies: a shard's backup has all that it has acknowledged, and goes on where the shard was lost with its machine."""

from __future__ import annotations

import os
import pickle
import signal
from collections import deque
from contextlib import closing, suppress
from functools import partial
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

import pytest
import torch
from setproctitle import getproctitle

import squall
from squall.plan import make_plan
from squall.record.rows import EventRow, LossRow, MemberRow, ProgressRow
from squall.report import Reader, summarize
from squall.report.coverage import audit
from squall.runtime import whole
from squall.settings import Settings
from squall.strategies import Strategy
from tests import deep
from tests.launchers import blobs, piped
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.test_machines import Cluster, Machine, cluster

COPIED = ["--replicas", "2", "--shards", "2", "--threads", "1", "--epochs", "100000", "--copies", "2"]


def role_of(pid: int) -> str:
    return " ".join(Path(f"/proc/{pid}/cmdline").read_text().split()[1:3])


class Rows(Protocol):
    """Whoever has a record."""

    def rows(self, table: type[Any], /) -> list[Any]: ...


def wait_whole(run: Rows, shards: int = 2) -> None:
    """Until each shard has a backup that can take over."""

    def whole() -> bool:
        newest = {row.node: row.change for row in run.rows(MemberRow)}
        return all(
            any(what == "joined" for node, what in newest.items() if node.startswith(f"backup-{index}."))
            for index in range(shards)
        )

    wait_for(whole, START_S, "backups of all shards")


def with_a_shard(found: Cluster) -> Machine:
    return next(each for each in found.machines if any("shard" in role_of(pid) for pid in each.pids()))


def interrupt(found: Cluster) -> None:
    """The run ends with a snapshot, and nothing of what it calls trained is missing."""
    found.run.process.send_signal(signal.SIGINT)
    assert found.run.finish()[0] == 130
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)
        assert not reader.rows(LossRow)
        summary = summarize(reader)
        assert summary.copied_bytes > 0
        assert 0 < (summary.copying or 0.0) < 1
    assert list((found.directory / "snapshots").iterdir())


CORRECTED = "asynchronous_sgd --staleness compensate --optimizer sgd --lr 0.01"


@pytest.mark.parametrize("strategy", deep.sweep(["downpour", "synchronous", "elastic_averaging", CORRECTED], 1))
def test_a_shards_backup_takes_over_when_its_machine_is_lost(tmp_path: Path, strategy: str) -> None:
    """And has a backup of its own again, so that the next machine may be lost as well."""
    with cluster(tmp_path, 4, "--strategy", *strategy.split(), *COPIED) as found:
        found.event("started")
        for times in (1, 2):
            wait_whole(found.run)
            lose_a_shard(found, times)
        found.run.goes_on()
        interrupt(found)


@deep.only
def test_who_joins_behind_a_takeover_finds_the_shard_where_it_is(tmp_path: Path) -> None:
    with cluster(tmp_path, 3, *COPIED, "--replicas", "6") as found:  # they have no room elsewhere
        wait_whole(found.run)
        lose_a_shard(found)
        found.machines.append(found.join())
        found.event("replaced", "on machine 3, which had room")
        trained = lambda: {row.replica for row in found.run.rows(ProgressRow)[-40:]}  # type: ignore[attr-defined]  # noqa: E731
        wait_for(lambda: trained() == set(range(6)), START_S, "all replicas to train")
        interrupt(found)


SPREAD = [
    ("downpour", ""), ("downpour", "--spread-parts"), ("synchronous", "--spread-parts"),
    (CORRECTED, "--spread-parts"), ("elastic_averaging", "--spread-parts"),
]  # fmt: skip


@deep.only
@pytest.mark.parametrize(("strategy", "spread"), SPREAD)
def test_a_backup_takes_over_what_replicas_of_several_parts_push_to(tmp_path: Path, strategy: str, spread: str) -> None:
    """Each lies on one machine, or no two parts of one do. Then others take their places, with parts that call it."""
    flags = ("--strategy", *strategy.split(), *COPIED, "--parts", "2", "--replicas", "3", *spread.split())
    with cluster(tmp_path, 3, *flags, file=Path(str(piped.__file__))) as found:
        wait_whole(found.run)
        found.run.goes_on()  # and what is pushed now is copied
        lose_a_shard(found)
        found.run.goes_on()
        interrupt(found)


@deep.only
def test_a_machine_that_leaves_with_a_shard_hands_it_over(tmp_path: Path) -> None:
    """To its backup: nothing starts again, nothing is trained twice, and another machine may leave or be lost then."""
    with cluster(tmp_path, 4, *COPIED) as found:
        wait_whole(found.run)
        leaver = with_a_shard(found)
        leaver.process.send_signal(signal.SIGINT)
        status, said = leaver.finish()
        assert status == 0
        assert "this machine has left the run" in said
        found.machines.remove(leaver)
        assert taken_over(found) >= 1
        found.run.goes_on()
        wait_whole(found.run)
        lose_a_shard(found, 1 + taken_over(found))
        found.run.goes_on()
        interrupt(found)
    with closing(Reader(found.directory / "run.sqlite")) as reader:
        assert not any("again" in row.text for row in reader.rows(EventRow) if row.kind == "started")


def lose_a_shard(found: Cluster, times: int = 1) -> None:
    """With its machine. Wait until its backup has taken over, as often as that in all."""
    lost = with_a_shard(found)
    lost.signal(signal.SIGKILL)
    wait_for(lambda: taken_over(found) >= times, START_S, "a takeover")
    lost.finish()
    found.machines.remove(lost)


def taken_over(found: Cluster) -> int:
    return sum("by its backup" in row.text for row in found.run.rows(EventRow))  # type: ignore[attr-defined]


class Deadly(torch.optim.Adam):
    """Ends its process in the midst of an update, if that is a shard: once, which is noted in the file ENDED."""

    role = "shard"
    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step(closure)
        self.updates += 1
        if self.updates >= 300 and f"squall {self.role}" in getproctitle():
            with suppress(FileExistsError):
                Path(os.environ["ENDED"]).touch(exist_ok=False)
                self.end()

    def end(self) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class Roomless(Deadly):
    """Of a backup on a machine that has no room for what it needs."""

    role = "backup"

    def end(self) -> None:
        raise MemoryError("no room for an update")


@deep.only
def test_a_death_inside_an_update_loses_nothing(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On one machine, too: the backup has made the updates of its own numbers, and goes on."""
    assert "shard 0, on machine 0, by its backup" in trained_through(Deadly, run_dir, monkeypatch)


@deep.only
def test_a_backup_that_raises_ends_alone(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """What is wrong with a copy, or with where it is, is told, and no reason to end the run."""
    assert any("backup 0" in text for text in trained_through(Roomless, run_dir, monkeypatch))
    assert "MemoryError: no room for an update" in capfd.readouterr().err


def trained_through(optimizer: type[Deadly], run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the record says of a run with copies in which one process ends so; nothing is lost or repeated."""
    monkeypatch.setenv("ENDED", str(run_dir.with_name("ended")))
    strategy = squall.Downpour(replicas=2, optimizer=partial(optimizer, lr=0.05))
    squall.fit(blobs.task, strategy, epochs=5, run_dir=run_dir, settings=Settings(copies=2, progress=False))
    assert run_dir.with_name("ended").exists()
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        found = audit(reader)
        assert not reader.rows(LossRow)
        assert found.complete
        assert not any(part.repeated for part in found.parts)
        return [event.text for event in reader.rows(EventRow)]


def test_a_backup_that_is_killed_is_replaced(tmp_path: Path) -> None:
    """Its shard waits for it no longer, and the next one has all that it has."""
    directory = tmp_path / f"run-{uuid4().hex[:8]}"
    run = Started.train(directory, *COPIED)
    try:
        wait_whole(run)
        for role in ("backup 0", "shard 1", "backup 1", "backup 0"):
            run.kill_shard(role)
            wait_for(lambda role=role: any(role in row.text for row in run.rows(EventRow)), START_S, role)  # type: ignore[attr-defined]
            wait_whole(run)
            run.goes_on()
        run.process.send_signal(signal.SIGINT)
        assert run.finish()[0] == 130
    finally:
        run.process.kill()
        run.process.communicate()
    assert run.gone()
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)


@pytest.mark.parametrize(
    ("strategy", "why"),
    [
        (squall.AllReduce(replicas=2), "every member of AllReduce has the weights already"),
        (squall.SingleProcess(), "SingleProcess is one process"),
    ],
)
def test_copies_are_refused_where_there_are_none(strategy: Strategy, why: str) -> None:
    with pytest.raises(ValueError, match=f"copies is 2, and {why}: leave it out"):
        make_plan(strategy, Settings(copies=2))


@pytest.mark.parametrize("settings", [{"copies": 3}, {"copies": 2, "launcher": "inline"}])
def test_there_are_one_or_two_copies_in_processes(settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="copies is"):
        Settings(**settings)


class Elsewhere:
    """Somebody else's."""


def test_a_state_of_other_classes_is_refused(tmp_path: Path) -> None:
    for other in (Elsewhere(), os.getpid, partial(print, "said")):
        with pytest.raises(pickle.UnpicklingError, match="is in no such state"):
            whole.machine(pickle.dumps(other))
    with pytest.raises(TypeError, match="deque is no machine that is copied"):
        whole.machine(pickle.dumps(deque([1])))
