"""A replica whose parts are on several machines: processes that know each other by addresses and certificates alone.

Each is as a nursery forks it. The test has the coordinator's place: it says which parts come from where.
"""

from __future__ import annotations

import dataclasses
import multiprocessing as mp
import os
import pickle
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from typing import Any

import msgspec
import torch

import squall
from squall.launchers import far_parts
from squall.launchers.far_parts import SpreadHost, run_far_part
from squall.parts.exchanging import PartExchanges
from squall.protocol.effects import MeetParts, Payload, UseWeights
from squall.protocol.heartbeats import Pulse
from squall.protocol.nodes import COORDINATOR, Node, part_nodes
from squall.protocol.nursery_messages import PartPlace
from squall.runtime import kinds
from squall.runtime.site import Site
from squall.transports.certificates import Identity, machine_name
from squall.transports.opening import listening
from tests.parts.replica import DOWNPOUR, WITHIN_S, Script, job_of

REPLICA = Node("replica", 0)


class InOneMemory(PartExchanges):
    """The test has the shard's place as well, in memory that all parts share: as if that were on each one's machine."""

    def begin(self, driver: object, failing: object) -> None:
        """There is none."""

    def push(self, clock: int, buffer: int) -> None:
        self.attach(Payload("gradient", REPLICA, buffer, clock, 0, part=self._part))

    def fetched(self, buffer: int) -> None:
        self.perform(UseWeights(buffer), 0.0)


class Spread:
    """Part k is on machine k."""

    def __init__(self, task: squall.Task, parts: int, starts: Sequence[int], strategy: squall.Strategy) -> None:
        job = job_of(task, strategy)
        settings = dataclasses.replace(job.plan.settings, launcher="local", parts=parts)
        self._job = replace(
            job, plan=msgspec.structs.replace(job.plan, settings=settings), starts=tuple(starts)
        ).with_shares()
        self._root = Identity.new_root("squall")
        self.listener = listening()
        self.nodes = (REPLICA, *part_nodes(REPLICA, parts))
        self.places = [PartPlace(REPLICA, 0, f":{self.listener.getsockname()[1]}")]
        self.places += [PartPlace(node, machine + 1) for machine, node in enumerate(self.nodes[1:])]
        self._pipes: dict[int, Connection] = {}
        self.processes: list[BaseProcess] = []

    def start(self, part: int, work: Callable[[], Any]) -> None:
        context = mp.get_context("fork")
        ours, theirs = context.Pipe(duplex=False)
        self.processes.append(process := context.Process(target=_enter, args=(work, theirs)))
        process.start()
        theirs.close()
        self._pipes[part] = ours

    def first(self, script: Script) -> Any:
        job = replace(self._job, site=self._site(0), listener=self.listener)
        made = SpreadHost(job, REPLICA, lambda job: kinds.host(job, REPLICA), print)
        made.perform(MeetParts(tuple(self.places[1:])), 0.0)
        return script(made, job)

    def other(self, part: int) -> None:
        far_parts.PartExchanges = InOneMemory  # type: ignore[misc]
        job = replace(self._job, site=self._site(part), first=self.places[0])
        run_far_part(job, self.nodes[part], print, lambda job, host: host)  # type: ignore[arg-type, return-value]

    def answers(self) -> dict[int, Any]:
        """By part, what it has returned or raised; None of one that was killed, or has lost another."""
        found: dict[int, Any] = {}
        while len(found) < len(self._pipes):
            waiting = {pipe: part for part, pipe in self._pipes.items() if part not in found}
            ready = wait(list(waiting), WITHIN_S)
            assert ready, f"parts {sorted(waiting.values())} do not end"
            for pipe in ready:
                found[waiting[pipe]] = None  # type: ignore[index]
                with suppress(EOFError):
                    found[waiting[pipe]] = pickle.loads(pipe.recv_bytes())  # type: ignore[index, union-attr]
        return found

    def _site(self, machine: int) -> Site:
        identity = self._root.issue(machine_name(machine), authority=True)
        addresses = {COORDINATOR: ("127.0.0.1", 0)}
        return Site(
            machine, {("shard", 0): machine}, addresses, identity, {}, {}, Pulse(), host="127.0.0.1" if machine else ""
        )


@contextmanager
def spread(
    task: squall.Task, parts: int, script: Script, starts: Sequence[int] = (), strategy: squall.Strategy = DOWNPOUR
) -> Iterator[Spread]:
    """All are started; part 0 runs the script with its host."""
    found = Spread(task, parts, starts, strategy)
    try:
        found.start(0, lambda: found.first(script))
        for part in range(1, parts):
            found.start(part, lambda part=part: found.other(part))  # type: ignore[misc]
        yield found
    finally:
        for process in found.processes:
            process.kill()
            process.join()


def spread_replica(
    task: squall.Task, parts: int, script: Script, starts: Sequence[int] = (), strategy: squall.Strategy = DOWNPOUR
) -> Any:
    """What the script returns. Raises what a part has raised."""
    with spread(task, parts, script, starts, strategy) as found:
        answers = found.answers()
    for answer in answers.values():
        if isinstance(answer, Exception):
            raise answer
    return answers[0]


def _enter(work: Callable[[], Any], pipe: Connection) -> None:
    torch.set_num_threads(1)
    try:
        answer = work()
    except Exception as error:
        answer = error
    pipe.send_bytes(pickle.dumps(answer))
    os._exit(0)
