"""Runs that go on without a terminal, as a user starts them, and what is said of them."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

from tests.launchers.processes import Started
from tests.warm import squall as command

BAD = """
import os, signal, threading
from pathlib import Path
import squall
from tests.launchers import blobs

def broken():
    raise RuntimeError("my own mistake")

def waiting():
    Path("here").touch()
    threading.Event().wait()

def later():
    made = blobs.task()
    def loss(model, batch):
        if Path("now").exists():
            raise RuntimeError("my own loss")
        return made.loss(model, batch)
    return squall.Task(model=made.model, loss=loss, train=made.train, batch_size=16)
"""


def detached(directory: Path, *flags: str, **options: Any) -> Started:
    """Up to the end of the command, which is that of all that holds its outputs."""
    run = Started.train(directory, "--detach", *flags, **options)
    status, out, err = run.finish()
    assert status == 0, err
    run.pid = int(re.search(r"pid (\d+)\)", out)[1])  # type: ignore[attr-defined, index]
    return run


def runs(*arguments: object) -> list[dict[str, Any]]:
    done = command("ps", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, Any]] = json.loads(done.stdout)
    return found


def status_of(directory: Path) -> str:
    (found,) = runs(directory, "--all")
    return str(found["status"])
