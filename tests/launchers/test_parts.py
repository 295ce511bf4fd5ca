"""Replicas of several processes, in whole runs: what they train, and what becomes of one whose part dies."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from collections import deque
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch
from torch import nn

import squall
from squall.launchers.parts import tell_raised, traceback_file
from squall.protocol.nodes import Node
from squall.record.rows import MemberRow, ProgressRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.test_all_reduce import examples
from tests.tasks import LOCAL, difference, regression

MOMENTUM = partial(torch.optim.SGD, lr=0.05, momentum=0.9)
PIPED = Path(__file__).with_name("piped.py")
TWO = dataclasses.replace(LOCAL, parts=2)
PIPELINE = squall.Pipeline(microbatches=4)


def deeper() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))


def sliced() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))


SPLITS: dict[str, tuple[Any, Any]] = {
    "pipeline": (deeper, PIPELINE),
    "slices": (sliced, squall.Tensor({"0": "column", "2": "row"})),
}
STRATEGIES: dict[str, squall.Strategy] = {
    "synchronous": squall.Synchronous(replicas=2, shards=2, optimizer=MOMENTUM),
    "bounded delay": squall.BoundedDelay(replicas=1, optimizer=MOMENTUM, max_delay=1),
    "downpour": squall.Downpour(replicas=1, optimizer=MOMENTUM, push_every=2, fetch_every=2),
    "averaging": squall.Averaging(replicas=1, optimizer=MOMENTUM, every=3),
    "elastic averaging": squall.ElasticAveraging(replicas=1, optimizer=MOMENTUM, every=3),
    "diloco": squall.DiLoCo(replicas=1, optimizer=partial(torch.optim.AdamW, lr=1e-3), inner_steps=3),
    "sandblaster": squall.Sandblaster(replicas=1, batch="full"),
    "delayed proximal": squall.DelayedProximal(replicas=1, l1=1e-4, optimizer=MOMENTUM),
}


@pytest.mark.parametrize(
    ("strategy", "split"),
    deep.sweep([("synchronous", "pipeline"), ("averaging", "slices"), *((s, "pipeline") for s in STRATEGIES)], 2),
)
def test_a_run_with_parts_is_the_run_without(tmp_path: Path, strategy: str, split: str) -> None:
    model, how = SPLITS[split]
    task = regression(model, examples=96, split=how)
    whole, split_run = (
        squall.fit(task, STRATEGIES[strategy], epochs=3, run_dir=tmp_path / name, settings=settings)
        for name, settings in (("one", LOCAL), ("two", TWO))
    )
    assert difference(split_run.model, whole.model) < 1e-5
    assert split_run.summary().updates == whole.summary().updates
    parts = {(each.replica, each.part) for each in split_run.summary().parts}
    assert parts == {(replica, part) for replica in range(STRATEGIES[strategy].recipe().replicas) for part in range(2)}
    assert whole.summary().parts == []


def started(directory: Path, *flags: str, **environment: str) -> Started:
    command = ("train", str(PIPED), "--run-dir", str(directory), "--replicas", "2", "--parts", "2", *flags)
    return Started(directory, *command, env={**os.environ, **environment})


@pytest.mark.parametrize(
    ("victim", "workers"),
    deep.sweep([("replica 1 part 1", "1"), ("replica 1 part 1", "0"), ("replica 1", "0")], 1),
)
def test_a_part_that_dies_is_its_replicas_death(tmp_path: Path, victim: str, workers: str) -> None:
    """Processes that load data, which the first part has too, do not keep it."""
    run = started(tmp_path / f"parted-{uuid4().hex[:8]}", "--epochs", "100000", WORKERS=workers, EXAMPLES="1024")
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        before = run.processes()
        assert {"replica 0 part 1", "replica 1 part 1"} < before.keys()
        os.kill(before[victim], signal.SIGKILL)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-1.1", "joined"))
        seen = examples(run)
        wait_for(lambda: examples(run) > seen + 1024, START_S, "the end of the epoch in which it died")
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
        assert status == 130, err
        with closing(Reader(run.directory / "run.sqlite")) as reader:
            assert audit(reader).complete
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


@deep.only
def test_a_part_that_dies_while_its_replica_waits_is_noticed_at_once(tmp_path: Path) -> None:
    """Replica 0 waits for a round in which replica 1 does not push, because it is stopped."""
    run = started(tmp_path / f"idle-{uuid4().hex[:8]}", "--epochs", "1000", "--strategy", "synchronous")
    try:
        for replica in range(2):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        held, pids = run.kill("replica 1", signal.SIGSTOP), run.processes()
        looks: deque[list[str]] = deque(maxlen=30)
        wait_for(lambda: at_rest(looks, pids["replica 0"], pids["replica 0 part 1"]), 30, "replica 0 to wait")
        os.kill(pids["replica 0 part 1"], signal.SIGKILL)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-0.0", "lost"), 10)
        run.wait_rows(MemberRow, lambda row: (row.node, row.change) == ("replica-0.1", "joined"))
        os.kill(held, signal.SIGCONT)
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
        assert status == 130, err
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")


def at_rest(looks: deque[list[str]], *pids: int) -> bool:
    """Whether processes have used no processor since the first of many looks."""
    looks.append([" ".join(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]) for pid in pids])
    return len(looks) == looks.maxlen and all(look == looks[0] for look in looks)


@pytest.mark.parametrize("raises", ["replica 0 part 1", "replica 0 of"])
def test_what_a_part_raises_is_told_as_the_users_mistake(tmp_path: Path, raises: str) -> None:
    run = started(tmp_path / f"raising-{uuid4().hex[:8]}", RAISES=raises)
    try:
        status, _, err = run.finish()
        assert status == 1, err
        assert "the user's own mistake" in err
        assert "NeighbourLost" not in err
        wait_for(run.gone, 10, "the processes to end")
    finally:
        run.process.kill()
        run.finish()


@deep.only
def test_a_run_with_parts_is_interrupted_and_resumed_with_one(tmp_path: Path) -> None:
    run = started(tmp_path / f"stopped-{uuid4().hex[:8]}", "--epochs", "1000")
    try:
        run.wait_rows(ProgressRow, lambda row: True)
        run.process.send_signal(signal.SIGINT)
        assert wait_for(run.gone, 10.0, "the children to be gone") < 3.0
        status, _, err = run.finish()
        assert status == 130, err
        assert "Traceback" not in err
    finally:
        run.process.kill()
        run.finish()
    epochs = examples(run) // EXAMPLES + 1
    again = Started(run.directory, "resume", str(run.directory), "--epochs", str(epochs), "--parts", "1")
    status, _, err = again.finish()
    assert status == 0, err
    assert json.loads((run.directory / "run.json").read_text())["plan"]["settings"]["parts"] == 1


@pytest.mark.parametrize(
    ("strategy", "settings", "message"),
    [
        (squall.SingleProcess(), {}, "parts is 2, and SingleProcess is one process"),
        (squall.AllReduce(shard_optimizer=True), {}, "between parts already, not by shard_optimizer"),
    ],
)
def test_what_parts_cannot_do_yet_is_refused_with_the_remedy(
    tmp_path: Path, strategy: squall.Strategy, settings: dict[str, Any], message: str
) -> None:
    task = regression(deeper, split=PIPELINE)
    with pytest.raises(ValueError, match=message):
        squall.fit(task, strategy, run_dir=tmp_path / "run", settings=dataclasses.replace(TWO, **settings))
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("given", "message"), [
    ({"parts": 0}, "parts is 0"),
    ({"parts": 2, "launcher": "inline"}, "parts is 2, and an inline run is in one process"),
    ({"parts": 2, "spread_parts": True}, "spread_parts is for replicas of several parts on several machines"),
    ({"spread_parts": True, "listen": "127.0.0.1:0"}, "spread_parts is for replicas of several parts"),
])  # fmt: skip
def test_settings_that_cannot_be(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        dataclasses.replace(LOCAL, **given)


def test_a_task_without_a_split_has_no_parts(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the task does not say how its model is split"):
        squall.fit(regression(), STRATEGIES["downpour"], parts=2, run_dir=tmp_path / "run", settings=LOCAL)


def test_one_part_ignores_the_split(tmp_path: Path) -> None:
    strategy = squall.Downpour(replicas=1, optimizer=partial(torch.optim.SGD, lr=0.1))
    task = regression(deeper, split=squall.Tensor({"no.such.layer": "row"}))
    assert squall.fit(task, strategy, run_dir=tmp_path / "run", settings=LOCAL).summary().examples == 90


def test_of_parts_that_raise_at_once_the_first_is_heard_whole(tmp_path: Path) -> None:
    """A later story must not be written over it: of unlike length, their mixture is told as it is, to people."""
    node = Node("replica", 0)
    for part in range(2):
        if not (pid := os.fork()):
            tell_raised(tmp_path, node, f"part {part}" + " and more" * (2 - part))
            os._exit(0)
        os.waitpid(pid, 0)
    assert traceback_file(tmp_path, node).read_text() == "part 0 and more and more"
