"""`squall ...`, `python SCRIPT ...` and nurseries that have torch imported already: one warm process forks them.

A start as users have it imports torch twice, which takes longer than most of what tests train. It is tried where it is
what a test is about, or where the command becomes another program (`squall replay`).
"""

from __future__ import annotations

import math
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager, suppress
from functools import cache
from multiprocessing import resource_tracker
from multiprocessing.connection import Connection, wait
from multiprocessing.context import ForkServerContext
from multiprocessing.forkserver import ensure_running
from pathlib import Path
from typing import Any

import torch
from setproctitle import setproctitle

from squall.cli import main
from squall.launchers import nursery_main as serve
from squall.launchers import nursery_process
from squall.launchers.environment import environment
from squall.replaying import apart
from squall.run import Run

IMPORTED = [
    "pytest", "torch", "torch._dynamo", "sklearn.datasets", "matplotlib.backends.backend_svg", "rich.live",
    "squall.cli", "squall.cli.strategies", "squall.train", "squall.script", "squall.report.html",
    "squall.launchers.nursery_main", "squall.replaying.run", "tests.tasks", "tests.warm", "tests.frozen",
]  # fmt: skip


def squall(*arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run it to its end; `options` as of `Warm`."""
    return Warm([str(argument) for argument in arguments], **options).completed()


def python(script: object, *arguments: object, **options: Any) -> subprocess.CompletedProcess[str]:
    """A script that is started by itself, to its end."""
    return Warm([str(argument) for argument in (script, *arguments)], be=_be_python, **options).completed()


@contextmanager
def nurseries() -> Iterator[None]:
    """In here the nurseries of this process's runs, and replays that fork, are forked by the warm one."""
    before, nursery_process.start_nursery = nursery_process.start_nursery, _start_nursery  # type: ignore[assignment]
    cold, apart.start_replay = apart.start_replay, _start_replay  # type: ignore[assignment]
    try:
        yield
    finally:
        nursery_process.start_nursery, apart.start_replay = before, cold


class _Forked:
    """As much of `subprocess.Popen` as is used, of a process that the warm one forks."""

    def __init__(
        self, be: Callable[..., None], arguments: Any, cwd: Path | None, env: Mapping[str, str], draws: bool = False
    ) -> None:
        call = (be, str(cwd or Path.cwd()), dict(env), draws, arguments)
        self._process = warm_process().Process(target=_run, args=call)
        self._process.start()
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


class Warm(_Forked):
    """`squall` with these arguments. Both outputs are pipes, of text.

    `draws`: its runs have a report, which takes longer to draw than most of these runs to train.
    """

    def __init__(
        self, arguments: list[str] | tuple[str, ...], cwd: Path | None = None, env: Mapping[str, str] | None = None,
        be: Callable[..., None] | None = None, draws: bool = False,
    ) -> None:  # fmt: skip
        outputs = [os.pipe(), os.pipe()]
        self.stdout, self.stderr = (os.fdopen(reading) for reading, _ in outputs)
        out, err = (Connection(writing, readable=False) for _, writing in outputs)
        with out, err:
            given = os.environ if env is None else env
            super().__init__(be or be_squall, (list(arguments), out, err), cwd, given, draws)

    def completed(self) -> subprocess.CompletedProcess[str]:
        out, err = self.communicate()
        assert self.returncode is not None
        return subprocess.CompletedProcess([], self.returncode, out, err)

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
def warm_process() -> ForkServerContext:
    """It is started when it is first wanted: by who looks for children that a test has left, before that test."""
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


def _run(be: Callable[..., None], cwd: str, variables: dict[str, str], draws: bool, arguments: Any) -> None:
    """In the new process: be that."""
    if not draws:
        Run.report = lambda run: run.directory / "report.html"  # type: ignore[method-assign]
    setproctitle("squall")  # it looks for its room while the environment is what it was
    multiprocessing.set_start_method("fork", force=True)  # as it is in any process that was not made by a server
    os.environ.clear()
    os.environ.update(variables)
    os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"  # who looked for a GPU otherwise could fork nobody who uses it
    tempfile.tempdir = None  # it is looked for in these variables
    os.chdir(cwd)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    be(*arguments)


def _say_to(*outputs: Connection) -> None:
    for number, output in enumerate(outputs, start=1):
        with output:
            os.dup2(output.fileno(), number)


def be_squall(arguments: list[str], out: Connection, err: Connection) -> None:
    """What `Warm` is by default."""
    setproctitle("squall " + " ".join(arguments))
    _say_to(out, err)
    if arguments[0] == "replay":
        os.environ.update(environment())  # else it becomes a new interpreter, to have that
    sys.path[0] = os.getcwd()
    sys.argv = ["squall", *arguments]
    nursery_process.start_nursery = _fork_nursery
    raise SystemExit(main(arguments))


def _be_python(arguments: list[str], out: Connection, err: Connection) -> None:
    _say_to(out, err)
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", len(os.sched_getaffinity(0)))))
    sys.path[0] = str(Path(arguments[0]).resolve().parent)
    sys.argv = arguments
    nursery_process.start_nursery = _fork_nursery
    runpy.run_path(arguments[0], run_name="__main__")


def _be_nursery(line: Connection, life: Connection, out: Connection, err: Connection) -> None:
    os.setsid()
    _say_to(out, err)
    serve.die_with_parent = lambda launcher: None  # its parent is the warm process
    serve.main(os.dup(line.fileno()))
    sys.stdout.flush()
    os._exit(0)


def _start_nursery(line: int, life: int, parts: bool) -> _Forked:
    with ExitStack() as ends:
        given = tuple(ends.enter_context(Connection(os.dup(handle))) for handle in (line, life, 1, 2))
        nursery = _Forked(_be_nursery, given, None, environment(parts))
    _until_it_leads(nursery.pid)
    return nursery


def _be_replay(line: Connection, out: Connection, err: Connection) -> None:
    _say_to(out, err)
    apart.die_with_parent = lambda launcher: None  # its parent is the warm process
    apart.main(os.dup(line.fileno()))


def _start_replay(line: int) -> _Forked:
    with ExitStack() as ends:
        given = tuple(ends.enter_context(Connection(os.dup(handle))) for handle in (line, 2, 2))
        return _Forked(_be_replay, given, None, environment())


def _until_it_leads(pid: int) -> None:
    """A stop ends the session of a nursery: until there is one, nothing would end it."""
    deadline = time.monotonic() + 10
    with suppress(ProcessLookupError):
        while os.getsid(pid) != pid:
            assert time.monotonic() < deadline, f"the nursery (pid {pid}) leads no session"
            time.sleep(0.001)


class _Child:
    """As much of `subprocess.Popen` as `NurseryProcess` uses, of a process that this one has forked."""

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


def _fork_nursery(line: int, life: int, parts: bool) -> _Child:
    pid = os.fork()
    if pid:
        _until_it_leads(pid)
        return _Child(pid)
    try:
        os.setsid()
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
        kept = sorted((0, 1, 2, line, life, resource_tracker.getfd()))
        for before, after in zip(kept, [*kept[1:], os.sysconf("SC_OPEN_MAX")]):
            os.closerange(before + 1, after)
        os.environ.update(environment(parts))
        serve.main(line)
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
        os._exit(1)
    os._exit(0)
