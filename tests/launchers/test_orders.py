"""What the head wants of a nursery that waits."""

from __future__ import annotations

import os
from multiprocessing.connection import Pipe
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall.launchers.control_pipe import ControlPipe
from squall.launchers.orders import Orders


def test_what_was_said_to_processes_that_have_ended_is_passed_over() -> None:
    """The head may have told of a machine that joined, or a user's wish, just before it heard of their end."""
    mine, theirs = Pipe()
    head = ControlPipe(mine)
    for stray in ({"kind": "joined", "machine": 2, "cores": 1}, {"kind": "leave", "why": "enough"}):
        head.say(**stray)
    head.say(kind="place", seats=[], placing=3)
    head.say(kind="kill")
    plan: Any = None
    assert Orders(ControlPipe(theirs)).next(plan) is None
    assert head.hear() == {"kind": "placed", "ports": {}, "placing": 3}


@pytest.mark.parametrize(("gpus", "seen"), [(None, "0,1"), ("1", "1"), ("", "")])
def test_the_first_machine_keeps_to_the_gpus_that_it_was_given(
    gpus: str | None, seen: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its other ones are those of machines on the same node, or of other programs."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    mine, theirs = Pipe()
    head, plan = ControlPipe(mine), SimpleNamespace()
    head.say(kind="launch", directory=str(tmp_path), snapshot=None, gpus=gpus)
    with open(tmp_path / "lock", "w") as lock:
        head.hand(lock.fileno())
    order = Orders(ControlPipe(theirs)).next(plan)  # type: ignore[arg-type]
    assert order is not None
    assert order.directory == tmp_path
    assert os.environ["CUDA_VISIBLE_DEVICES"] == seen
