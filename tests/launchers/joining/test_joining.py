"""Joining over real sockets: who has the token is admitted, if it is of the same versions; everybody else is not."""

from __future__ import annotations

import os
import socket
import threading
from pathlib import Path

import msgspec
import pytest

from squall.errors import SquallError
from squall.launchers.joining.address import bound
from squall.launchers.joining.call import Call
from squall.launchers.joining.hello import Hello, hello, why_not
from squall.launchers.joining.joining import Membership, join
from squall.launchers.joining.token import Token
from squall.transports.certificates import Identity
from tests.launchers.joining.head import SOON_S, Head


def call(head: Head, token: Token | None = None) -> Membership:
    return join(Call(head.address, token or head.token, wait_s=SOON_S, cores=3), print)


def test_a_machine_joins_with_its_facts_and_gets_a_name_and_a_pipe(head: Head, tmp_path: Path) -> None:
    with head.attended():
        members = [call(head), call(head)]
    head_has = head.joined
    assert [m.machine for m in members] == [m.number for m in head_has] == [1, 2]
    first, facts = members[0], head_has[0].hello
    assert (facts.cores, facts.machine, facts.address) == (3, socket.gethostname(), "127.0.0.1")
    assert facts.shared_memory > 0
    assert first.identity == head_has[0].identity
    assert first.identity.name == "machine-1"
    assert first.identity.root == head.root.root
    first.identity.issue("replica-3.2").contexts()
    for member, machine in zip(members, head_has):
        machine.pipe.send_bytes(b"build this" * 100_000)
        while not member.pipe.poll():
            machine.pipe.poll()
        assert member.pipe.recv_bytes() == b"build this" * 100_000
        member.pipe.send_bytes(b"done")
        assert machine.pipe.poll(SOON_S)
        assert machine.pipe.recv_bytes() == b"done"
        member.pipe.close()


def test_a_wrong_secret_is_refused(head: Head) -> None:
    wrong = Token(Token.new(head.root).secret, head.token.fingerprint)
    with head.attended(), pytest.raises(SquallError, match="refuses: the token is wrong") as raised:
        call(head, wrong)
    assert not head.joined
    assert wrong.secret not in str(raised.value)
    assert head.token.secret not in str(raised.value)


def test_a_joiner_tells_its_secret_to_nobody_but_the_head_of_its_token() -> None:
    """Somebody listens at the address, and speaks TLS as the head does, with a root of its own."""
    token = Token.new(Identity.new_root("a run"))
    heard: list[bytes] = []
    with bound(("127.0.0.1", 0)) as listening:

        def impostor() -> None:
            raw, _ = listening.accept()
            raw.settimeout(SOON_S)
            with Identity.new_root("a run").reception().wrap_socket(raw, server_side=True) as connection:
                heard.append(connection.recv(1 << 16))

        thread = threading.Thread(target=impostor)
        thread.start()
        with pytest.raises(SquallError, match="is not the run that the token is of: copy the file"):
            join(Call(listening.getsockname(), token, wait_s=5), print)
        thread.join()
    assert heard == [b""]


def test_a_machine_of_other_versions_is_refused_and_both_ends_say_why(
    head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = msgspec.structs.replace(hello(""), machine="vm-2", torch="2.1.0", python="3.99")
    monkeypatch.setattr("squall.launchers.joining.joining.hello", lambda address, cores: other)
    here = hello("")
    torch, python = here.torch.partition("+")[0], here.python
    why = (
        f"machine vm-2 has torch 2.1.0, this one {torch}: install torch=={torch} there; "
        f"machine vm-2 has Python 3.99, this one {python}: use Python {python} there"
    )
    with head.attended(), pytest.raises(SquallError) as raised:
        call(head)
    assert str(raised.value).endswith(f"refuses: {why}")
    assert list(head.listener.refused) == [why]
    assert not head.joined


def test_a_build_of_torch_for_another_processor_is_the_same_torch() -> None:
    here = hello("")
    assert not why_not(msgspec.structs.replace(here, torch=here.torch.partition("+")[0] + "+cu999"), here)
    assert "protocol 7, this one 1: install the Squall" in why_not(msgspec.structs.replace(here, protocol=7), here)
    assert "has squall unknown, this one" in why_not(Hello(), here)


def test_a_head_that_comes_later_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    paused = threading.Event()
    root = Identity.new_root("a run")
    token, found = Token.new(root), list[Membership]()

    def sleep(seconds: float) -> None:
        paused.set()
        assert begun.wait(SOON_S)

    begun = threading.Event()
    monkeypatch.setattr("squall.launchers.joining.joining.time.sleep", sleep)
    calling = threading.Thread(target=lambda: found.append(join(Call(("127.0.0.1", port), token, wait_s=20), print)))
    calling.start()
    assert paused.wait(SOON_S), "nobody has answered its first call"
    head = Head(port, root, token)
    with head.attended():
        begun.set()
        calling.join(SOON_S)
    assert [member.machine for member in found] == [1]
    found[0].pipe.close()
    head.close()


def test_an_address_where_nobody_answers_is_tried_and_then_named_with_what_to_look_at(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with bound(("127.0.0.1", 0)) as free:
        address = free.getsockname()
    told: list[str] = []
    monkeypatch.setattr("squall.launchers.joining.joining.TELL_AFTER_S", 0.1)
    with pytest.raises(SquallError, match=r"it was tried for 0\.5 s \(--wait\)") as raised:
        join(Call(address, Token.new(Identity.new_root("a run")), wait_s=0.5), told.append)
    text = f"no run answers at 127.0.0.1:{address[1]} (Connection refused): look whether the address and the port"
    assert str(raised.value).startswith(text)
    assert len(told) == 1
    assert told[0].startswith(text)
    assert told[0].endswith("s more")
    with pytest.raises(SquallError, match=r"nowhere\.invalid:7700 \(.*not known\)"):
        join(Call(("nowhere.invalid", 7700), Token.new(Identity.new_root("a run")), wait_s=0), told.append)


def test_joining_starts_no_thread_in_either_process(head: Head) -> None:
    """A nursery forks."""
    pid = os.fork()
    if not pid:
        head.listener.close()
        threads = [len(os.listdir("/proc/self/task"))]
        call(head)
        threads.append(len(os.listdir("/proc/self/task")))
        os._exit(0 if threads == [1, 1] else 1)
    before = len(os.listdir("/proc/self/task"))
    head.until(lambda: head.joined)
    assert len(os.listdir("/proc/self/task")) == before
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
