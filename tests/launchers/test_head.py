"""The head of a run on several machines: what a machine says that nobody says costs its connection, and no more."""

from __future__ import annotations

import os
import random
import threading
from collections.abc import Iterator
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import Any

import msgspec
import pytest

from squall import Downpour
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.gathering import Wanted
from squall.launchers.head import Head
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import Membership, join
from squall.launchers.joining.token import find_token
from squall.launchers.member_messages import understood
from tests import deep

SOON_S = 10.0
WHOLE: list[dict[str, Any]] = [
    {"kind": "placed", "ports": {"shard-0.0": 7}},
    {"kind": "failed", "error": "a", "task": True},
    {"kind": "exited", "node": "replica-1.2", "pid": 7, "why": "it was killed", "traceback": ""},
    {"kind": "ready"},
    {"kind": "listening"},
    {"kind": "stopping"},
    {"kind": "ended", "status": "", "reason": ""},
    {"kind": "script", "replica": 1, "said": {"kind": "leave", "why": "a break"}},
    {"kind": "script", "replica": 1, "said": {"kind": "logged", "values": {"a": 1.5, "b": "nan"}}},
    {
        "kind": "script",
        "replica": 0,
        "said": {"kind": "begin", "examples": 7, "batch_size": 2, "epochs": 1, "steps": None},
    },
]
NONE: list[Any] = [None, -1, 1 << 70, 1.5, "", "x-y", "shard-0", [], [1], {"a": {}}, {"shard-0.0": 99_999}, {"x": 1}]


@pytest.fixture
def head(tmp_path: Path) -> Iterator[Head]:
    found = Head(("127.0.0.1", 0), Wanted(100_000), Downpour(replicas=2).recipe())
    mine, _ = own = Pipe()
    found.gather(ControlPipe(mine), b"the task", tmp_path, None, -1)
    yield found
    found.close()
    for end in own:
        end.close()


def turns(head: Head, over: threading.Event) -> list[tuple[int, dict[str, Any]]]:
    """Until it is over: what the machines have said."""
    told: list[tuple[int, dict[str, Any]]] = []
    while not over.is_set():
        wait(head.sources, 0.005)
        told += head.turn()
    return told


def nonsense(chance: random.Random) -> bytes:
    """A message with a part that is missing or of another kind; bytes that are none."""
    if chance.random() < 0.2:
        return chance.choice([b"", b"[]", b"{}", b'{"kind":7}', b'{"kind":"frame"}', b"[" * 9000, chance.randbytes(50)])
    message = dict(chance.choice([m for m in WHOLE if len(m) > 1]))
    part = chance.choice([name for name in message if name != "kind"])
    if chance.random() < 0.5:
        del message[part]
    else:
        message[part] = chance.choice([value for value in NONE if not isinstance(value, str) and value != 7])
    return msgspec.json.encode(message)


def test_nonsense_of_a_machine_that_has_joined_costs_its_connection_and_no_more(head: Head, tmp_path: Path) -> None:
    """2,000 in `make deep`, each of a machine of its own."""
    chance = random.Random(16)
    over = threading.Event()
    token = find_token(str(tmp_path / "token"))
    failed: list[bytes] = []

    def machines(count: int) -> None:
        try:
            for _ in range(count):
                member = join(Call(head._listener.address, token, SOON_S), print)
                assert member.pipe.recv_bytes() == b"the task"
                message = nonsense(chance)
                member.pipe.send_bytes(message)
                if not _closed(member):
                    failed.append(message)
                member.pipe.close()
        finally:
            over.set()

    for count in (1, len(deep.sweep(range(2_000), 150))):
        files = len(os.listdir("/proc/self/fd"))
        over.clear()
        thread = threading.Thread(target=machines, args=[count])
        thread.start()
        assert not turns(head, over)
        thread.join()
    assert not failed
    assert len(os.listdir("/proc/self/fd")) == files


def _closed(member: Membership) -> bool:
    try:
        return member.pipe.poll(SOON_S) and not member.pipe.recv_bytes()
    except EOFError:
        return True


@pytest.mark.parametrize("message", WHOLE, ids=lambda message: message["kind"])
def test_what_machines_do_say_is_understood(message: dict[str, Any]) -> None:
    assert understood(message)
    assert not understood({**message, "kind": "frame"})
