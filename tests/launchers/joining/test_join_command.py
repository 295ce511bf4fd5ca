"""`squall join` in processes: it takes part, leaves, and says what is wrong."""

from __future__ import annotations

import json
import re
import signal
from multiprocessing import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall import replay
from squall.cli import main
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining import attending
from squall.launchers.joining.address import bound, written
from squall.launchers.joining.call import Call
from squall.launchers.joining.token import VARIABLE, Token
from squall.transports.certificates import Identity
from tests.launchers.joining.head import SOON_S, Head
from tests.launchers.processes import Started, alive, wait_for
from tests.warm import Warm, squall


class Joining:
    """`squall join` of one machine, which the head has let in and told nothing."""

    def __init__(self, head: Head, directory: Path) -> None:
        head.token.write(directory / "token")
        self.process = Warm(["join", written(head.address), "--token-file", str(directory / "token")])
        head.until(lambda: head.joined)
        self.pipe = head.joined[0].pipe
        said = self.process.stderr.readline()
        expected = f"squall: this is machine 1 of the run at {written(head.address)} now; Ctrl-C leaves it in order\n"
        assert said == expected
        (self.nursery,) = children(self.process.pid)

    def finish(self) -> tuple[int, str, str]:
        out, err = self.process.communicate(SOON_S)
        assert self.process.returncode is not None
        wait_for(lambda: not alive(self.nursery), SOON_S, "the nursery to end")
        assert self.pipe.poll(SOON_S), "the connection is over"
        return self.process.returncode, out, err


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def test_a_machine_shows_its_token_to_nobody_and_leaves_at_once_where_nothing_is_trained(
    head: Head, tmp_path: Path
) -> None:
    machine = Joining(head, tmp_path)
    for pid in (machine.process.pid, machine.nursery):
        for file in ("cmdline", "environ"):
            assert head.token.secret.encode() not in Path(f"/proc/{pid}/{file}").read_bytes()
    machine.process.send_signal(signal.SIGINT)
    expected = (130, "", "squall: interrupted before the training began on this machine\n")
    assert machine.finish() == expected


def test_a_machine_whose_head_is_gone_says_so(head: Head, tmp_path: Path) -> None:
    machine = Joining(head, tmp_path)
    head.joined.pop().pipe.close()
    out, err = machine.process.communicate(SOON_S)
    gone = f"the run's first machine ({written(head.address)}) is gone before the training began"
    assert (machine.process.returncode, out, err) == (1, "", f"squall: error: {gone}\n")


def test_a_machine_whose_command_is_gone_ends_its_nursery(head: Head, tmp_path: Path) -> None:
    machine = Joining(head, tmp_path)
    machine.process.kill()
    machine.finish()


def test_a_machine_trains_in_the_run_of_another_one(tmp_path: Path) -> None:
    run = Started.train(
        tmp_path / "run", "--machines", "2", "--listen", "127.0.0.1:0", "--replicas", "2", "--epochs", "2"
    )
    while "squall join" not in (line := run.process.stderr.readline()):
        assert line
    token = tmp_path / "run" / "token"
    joined = squall(*line.split()[1:3], "--token-file", token)
    late = squall(*line.split()[1:3], "--token-file", token, "--wait", "0")
    status, out, err = run.finish()
    assert (joined.returncode, joined.stdout) == (0, "the run has ended\n")
    assert status == 0
    assert late.returncode == 1
    assert "finished" in out
    sent = squall("report", tmp_path / "run", "--json").stdout
    told = json.loads(sent)
    assert [runs for *_, runs in told["inventory"]["machines"]] == [
        "coordinator, evaluator, shard 0, replica 0",
        "replica 1",
    ]
    traffic = told["machines"]
    assert traffic["0"] == traffic["1"][::-1] != [0, 0], "what one has sent the other has received"
    replayed = replay(tmp_path / "run", check=True)
    assert replayed.snapshots, "bit for bit, with what every machine has done"
    assert not replayed.difference
    assert not replayed.stopped
    secret = token.read_text().strip()
    assert not any(secret in text for text in (out, err, line, joined.stdout, joined.stderr, late.stderr))


@pytest.fixture
def nobody(tmp_path: Path) -> str:
    """An address where nobody listens; there is a token."""
    Token.new(Identity.new_root("a run")).write(tmp_path / "token")
    with bound(("127.0.0.1", 0)) as free:
        return written(free.getsockname())


def test_a_run_that_is_not_there_is_named_with_what_to_look_at(nobody: str, tmp_path: Path) -> None:
    ended = squall("join", nobody, "--token-file", tmp_path / "token", "--wait", "0.2")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr.startswith(f"squall: error: no run answers at {nobody} (Connection refused): look whether")
    assert ended.stderr.endswith("; it was tried for 0.2 s (--wait)\n")


def test_an_interrupt_while_the_run_does_not_answer_ends_at_once(nobody: str, tmp_path: Path) -> None:
    process = Warm(["join", nobody, "--token-file", str(tmp_path / "token")])
    wait_for(lambda: children(process.pid), SOON_S, "its nursery")
    process.send_signal(signal.SIGINT)
    out, err = process.communicate(SOON_S)
    assert (process.returncode, out) == (130, "")
    assert err.endswith("squall: interrupted before the training began on this machine\n")


@pytest.mark.parametrize(
    ("arguments", "error"),
    [
        (["10.0.0.1"], "the address '10.0.0.1' is no HOST:PORT: write an address and a port, such as 10.0.0.1:7700"),
        (["10.0.0.1:7700"], "there is no token: copy the file that the run's first machine names"),
        (
            ["10.0.0.1:7700", "--token-file", "nothing"],
            "--token-file nothing cannot be read: No such file or directory",
        ),
        (["10.0.0.1:7700", "--cores", "0"], "--cores is 0: it must be at least 1"),
        (["10.0.0.1:7700", "--wait", "-1"], "--wait is -1.0: it must be 0 or more seconds"),
    ],
)
def test_a_mistake_is_told_before_anything_starts(
    arguments: list[str], error: str, capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    monkeypatch.setattr("squall.launchers.joining.attending.NurseryProcess", None)
    assert main(["join", *arguments]) == 1
    assert re.match(re.escape(f"squall: error: {error}"), capsys.readouterr().err)


def test_ctrl_c_behind_what_the_nursery_has_said_leaves_in_order_however_late_that_is_read(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    mine, theirs = map(ControlPipe, Pipe())
    monkeypatch.setattr(attending, "NurseryProcess", lambda: SimpleNamespace(pipe=mine))
    theirs.say(kind="joined", machine=1)
    theirs.say(kind="listening")
    theirs.say(kind="end", status="left", reason="")
    found = attending.Attending(Call(("here", 7), Token.for_all(), 1.0), tmp_path, str)
    assert theirs.connection.recv_bytes(), "the call"
    assert found.run([signal.SIGINT]).status == "left"
    assert theirs.hear() == {"kind": "leave"}
