"""`squall replay`: what it is asked, and what it prints."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli.output import check_output
from squall.launchers.environment import environment, replayed_apart

if TYPE_CHECKING:
    from torch import nn


def begin_anew(arguments: Sequence[str]) -> None:
    """For a replay that forks start this process anew, with nothing imported, in the environment that the run had."""
    if dict(os.environ) != environment() and any(replayed_apart(Path(argument)) for argument in arguments):
        sys.stdout.flush()
        sys.stderr.flush()
        os.execve(sys.executable, [sys.executable, "-m", "squall", *arguments], environment())


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "replay", help="recompute a run from its seed and its schedule, bit for bit",
        description="Recompute a run from its seed and its schedule, bit for bit. A script is run again, up to the end"
        " of its loop: what it writes until then it writes again, unless it looks at session.replayed.",
    )  # fmt: skip
    parser.set_defaults(run=_replay)
    parser.add_argument(
        "run_dir",
        metavar="RUN_DIR",
        help="only one that you trust: its code.pickle is read and run, as `squall resume` does",
    )
    parser.add_argument(
        "--until", type=int, metavar="UPDATE",
        help="stop when every shard has made so many updates; exit status 1 if they are not reached",
    )  # fmt: skip
    parser.add_argument(
        "--check", action="store_true",
        help="compare with the record and the snapshots; exit status 1 if they differ or the schedule breaks off",
    )  # fmt: skip
    parser.add_argument("--around-nan", action="store_true", help="stop at the first batch that made a NaN or Inf")
    parser.add_argument("--output", metavar="FILE", help="write the model's weights there, as safetensors")
    parser.add_argument("--force", action="store_true", help="write over an older output")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def _replay(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    output = None if options.output is None else Path(options.output)
    if output is not None:
        check_output(output, options.force)
    apart = replayed_apart(Path(options.run_dir))
    from squall.replaying.run import replay

    done = replay(
        options.run_dir, until=options.until, check=options.check, around_nan=options.around_nan, own_process=apart
    )
    if output is not None:
        _save(done.model, output)
    answer = json.dumps(done.to_json_dict()) if options.json else str(done)
    return (0 if done.as_asked else 1), f"{answer}\n"


def _save(model: nn.Module, path: Path) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_model

    try:
        save_model(model, str(path))
    except (OSError, SafetensorError) as error:
        raise ValueError(f"--output {path} cannot be written: {error}") from None
