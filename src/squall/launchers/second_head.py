"""The head of a run on a machine that has joined it, from when the run's first one is lost: it lets others in."""

from __future__ import annotations

import sqlite3
import threading
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from squall.launchers.completing import give_directory, give_nothing, given
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.gathering import Gathering
from squall.launchers.head import Head, tell
from squall.launchers.joining.address import Address, bound
from squall.launchers.joining.call import Call
from squall.launchers.joining.listener import JoinedMachine
from squall.launchers.orders import Facts
from squall.launchers.roster import Standing, Wanted
from squall.protocol.effects import End

ANYWHERE = ("0.0.0.0", 0)
ENDS_WITHIN_S = 2.0  # what runs on other machines, when the run has ended
FETCHES_WITHIN_S = 30.0  # a machine that has said so, what its directory lacks


class SecondHead(Head):
    """In `squall join`, whose nursery has said that the run goes on from here."""

    def __init__(self, call: Call, said: dict[str, Any], own: ControlPipe, task: Path) -> None:
        """`said`: by the nursery, to which `own` leads. `task` has what that was given as it joined.

        Raises `OSError` where that is gone, and `ValueError` where nothing can be listened on.
        """
        message: dict[str, Any] = cloudpickle.loads(task.read_bytes())  # from whom the token has proved
        plan = message["plan"]
        plan = msgspec.structs.replace(plan, settings=replace(plan.settings, keep_schedule=0.0))  # it was there
        wanted = Wanted.of(plan)._replace(machines=1, least_replicas=None)
        listen = _free((said["host"], call.head[1]))
        super().__init__(listen, wanted, None, schedules_bytes=0, token=call.token, number=said["number"])
        self._machine = said["machine"]
        self._incomplete: set[int] = set()  # machines
        self._gives = False
        self._callers: list[JoinedMachine] = []  # that fetch
        standing = Standing(
            Path(said["directory"]), msgspec.convert(said["facts"], Facts),
            {(role, index): at for role, index, at in said["seats"]},
            {name: (host, port) for name, (host, port) in said["addresses"].items()},
        )  # fmt: skip
        gathering = Gathering(self.here(own), wanted, None, self._root, tell)
        gathering.go_on(standing)
        try:
            self.let_in(gathering, cloudpickle.dumps({**message, "plan": plan}), standing.directory)
        except BaseException:
            self._listener.close()
            raise
        tell("the run's first machine, if it is there again, joins so with --complete and the run's directory on it")

    def close(self, end: End | None = None) -> None:
        """Without an end this machine is lost alone."""
        if end is None:
            self.leave()
        else:
            self._gives = end.status != "failed"  # else others may go on
            end = End(end.status, f"the run is {end.status}, on machine {self._machine}")
            self.over(end.status, end.reason)
            until = time.monotonic() + ENDS_WITHIN_S
            while not self.collected and (left := until - time.monotonic()) > 0:
                wait(self.sources, left)
                self.attend()
            self._complete_others(end)
        super().close(end)

    def _greet(self, joined: JoinedMachine) -> None:
        if joined.hello.incomplete:
            self._incomplete.add(joined.number)
        if joined.hello.fetches and self._gives:
            self._callers.append(joined)
        else:
            super()._greet(joined)

    def _complete_others(self, end: End) -> None:
        """Give what the run has left here to whom it has begun with."""
        assert self._guests is not None
        awaited = self._incomplete & self._guests.machines.keys() if self._gives else set()
        self._dismiss(end)
        try:
            if awaited:
                with given(self._directory) as files:
                    self._give(files, awaited)
        except (OSError, ValueError, sqlite3.Error) as error:
            tell(f"warning: the run's first machine does not get {self._directory}: {error}")
        for joined in self._callers:
            give_nothing(ControlPipe(joined.pipe), "the run's directory cannot be given there")

    def _give(self, files: Mapping[str, Path], awaited: set[int]) -> None:
        """To each that calls, until all have that are awaited."""
        until, givers = time.monotonic() + FETCHES_WITHIN_S, []
        while awaited and (left := until - time.monotonic()) > 0:
            for joined in [*self._callers, *self._listener.turn(time.monotonic())]:
                if joined.hello.fetches:
                    awaited.discard(joined.hello.number)
                    tell(f"giving the run's files to machine {joined.hello.number}")
                    givers.append(threading.Thread(target=_give_to, args=(joined, files), daemon=True))
                    givers[-1].start()
                else:
                    joined.pipe.close()
            self._callers.clear()
            if awaited:
                wait(self.sources[:1], left)  # the listener
        for giver in givers:
            giver.join()

    def attend(self) -> None:
        """What processes on other machines have come to the record tells."""
        for _ in self.turn():
            pass


def _give_to(joined: JoinedMachine, files: Mapping[str, Path]) -> None:
    try:
        give_directory(ControlPipe(joined.pipe), files)
    except OSError as error:
        tell(f"warning: machine {joined.hello.number} does not get all of the run's files: {error}")


def _free(wanted: Address) -> Address:
    """The address of the run's first head on this machine, if that is free; with another port where it is not."""
    for address in (wanted, (wanted[0], 0)):
        with suppress(ValueError), bound(address) as socket:
            found: Address = socket.getsockname()[:2]
            return found
    return ANYWHERE
