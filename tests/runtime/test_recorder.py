"""What the record holds when something else of the run is there already."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import squall
from squall.record import Lease, RecordError
from squall.report import Reader
from squall.run import Run
from squall.runtime.snapshot import Manifest, Snapshots
from squall.writer import Record
from tests.tasks import INLINE, regression

Fit = Callable[..., Run]
OFTEN = squall.Settings(launcher="inline", threads=1, progress=False, snapshot_every_s=0.02)
STRATEGIES = [squall.SingleProcess(), squall.Downpour(replicas=2, shards=2)]


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "downpour"])
def test_rows_are_there_before_the_snapshot_that_they_belong_to(
    inline: Fit, monkeypatch: pytest.MonkeyPatch, strategy: squall.Strategy
) -> None:
    """Whatever a snapshot's ledger calls trained is in the record or in the ledger's own leases, at every moment."""
    publish = Snapshots.publish
    missing = []

    def looked_at(snapshots: Snapshots, manifest: Manifest) -> Path:
        reader = Reader(snapshots.directory.parent / "run.sqlite")
        leases = [row for row in reader.rows(Lease) if str(row.lease) not in manifest.ledger["held"]]
        reader.close()
        held = manifest.ledger["held"].values()
        trained = sum(row.trained_stop - row.start for row in leases) + sum(done - start for _, start, done, *_ in held)
        missing.append(manifest.ledger["trained"] - trained)
        return publish(snapshots, manifest)

    monkeypatch.setattr(Snapshots, "publish", looked_at)
    inline(regression(examples=1600), strategy, epochs=4, settings=OFTEN)
    assert len(missing) > 1
    assert max(missing) <= 0, "a kill would lose rows of so many examples"


@pytest.mark.parametrize("strategy", STRATEGIES, ids=["single", "downpour"])
def test_while_the_record_cannot_be_written_only_the_last_snapshot_is_published(
    inline: Fit, run_dir: Path, monkeypatch: pytest.MonkeyPatch, strategy: squall.Strategy
) -> None:
    published = []
    publish = Snapshots.publish

    def noted(snapshots: Snapshots, manifest: Manifest) -> Path:
        published.append(manifest.number)
        return publish(snapshots, manifest)

    def locked(record: Record) -> None:
        raise RecordError(f"cannot write {record.path}: database is locked")

    monkeypatch.setattr(Snapshots, "publish", noted)
    monkeypatch.setattr(Record, "secure", locked)
    run = inline(regression(examples=1600), strategy, epochs=4, settings=OFTEN)
    assert len(published) == 1
    assert published[0] > 1
    assert run.summary().status == "finished"
    monkeypatch.undo()
    assert squall.resume(run.directory, epochs=5, settings=INLINE).summary().examples == 5 * 1600
