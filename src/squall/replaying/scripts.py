"""The replay of a script's run: the script once more, with recorded batches in its loop.

The loop is the user's, and may keep anything from batch to batch, so every replica is a process again. The script runs
once until it joins; there the replay begins, and forks a process per replica when that has its first record to perform.
In it `join` returns, and `session.batches` hands out what the schedule says. From its first batch on a replica and the
replay take turns: the replay sends an effect, and waits for what comes of it. When a replica has no more records its
process is killed, as it asks for another batch. A loop that stops by its own count asks for none: what is behind it is
begun again, unless the script looks at `session.replayed`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import random
import signal
import sys
import traceback
from collections.abc import Callable, Iterable
from functools import cached_property, partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
from setproctitle import setproctitle
from torch import nn

from squall.launchers.script_fellows import Fellows
from squall.launchers.script_replica import ScriptBackend, WholeBackend
from squall.launchers.script_start import Over, chosen, run_file
from squall.parts.host import Watch
from squall.protocol.effects import Compute
from squall.protocol.nodes import Node
from squall.replaying.nonfinite import NonFiniteBatch
from squall.replaying.processes import ReplicaProcess, forked
from squall.replaying.script_replica import Began, Examine, ReplayBackend
from squall.runtime.batches import Counted
from squall.runtime.job import Job
from squall.session.backend import SessionBackend
from squall.session.script_task import joined_task
from squall.strategies import Strategy
from squall.task import OptimizerFactory, Task
from squall.usercode.kept import ScriptCode


class _ReplayForked(BaseException):
    """In a process that was just forked: unwinds the replay's frames, back into the script's `join`."""


class ScriptHost(ReplicaProcess):
    """A replica's host in the replay of a script."""

    @cached_property
    def began(self) -> Began:
        """Waits until the script has called `session.batches`. Raises `Strayed`."""
        found: Began = self.answer()
        return found

    def examine(self, effect: Compute) -> NonFiniteBatch:
        found: NonFiniteBatch = self.ask(Examine(effect))
        return found


class ScriptReplicas:
    """The replicas of a script that has joined: they are forked from this process one after the other."""

    def __init__(self, folder: Path) -> None:
        """`folder`: where the parts of a replica find each other."""
        self._folder = folder
        self._hosts: dict[Node, ScriptHost] = {}
        self._chance = random.getstate(), np.random.get_state(), torch.get_rng_state()  # where the script has joined
        # Set in a replica's process, or a part's.
        self.backend: ScriptBackend | None = None
        self._replica: ReplayBackend | None = None  # in the only one, or the first part
        self._fellows: Fellows

    def host(self, job: Job, node: Node) -> ScriptHost:
        """The replica's, forked when it is first asked for. Raises `_ReplayForked` in the new process."""
        if node not in self._hosts:
            self._hosts[node] = self._fork(job, node)
        return self._hosts[node]

    def completed(self, job: Job, node: Node) -> Job:
        """The job with the data that a replica's script says it trains on."""
        began = self.host(job, node).began
        task = dataclasses.replace(job.task, train=Counted(began.examples), batch_size=began.batch_size)
        return dataclasses.replace(job, task=task)

    def close(self) -> None:
        for host in self._hosts.values():
            host.close()

    def _fork(self, job: Job, node: Node) -> ScriptHost:
        pid, pipe = forked(self._hosts.values())
        if pid:
            return ScriptHost(node, pid, pipe)
        try:
            setproctitle(f"squall replica {node.index} of the replay of {job.directory.name}")
            torch.set_num_threads(job.plan.threads)
            random.setstate(self._chance[0])
            np.random.set_state(self._chance[1])
            torch.set_rng_state(self._chance[2])
            self._fellows = Fellows(node, self._folder)
            self.backend = self._fellows.forked(job, partial(self._first, node, pipe), pipe.close, replayed=True)
        except BaseException:  # this process never returns into the replay's own code
            traceback.print_exc()
            os._exit(1)
        raise _ReplayForked

    def _first(self, node: Node, pipe: Connection, job: Job, watch: Watch | None) -> WholeBackend:
        self._replica = ReplayBackend(job, node, pipe)
        return self._replica

    def leave(self, ended: BaseException | None, story: str) -> NoReturn:
        """In a replica's process, or a part's: the script has come to its end, or has raised."""
        try:
            if self._replica is not None:
                self._replica.leave(story if ended is None else self._fellows.told(ended, story))
            elif ended is not None:
                self._fellows.fail(ended, story)
            else:
                signal.pause()  # the first part may have more to perform; it takes this one with it
        finally:
            os._exit(1)


def run_to_join(code: ScriptCode, folder: Path, perform: Callable[[Strategy, Task, ScriptReplicas], None]) -> None:
    """Run a script until it joins, and `perform` there. What it prints goes to standard error.

    `folder` is as for `ScriptReplicas`.

    Raises `ValueError` if the script does not come to join, and whatever `perform` raises.
    """
    known = set(sys.modules)
    joined: list[ScriptReplicas] = []  # one, when the script has joined
    failures: list[BaseException] = []

    def join(model: nn.Module, optimizer: OptimizerFactory | None, options: dict[str, Any]) -> SessionBackend:
        joined.append(scripts := ScriptReplicas(folder))
        try:
            perform(chosen(code["strategy"], optimizer, code["optimizer_chosen"]), joined_task(model, options), scripts)
        except _ReplayForked:
            assert scripts.backend is not None
            return scripts.backend
        except BaseException as error:  # the user's code has nothing to do with it
            failures.append(error)
        raise Over

    ended: BaseException | None = None
    try:
        with contextlib.redirect_stdout(sys.stderr):
            run_file(code["script"], code["text"], code["arguments"], code["plan"].seed, join)
    except BaseException as error:  # a replica's process never returns into the replay's own code
        ended = error
    story = "it ended" if ended is None else f"it raised\n{''.join(traceback.format_exception(ended))}"
    scripts = joined[0] if joined else None
    if scripts is not None and scripts.backend is not None:
        scripts.leave(ended, story)
    if scripts is not None:
        scripts.close()
    _forget(sys.modules.keys() - known, code["script"].parent)
    if failures:
        raise failures[0]
    if scripts is None:
        if isinstance(ended, KeyboardInterrupt):
            raise ended
        raise ValueError(f"{code['script']} does not come to squall.join any more: {story}")


def _forget(modules: Iterable[str], beside: Path) -> None:
    """The script's own modules begin anew with the next attempt, as they did in the run."""
    for name in modules:
        file = str(getattr(sys.modules[name], "__file__", None))
        if file.startswith(f"{beside}{os.sep}") and "site-packages" not in file:
            del sys.modules[name]
