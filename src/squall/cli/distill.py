"""`squall distill`: a smaller model, trained on the outputs of a run's."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from squall.cli.flags import add_kept, add_limits, add_settings, add_snapshots


def add(commands: Any, arguments: Sequence[str]) -> None:
    about = (
        "Train a smaller model on a run's outputs as well as on the labels, and show teacher, student alone and student"
        " distilled side by side. Given again with the same --run-dir, the command goes on."
    )
    parser = commands.add_parser(
        "distill", help="train a smaller model on the outputs of a larger one", description=about,
        usage="%(prog)s RUN FILE[:function] [--strategy NAME] [flags]",
    )  # fmt: skip
    parser.set_defaults(run=_distill, slow=None)
    parser.add_argument("teacher", metavar="RUN", help="the run whose model is the teacher")
    parser.add_argument(
        "file", metavar="FILE[:function]", help="its function (default: task) builds the student's task"
    )
    group = parser.add_argument_group("what is learnt")
    group.add_argument("--temperature", type=float, default=2.0, help="that outputs are softened by (default: 2)")
    group.add_argument("--mix", type=float, default=0.5, help="share of the teacher in the loss, 0 to 1 (default: 0.5)")
    group.add_argument("--dim", type=int, default=-1, help="of outputs along which classes lie (default: the last)")
    group.add_argument("--best", action="store_true", help="the teacher's weights of its best evaluation (--keep-best)")
    group.add_argument("--not-alone", action="store_true", help="do not train the student without the teacher as well")
    if arguments[:1] == ["distill"]:
        from squall.cli.strategies import add_strategy_flags

        add_strategy_flags(parser, arguments)
    add_limits(parser)
    add_settings(parser)
    add_snapshots(add_kept(parser))


def _distill(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.cli.strategies import aims_of, build_strategy, settings_of
    from squall.distilling import distill
    from squall.usercode.task_file import load_task

    if options.machines == "auto":
        raise ValueError("machines is auto: say here how many there are")
    loaded = load_task(options.file)
    found = distill(
        options.teacher, loaded.function, build_strategy(options, loaded.strategies), temperature=options.temperature,
        mix=options.mix, dim=options.dim, best=options.best, alone=not options.not_alone,
        **aims_of(options, loaded.epochs), seed=options.seed, device=options.device, run_dir=options.run_dir,
        settings=settings_of(options),
    )  # fmt: skip
    return 0, f"{json.dumps(found.to_json_dict())}\n" if options.json else f"{found}\n\nrun  {found.run.directory}\n"
