"""Replicas on a GPU. Without one these tests are skipped; `benchmarks/RESULTS.md` says where they have run last."""

from __future__ import annotations

import signal
from contextlib import closing
from pathlib import Path

import pytest
import torch

import squall
from squall.record.rows import ProgressRow
from squall.report import Reader
from squall.report.coverage import audit
from squall.settings import Settings
from squall.strategies import Strategy
from tests.launchers import blobs
from tests.launchers.processes import START_S, Started, wait_for

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="this machine has no GPU")
QUIET = Settings(progress=False)

STRATEGIES = {
    "downpour": squall.Downpour(replicas=2, shards=2),
    "overlap": squall.Downpour(replicas=2, overlap=True),
    "synchronous": squall.Synchronous(replicas=2),
    "elastic averaging": squall.ElasticAveraging(replicas=2, every=4),
    "diloco": squall.DiLoCo(replicas=2, inner_steps=8),
    "all-reduce": squall.AllReduce(replicas=4),
    "all-reduce, shared": squall.AllReduce(replicas=3, shard_optimizer=True),
    "single process": squall.SingleProcess(),
}


@pytest.mark.parametrize("name", STRATEGIES)
def test_it_trains_on_a_gpu(run_dir: Path, name: str) -> None:
    run = squall.fit(blobs.task, STRATEGIES[name], epochs=3, run_dir=run_dir, device="cuda", settings=QUIET)
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete
    assert run.summary().status == "finished"
    assert all(torch.isfinite(value).all() for value in run.model.state_dict().values())


def defined() -> squall.Task:
    """Without the bias that BatchNorm subtracts again: of its gradient, which is rounding, Adam makes whole steps."""
    task = blobs.task()
    task.model[0].register_parameter("bias", None)
    return task


@pytest.mark.parametrize("strategy", [squall.Synchronous(replicas=2), squall.AllReduce(replicas=2)])
def test_lock_step_is_on_a_gpu_what_it_is_on_a_processor(tmp_path: Path, strategy: Strategy) -> None:
    found = []
    for device in ("cpu", "cuda"):
        run = squall.fit(defined, strategy, epochs=1, run_dir=tmp_path / device, device=device, settings=QUIET)
        found.append(run.model.state_dict())
    for name, value in found[0].items():
        torch.testing.assert_close(found[1][name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("strategy", ["downpour", "all_reduce"])
def test_a_replica_that_is_killed_on_a_gpu_is_replaced(tmp_path: Path, strategy: str) -> None:
    flags = ("--strategy", strategy, "--device", "cuda", "--replicas", "2", "--epochs", "100000")
    run = Started.train(tmp_path / f"run-gpu-{strategy}", *flags)
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        run.kill("replica 1")
        wait_for(lambda: run.replaced("replica 1"), START_S, "a replacement")
        run.goes_on()
    finally:
        run.process.send_signal(signal.SIGTERM)
        run.finish()
    assert run.gone()
