"""`squall train`: the task of a Python file."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from squall.cli.detach import add_detach, begins
from squall.cli.flags import add_keep_best, add_kept, add_limits, add_patience, add_settings, add_snapshots
from squall.cli.machines import settle
from squall.cli.output import summarized

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun


def add(commands: Any, arguments: Sequence[str]) -> None:
    train = commands.add_parser(
        "train", help="train the task of a Python file", usage="%(prog)s FILE[:function] [--strategy NAME] [flags]"
    )
    train.set_defaults(run=_train)
    train.add_argument("file", metavar="FILE[:function]", help="its function (default: task) builds a squall.Task")
    if arguments[:1] == ["train"]:  # the flags of strategies need torch, which the other commands should not wait for
        from squall.cli.strategies import add_strategy_flags

        add_strategy_flags(train, arguments)
    add_patience(add_limits(train))
    add_settings(train)
    add_detach(train)
    kept = add_kept(train)
    add_keep_best(kept)
    add_snapshots(kept)
    train.set_defaults(slow=None)


def _train(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli.strategies import aims_of, build_strategy, settings_of
    from squall.plan import make_plan
    from squall.runtime.run_plan import Aims
    from squall.train import Launch
    from squall.usercode.kept import Code
    from squall.usercode.task_file import load_task

    if (elsewhere := settle(options)) is not None:
        return elsewhere
    loaded = load_task(options.file)
    strategy = build_strategy(options, loaded.strategies)
    settings = settings_of(options)
    aims = Aims(**aims_of(options, loaded.epochs))
    plan = make_plan(strategy, settings, aims, seed=options.seed, device=options.device)
    code = Code(task=loaded.function, strategy=strategy, settings=settings, plan=plan, file=loaded.file)
    return summarized(Launch(code, local, commanded_at, begins=begins(options)).go(options.run_dir), options.json)
