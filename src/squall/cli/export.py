"""`squall export`: a run's trained model as a file for other programs."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "export", help="write a run's trained model for other programs: ONNX, torch.export, safetensors; also in INT8",
        description="Write a run's trained model to a file, run it, and compare it with the trained one: only then is"
        " the file there. It takes batches of any size. What the model is called with is found by running the task's"
        " loss.",
    )  # fmt: skip
    parser.set_defaults(run=_export)
    parser.add_argument("run_dir", metavar="RUN_DIR", help="only one that you trust: its code.pickle is read and run")
    parser.add_argument(
        "file", metavar="FILE",
        help="its suffix decides: .onnx, .pt2 (torch.export), .safetensors (the names of the model's state), .keras,"
        " .xml (OpenVINO), .engine (TensorRT)",
    )  # fmt: skip
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--snapshot", type=int, metavar="N", help="this one's weights, and not the newest's")
    which.add_argument("--best", action="store_true", help="the weights that --keep-best kept")
    parser.add_argument(
        "--int8", action="store_true",
        help="quantize with examples of the task's own data; refused, with exit status 1, if the model is then slower"
        " or its metrics change by more than --tolerance",
    )  # fmt: skip
    parser.add_argument(
        "--tolerance", type=float, metavar="PART",
        help="what --int8 may change a metric by: of one above 1, and of a loss, this part of itself (default 0.005)",
    )  # fmt: skip
    parser.add_argument("--overwrite", action="store_true", help="write over an older file")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def _export(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.export.exporting import export
    from squall.export.verdict import TOLERANCE
    from squall.runtime.interrupts import ended_like_ctrl_c

    if options.tolerance is not None and not options.int8:
        raise ValueError("--tolerance is for --int8: give both, or neither")
    with ended_like_ctrl_c():
        done = export(
            options.run_dir, options.file, weights="best" if options.best else options.snapshot, int8=options.int8,
            tolerance=TOLERANCE if options.tolerance is None else options.tolerance, overwrite=options.overwrite,
        )  # fmt: skip
    answer = json.dumps(done.to_json_dict()) if options.json else str(done)
    return int(done.bytes is None), f"{answer}\n"
