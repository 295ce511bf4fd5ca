"""`squall resume`: on with a run from its last snapshot."""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from squall.cli.detach import add_detach, begins
from squall.cli.flags import (
    SAVES_ITSELF,
    add_copies,
    add_keep_best,
    add_limits,
    add_live,
    add_patience,
    add_restarts,
    add_tensorboard,
)
from squall.cli.output import summarized

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun
    from squall.run import Run
    from squall.runtime.run_plan import Plan
    from squall.settings import Settings


def add(commands: Any, arguments: Sequence[str]) -> None:
    again = commands.add_parser("resume", help="go on with a run from its last snapshot")
    again.set_defaults(run=_resume)
    again.add_argument("run_dir", metavar="RUN_DIR")
    code = again.add_mutually_exclusive_group()
    code.add_argument("--task", metavar="FILE[:function]", help="train this task from now on (default: the run's own)")
    code.add_argument(
        "--as-it-was", action="store_true", help="go on with the code that was kept, instead of reading its file again"
    )
    again.add_argument("--by-itself", action="store_true", help=argparse.SUPPRESS)  # nobody has asked for it
    again.add_argument("--replicas", type=int, help="another number of replicas")
    again.add_argument("--shards", type=int, help="another number of shards")
    again.add_argument("--parts", type=int, metavar="N", help="another number of processes of each replica")
    again.add_argument(
        "--on-nan", metavar="stop|skip:N", help="what becomes of a batch that gives NaN twice, from now on"
    )
    again.add_argument("--machines", type=int, metavar="N", help="so many machines, in place of those that it had")
    again.add_argument("--listen", metavar="HOST:PORT", help="where others reach this machine now")
    lost = "a machine is lost after S silent seconds"
    again.add_argument("--lost-after", dest="lost_after_s", type=float, metavar="S", help=lost)
    again.add_argument(
        "--plaintext", action=argparse.BooleanOptionalAction, help="between machines: no encryption from now on"
    )
    add_patience(add_limits(again, time=""))
    kept = again.add_argument_group("what is kept")
    add_keep_best(kept)
    add_tensorboard(kept)
    add_live(kept)
    add_restarts(again, default=None)
    add_copies(again, default=None)
    add_detach(again)
    again.add_argument("--json", action="store_true", help="print one JSON object at the end")


def _resume(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.runtime.run_plan import Aims
    from squall.train import Launch
    from squall.usercode.rereading import code_again, resumed_code

    path = Path(options.run_dir)
    old = code_again(path, options.task, options.as_it_was)
    changes = {n: getattr(options, n) for n in ("replicas", "shards") if getattr(options, n) is not None}
    limits = {f.name: value for f in dataclasses.fields(Aims) if (value := getattr(options, f.name)) is not None}
    strategy = _changed(old["strategy"], changes)
    scripted = "script" in old
    if scripted:
        if {"epochs", "steps"} & set(limits):
            raise ValueError("how much a script trains it says itself, to session.batches: leave --epochs, --steps out")
        if options.keep_best is not None:
            raise ValueError(f"leave --keep-best out: {SAVES_ITSELF}")
    code = resumed_code(old, strategy, _settings(old["settings"], options), **limits)
    code["plan"] = _moved(code["plan"], options)
    launch = Launch(code, local, commanded_at, begins=begins(options), by_itself=options.by_itself)
    run = launch.go(path, again=True)
    if not scripted:
        sys.stderr.write(_of_before(run, code["plan"], limits))
    return summarized(run, options.json)


def _settings(old: Settings, options: argparse.Namespace) -> Settings:
    parts = old.parts if options.parts is None else options.parts
    spread = old.spread_parts and parts > 1
    tensorboard = old.tensorboard or options.tensorboard
    on_nan = options.on_nan or old.on_nan
    again = old.restarts if options.restarts is None else options.restarts
    copies = old.copies if options.copies is None else options.copies
    return dataclasses.replace(
        old,
        parts=parts,
        spread_parts=spread,
        tensorboard=tensorboard,
        live=options.live,
        on_nan=on_nan,
        restarts=again,
        copies=copies,
    )


def _moved(plan: Plan, options: argparse.Namespace) -> Plan:
    """On other machines, if some are given."""
    names = ("machines", "listen", "lost_after_s", "plaintext")
    given = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    return msgspec.structs.replace(plan, settings=dataclasses.replace(plan.settings, **given))


def _of_before(run: Run, plan: Plan, limits: dict[str, Any]) -> str:
    """What to tell a user who gave a limit, if the run was ended by another one that it had before."""
    held = {"data": "epochs", "steps": "steps"}.get(run.summary().ended or "", "")
    if not limits or not held or held in limits:
        return ""
    value = getattr(plan, held)
    given = " ".join(f"--{name.replace('_', '-')} {limit}" for name, limit in limits.items())
    return (
        f"squall: the run has ended at --{held} {value}, which it had before: go on with"
        f" squall resume {run.directory} --{held} {2 * value} {given}\n"
    )


def _changed(strategy: Any, changes: dict[str, int]) -> Any:
    known = {field.name for field in dataclasses.fields(strategy)}
    for name in changes:
        if name not in known:
            raise ValueError(f"{type(strategy).__name__} has no {name}: leave --{name} out")
    return dataclasses.replace(strategy, **changes)
