"""The command line, the only reader of a user's argv: a file a command, each a thin layer over the package."""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli import (
    attach,
    chaos,
    compare,
    detach,
    distill,
    doctor,
    export,
    join,
    live,
    measure,
    plan,
    predict,
    ps,
    replay,
    report,
    resume,
    run,
    simulate,
    stop,
    token,
    train,
)
from squall.detaching import Command as Waiting
from squall.detaching import Daemon, Outcome, fork
from squall.runtime.interrupts import ended_like_ctrl_c
from squall.version import __version__

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun

COMMANDS = (
    train, run, join, compare, resume, attach, stop, ps, predict, distill, report, live, export, replay, measure,
    simulate, plan, doctor, chaos, token,
)  # fmt: skip


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `squall`; returns the exit status."""
    commanded_at = _process_started_at()
    os.environ["KERAS_BACKEND"] = "torch"  # for whatever imports Keras here: nothing else can be trained
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    daemon, as_json = None, "--json" in arguments
    if detach.wanted(run.before_script(arguments)):
        side = fork(as_json)
        if isinstance(side, Waiting):
            return detach.wait(side, as_json)
        daemon = side
    try:
        outcome = _carry_out(arguments, commanded_at, daemon)
    except BaseException as error:
        if daemon is not None:  # it was not killed
            daemon.ended(Outcome(1, error=f"squall: error: {error!r}\n"))
        raise
    sys.stderr.write(outcome.error)
    sys.stdout.write(outcome.output)
    if daemon is not None:
        daemon.ended(outcome)
    return outcome.status


def _carry_out(arguments: Sequence[str], commanded_at: float, daemon: Daemon | None) -> Outcome:
    try:
        if arguments[:1] == ["replay"]:
            replay.begin_anew(arguments)
        told_to_end = ended_like_ctrl_c() if daemon is not None else contextlib.nullcontext()
        with (
            told_to_end,
            _prints_to_stderr("--json" in run.before_script(arguments), daemon),
            warnings.catch_warnings(),
        ):
            warnings.showwarning = _warn
            local = _start_early(arguments)
            try:
                with _nothing_is_garbage():
                    options = _parser(arguments).parse_args(arguments)
                options.daemon = daemon
                return _run(options, local, commanded_at)
            finally:
                if local is not None:
                    local.close()
    except KeyboardInterrupt as interrupt:
        exec("")  # resets a flag: after an interrupt within `exec`, which imports use, Python would end by the signal
        return Outcome(130, error=f"squall: {str(interrupt) or 'interrupted'}\n")


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """A warning is for the user, who need not know where it was raised."""
    sys.stderr.write(f"squall: warning: {message}\n")


@contextlib.contextmanager
def _prints_to_stderr(wanted: bool, daemon: Daemon | None) -> Iterator[None]:
    """What the user's code prints, here and in the processes started from here, is no part of a JSON output."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    if daemon is not None:
        daemon.outputs.append(output)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


@contextlib.contextmanager
def _nothing_is_garbage() -> Iterator[None]:
    """Python would look for garbage dozens of times among what torch imports, for a sixth of the time that it takes."""
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def _start_early(arguments: Sequence[str]) -> LocalRun | None:
    """The nursery takes as long as this process to import torch: let both do it at once."""
    own = run.before_script(arguments)
    several = own[:1] in (["doctor"], ["measure"]) and "--cluster" in own
    if not own or not (several or own[0] in ("train", "resume", "run", "predict")) or {"-h", "--help"} & set(own):
        return None
    from squall.launchers.environment import has_parts
    from squall.launchers.local import LocalRun

    parts = any(each.startswith("--parts") for each in own)
    return LocalRun(parts or (own[0] == "resume" and any(has_parts(Path(each)) for each in own[1:])))


def _run(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> Outcome:
    """Carry out a command."""
    from squall.errors import SquallError
    from squall.record.rows import RecordError
    from squall.usercode.blame import as_json, failure

    try:
        return Outcome(*options.run(options, local, commanded_at))
    except Exception as error:
        text = str(error)
        if not isinstance(error, SquallError):
            found = failure(error)
            if not found.file and not isinstance(error, ValueError | RecordError):
                raise
            text = f"in the user's own code:\n{found}" if found.file else text
        output = f"{json.dumps({'error': as_json(error)})}\n" if getattr(options, "json", False) else ""
        return Outcome(1, output, f"squall: error: {text}\n")


# ---------------------------------------------------------------- parsing


class Command(argparse.ArgumentParser):
    """The parser of one command. It refuses unknown flags itself, so that its own usage is shown."""

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            self.error(f"unrecognized arguments: {' '.join(unknown)}")
        return found, unknown


def _parser(arguments: Sequence[str]) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="squall", description="Train PyTorch models on many processes, with any data-parallel algorithm."
    )
    parser.add_argument("--version", action="version", version=f"squall {__version__}")
    commands = parser.add_subparsers(required=True, metavar="command", parser_class=Command)

    for command in COMMANDS:
        command.add(commands, arguments)
    return parser


def _process_started_at() -> float:
    """When this process began, seconds since 1970: the interpreter's own start counts as well."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
