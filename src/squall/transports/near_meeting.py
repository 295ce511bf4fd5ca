"""How processes of one machine come to have connections to each other: each calls those before it, others call it.

They find each other in a directory that only the user may enter, so whoever calls is one of his.
"""

from __future__ import annotations

import os
import select
import socket
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from squall.transports.mesh import MeshBroken

COME_WITHIN_S = 5.0  # whoever does not come, though it lives, is waited for so long
LOOK_EVERY_S = 0.002  # whether somebody who is to be called listens
SAYS_WITHIN_S = 1.0  # who it is; meanwhile nobody else is heard
PLACE_BYTES = 2  # of who calls
DIED, NOT_COME = "a member died while the group formed", "a member has not come to the group"


def meet(directory: Path, name: str, pids: Sequence[int], own: int) -> dict[int, socket.socket]:
    """Connections to all others, by their places in `pids`; they do not block. `own` is this process's place.

    All give the same `pids` in the same order, and a new `name`. Raises `MeshBroken` where one of them does not come,
    or dies before all are there, and `OSError` where no socket can be made.
    """
    until, found = time.monotonic() + COME_WITHIN_S, dict[int, socket.socket]()
    with ends_of(pids) as ends, socket.socket(socket.AF_UNIX) as listener:
        try:
            listener.bind(f"{directory}/{name}-{own}")
            listener.listen(len(pids))
            while True:
                to_call = set(range(own)) - found.keys()
                found |= {place: line for place in to_call if (line := _call(f"{directory}/{name}-{place}", own))}
                if len(found) == len(pids) - 1:
                    break
                look_at = time.monotonic() + LOOK_EVERY_S if to_call - found.keys() else until
                if _is_called(listener, ends, min(until, look_at)):
                    found |= [_answer(listener, until)]
                elif time.monotonic() >= until:
                    raise MeshBroken(NOT_COME)
        except BaseException:
            for connection in found.values():
                with suppress(OSError):  # it has hung up itself
                    connection.shutdown(socket.SHUT_RDWR)  # also where a process that was forked holds it open
                connection.close()
            raise
    for connection in found.values():
        connection.setblocking(False)
    return found


@contextmanager
def ends_of(pids: Sequence[int]) -> Iterator[list[int]]:
    """Descriptors that are readable when the process has ended. Raises `MeshBroken` where one is gone already."""
    ends: list[int] = []
    try:
        for pid in pids:
            ends.append(os.pidfd_open(pid))
        yield ends
    except ProcessLookupError as error:
        raise MeshBroken("a member was gone before the group began to form") from error
    finally:
        for descriptor in ends:
            os.close(descriptor)


def _call(path: str, own: int) -> socket.socket | None:
    """None: nobody listens there yet."""
    connection = socket.socket(socket.AF_UNIX)
    try:
        connection.connect(path)
        connection.sendall(own.to_bytes(PLACE_BYTES))
    except OSError:
        connection.close()
        return None
    return connection


def _is_called(listener: socket.socket, ends: Sequence[int], until: float) -> bool:
    """Whether somebody calls by then. Raises `MeshBroken` as soon as a process has ended."""
    poll = select.poll()
    for waited_for in (listener.fileno(), *ends):
        poll.register(waited_for, select.POLLIN)
    ready = {descriptor for descriptor, _ in poll.poll(max(0.0, until - time.monotonic()) * 1000)}
    if ready.intersection(ends):
        raise MeshBroken(DIED)
    return bool(ready)


def _answer(listener: socket.socket, until: float) -> tuple[int, socket.socket]:
    """The place of who calls, and the connection."""
    connection, _ = listener.accept()
    connection.settimeout(min(SAYS_WITHIN_S, max(LOOK_EVERY_S, until - time.monotonic())))
    try:
        said = connection.recv(PLACE_BYTES)
    except OSError as error:
        connection.close()
        raise MeshBroken(NOT_COME) from error
    if not said:
        connection.close()
        raise MeshBroken(DIED)
    return int.from_bytes(said), connection
