"""The head of a run on a machine that has joined it, from when the run's first one is lost: it lets others in."""

from __future__ import annotations

import time
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

import cloudpickle
import msgspec

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.gathering import Gathering
from squall.launchers.head import Head, tell
from squall.launchers.joining.address import Address, bound
from squall.launchers.joining.call import Call
from squall.launchers.orders import Facts
from squall.launchers.roster import Standing, Wanted
from squall.protocol.effects import End

ANYWHERE = ("0.0.0.0", 0)
ENDS_WITHIN_S = 2.0  # what runs on other machines, when the run has ended


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

    def close(self, end: End | None = None) -> None:
        """Without an end this machine is lost alone."""
        if end is None:
            self.leave()
        else:
            end = End(end.status, f"the run is {end.status}, on machine {self._machine}")
            self.over(end.status, end.reason)
            until = time.monotonic() + ENDS_WITHIN_S
            while not self.collected and (left := until - time.monotonic()) > 0:
                wait(self.sources, left)
                self.attend()
        super().close(end)

    def attend(self) -> None:
        """What processes on other machines have come to the record tells."""
        for _ in self.turn():
            pass


def _free(wanted: Address) -> Address:
    """The address of the run's first head on this machine, if that is free; with another port where it is not."""
    for address in (wanted, (wanted[0], 0)):
        with suppress(ValueError), bound(address) as socket:
            found: Address = socket.getsockname()[:2]
            return found
    return ANYWHERE
