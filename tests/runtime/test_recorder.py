"""What the record holds when something else of the run is there already."""

from __future__ import annotations

import dataclasses
import sqlite3
from collections.abc import Callable, Sequence
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET
from torch import Tensor, nn

import squall
from squall.plan import make_plan
from squall.protocol.effects import End, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.leases import Leases, Limits
from squall.protocol.ledger import Ledger
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import (
    EvaluationAsked,
    SnapshotAsked,
    TargetReached,
    TrainingBegan,
    TrainingOver,
    WorkReported,
)
from squall.record import writer
from squall.record.rows import LeaseRow, ProgressRow
from squall.record.writer import COMMIT_EVERY_S
from squall.report import Reader, audit
from squall.run import Run
from squall.runtime.job import private_job
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.snapshot import Manifest, Snapshots
from squall.vector import Layout
from tests.tasks import INLINE, mean_square, regression

Fit = Callable[..., Run]
STRATEGIES = [squall.SingleProcess(), squall.Downpour(replicas=2, shards=2)]


def often(strategy: squall.Strategy) -> squall.Settings:
    """Several snapshots; each waits for the disk. Other strategies train in virtual time here."""
    return dataclasses.replace(INLINE, snapshot_every_s=0.02 if strategy.recipe().alone else 0.2)


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "downpour"])
def test_rows_are_there_before_the_snapshot_that_they_belong_to(
    inline: Fit, monkeypatch: pytest.MonkeyPatch, strategy: squall.Strategy
) -> None:
    """Whatever a snapshot's ledger calls trained is in the record or in the ledger's own leases, at every moment."""
    publish = Snapshots.publish
    missing = []

    def looked_at(snapshots: Snapshots, manifest: Manifest) -> Path:
        reader = Reader(snapshots.directory.parent / "run.sqlite")
        leases = [row for row in reader.rows(LeaseRow) if str(row.lease) not in manifest.ledger["held"]]
        reader.close()
        held = manifest.ledger["held"].values()
        trained = sum(row.trained_stop - row.start for row in leases) + sum(done - start for _, start, done, *_ in held)
        missing.append(manifest.ledger["trained"] - trained)
        return publish(snapshots, manifest)

    monkeypatch.setattr(Snapshots, "publish", looked_at)
    inline(regression(examples=1600), strategy, epochs=4, settings=often(strategy))
    assert len(missing) > 1
    assert max(missing) <= 0, "a kill would lose rows of so many examples"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "downpour"])
def test_while_the_record_cannot_be_written_snapshots_bring_its_rows_along(
    inline: Fit, run_dir: Path, monkeypatch: pytest.MonkeyPatch, strategy: squall.Strategy
) -> None:
    """Somebody else holds it from the second snapshot to the end of the run, which cannot be told there."""
    monkeypatch.setattr(writer, "OPEN_S", 0.1)  # for which the end waits in vain
    publish, published = Snapshots.publish, []
    others: list[sqlite3.Connection] = []

    def noted(snapshots: Snapshots, manifest: Manifest) -> Path:
        published.append(manifest.rows)
        if len(published) == 2:
            others.append(sqlite3.connect(run_dir / "run.sqlite", isolation_level=None))
            others[-1].execute("BEGIN IMMEDIATE")
        return publish(snapshots, manifest)

    monkeypatch.setattr(Snapshots, "publish", noted)
    with pytest.raises(squall.SquallError, match="another process holds it"):
        inline(regression(examples=1600), strategy, epochs=4, settings=often(strategy), run_dir=run_dir)
    others[0].close()
    assert published[:2] == [UNSET, UNSET]
    assert all(isinstance(rows, bytes) for rows in published[2:])
    assert len(published) > 2
    run = squall.resume(run_dir, epochs=5, settings=INLINE)
    assert run.summary().examples == 5 * 1600
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert all(epoch.exact for epoch in audit(reader).epochs), str(audit(reader))


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "downpour"])
def test_a_run_without_a_snapshot_begins_its_record_anew(inline: Fit, run_dir: Path, strategy: squall.Strategy) -> None:
    batches = []

    def loss(model: nn.Module, batch: Sequence[Tensor]) -> Tensor:
        batches.append(batch)
        if len(batches) == 50:
            raise OSError("once")
        return mean_square(model, batch)

    task = regression(examples=400, loss=loss)
    with pytest.raises(OSError, match="once"):
        inline(task, strategy, epochs=4, run_dir=run_dir)
    run = squall.resume(run_dir, task=task, settings=INLINE)
    assert run.summary().examples == 4 * 400
    assert run.summary().updates == 4 * 25


def test_leases_that_a_snapshot_knows_have_numbers_of_their_own() -> None:
    """Those that were granted while it was written are in it as well, and so is what was skipped of them."""
    leases, node = Leases(100, 10, Limits()), Node("replica", 0)
    for progress in (0, 5):
        state = leases.state()
        lease = leases.take(node, 1, 0.0)
        assert lease is not None
        state, _ = leases.extended(state, [{lease.id: lease.start + progress} if progress else {}])
        again = Leases.restore(state, [], 10, Limits()).take(node, 1, 0.0)
        assert again is not None
        assert again.id == msgspec.convert(state, Ledger).dealt_upto == lease.id + (progress > 0)


class Nobody:
    """A channel to nobody."""

    def start(self, node: Node) -> None: ...

    def end(self, end: End) -> None: ...

    def poll(self) -> Event | None: ...

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None: ...


def coordinator_host(run_dir: Path, clock: Callable[[], float] | None = None) -> CoordinatorHost:
    run_dir.mkdir()
    strategy, task = squall.Downpour(replicas=1), regression(examples=400)()
    plan = make_plan(strategy, INLINE, Aims(epochs=1))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    return CoordinatorHost(private_job(plan, strategy, task, layout, run_dir), Nobody(), clock)


def test_a_row_is_written_though_nothing_happens_behind_it(run_dir: Path) -> None:
    now = 1.0
    host = coordinator_host(run_dir, lambda: now)

    def evaluating() -> str:
        with closing(Reader(run_dir / "run.sqlite")) as reader:
            return reader.state()["evaluating"]

    host.perform(TargetReached("somebody waits to see it"), now)  # written at once
    now += COMMIT_EVERY_S / 4
    host.perform(EvaluationAsked(7), now)
    host.poll()
    assert evaluating() == ""
    now += COMMIT_EVERY_S
    host.poll()
    assert evaluating() == "7"
    host.perform(End("interrupted"), now)
    assert evaluating() == "", "a run that is resumed waits for nobody"


def test_the_last_snapshot_finds_all_that_it_holds_in_the_record(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A run that is killed behind it has no other rows of what was not reported: a resume takes it at its word."""
    host = coordinator_host(run_dir)
    found = []

    def looked_at(snapshots: Snapshots, manifest: Manifest) -> Path:
        with closing(Reader(run_dir / "run.sqlite")) as reader:
            found.extend(row.examples for row in reader.rows(ProgressRow))
        (snapshots.directory / "000001.partial").mkdir(parents=True)
        return publish(snapshots, manifest)

    publish = Snapshots.publish
    monkeypatch.setattr(Snapshots, "publish", looked_at)
    ledger = {"next_id": 1, "held": {"0": [0, 0, 16, 48, 0]}}
    for effect in (
        TrainingBegan(), WorkReported(Node("replica", 0), Stats(16, 1)), TrainingOver(),
        SnapshotAsked(1), PublishSnapshot(1, ledger, (2,), (32,), {"0": 32}, (0,), final=True),
        End("interrupted"),
    ):  # fmt: skip
        host.perform(effect, 1.0)
    assert found == [16, 16]
