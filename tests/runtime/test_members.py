"""A member of all-reduce that gives something up is as it was before: what comes next follows from its record."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import squall
from squall.plan import make_plan
from squall.protocol.effects import JoinGroup, LeaveGroup, Step
from squall.protocol.events import GroupBroken
from squall.protocol.nodes import Node
from squall.runtime.collective import process
from squall.runtime.collective.host import CollectiveHost, in_a_process
from squall.runtime.job import private_job
from squall.vector import Layout
from tests.rehearsal import normalized
from tests.tasks import LOCAL, regression

BOTH = (Node("replica", 0), Node("replica", 1))


@pytest.fixture
def one_thread() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def host_of(node: Node, directory: Path) -> CollectiveHost:
    task = regression(normalized)()
    strategy = squall.AllReduce(replicas=2)
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(make_plan(strategy, LOCAL), strategy, task, layout, directory)
    return in_a_process(replace(job, scratch=directory), node)


def test_a_step_that_is_given_up_leaves_the_models_buffers_as_they_were(tmp_path: Path, one_thread: None) -> None:
    member = (host := host_of(BOTH[0], tmp_path)).in_group.member
    norm = member.backward.on_vector.model[1]
    assert isinstance(norm, nn.BatchNorm1d)
    before = [buffer.clone() for buffer in norm.buffers()]
    member.backward.differentiate(member.load(Step(1, 0, 0, 16, 32)))
    assert not all(map(torch.equal, before, norm.buffers()))
    host.perform(LeaveGroup(), 0.0)
    assert all(map(torch.equal, before, norm.buffers()))


def in_a_fork(work: Callable[[Connection], None]) -> Connection:
    ours, theirs = get_context("fork").Pipe()
    get_context("fork").Process(target=work, args=(theirs,), daemon=True).start()
    return ours


def test_who_fails_to_join_does_not_keep_what_it_was_given(tmp_path: Path, one_thread: None) -> None:
    """It says that it has come as far as before, and another may be the newest in the next group."""

    def be(node: Node, fails: bool, line: Connection) -> None:
        torch.set_num_threads(1)
        host = host_of(node, tmp_path)
        vector = host.in_group.member.vector.fill_(1.0 + node.index)
        line.send("here")
        line.recv()  # both are
        if fails:
            process.DistributedDataParallel = _broken  # type: ignore[misc, assignment]
        answer = host.perform(JoinGroup(1, BOTH, BOTH[0], transfer=True, clock=3), 0.0)
        line.send((isinstance(answer, GroupBroken), vector.unique().tolist()))
        line.recv()  # the other has answered, too
        os._exit(0)

    lines = [in_a_fork(lambda line, node=node: be(node, node.index == 1, line)) for node in BOTH]
    for said in ("go", "end"):
        answers = [heard(line) for line in lines]
        for line in lines:
            line.send(said)
    assert answers == [(False, [1.0]), (True, [2.0])]


def _broken(*given: Any, **named: Any) -> None:
    raise RuntimeError("a member was lost")


def heard(line: Connection) -> Any:
    assert line.poll(60), "no answer"
    return line.recv()
