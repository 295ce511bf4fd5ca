"""`squall compare`: several strategies on the same cores."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any

from squall.cli.flags import add_kept, add_limits, add_settings, ratio


def add(commands: Any, arguments: Sequence[str]) -> None:
    about = (
        "Train with several strategies, all on the same cores; compare.html, compare.png and the runs are in --run-dir."
    )
    parser = commands.add_parser("compare", help="train with several strategies, and show them", description=about)
    parser.set_defaults(run=_compare)
    parser.add_argument("file", metavar="FILE[:function]", help="as of `squall train`")
    parser.add_argument(
        "--strategies", required=True, metavar="NAME[:field=value...],...",
        help="for example synchronous,bounded_delay:max_delay=4,diloco:inner_steps=50",
    )  # fmt: skip
    parser.add_argument("--replicas", type=int, help="of all of them")
    parser.add_argument("--shards", type=int, help="of all of them")
    if arguments[:1] == ["compare"]:
        from squall.cli.strategies import add_optimizer_flags

        add_optimizer_flags(parser)
    parser.add_argument("--seeds", type=int, default=1, help="runs of each strategy (default: 1)")
    parser.add_argument(
        "--slow", type=ratio, metavar="0.1x", help="let the last replica run at a fraction of its speed"
    )
    add_limits(parser)
    add_settings(parser)
    add_kept(parser)
    parser.set_defaults(snapshot_every_s=None)


def _compare(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.cli.strategies import aims_of, named_strategies, settings_of
    from squall.compare import compare
    from squall.usercode.task_file import load_task

    loaded = load_task(options.file)
    found = compare(
        loaded.function, named_strategies(options, loaded.strategies), **aims_of(options, loaded.epochs),
        seeds=options.seeds, seed=options.seed, device=options.device, run_dir=options.run_dir,
        settings=settings_of(options),
    )  # fmt: skip
    if options.json:
        return 0, json.dumps(found.to_json_dict()) + "\n"
    return 0, f"{found}\n page     {found.page}\n picture  {found.picture}\n"
