"""Machines that join as for a run, and are looked at instead: the head's side."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, TypeVar

from squall.errors import SquallError, TaskError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers.head import Head, tell
from squall.launchers.head_of_plan import head_of
from squall.launchers.local import LocalRun
from squall.launchers.member_messages import Failed
from squall.launchers.roster import Gathered
from squall.plan import make_plan
from squall.protocol.effects import End
from squall.settings import Settings
from squall.strategies import Downpour
from squall.survey.messages import Answer, Called, Listens, understood

POLL_S = 0.1
ALL_OF_RAY = 10**6  # replicas: more than any cluster has processors

A = TypeVar("A", bound=Answer)


class Survey:
    """Those of the machines that are there, by their numbers, and what they answer."""

    begun = False
    waits = ""

    def __init__(self, local: LocalRun, head: Head, own: Gathered) -> None:
        self.machines = {0: own}
        self.lost: dict[int, str] = {}  # machines that are gone again, and their names
        self.wanted = head.wanted
        self.refused = head.refused
        self._local = local
        self._head = head
        self._answers: dict[int, Answer] = {}
        self._ports: dict[int, int] = {}

    # ------------------------------------------------------------ as the head's guests

    def add(self, machine: Gathered, task: bytes) -> None:
        self.machines[machine.number] = machine
        machine.pipe.send(task)
        missing = self.wanted - len(self.machines)
        waits = f"waiting for {missing} more" if missing > 0 else "all are here"
        tell(f"machine {machine.number} is here: {machine.name}, {machine.room.cores} cores; {waits}")

    def lose(self, number: int) -> None:
        self.lost[number] = self.machines.pop(number).name

    def understands(self, said: dict[str, Any]) -> bool:
        return understood(said) is not None

    def hear(self, number: int, said: dict[str, Any]) -> bool:
        found = understood(said)
        if isinstance(found, Failed) and number == 0:
            return False  # as in a run, it is raised
        if isinstance(found, Failed):
            why = str(TaskError.told(found.error)) if found.task else found.error
            raise SquallError(f"on machine {number} ({self.machines[number].name}): {why}")
        if found is not None:
            self._answers[number] = found
        return found is not None

    # ------------------------------------------------------------ what is asked

    def gather(self, wait_s: float) -> None:
        """Wait until as many machines as are wanted have come, or were sent away, but not longer."""
        until = time.monotonic() + wait_s
        while len(self.machines) + len(self.refused) < self.wanted and time.monotonic() < until:
            self._turn()
        self.begun = True

    @property
    def missing(self) -> str:
        """Who has not come; "" if all have."""
        absent = self.wanted - len(self.machines) - len(self.refused) - len(self.lost)
        here = ", ".join(f"{number}: {machine.name}" for number, machine in sorted(self.machines.items()))
        return f"{absent} of {self.wanted} did not come; here are {here}" if absent > 0 else ""

    @property
    def remedy(self) -> str:
        """What is to be looked at when machines do not come."""
        host, port = self._head.reached
        return (
            "look what squall join says there; it needs this time's address and token, and a way through firewalls:"
            f" nc -zv {host} {port} tells whether there is one"
        )

    def ask(self, kind: type[A], questions: Mapping[int, dict[str, Any]]) -> dict[int, A]:
        """Machines' answers, by their numbers. Who is lost meanwhile gives none."""
        asked = [number for number in questions if number in self.machines]
        for number in asked:
            self._answers.pop(number, None)
            self.machines[number].pipe.say(**questions[number])
        while any(number in self.machines and number not in self._answers for number in asked):
            self._turn()
        found = {number: self._answers[number] for number in asked if number in self.machines}
        return {number: answer for number, answer in found.items() if isinstance(answer, kind)}

    def clocks(self) -> dict[int, float]:
        """Have all listen, as a run's processes do; how far their clocks are ahead of this machine's, in seconds."""
        ahead = {}
        for number in sorted(self.machines):
            question: dict[str, Any] = {"kind": "listen"}
            if number == 0:  # the others have theirs
                question["identity"] = self._head.identity()
            before = time.time()
            for listens in self.ask(Listens, {number: question}).values():
                self._ports[number] = listens.port
                ahead[number] = listens.clock - (before + time.time()) / 2
        return ahead

    def links(self, seconds: float) -> dict[tuple[int, int], Called]:
        """From each machine that listens to each other one, one after the other, and about so many seconds each."""
        found = {}
        ways = list(itertools.permutations(sorted(self._ports), 2))
        if ways:
            tell(f"{len(ways)} links, one after the other")
        for here, there in ways:
            if here in self.machines and there in self.machines:
                host, port = self.machines[there].address, self._ports[there]
                question = {"kind": "call", "machine": there, "host": host, "port": port, "seconds": seconds}
                for answer in self.ask(Called, {here: question}).values():
                    found[here, there] = answer
        return found

    def _turn(self) -> None:
        self._local.attend(POLL_S, EvaluationCallback(None))


@contextmanager
def surveying(
    settings: Settings, code: dict[str, Any], message: dict[str, Any], local: LocalRun | None = None
) -> Iterator[Survey]:
    """Let machines in, as the settings say; they end when the block is left.

    Args:
        settings: machines, listen, launcher and what belongs to them count, and plaintext.
        code: for all machines, shipped by value.
        message: for all machines.
        local: that was started before.

    Raises `ValueError` where it cannot listen, and later `SquallError` for what fails on a machine.
    """
    if settings.launcher != "ray" and (settings.machines or 1) < 2:
        raise ValueError("--cluster looks at several machines: give --machines N --listen HOST:PORT, or --launcher ray")
    machines = settings.machines
    replicas = machines * (settings.cores or 1) if machines is not None else ALL_OF_RAY
    strategy = Downpour(replicas=replicas)
    head = head_of(make_plan(strategy, settings), strategy.recipe())
    assert head is not None
    local = local or LocalRun()
    ended = End("interrupted", "nobody looks any more")
    with TemporaryDirectory(prefix="squall-survey-") as folder:
        try:
            local.prepare(code, {"survey": True, "plaintext": settings.plaintext, **message}, head)
            yield local.survey(partial(Survey, local, head), Path(folder))
            ended = End("finished", "the machines were looked at")
        finally:
            local.ended = ended
            local.close()
