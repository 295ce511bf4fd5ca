"""`squall predict`: a trained model's outputs for the examples of a dataset."""

from __future__ import annotations

import argparse
import json
import shlex
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli.flags import add_launcher, add_machines
from squall.cli.machines import replicas

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "predict", help="answer every example of a dataset with a trained model",
        description="Run a trained model on every example of a dataset, once and in order, on many processes. What is"
        " answered is kept: given again, the command goes on with the rest. Several machines need the run and the data"
        " at the same paths on each of them. At the end the answers lie on the disk twice for a moment.",
    )  # fmt: skip
    parser.set_defaults(run=_predict, seed=0, command=shlex.join(["squall", *arguments]))
    parser.add_argument("run_dir", metavar="RUN", help="the run whose model it is, or a file by squall export")
    parser.add_argument(
        "file", metavar="FILE[:function]",
        help="its function (default: data) builds a dataset, (dataset, predict) or a squall.Task (then: its validation"
        " set); a function predict(model, batch) of the file says what the outputs are",
    )  # fmt: skip
    parser.add_argument("--replicas", type=replicas, default=2, metavar="N", help="processes that answer (default: 2)")
    parser.add_argument("--best", action="store_true", help="with the weights of the best evaluation (--keep-best)")
    parser.add_argument("--out", metavar="DIR", help="a new directory, or one to go on with (default: RUN/predictions)")
    parser.add_argument(
        "--format", choices=("numpy", "arrow"), default="numpy", help="predictions.npy or .arrow (default: numpy)"
    )
    parser.add_argument(
        "--batch-size", type=int, default=256, metavar="N", help="examples that the model gets (default: 256)"
    )
    group = parser.add_argument_group("where and how")
    group.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:1 (default: cpu)")
    group.add_argument("--threads", type=int, help="torch threads of a replica (default: cores / replicas)")
    add_launcher(group, "local", "inline", "ray", text="local (processes), inline (one), ray (default: local)")
    add_machines(group)
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def _predict(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from squall.cli.machines import settle
    from squall.cli.strategies import settings_of
    from squall.predicting import build, carry_out, model_in_words
    from squall.prediction import Prediction
    from squall.usercode.task_file import load_task

    if (elsewhere := settle(options)) is not None:
        return elsewhere
    run = Path(options.run_dir)
    words = model_in_words(run, options.best)
    loaded = load_task(options.file, default="data")
    what = Prediction(
        replicas=options.replicas, model=words, data=loaded.file, format=options.format, batch_size=options.batch_size,
        again=f"go on with the rest: {options.command}",
    )  # fmt: skip
    task = partial(
        build, str(run.resolve()), options.best, loaded.function, loaded.predict, options.batch_size, options.format
    )
    beside = run.with_name(f"{run.stem}-predictions") if run.is_file() else run / "predictions"
    found = carry_out(
        task, what, Path(options.out or beside), settings_of(options), device=options.device,
        local=local, commanded_at=commanded_at,
    )  # fmt: skip
    return 0, f"{json.dumps(found.to_json_dict())}\n" if options.json else f"{found}\n"
