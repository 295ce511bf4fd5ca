"""What scripts leave out is trained by nobody: no label and no report counts it, also of a run that is resumed."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

import msgspec
import pytest
from msgspec import UNSET

import squall
from squall.plan import make_plan
from squall.protocol import messages
from squall.protocol.nodes import Node
from squall.protocol.notes import BatchLeftOut, LeaseEnded, TrainingBegan, WeightsMeasured
from squall.record.rows import LeaseRow, MetricRow, ProgressRow, SkipRow
from squall.record.writer import Record
from squall.report import Reader, summarize
from squall.runtime.job import Job, private_job
from squall.runtime.kinds import machine
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.snapshot import Manifest, Restored
from squall.vector import Layout
from tests.runtime.test_recorder import Nobody
from tests.tasks import INLINE, regression

R0 = Node("replica", 0)


@pytest.fixture
def resumed(run_dir: Path) -> Callable[..., Job]:
    """Of the first 40 of 100 examples of an epoch 20 are trained, 10 of them since the ledger, and 20 left out."""
    run_dir.mkdir()
    with closing(Record(run_dir / "run.sqlite")) as record:
        for start in (10, 20):
            record.add(SkipRow(0, 0, start, start + 10, 0))
        record.add(ProgressRow(0.0, 0, 10, 1, 1.0, 0.0, 0.0, 0, 0))
    strategy, task = squall.Downpour(replicas=1, shards=2), regression(examples=100, batch_size=10)()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    plan = make_plan(strategy, INLINE, Aims(epochs=2))
    ledger = {
        "examples": 100, "cursor": 50, "trained": 20, "next_id": 1, "remaining": [[0, 20, 50]],
        "held": {"0": [0, 0, 20, 50, 0]},
    }  # fmt: skip

    def job(**told: object) -> Job:
        manifest = Manifest(1, layout, (2, 3), ledger, {"0": 40}, 1.0, 1.0, "SGD", **told)  # type: ignore[arg-type]
        kept = msgspec.json.decode(manifest.encoded(), type=Manifest)
        assert kept.intact
        return private_job(plan, strategy, task, layout, run_dir, Restored(kept, {}))

    return job


def counts(job: Job) -> list[tuple[int, int]]:
    """Updates and examples that the shards go on from."""
    shards = [machine(job, Node("shard", index)).machine for index in range(2)]
    return [(shard.version, shard.examples) for shard in shards]  # type: ignore[attr-defined]


def test_a_resumed_run_goes_on_with_the_examples_that_its_snapshot_had(resumed: Callable[..., Job]) -> None:
    assert counts(resumed(examples=(20, 30))) == [(3, 20), (3, 20)]


def test_a_snapshot_of_an_older_version_has_those_of_its_ledger(resumed: Callable[..., Job]) -> None:
    job = resumed()
    assert job.restored is not None
    assert job.restored.manifest.examples is UNSET
    assert b'"examples":[' not in job.restored.manifest.encoded().replace(b" ", b"")
    assert counts(job) == [(3, 40), (3, 40)]


def test_a_label_knows_its_epoch_and_a_report_what_was_trained(resumed: Callable[..., Job]) -> None:
    job = resumed(examples=(20, 30))
    host = CoordinatorHost(job, Nobody())
    for note in (
        TrainingBegan(),
        BatchLeftOut(R0, messages.Skip(1, 0, 40, 50)),
        LeaseEnded(messages.Lease(1, 0, 40, 100), R0, 1.0, 40),
        metric(examples=20 + 59),  # and 20 are left out
        BatchLeftOut(R0, messages.Skip(2, 0, 90, 100)),
        LeaseEnded(messages.Lease(2, 0, 40, 100), R0, 1.0, 100),
        metric(examples=20 + 50),  # and 30
    ):
        host.perform(note, 1.0)
    host._commit(force=True)
    with closing(Reader(job.directory / "run.sqlite")) as reader:
        assert summarize(reader).examples == 20
        assert [row.epoch for row in reader.rows(MetricRow)] == [0, 1]
        assert reader.skipped(100) == [(10, 20), (20, 30), (90, 100)]
        assert [(row.lease, row.trained_stop) for row in reader.rows(LeaseRow)] == [(0, 40), (1, 40), (2, 100)]


def metric(examples: int) -> WeightsMeasured:
    return WeightsMeasured({"loss": 1.0}, messages.Weights(5, examples, 0.0))
