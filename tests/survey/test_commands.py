"""`squall doctor --cluster` and `squall measure --cluster` with two machines on loopback."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from squall.cli import main
from squall.launchers.joining.address import bound
from squall.launchers.joining.token import VARIABLE, Token
from squall.sim.cluster.model import Cluster
from tests import deep
from tests.launchers.processes import START_S
from tests.warm import Warm

FILE = Path(__file__).parents[1] / "launchers" / "blobs.py"


@contextmanager
def joiner(*, wait_s: float = START_S) -> Iterator[tuple[Warm, str]]:
    """A machine that calls the address until it is let in; both have the token in the environment."""
    with bound(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    os.environ[VARIABLE] = Token.for_all().text()
    try:
        process = Warm(["join", address, "--wait", str(wait_s)])
        yield process, address
    finally:
        os.environ.pop(VARIABLE, None)
        process.kill()


def finished(process: Warm) -> tuple[int, str, str]:
    out, err = process.communicate(START_S)
    assert process.returncode is not None
    return process.returncode, out, err


def looked_at(*arguments: str) -> tuple[dict[str, Any], str]:
    """What a command prints as JSON of two machines, and the status 0 of both."""
    with joiner() as (other, address):
        process = Warm([*arguments, "--json", "--cluster", "--machines", "2", "--listen", address])
        status, out, err = finished(process)
        assert status == 0, err
        assert finished(other)[:2] == (0, "the machines were looked at\n")
    return json.loads(out), err


def test_two_machines_are_looked_at() -> None:
    said, _ = looked_at("doctor")
    findings = {finding["name"]: finding for finding in said["findings"]}
    host = os.uname().nodename
    assert {f"0: {host}", f"1: {host}", "0 - 1", "verdict"} <= findings.keys()
    assert findings["verdict"]["ok"]
    assert "round trip" in findings["0 - 1"]["found"]


@deep.only
def test_two_machines_are_measured(tmp_path: Path) -> None:
    host = os.uname().nodename
    out = tmp_path / "cluster.toml"
    said, err = looked_at("measure", str(FILE), "--seconds", "0.5", "--busy", "--out", str(out))
    cluster = Cluster.load(out)
    assert [machine.name for machine in cluster.machines] == [f"{host}-0", f"{host}-1"]
    assert all(machine.step_s and machine.interface > 1e6 for machine in cluster.machines)
    assert "measured by squall" in out.read_text().splitlines()[0]
    assert {(link["from"], link["to"]) for link in said["links"]} == {(0, 1), (1, 0)}
    assert "measuring 2 machines at once" in err


@deep.only
def test_who_does_not_come_is_missed(capsys: pytest.CaptureFixture[str]) -> None:
    status = main(["doctor", "--cluster", "--machines", "2", "--listen", "127.0.0.1:0", "--wait", "0.1", "--json"])
    found = capsys.readouterr()
    assert status == 1
    (missing,) = [f for f in json.loads(found.out)["findings"] if f["name"] == "machines"]
    assert "1 of 2 did not come" in missing["found"]
    assert "nc -zv 127.0.0.1" in missing["remedy"]


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (["--machines", "2"], "add --cluster"),
        (["--cluster"], "give --machines N --listen HOST:PORT"),
        (["--cluster", "--machines", "2"], "say where others reach this one"),
        (["--cluster", "--machines", "auto"], "nothing says which machines there are"),
    ],
)
def test_flags_that_do_not_go_together_are_refused(
    flags: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", *flags]) == 1
    assert text in capsys.readouterr().err


@deep.only
def test_what_fails_on_another_machine_is_named_with_it(tmp_path: Path) -> None:
    file = tmp_path / "task.py"
    file.write_text(
        "import os, squall\nHERE = os.getpid()\n"
        "def task():\n    raise RuntimeError('no such disk')\n"
    )  # fmt: skip
    with joiner() as (other, address):
        flags = ["--cluster", "--machines", "2", "--listen", address, "--busy"]
        status, _, err = finished(Warm(["measure", str(file), *flags]))
        assert status == 1
        assert "no such disk" in err
        assert finished(other)[0] == 1


@deep.only
def test_an_interrupt_ends_all(tmp_path: Path) -> None:
    with joiner() as (other, address):
        process = Warm(
            ["measure", str(FILE), "--cluster", "--machines", "2", "--listen", address, "--busy"], cwd=tmp_path
        )
        while "measuring" not in process.stderr.readline():
            assert process.poll() is None
        process.send_signal(signal.SIGINT)
        assert finished(process)[0] == 130
        assert finished(other)[0] == 1
