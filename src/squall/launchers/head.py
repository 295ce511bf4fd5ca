"""The launching process of a run on several machines: it listens, lets machines in, and has all launch together."""

from __future__ import annotations

import math
import os
import socket
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from squall.launchers.completing import give_nothing
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.gathering import Gathering
from squall.launchers.joining.address import Address, bound, written
from squall.launchers.joining.hello import Hello, hello
from squall.launchers.joining.joining import FROM_HEAD_BYTES
from squall.launchers.joining.listener import JoinedMachine, Listener
from squall.launchers.joining.token import TOKEN, VARIABLE, Token, find_token
from squall.launchers.roster import Gathered, Guests, Launched, Provider, Room, Step, Wanted
from squall.launchers.schedules import Schedules
from squall.launchers.script_relay import ScriptRelay
from squall.protocol.effects import End
from squall.runtime.attempts import numbers
from squall.strategies import Recipe
from squall.transports.certificates import Identity, machine_name
from squall.transports.texts import printable


class Head:
    """What it listens on is bound at once: raises `ValueError`, with the remedy, where that cannot be."""

    def __init__(
        self, listen: Address, wanted: Wanted, recipe: Recipe | None, provider: Provider | None = None,
        schedules_bytes: float = math.inf, token: Token | None = None, number: int = 1,
    ) -> None:  # fmt: skip
        """A machine may hand over schedules of so many bytes. `token`: of a run that has begun, without a recipe."""
        self._wanted = wanted
        self._recipe = recipe
        self._provider = provider
        self._shared = VARIABLE in os.environ  # the token: other machines have it as well
        if token is None and self._shared:
            token = find_token(None)
        elif token is None and wanted.copies > 1:  # any machine may have to let others in
            token = Token.for_all()
        self._root = Identity.new_root("squall") if token is None else token.root()
        self._token = token or Token.new(self._root)
        self._listener = Listener(bound(listen), self._root, self._token, number)
        self._machine = 0  # on which it is
        self._guests: Guests | None = None
        self.refused: list[str] = []  # why machines were not let in
        self._relay: ScriptRelay | None = None  # of a script's run
        self._task = b""  # for each machine that joins
        self._launched: Launched | None = None  # that waits for the provider
        self._directory = Path()  # of the run
        self._schedules: Schedules | None = None
        self._schedules_bytes = schedules_bytes
        self._owe: set[int] = set()  # machines whose schedules are awaited
        self.others_go_on = False  # without this machine: they have a deputy of the coordinator
        self.heard_at = 0.0  # when another machine has said something last

    def gather(self, own: ControlPipe, task: bytes, directory: Path, snapshot: int | None, lock: int) -> None:
        """From now on machines are let in; each gets the task. `own` leads to the nursery here.

        Raises `ValueError` for a task that is too large to be sent.
        """
        gathering = Gathering(self.here(own), self._wanted, self._recipe, self._root, tell)
        self._launched = Launched(directory, snapshot, lock)
        self.let_in(gathering, task, directory)
        self._launch(gathering)

    def _launch(self, gathering: Gathering) -> None:
        """As soon as it is known on which GPUs of this machine."""
        launched = self._launched
        if launched is not None and self._provider is not None:
            launched = self._provider.known(launched)
        if launched is not None:
            self._launched = None
            gathering.launch(launched)

    def here(self, own: ControlPipe) -> Gathered:
        """This machine."""
        said = hello(self._listener.address[0])
        room = self._provider.room if self._provider is not None else self._room(said)
        return Gathered(self._machine, said.machine, room, own)

    def let_in(self, guests: Guests, task: bytes, directory: Path) -> None:
        """From now on; the user is told what to type, with a token that is written into the directory if it is new."""
        if len(task) > FROM_HEAD_BYTES:
            raise ValueError(
                f"the task takes {len(task) / 2**30:.1f} GiB with the data that its functions hold, and"
                f" {FROM_HEAD_BYTES / 2**30:.0f} GiB can be sent to another machine: have them load the data from a"
                " file that every machine has, and keep it out of global variables and closures"
            )
        self._guests, self._task, self._directory = guests, task, directory
        head = written(self.reached)
        if self._provider is not None:
            self._provider.start(directory.name, head, self._token.text())
            return
        missing = self._wanted.machines - 1
        others = {0: "any other machine", 1: "the other machine"}.get(missing, f"each of the other {missing} machines")
        why = f"{guests.waits}; " if guests.waits else ""
        if self._shared:
            tell(f"{why}{others} joins with the same {VARIABLE}; by hand: squall join {head}")
            return
        file = directory / TOKEN
        self._token.write(file)
        tell(f"{why}on {others}, with a copy of {file}, type:\n    squall join {head} --token-file {file.name}")

    def relay_scripts(self) -> None:
        """It is a script that trains: what those elsewhere say is for the nursery here."""
        assert isinstance(self._guests, Gathering)
        self._relay = ScriptRelay(self._guests, self._directory)

    @property
    def wanted(self) -> int:
        """Machines that are waited for, this one included."""
        return self._wanted.machines

    def identity(self) -> Identity:
        """An authority over the processes of this machine."""
        return self._root.issue(machine_name(0), authority=True)

    @property
    def sources(self) -> list[Any]:
        """What becomes readable when `turn` has something to do."""
        return [self._listener, *(machine.pipe.connection for machine in self._others())]

    def turn(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """What machines have said that is not about their gathering, with their numbers; the own nursery's is not."""
        for joined in self._listener.turn(time.monotonic()):
            self._greet(joined)
        if self._provider is not None and self._guests is not None:
            for text in self._provider.turn(time.monotonic(), self.begun):
                tell(text)
                for machine in self._others() if self._provider.gone else ():
                    machine.pipe.say(kind="unattended")
            if isinstance(self._guests, Gathering):
                self._launch(self._guests)
        while self._listener.refused:
            self.refused.append(self._listener.refused.popleft())
            tell(f"a machine was not let in: {self.refused[-1]}")
        for number, pipe in [(machine.number, machine.pipe) for machine in self._others()]:
            if pipe.connection.closed or not pipe.connection.poll():
                continue
            assert self._guests is not None
            said, self.heard_at = pipe.hear(), time.monotonic()
            if said is None or not self._guests.understands(said):
                self._lose(number)
            elif said["kind"] == "scheduled":
                self._take_schedule(number, said)
            elif said["kind"] == "ended":
                self._ends(number, said["status"])
            elif not self.heard(number, told := printable(said)):
                yield number, told
        if self._relay is not None:
            self._relay.turn(self.collected)

    def _greet(self, joined: JoinedMachine) -> None:
        assert self._guests is not None
        pipe = ControlPipe(joined.pipe)
        if joined.hello.fetches:
            give_nothing(pipe, "there the run has not ended, or has failed")
            return
        room = self._room(joined.hello)
        machine = Gathered(joined.number, joined.hello.machine, room, pipe, joined.hello.address)
        self._guests.add(machine, self._task)

    @property
    def collected(self) -> bool:
        """All that ran on other machines has ended, and they have handed over what they had."""
        return all(machine.step is not Step.BEGUN for machine in self._others())

    def _ends(self, number: int, status: str) -> None:
        assert self._guests is not None
        machine = self._guests.machines[number]
        self._owe.discard(number)
        machine.step, machine.leaves = Step.ENDED, status not in ("finished", "moved")

    def _take_schedule(self, number: int, said: dict[str, Any]) -> None:
        if self._schedules is None:
            attempt = self._directory / "schedule" / str(max(numbers(self._directory), default=0))
            self._schedules = Schedules(attempt, self._schedules_bytes)
        try:
            self._schedules.take(number, said)
        except OSError as error:
            tell(f"warning: the schedule of machine {number} cannot be kept ({error}): there will be no replay")
            self._lose(number)

    def heard(self, number: int, said: dict[str, Any]) -> bool:
        """Whether it was about the guests, or of a script, and is done with."""
        heard = self._guests is not None and self._guests.hear(number, said)
        if self._relay is None or self._guests is None:
            return heard
        if number not in self._guests.machines:  # it was sent away
            self._relay.lose(number, ended=False)
        return heard or self._relay.hear(number, said)

    def over(self, status: str, reason: str) -> None:
        """All has ended here: the other machines need not wait for the coordinator, and hand over what they have."""
        status, reason = status or "failed", reason or "the run has failed"
        if isinstance(self._guests, Gathering):
            self._guests.closing = True
        owe = [machine.number for machine in self._others() if machine.step is Step.BEGUN]
        self._owe = set(owe) if self._schedules_bytes else set()
        if self._relay is not None:
            self._relay.ended(status, reason)
            return
        for machine in self._others():
            machine.pipe.say(kind="end", status=status, reason=reason)

    @property
    def begun(self) -> bool:
        """What it has gathered machines for."""
        return self._guests is not None and self._guests.begun

    def leave(self) -> None:
        """The others go on without this machine, and hear no more of it."""
        for machine in self._others():
            self._lose(machine.number)

    def renew(self, own: ControlPipe) -> None:
        """Another nursery is in the place of the one here."""
        assert self._guests is not None
        self._guests.machines[0].pipe = own

    def again(self, snapshot: int | None) -> None:
        """All has ended: the run goes on from this snapshot, on the machines that stay."""
        assert isinstance(self._guests, Gathering)
        self._miss()
        self._schedules, self.others_go_on = None, False
        if self._relay is not None:
            self.relay_scripts()
        self._guests.again(snapshot)

    def _miss(self) -> None:
        """Tell of machines that have ended, or are silent, without a word of what ran there."""
        for number in sorted(self._owe):
            tell(f"warning: machine {number} was gone before it had handed over its schedule: there will be no replay")
        self._owe.clear()

    def close(self, end: End | None = None) -> None:
        """The other machines are told how the run has ended, and that they have nothing more to do."""
        self._listener.close()
        if end is not None:
            self._miss()
        self._dismiss(end or End("failed", "the run has failed"))
        if self._provider is not None:
            self._provider.close()

    def _dismiss(self, end: End) -> None:
        for machine in self._others():
            machine.pipe.say(kind="kill", status=end.status, reason=end.reason)
            machine.pipe.connection.close()

    def _lose(self, number: int) -> None:
        """Its connection is over. When the run has begun, it is the coordinator that takes a machine for lost."""
        assert self._guests is not None
        machine = self._guests.machines[number]
        machine.pipe.connection.close()
        self._guests.lose(number)
        if self._relay is not None:
            self._relay.lose(number, machine.step is Step.ENDED)

    def _room(self, said: Hello) -> Room:
        return Room(said.cores, said.gpus if self._wanted.device.startswith("cuda") else 0)

    def _others(self) -> list[Gathered]:
        machines = self._guests.machines.values() if self._guests is not None else ()
        return [machine for machine in machines if machine.number != self._machine]

    @property
    def reached(self) -> Address:
        """What others can call, where it listens on all addresses."""
        host, port = self._listener.address
        return (socket.gethostname() if host in ("0.0.0.0", "::") else host), port


def tell(text: str) -> None:
    sys.stderr.write(f"squall: {text}\n")
