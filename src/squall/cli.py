"""The command line: the only reader of a user's argv. Each command is a thin layer over a function of the package."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli_flags import (
    SAVES_ITSELF,
    add_common,
    add_keep_best,
    add_kept,
    add_limits,
    add_patience,
    add_seconds,
    add_settings,
    add_snapshots,
    ratio,
)
from squall.cli_measure import add_measure
from squall.cli_plan import add_plan
from squall.cli_replay import add_replay, begin_anew
from squall.cli_report import add_doctor, add_report
from squall.cli_resume import add_resume, summarized
from squall.cli_simulate import add_simulate
from squall.version import __version__

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun


def main(arguments: Sequence[str] | None = None) -> int:
    """Entry point of `squall`; returns the exit status."""
    commanded_at = _process_started_at()
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if arguments[:1] == ["replay"]:
            begin_anew(arguments)
        with _prints_to_stderr("--json" in _before_script(arguments)), warnings.catch_warnings():
            warnings.showwarning = _warn
            status, output = _parse_and_run(arguments, commanded_at)
        sys.stdout.write(output)
        return status
    except KeyboardInterrupt as interrupt:
        exec("")  # else Python ends by the signal if it came to code from a string, as imports run it
        sys.stderr.write(f"squall: {str(interrupt) or 'interrupted'}\n")
        return 130


def _warn(
    message: Warning | str, category: type[Warning], filename: str, lineno: int, file: object = None,
    line: str | None = None,
) -> None:  # fmt: skip
    """A warning is for the user, who need not know where it was raised."""
    sys.stderr.write(f"squall: warning: {message}\n")


def _before_script(arguments: Sequence[str]) -> Sequence[str]:
    """What is looked through before the parser is there; what stands behind a script's name is the script's."""
    if arguments[:1] == ["run"]:
        for i, argument in enumerate(arguments[1:], start=1):
            if argument.endswith(".py") or Path(argument).is_file():
                return arguments[:i]
    return arguments


def _parse_and_run(arguments: Sequence[str], commanded_at: float) -> tuple[int, str]:
    local = _start_early(arguments)
    try:
        options = _parser(arguments).parse_args(arguments)
        return _run(options, local, commanded_at)
    finally:
        if local is not None:
            local.close()


@contextlib.contextmanager
def _prints_to_stderr(wanted: bool) -> Iterator[None]:
    """What the user's code prints, here and in the processes started from here, is no part of a JSON output."""
    if not wanted:
        yield
        return
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        with contextlib.redirect_stdout(sys.stderr):
            yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _start_early(arguments: Sequence[str]) -> LocalRun | None:
    """The nursery takes as long as this process to import torch: let both do it at once."""
    own = _before_script(arguments)
    if not own or own[0] not in ("train", "resume", "run") or {"-h", "--help"} & set(own):
        return None
    from squall.launchers.local import LocalRun

    return LocalRun()


