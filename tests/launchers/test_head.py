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
from squall.launchers.head import Head
from squall.launchers.joining.call import Call
from squall.launchers.joining.joining import FROM_HEAD_BYTES, Membership, join
from squall.launchers.joining.token import VARIABLE, Token, find_token
from squall.launchers.member_messages import understood
from squall.launchers.roster import Gathered, Room, Step, Wanted
from squall.protocol.effects import End
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
    {"kind": "script", "replica": 1, "said": {"kind": "over"}},
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


def test_texts_of_a_machine_do_nothing_to_a_terminal(head: Head, tmp_path: Path) -> None:
    member = joined(head, tmp_path)
    said = {
        "kind": "exited",
        "node": "replica-1.0",
        "pid": 7,
        "why": "it \x1b]0;was\x07 killed",
        "traceback": "a\n\tb\x9b",
    }
    member.pipe.send_bytes(msgspec.json.encode(said))
    told: list[tuple[int, dict[str, Any]]] = []
    while not told:
        wait(head.sources, SOON_S)
        told += head.turn()
    assert told == [(1, {**said, "why": "it \ufffd]0;was\ufffd killed", "traceback": "a\n\tb\ufffd"})]
    member.pipe.close()


def test_a_machine_that_does_not_read_a_large_task_keeps_nobody_waiting(head: Head, tmp_path: Path) -> None:
    head._task = bytes(100 << 20)
    silent, other = joined(head, tmp_path), joined(head, tmp_path)
    got: list[bytes] = []
    reading = threading.Thread(target=lambda: got.append(other.pipe.recv_bytes()))
    reading.start()
    while reading.is_alive():
        wait(head.sources, 0.005)
        assert not list(head.turn())
    assert got == [head._task]
    for member in (silent, other):
        member.pipe.close()


def joined(head: Head, directory: Path) -> Membership:
    """A machine that has joined, and has not read its task."""
    over = threading.Event()
    members: list[Membership] = []

    def join_it() -> None:
        try:
            members.append(join(Call(head._listener.address, find_token(str(directory / "token")), SOON_S), print))
        finally:
            over.set()

    threading.Thread(target=join_it).start()
    turns(head, over)
    return members[0]


def test_a_task_that_is_too_large_to_be_sent_is_refused_with_the_remedy(tmp_path: Path) -> None:
    found = Head(("127.0.0.1", 0), Wanted(2), Downpour(replicas=2).recipe())
    with pytest.raises(ValueError, match=r"takes 1\.0 GiB .* 1 GiB can be sent .* have them load the data from a file"):
        found.gather(ControlPipe(Pipe()[0]), bytes(FROM_HEAD_BYTES + 1), tmp_path, None, -1)
    found.close()


def test_a_token_that_all_machines_have_is_written_nowhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(VARIABLE, Token.for_all().text())
    found = Head(("127.0.0.1", 0), Wanted(2), Downpour(replicas=2).recipe())
    mine, theirs = Pipe()
    found.gather(ControlPipe(mine), b"the task", tmp_path, None, -1)
    told = f"the other machine joins with the same {VARIABLE}; by hand: squall join 127.0.0.1:"
    assert told in capfd.readouterr().err
    assert not list(tmp_path.iterdir())
    found.close()
    mine.close()
    theirs.close()


def test_a_machine_that_is_gone_before_it_has_handed_over_its_schedule_is_named(
    head: Head, capsys: pytest.CaptureFixture[str]
) -> None:
    assert head._guests is not None
    pipes = [Pipe() for _ in range(2)]
    for number, (mine, _) in enumerate(pipes, start=1):
        machine = Gathered(number, "host", Room(1), ControlPipe(mine), step=Step.BEGUN)
        head._guests.machines[number] = machine
    head.over("finished", "all is trained")
    ControlPipe(pipes[0][1]).say(kind="ended", status="finished", reason="")
    pipes[1][1].close()
    assert not list(head.turn())
    assert head.collected
    head.close(End("finished"))
    told = capsys.readouterr().err
    assert "warning: machine 2 was gone before it had handed over its schedule: there will be no replay" in told
    assert "warning: machine 1" not in told
    for _, theirs in pipes:
        theirs.close()
