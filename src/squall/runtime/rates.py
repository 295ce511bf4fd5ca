"""A learning-rate schedule that comes to any step without taking them all.

What a scheduler is after n steps follows from its settings and n. So now and then it is kept in a file of the run, a
line each, and whoever needs step n goes on from the last line before it: the shards of a resumed run, a replica that
takes another's place. Where no line serves, because the file is gone or the settings are others now, every step is
taken, with the same result.
"""

from __future__ import annotations

import hashlib
import json
import os
import warnings
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.optim import Optimizer

from squall.task import Task
from squall.usercode.blame import note

EVERY = 1 << 16  # steps from one line to the next: they take a second
NAME = "rates.jsonl"


class Schedule:
    """A task's schedule on one optimizer. `file` is where it is kept; without one it is not."""

    def __init__(self, task: Task, optimizer: Optimizer) -> None:
        assert task.schedule is not None
        self._optimizer = optimizer
        self._scheduler = task.schedule(optimizer)
        self._settings = hashlib.sha256(_text([type(self._scheduler).__qualname__, self._state()])).hexdigest()
        self.file: Path | None = None
        self.steps = 0

    def step(self) -> None:
        try:
            self._scheduler.step()
        except Exception as error:
            note(error, f"at step {self.steps + 1} of the learning-rate schedule", step=self.steps + 1)
            raise
        self.steps += 1
        if self.steps % EVERY == 0:
            self._keep()

    def advance(self, steps: int) -> None:
        """Go on until `steps` have been taken. If more have been taken already, nothing changes."""
        if steps - self.steps > EVERY:
            self._leap(steps)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch expects optimizer steps in between
            while self.steps < steps:
                self.step()

    def _state(self) -> dict[str, Any]:
        """What a step may change. Schedulers read the rates of the groups, and some set momentum there."""
        groups = [{k: v for k, v in group.items() if k != "params"} for group in self._optimizer.param_groups]
        return {"scheduler": self._scheduler.state_dict(), "groups": groups}

    def _keep(self) -> None:
        if any(steps >= self.steps for steps, _ in self._kept()):
            return  # by another process
        line = _text({"settings": self._settings, "steps": self.steps, "state": self._state()})
        with suppress(OSError):  # whoever needs it takes the steps
            if self.file is not None:
                with open(os.open(self.file, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600), "wb") as file:
                    file.write(b"\n" + line)  # a line of its own also behind one that is cut off

    def _kept(self) -> Iterator[tuple[int, Any]]:
        """(steps, state) of this schedule, the newest first."""
        try:
            lines = self.file.read_bytes().splitlines() if self.file is not None else []
        except OSError:
            return
        for line in reversed(lines):
            with suppress(ValueError, KeyError, TypeError):  # of a line that is cut off
                kept = json.loads(line)
                if kept["settings"] == self._settings:
                    yield int(kept["steps"]), kept["state"]

    def _leap(self, steps: int) -> None:
        """Take up the newest line from before that step.

        The step itself is then taken, so that what a scheduler keeps elsewhere than in its state is set, too.
        """
        for kept_steps, kept in self._kept():
            if self.steps < kept_steps < steps:
                with suppress(ValueError):
                    state = _filled(self._state(), kept)
                    self._scheduler.load_state_dict(state["scheduler"])
                    for group, values in zip(self._optimizer.param_groups, state["groups"], strict=True):
                        group.update(values)
                    self.steps = kept_steps
                    return


def _text(value: Any) -> bytes:
    return json.dumps(value, default=repr).encode()


def _filled(own: Any, kept: Any) -> Any:
    """`own` with the numbers of `kept`, which JSON has brought here. Raises `ValueError` unless they are alike."""
    if isinstance(own, Mapping) and isinstance(kept, dict) and [str(name) for name in own] == list(kept):
        kind: Any = type(own)
        return kind({name: _filled(value, kept[str(name)]) for name, value in own.items()})
    if isinstance(own, list | tuple) and isinstance(kept, list) and len(own) == len(kept):
        return type(own)([_filled(value, other) for value, other in zip(own, kept)])
    if kept is None or isinstance(kept, int | float):
        return kept
    if kept == (own if isinstance(own, str) else repr(own)):
        return own
    raise ValueError(f"{kept!r} does not fit {own!r}")
