"""The replay of replicas of several parts: the same processes again, each replica's with the replay at their head.

A part's computation needs the others', so a replica is what it was in the run: a process that forks the other parts and
forms their group. It is told by the replay what its machine told it.
"""

from __future__ import annotations

import os
import pickle
import traceback
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import NoReturn

import cloudpickle
import torch
from setproctitle import setproctitle
from torch import Tensor

from squall.launchers.parts import first_part, traceback_file, with_own
from squall.parts.host import Speaker
from squall.parts.inside import inside  # noqa: F401  what takes seconds to import comes before the forks
from squall.parts.neighbours import NeighbourLost
from squall.protocol.effects import Compute, Effect, UseWeights
from squall.protocol.events import Event
from squall.protocol.nodes import Node
from squall.replaying.nonfinite import NonFiniteBatch, examine
from squall.replaying.processes import Failed, ReplicaProcess, forked
from squall.runtime.backward import Backward
from squall.runtime.driver import Host
from squall.runtime.job import Job, own_model
from squall.runtime.kinds import host
from squall.usercode.blame import decode


class PartedHost(ReplicaProcess):
    """A replica of several parts."""

    def __init__(self, job: Job, node: Node, pid: int, pipe: Connection) -> None:
        super().__init__(node, pid, pipe)
        self._job = job
        self._buffer = 0  # of weights, in use

    def perform(self, effect: Effect, now: float) -> Event | None:
        if isinstance(effect, UseWeights):
            self._buffer = effect.buffer
        return super().perform(effect, now)

    def examine(self, effect: Compute) -> NonFiniteBatch:
        job = self._job
        weights = job.arena.weights(self.node.index, self._buffer) if job.own is None else job.own
        return examine_whole(job, self.node, effect, weights)


def examine_whole(job: Job, node: Node, effect: Compute, weights: Tensor) -> NonFiniteBatch:
    """In this process, on the whole model: parts know no more than their own modules."""
    job = own_model(job)
    backward = Backward(job.task, job.layout, [weights], job.plan.seed, job.device(node.index))
    backward.on_vector.use(0)
    return examine(node, effect, backward)


class PartedReplicas:
    """The replicas of an attempt, forked one after the other."""

    def __init__(self, folder: Path) -> None:
        """`folder`: of the attempt, where parts find each other."""
        self._folder = folder
        self._hosts: list[PartedHost] = []

    def host(self, job: Job, node: Node) -> PartedHost:
        job = with_own(job)
        pid, pipe = forked(self._hosts)
        if not pid:
            _serve(job, node, self._folder, pipe)
        self._hosts.append(PartedHost(job, node, pid, pipe))
        return self._hosts[-1]

    def completed(self, job: Job, node: Node) -> Job:
        return job


def _serve(job: Job, node: Node, folder: Path, pipe: Connection) -> NoReturn:
    """Be the first part, or the only one."""
    try:
        setproctitle(f"squall replica {node.index} of the replay of {job.directory.name}")
        torch.set_num_threads(job.plan.threads)
        made = _first(job, node, folder) if job.plan.settings.parts > 1 else host(job, node)
        while True:
            order = pickle.loads(pipe.recv_bytes())  # from the process that forked this one
            pipe.send_bytes(cloudpickle.dumps(made.perform(order, 0.0)))
    except (EOFError, ConnectionResetError):  # the replay is over
        pass
    except NeighbourLost as lost:
        pipe.send_bytes(cloudpickle.dumps(Failed(story(lost, node, folder))))
    except BaseException:  # this process never returns into the replay's own code
        pipe.send_bytes(cloudpickle.dumps(Failed(f"{node} raised\n{traceback.format_exc()}")))
    os._exit(1)


def _first(job: Job, node: Node, folder: Path) -> Host:
    job, neighbours, watch = first_part(job, node, folder)
    return Speaker(host(job, node), neighbours, own_weights=job.recipe.work.local is not None, watch=watch)


def story(lost: NeighbourLost, node: Node, folder: Path) -> str:
    """What the part that is gone has raised, if it was that."""
    with suppress(ChildProcessError):
        while True:  # the group is cut, so all others end
            os.wait()
    file = traceback_file(folder, node)
    raised = decode(file.read_text()) if file.exists() else None
    return f"another part of {node} was lost: {lost}" if raised is None else f"{node} raised\n{raised}"
