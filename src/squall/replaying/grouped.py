"""A member of all-reduce in the replay: a process with the host that it had in the run, in real groups with others."""

from __future__ import annotations

import os
import pickle
import traceback
from collections.abc import Mapping
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import cloudpickle
import msgspec
import torch
from setproctitle import setproctitle
from torch import Tensor

from squall.protocol.effects import Compute, Effect, LeaveGroup, Step
from squall.protocol.events import Event, StepTaken
from squall.protocol.nodes import Node
from squall.replaying.nonfinite import NonFiniteBatch, examine
from squall.replaying.processes import Failed, ReplicaProcess, forked
from squall.runtime.collective.host import in_a_process
from squall.runtime.collective.process import GroupedMember, import_beforehand
from squall.runtime.job import Job
from squall.runtime.records import SEEN, Fingerprint, Formed


class GiveState(NamedTuple):
    """The order to say what the member holds."""


class TakeUp(NamedTuple):
    """The order to go on from what another holds."""

    state: Mapping[str, Tensor]
    clock: int


class Examine(NamedTuple):
    """The order to watch the computation of a batch."""

    batch: Compute


class Stepped(NamedTuple):
    """What came of a step."""

    taken: Event | None
    fingerprint: int  # of the weights behind it, if they have moved


class GroupedProcess(ReplicaProcess):
    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.ask(GiveState())
        return found

    def examine(self, effect: Compute) -> NonFiniteBatch:
        found: NonFiniteBatch = self.ask(Examine(effect))
        return found


class GroupedReplicas:
    """The members of an attempt, forked one after the other."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the attempt, where members find each other."""
        import_beforehand()
        self._folder = folder
        self._hosts: dict[Node, GroupedProcess] = {}

    def host(self, job: Job, node: Node) -> GroupedProcess:
        """The member's, forked when it is first asked for. The others find it when this returns."""
        if node not in self._hosts:
            pid, pipe = forked(self._hosts.values())
            if not pid:
                _serve(replace(job, scratch=self._folder), node, pipe)
            self._hosts[node] = GroupedProcess(node, pid, pipe)
            self._hosts[node].answer()
        return self._hosts[node]

    def completed(self, job: Job, node: Node) -> Job:
        return job

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def _serve(job: Job, node: Node, pipe: Connection) -> NoReturn:
    """Be the member."""
    try:
        setproctitle(f"squall replica {node.index} of the replay of {job.directory.name}")
        torch.set_num_threads(job.plan.threads)
        member = _Member(job, node)
        answer: object = None  # it is there
        while True:
            pipe.send_bytes(cloudpickle.dumps(answer))
            answer = member.on(pickle.loads(pipe.recv_bytes()))  # from the process that forked this one
    except (EOFError, ConnectionResetError):  # the replay is over
        pass
    except BaseException:  # this process never returns into the replay's own code
        pipe.send_bytes(cloudpickle.dumps(Failed(f"{node} raised\n{traceback.format_exc()}")))
    os._exit(1)


class _Member:
    def __init__(self, job: Job, node: Node) -> None:
        self._node = node
        self._host = in_a_process(job, node)
        assert isinstance(self._host.in_group, GroupedMember)
        self._in_group = self._host.in_group
        self._member = self._in_group.member
        self._fingerprint = Fingerprint(self._member.vector)

    def on(self, order: Effect | Formed | GiveState | TakeUp | Examine) -> object:
        match order:
            case Formed(group, unused):
                self._host.perform(LeaveGroup(), 0.0)
                self._in_group.unused = unused
                self._fingerprint = Fingerprint(self._member.vector, group.clock)
                return self._host.perform(msgspec.structs.replace(group, transfer=False), 0.0)  # it has been given
            case Step():
                taken = self._host.perform(order, 0.0)
                moved = isinstance(taken, StepTaken) and taken.finite
                return Stepped(taken, self._fingerprint() & SEEN if moved else 0)
            case GiveState():
                return self._member.state()
            case TakeUp(state, clock):
                self._member.take_up(state, clock)
                return None
            case Examine(batch):
                self._host.perform(LeaveGroup(), 0.0)  # by itself
                return examine(self._node, batch, self._member.backward)
        raise AssertionError(order)
