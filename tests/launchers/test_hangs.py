"""Who hangs is killed and replaced; who is slow is not, nor anybody because all stood still."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from uuid import uuid4

import pytest

from squall.record.rows import EventRow, ProgressRow
from squall.report import Reader, audit
from tests.launchers.processes import Started, wait_for

TASK = Path(__file__).with_name("hanging.py")
AFTER_S = 1.5
WITHIN_S = 20.0  # on a loaded machine


class Hanging(Started):
    folder: Path

    @classmethod
    @contextmanager
    def run(cls, tmp_path: Path, *flags: str) -> Iterator[Hanging]:
        """Training, with two replicas; behind it the run is stopped in order, and nothing was lost."""
        folder = tmp_path / "hanging"
        folder.mkdir()
        directory = tmp_path / f"run-{uuid4().hex[:8]}"
        hang = ("--hang-after", str(AFTER_S))
        arguments = ("--replicas", "2", "--epochs", "1000", *hang, "--run-dir", str(directory), *flags)
        found = cls(directory, "train", str(TASK), *arguments, env={**os.environ, "HANGING": str(folder)})
        found.folder = folder
        try:
            for replica in range(2):
                found.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
            yield found
            found.process.send_signal(signal.SIGINT)
            status, _, err = found.finish()
            assert status == 130, err
        finally:
            found.process.kill()
            found.process.communicate()
        wait_for(found.gone, 10, "the processes to end")
        with closing(Reader(directory / "run.sqlite")) as reader:
            assert not any(part.missed for part in audit(reader).parts)

    def events(self, kind: str) -> list[str]:
        return [row.text for row in self.rows(EventRow) if row.kind == kind]  # type: ignore[attr-defined]

    def wait_replaced(self, what: str) -> str:
        """Until it is, for it hung; the record's words for that."""
        wait_for(lambda: self.replaced(what), WITHIN_S, f"another {what}")
        (died,) = self.events("died")
        assert died.startswith(f"{what}")
        return died


@pytest.mark.parametrize("role", ["replica 1", "shard 0", "evaluator"])
def test_who_is_stopped_is_replaced(tmp_path: Path, role: str) -> None:
    with Hanging.run(tmp_path) as run:
        if role == "shard 0":
            wait_stopped_at_rest(run, role)
        else:
            run.kill(role, signal.SIGSTOP)
        assert "it hung: it was stopped for" in run.wait_replaced(role)
        run.goes_on()


def wait_stopped_at_rest(run: Hanging, role: str) -> None:
    """In no update: that would end the run, as a death there does."""
    raise NotImplementedError
