"""A member of all-reduce in the replay: a process with the host that it had in the run, in real groups with others.

One of several parts forks the others again. Members that were on several machines are on one now, and meet over
connections as they did: such groups add up in another order than those of one machine.
"""

from __future__ import annotations

import os
import pickle
import traceback
from dataclasses import replace
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NamedTuple, NoReturn

import cloudpickle
import msgspec
import torch
from safetensors.torch import load_file
from setproctitle import setproctitle
from torch import Tensor

from squall.launchers.parts import first_part, with_own
from squall.launchers.scratch import check_length
from squall.parts.host import Speaker
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Compute, Effect, JoinGroup, LeaveGroup, Step, WriteSnapshot
from squall.protocol.events import Event, SnapshotWritten, StepTaken
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import COORDINATOR, Node
from squall.replaying.nonfinite import NonFiniteBatch, examine
from squall.replaying.processes import Failed, ReplicaProcess, forked
from squall.runtime.collective.host import CollectiveHost, in_a_process
from squall.runtime.collective.process import GroupedMember, import_beforehand
from squall.runtime.collective.recording import looked_at
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.records import SEEN, Fingerprint, Formed
from squall.runtime.site import Site
from squall.runtime.snapshot import Snapshots
from squall.transports.certificates import Identity, machine_name
from squall.transports.opening import listening

LOOPBACK = "127.0.0.1"


class GiveState(NamedTuple):
    """The order to say what the member holds."""


class Examine(NamedTuple):
    """The order to watch the computation of a batch."""

    batch: Compute


class Stepped(NamedTuple):
    """What came of a step."""

    taken: Event | None
    fingerprint: int  # of the weights behind it, if they have moved


class GroupedProcess(ReplicaProcess):
    def __init__(self, job: Job, node: Node, pid: int, pipe: Connection) -> None:
        super().__init__(node, pid, pipe)
        self._job = job
        self.address: str = self.answer()  # where others call it; empty where all were on one machine

    def state(self) -> dict[str, Tensor]:
        found: dict[str, Tensor] = self.ask(GiveState())
        return found

    def examine(self, effect: Compute) -> NonFiniteBatch:
        if self._job.own is None:
            found: NonFiniteBatch = self.ask(Examine(effect))
            return found
        from squall.replaying.parted import examine_whole

        return examine_whole(self._job, self.node, effect, self._job.own)


class GroupedReplicas:
    """The members of an attempt, forked one after the other."""

    def __init__(self, folder: Path, parts: int) -> None:
        """`folder`: of the attempt, where members find each other, and the parts of each.

        Raises `SquallError` where sockets in it would have too long names.
        """
        check_length(folder)
        import_beforehand()
        if parts > 1:
            import_module("squall.parts.inside")  # what takes seconds to import comes before the forks
        self._folder = folder
        self._hosts: dict[Node, GroupedProcess] = {}
        self._root = Identity.new_root("replay")

    def host(self, job: Job, node: Node, machine: int | None = None) -> GroupedProcess:
        """The member's, forked when it is first asked for. The others find it when this returns.

        `machine`: on which it was, where there were several.
        """
        if node not in self._hosts:
            if job.plan.settings.parts > 1:
                job = with_own(job)
            pid, pipe = forked(self._hosts.values())
            if not pid:
                site = None if machine is None else self._site(machine)
                _serve(replace(job, scratch=self._folder, site=site), node, pipe)
            self._hosts[node] = GroupedProcess(job, node, pid, pipe)
        return self._hosts[node]

    def _site(self, machine: int) -> Site:
        """As the machine had one, with an identity that is the replay's."""
        identity = self._root.issue(machine_name(machine), authority=True)
        return Site(machine, {}, {COORDINATOR: (LOOPBACK, 0)}, identity, {}, {}, Pulse(), host=LOOPBACK)

    def completed(self, job: Job, node: Node) -> Job:
        return job

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()


def _serve(job: Job, node: Node, pipe: Connection) -> NoReturn:
    """Be the member, or its first part."""
    assert job.scratch is not None
    try:
        setproctitle(f"squall replica {node.index} of the replay of {job.directory.name}")
        torch.set_num_threads(job.plan.threads)
        member = _Member(job, node)
        answer: object = member.address  # it is there
        while True:
            pipe.send_bytes(cloudpickle.dumps(answer))
            answer = member.on(pickle.loads(pipe.recv_bytes()))  # from the process that forked this one
    except (EOFError, ConnectionResetError):  # the replay is over
        pass
    except NeighbourLost as lost:
        from squall.replaying.parted import story

        pipe.send_bytes(cloudpickle.dumps(Failed(story(lost, node, job.scratch))))
    except BaseException:  # this process never returns into the replay's own code
        pipe.send_bytes(cloudpickle.dumps(Failed(f"{node} raised\n{traceback.format_exc()}")))
    os._exit(1)


class _Member:
    def __init__(self, job: Job, node: Node) -> None:
        assert job.scratch is not None
        self._node = node
        self._folder = job.scratch / f"state-{node}"
        self._folder.mkdir(exist_ok=True)
        parts = job.plan.settings.parts > 1
        if parts:
            job, neighbours, watch = first_part(job, node, job.scratch)
        self.address = ""
        if job.site is not None:
            listener = listening()
            job = replace(job, listener=listener)
            self.address = f"{LOOPBACK}:{listener.getsockname()[1]}"
        self._in_group = in_a_process(job, node).in_group
        self._member = self._in_group.member
        host = CollectiveHost(replace(job, directory=self._folder), self._in_group)
        self._host: Host = Speaker(host, neighbours, watch=watch) if parts else host
        self._looked_at = looked_at(self._member.vector, job.inside)
        self._fingerprint = Fingerprint(self._looked_at)

    def on(self, order: Effect | Formed | GiveState | Examine) -> object:
        match order:
            case Formed(group, unused):
                if isinstance(self._in_group, GroupedMember):
                    self._in_group.unused = unused
                self._fingerprint = Fingerprint(self._looked_at, group.clock)
                return self.on(msgspec.structs.replace(group, transfer=False))  # it has been given
            case JoinGroup():
                self._host.perform(LeaveGroup(), 0.0)
                return self._host.perform(order, 0.0)
            case Step():
                taken = self._host.perform(order, 0.0)
                moved = isinstance(taken, StepTaken) and taken.finite
                return Stepped(taken, self._fingerprint() & SEEN if moved else 0)
            case GiveState():
                return self._state()
            case Examine(batch):
                self._host.perform(LeaveGroup(), 0.0)  # by itself
                return examine(self._node, batch, self._member.backward)
        raise AssertionError(order)

    def _state(self) -> dict[str, Tensor]:
        """As it would be in a snapshot: parts put that together."""
        written = self._host.perform(WriteSnapshot(0, 0), 0.0)
        assert isinstance(written, SnapshotWritten)
        if written.error:
            raise OSError(written.error)
        path = Snapshots(self._folder).part(0, 0, 1)
        state = load_file(path)
        path.unlink()
        return state