def _run(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    """The exit status, and what belongs on stdout."""
    from squall.blame import as_json, failure
    from squall.errors import SquallError
    from squall.record import RecordError

    try:
        done: tuple[int, str] = options.run(options, local, commanded_at)
        return done
    except Exception as error:
        text = str(error)
        if not isinstance(error, SquallError):
            found = failure(error)
            if not found.file and not isinstance(error, ValueError | RecordError):
                raise
            text = f"in the user's own code:\n{found}" if found.file else text
        sys.stderr.write(f"squall: error: {text}\n")
        return 1, f"{json.dumps({'error': as_json(error)})}\n" if getattr(options, "json", False) else ""


# ---------------------------------------------------------------- commands


def _train(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli_options import build_strategy, settings_of
    from squall.plan import make_plan
    from squall.run import Code
    from squall.task_file import load_task
    from squall.train import Launch

    loaded = load_task(options.file)
    strategy = build_strategy(options, loaded.strategies)
    settings = settings_of(options)
    limits = (options.epochs, options.steps, options.until, options.seconds, options.patience)
    limited = any(limit is not None for limit in limits)
    plan = make_plan(
        strategy, settings, epochs=options.epochs if limited else loaded.epochs, steps=options.steps,
        until=options.until, seed=options.seed, device=options.device, keep_best=options.keep_best,
        patience=options.patience,
    )  # fmt: skip
    code = Code(task=loaded.function, strategy=strategy, settings=settings, plan=plan, file=loaded.file)
    return summarized(Launch(code, local, commanded_at).go(options.run_dir), options.json)


def _script(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli_options import build_strategy, settings_of
    from squall.script import run_script, script_code

    if options.keep_best is not None:
        raise ValueError(f"--keep-best {options.keep_best} is for `squall train`: {SAVES_ITSELF}")
    chosen = any(getattr(options, name) is not None for name in ("optimizer", "lr", "momentum", "weight_decay"))
    code = script_code(
        Path(options.script), options.arguments, build_strategy(options, ()), settings_of(options),
        optimizer_chosen=chosen, seed=options.seed, device=options.device, until=options.until,
        patience=options.patience,
    )  # fmt: skip
    return summarized(run_script(code, options.run_dir, local=local, commanded_at=commanded_at), as_json=False)


def _compare(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli_options import named_strategies, settings_of
    from squall.compare import compare
    from squall.task_file import load_task

    loaded = load_task(options.file)
    limited = any(x is not None for x in (options.epochs, options.steps, options.until, options.seconds))
    settings = settings_of(options)
    found = compare(
        loaded.function, named_strategies(options, loaded.strategies),
        epochs=options.epochs if limited else loaded.epochs, steps=options.steps, until=options.until,
        seeds=options.seeds, seed=options.seed, device=options.device, run_dir=options.run_dir, settings=settings,
    )  # fmt: skip
    if options.json:
        return 0, json.dumps(found.to_json_dict()) + "\n"
    return 0, f"{found}\n page     {found.page}\n picture  {found.picture}\n"


# ---------------------------------------------------------------- parsing


class Command(argparse.ArgumentParser):
    """Of one command: it refuses flags that it does not know itself, so that its own usage is shown."""

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

    train = commands.add_parser(
        "train", help="train the task of a Python file", usage="%(prog)s FILE[:function] [--strategy NAME] [flags]"
    )
    train.set_defaults(run=_train)
    train.add_argument(
        "file", metavar="FILE[:function]", help="a file whose function (default: task) builds a squall.Task"
    )
    if arguments[:1] == ["train"]:  # the flags of strategies need torch, which the other commands should not wait for
        from squall.cli_options import add_strategy_flags

        add_strategy_flags(train, arguments)
    add_patience(add_limits(train))
    add_settings(train)
    kept = add_kept(train)
    add_keep_best(kept)
    add_snapshots(kept)
    train.set_defaults(slow=None)

    script = commands.add_parser(
        "run", help="start your own script, once per replica (it calls squall.join)",
        usage="%(prog)s [--strategy NAME] [flags] SCRIPT [the script's own flags]",
    )  # fmt: skip
    script.set_defaults(run=_script)
    if arguments[:1] == ["run"]:
        from squall.cli_options import add_strategy_flags

        add_strategy_flags(script, _before_script(arguments))
    ends = script.add_argument_group("when it ends, beside the script's own end")
    ends.add_argument("--until", metavar="METRIC=VALUE", help="when a metric that the script logs is reached")
    add_patience(ends, "in --until's metric, else in the loss, as the script logs them")
    add_seconds(ends)
    how = script.add_argument_group("where and how")
    add_common(how)
    kept = add_kept(script)
    kept.add_argument("--keep-best", metavar="METRIC", help=f"refused: {SAVES_ITSELF}")
    add_snapshots(kept)
    how.add_argument(
        "--progress", dest="quiet", action="store_false", help="show progress between what the script prints"
    )
    script.set_defaults(launcher="local", evaluate_every_s=None, slow=None, json=False)
    script.add_argument("script", metavar="SCRIPT", help="a Python file")
    script.add_argument("arguments", nargs=argparse.REMAINDER, help="the script's own arguments")

    about = (
        "Train with several strategies, all on the same cores; compare.html, compare.png and the runs are in --run-dir."
    )
    side = commands.add_parser("compare", help="train with several strategies, and show them", description=about)
    side.set_defaults(run=_compare)
    side.add_argument("file", metavar="FILE[:function]", help="as of `squall train`")
    side.add_argument(
        "--strategies", required=True, metavar="NAME[:field=value...],...",
        help="for example synchronous,bounded_delay:max_delay=4,diloco:inner_steps=50",
    )  # fmt: skip
    side.add_argument("--replicas", type=int, help="of all of them")
    side.add_argument("--shards", type=int, help="of all of them")
    if arguments[:1] == ["compare"]:
        from squall.cli_options import add_optimizer_flags

        add_optimizer_flags(side)
    side.add_argument("--seeds", type=int, default=1, help="runs of each strategy (default: 1)")
    side.add_argument("--slow", type=ratio, metavar="0.1x", help="let the last replica run at a fraction of its speed")
    add_limits(side)
    add_settings(side)
    add_kept(side)
    side.set_defaults(snapshot_every_s=None)

    add_resume(commands)
    add_report(commands)
    add_replay(commands)
    add_measure(commands)
    add_simulate(commands, arguments)
    add_plan(commands)
    add_doctor(commands)
    return parser


def _process_started_at() -> float:
    """When this process began, seconds since 1970: the interpreter's own start counts as well."""
    try:
        ticks = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[19])
        uptime_s = float(Path("/proc/uptime").read_text().split()[0])
        return time.time() - (uptime_s - ticks / os.sysconf("SC_CLK_TCK"))
    except (OSError, ValueError, IndexError):
        return time.time()
