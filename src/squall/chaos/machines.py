"""Machines of a run that are network namespaces of this one: only their network is another, so that it can be cut.

The command that makes them has a network of its own (`apart`), in which nothing else is. Machine 0 is there, and a
bridge leads to the others.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

NETWORK, PORT = "10.78.0", 7700
HEAD = f"{NETWORK}.1:{PORT}"
OWN = ("unshare", "--map-root-user", "--net")  # of util-linux: what this user may do is enough
INSIDE = "SQUALL_CHAOS_APART"
AGAIN_AFTER_S = 1.0  # a machine joins anew, when its command has ended
ANSWERS_WITHIN_S = 0.2  # to a call; else its machine is cut off, or lost
BEGIN_WITHIN_S = 5.0  # that a namespace has to be there


def apart(command: Sequence[str]) -> None:
    """Be this command, which this process is, in a network of its own; it does not return where it was not.

    Raises `ValueError` with the remedy where the kernel makes none.
    """
    if os.environ.pop(INSIDE, None):
        _ip("link", "set", "dev", "lo", "up")
        return
    try:
        tried = subprocess.run([*OWN, "ip", "link"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise ValueError("unshare is missing, which makes networks: apt install util-linux") from None
    if tried.returncode:
        raise ValueError(
            f"no network of its own can be made here ({tried.stderr.strip()}): it takes iproute2 (apt install iproute2)"
            " and a kernel that lets users make namespaces (sysctl kernel.unprivileged_userns_clone=1), or root"
        )
    os.environ[INSIDE] = "1"
    os.execvp(OWN[0], [*OWN, *command])


class Machines:
    """All but the first: each is in the run again soon after it has left it. A context manager."""

    def __init__(self, count: int) -> None:
        self.numbers = range(1, count)
        self._made = ExitStack()
        self._holders: dict[int, subprocess.Popen[bytes]] = {}  # a namespace is there while a process is in it
        self._commands: dict[int, subprocess.Popen[bytes]] = {}
        self._joins_at: dict[int, float] = {}
        self._environment: Mapping[str, str] = {}
        self._head = HEAD  # whom they call

    def __enter__(self) -> Machines:
        _ip("link", "add", "squall", "type", "bridge")
        self._made.callback(_delete, "squall")
        _ip("addr", "add", f"{NETWORK}.1/24", "dev", "squall")
        _ip("link", "set", "dev", "squall", "up")
        for number in self.numbers:
            holder = subprocess.Popen(["unshare", "--net", "cat"], stdin=subprocess.PIPE)  # it ends with this process
            self._made.callback(_end, holder)
            self._holders[number] = holder
            _wait_apart(holder.pid)
            _ip("link", "add", f"machine{number}", "type", "veth", "peer", "name", "net", "netns", str(holder.pid))
            self._made.callback(_delete, f"machine{number}")
            _ip("link", "set", "dev", f"machine{number}", "master", "squall", "up")
            for words in (
                ("addr", "add", f"{NETWORK}.{number + 1}/24", "dev", "net"),
                ("link", "set", "dev", "net", "up"),
                ("link", "set", "dev", "lo", "up"),
            ):
                _ip(*words, within=self._within(number))
        return self

    def __exit__(self, *raised: object) -> None:
        self._made.close()

    def begin(self, environment: Mapping[str, str]) -> None:
        """`environment`: of their commands; it has the run's token."""
        self._environment = environment
        for number in self.numbers:
            self._join(number)

    def follow(self, pid: int) -> None:
        """The run goes on from the machine of this process: who joins calls that, the first machine too."""
        with suppress(OSError):  # it has ended meanwhile
            there = _network(pid)
            led = (number for number, holder in self._holders.items() if _network(holder.pid) == there)
            self._head = f"{NETWORK}.{next(led, 0) + 1}:{PORT}"
            if 0 not in self._commands:
                self._join(0)

    def turn(self, now: float) -> list[int]:
        """Returns the pids of their commands."""
        for number, command in self._commands.items():
            if command.poll() is None:
                self._joins_at.pop(number, None)
            elif now >= self._joins_at.setdefault(number, now + AGAIN_AFTER_S) and self._answers():
                self._join(number)
        return [command.pid for command in self._commands.values()]

    def _answers(self) -> bool:
        """Somebody listens where machines join: it may be that the run goes on elsewhere soon."""
        host, _, port = self._head.partition(":")
        with suppress(OSError), socket.create_connection((host, int(port)), ANSWERS_WITHIN_S):
            return True
        return False

    def cut(self, number: int) -> None:
        _ip("link", "set", "dev", f"machine{number}", "down")

    def heal(self, number: int) -> None:
        _ip("link", "set", "dev", f"machine{number}", "up")

    def end(self, within_s: float) -> list[str]:
        """The run is over. Returns which commands of machines had to be killed."""
        living = _living(self._commands, within_s)
        for _ in range(2):  # it may have come too late to join; or was cut off, and waits for others that go on
            for number in living:
                self._commands[number].send_signal(signal.SIGINT)
            living = _living(self._commands, within_s) if living else []
        for number in living:
            _end(self._commands[number])
        return [f"squall join of machine {number} (pid {self._commands[number].pid})" for number in living]

    def _join(self, number: int) -> None:
        command = [*self._within(number), sys.executable, "-m", "squall", "join", self._head]
        quiet = subprocess.DEVNULL
        self._commands[number] = subprocess.Popen(command, env=self._environment, stdout=quiet, stderr=quiet)

    def _within(self, number: int) -> list[str]:
        return [] if number not in self._holders else ["nsenter", f"--net=/proc/{self._holders[number].pid}/ns/net"]


def _ip(*words: str, within: Sequence[str] = ()) -> None:
    subprocess.run([*within, "ip", *words], check=True)


def _delete(device: str) -> None:
    """It may be gone with a machine whose holder Ctrl-C has ended as well."""
    subprocess.run(["ip", "link", "delete", "dev", device], stderr=subprocess.DEVNULL, check=False)


def _network(process: int | str) -> Path:
    return Path(f"/proc/{process}/ns/net").readlink()


def _wait_apart(pid: int) -> None:
    """Until that process has a network of its own."""
    until = time.monotonic() + BEGIN_WITHIN_S
    while _network(pid) == _network("self"):
        if time.monotonic() > until:
            raise TimeoutError(f"unshare --net (pid {pid}) has not made a network")
        time.sleep(0.001)


def _living(commands: Mapping[int, subprocess.Popen[bytes]], within_s: float) -> list[int]:
    """Those that do not end in that time."""
    until = time.monotonic() + within_s
    for command in commands.values():
        with suppress(subprocess.TimeoutExpired):
            command.wait(max(0.0, until - time.monotonic()))
    return [number for number, command in commands.items() if command.poll() is None]


def _end(process: subprocess.Popen[bytes]) -> None:
    process.kill()
    process.communicate()
