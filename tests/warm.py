"""`squall ...` in a process that has torch imported already, as its nursery has: one warm process forks them.

A start as users have it imports torch twice, which takes longer than most of what tests train. It is tried where it is
what a test is about, or where the command becomes another program (`squall replay`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from squall.cli import main
from squall.launchers import local, serve
from squall.launchers.environment import environment

IMPORTED = [
    "pytest", "torch", "torch._dynamo", "sklearn.datasets", "matplotlib.backends.backend_svg", "rich.live",
    "squall.cli", "squall.cli_options", "squall.train", "squall.script", "squall.report.html",
    "squall.launchers.serve", "tests.tasks", "tests.warm",
]  # fmt: skip


def squall(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `options` as of `Warm`."""
    process = Warm([str(argument) for argument in arguments], **options)
    out, err = process.communicate()
    assert process.returncode is not None
    return subprocess.CompletedProcess(arguments, process.returncode, out, err)


class Warm:
    """As much of `subprocess.Popen` as tests use, of `squall` with these arguments. Both outputs are pipes, of text."""

    def __init__(self, arguments: Sequence[str], cwd: Path | None = None, env: Mapping[str, str] | None = None) -> None:
        context = _warm_process()
        outputs = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(reading) for reading, _ in outputs)
        self._process = context.Process(
            target=_run,
            args=(list(arguments), str(cwd or Path.cwd()), dict(os.environ if env is None else env),
                  [_Passed(writing) for _, writing in outputs]),
        )  # fmt: skip
        self._process.start()
        for _, writing in outputs:
            os.close(writing)
        assert self._process.pid is not None
        self.pid: int = self._process.pid
        self.returncode: int | None = None
        self._one_at_a_time = threading.Lock()

    def poll(self) -> int | None:
        with self._one_at_a_time:  # who comes second would find that the status was read, and take it for lost
            self.returncode = self._process.exitcode
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        wait([self._process.sentinel], timeout)
        status = self.poll()
        if status is None:
            raise subprocess.TimeoutExpired("squall", timeout or 0.0)
        return status

    def communicate(self, timeout: float | None = None) -> tuple[str, str]:
        """Both outputs up to their ends, and the process's."""
        ends = math.inf if timeout is None else time.monotonic() + timeout
        files = [file for file in (self.stdout, self.stderr) if not file.closed]
        found = dict.fromkeys(files, "")
        threads = [threading.Thread(target=lambda file=file: found.update({file: file.read()})) for file in files]
        for thread in threads:
            thread.daemon = True
            thread.start()
        for file, thread in zip(files, threads):
            thread.join(None if timeout is None else max(0.0, ends - time.monotonic()))
            if thread.is_alive():
                raise subprocess.TimeoutExpired("squall", timeout or 0.0)
            file.close()
        self.wait(None if timeout is None else max(0.0, ends - time.monotonic()))
        return found.get(self.stdout, ""), found.get(self.stderr, "")

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


@cache
def _warm_process() -> ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(IMPORTED)
    before = dict(os.environ)
    os.environ.update(environment())  # as a nursery has it: torch sets up its threads when it is imported
    try:
        ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


class _Passed:
    """A descriptor that goes to another process with what is pickled."""

    def __init__(self, handle: int) -> None:
        self._handle = DupFd(handle)

    def take(self) -> int:
        return int(self._handle.detach())


def _run(arguments: list[str], cwd: str, variables: dict[str, str], outputs: list[_Passed]) -> None:
    """In the new process: be `squall`."""
    setproctitle("squall " + " ".join(arguments))  # it looks for its room while the environment is what it was
    for number, output in enumerate(outputs, start=1):
        handle = output.take()
        os.dup2(handle, number)
        os.close(handle)
    multiprocessing.set_start_method("fork", force=True)  # as it is in any process that was not made by a server
    os.environ.clear()
    os.environ.update(variables)
    if arguments[0] == "replay":
        os.environ.update(environment())  # else it becomes a new interpreter, to have that
    os.chdir(cwd)
    sys.path[0] = cwd
    sys.argv = ["squall", *arguments]
    signal.signal(signal.SIGINT, signal.default_int_handler)
    local.start_nursery = _fork_nursery
    raise SystemExit(main(arguments))


class _Forked:
    """As much of `subprocess.Popen` as `LocalRun` uses."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None

    def wait(self, timeout: float | None = None) -> int:
        if self.returncode is None:
            handle = os.pidfd_open(self.pid)
            try:
                if not wait([handle], timeout):
                    raise subprocess.TimeoutExpired("nursery", timeout or 0.0)
            finally:
                os.close(handle)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode


def _fork_nursery(line: int, life: int) -> _Forked:
    pid = os.fork()
    if pid:
        return _Forked(pid)
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kept = sorted((0, 1, 2, line, life, resource_tracker.getfd()))
        for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
            os.closerange(before + 1, after)
        os.environ.update(environment())
        serve.main(line)
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
