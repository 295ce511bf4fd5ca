"""Real runs as a user starts them, and a look at their processes from outside."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from squall.record.rows import EventRow, ProgressRow, Row
from squall.report import Reader
from tests.warm import Warm

FILE = Path(__file__).with_name("blobs.py")
POLL = "7"  # the system call in which a process waits for messages (x86-64)
START_S = 60.0  # on a loaded machine


def wait_for(condition: Callable[[], object], timeout_s: float, what: str) -> float:
    """Seconds until the condition holds. Fails when it does not in time."""
    began = time.monotonic()
    pause = threading.Event()
    while not condition():
        assert time.monotonic() - began < timeout_s, f"waited {timeout_s:g} s for {what}"
        pause.wait(0.01)
    return time.monotonic() - began


def send(pids: Iterable[int], number: int) -> None:
    """A signal to all of them that are still there: who gets it first may take others along."""
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, number)


def alive(pid: int) -> bool:
    """It may still do something. One that ends closes its files, and is a zombie a moment later."""
    try:
        return bool(os.listdir(f"/proc/{pid}/fd"))
    except OSError:
        return False


class Started:
    """`squall ARGUMENTS` in a process of its own. Processes are found by the directory's name, so it must be unique."""

    def __init__(self, directory: Path, *arguments: str, **options: Any) -> None:
        self.directory = directory
        self.process = Warm(arguments, **options)

    @classmethod
    def train(cls, directory: Path, *flags: str, **options: Any) -> Started:
        return cls(directory, "train", str(FILE), "--run-dir", str(directory), *flags, **options)

    def processes(self) -> dict[str, int]:
        """Title -> pid of the run's living processes."""
        found = {}
        for path in Path("/proc").glob("[0-9]*"):
            try:
                title = (path / "cmdline").read_bytes().replace(b"\0", b" ").decode().strip()
                state = (path / "stat").read_text().rpartition(")")[2].split()[0]
            except OSError:
                continue  # it ended while we looked
            if title.startswith("squall ") and title.endswith(f" of {self.directory.name}") and state != "Z":
                found[title.removeprefix("squall ").removesuffix(f" of {self.directory.name}")] = int(path.name)
        return found

    def rows(self, table: type[Row]) -> list[Row]:
        if not (self.directory / "run.sqlite").exists():
            return []
        reader = Reader(self.directory / "run.sqlite")
        try:
            return reader.rows(table)
        finally:
            reader.close()

    def wait_rows(self, table: type[Row], condition: Callable[[Row], bool], timeout_s: float = START_S) -> float:
        return wait_for(lambda: any(condition(row) for row in self.rows(table)), timeout_s, f"a {table.__name__} row")

    def kill(self, role: str, number: int = signal.SIGKILL) -> int:
        pid = self.processes()[role]
        os.kill(pid, number)
        return pid

    def kill_shard(self, role: str) -> None:
        """Where it is in no update; also on another machine."""
        os.kill(self.stop_waiting(role), signal.SIGKILL)

    def stop_waiting(self, role: str) -> int:
        """SIGSTOP, where it waits for messages. Returns the pid."""
        pid = self.processes()[role]

        def waits() -> bool:
            os.kill(pid, signal.SIGSTOP)
            if Path(f"/proc/{pid}/syscall").read_text().split()[0] == POLL:
                return True
            os.kill(pid, signal.SIGCONT)
            return False

        wait_for(waits, START_S, f"{role} to wait")
        return pid

    def goes_on(self) -> None:
        """Wait until more is trained."""
        trained = lambda: sum(row.examples for row in self.rows(ProgressRow))  # type: ignore[attr-defined]  # noqa: E731
        before = trained()
        wait_for(lambda: trained() > before, START_S, "training to go on")

    def replaced(self, what: str) -> int:
        """How often it was."""
        rows = self.rows(EventRow)
        return sum((row.kind, row.text) == ("replaced", what) for row in rows)  # type: ignore[attr-defined]

    def finish(self, timeout_s: float = START_S) -> tuple[int, str, str]:
        """(exit status, stdout, stderr)."""
        out, err = self.process.communicate(timeout=timeout_s)
        return self.process.returncode, out, err

    def gone(self) -> bool:
        return not self.processes()


@contextmanager
def training_all(run: Started, replicas: int) -> Iterator[None]:
    """When so many replicas have trained; behind it the run is killed, and its processes have ended."""
    try:
        for replica in range(replicas):
            run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)
        yield
    finally:
        run.process.kill()
        run.finish()
        wait_for(run.gone, 10, "the processes to end")
