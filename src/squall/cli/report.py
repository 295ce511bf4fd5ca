"""`squall report`: the page of a run or of several, its audit, and what TensorBoard reads."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser("report", help="write a run's report.html anew, or one page of several runs")
    parser.set_defaults(run=_report)
    parser.add_argument("run_dirs", metavar="RUN_DIR", nargs="+", help="several: on one page, beside the first of them")
    parser.add_argument("--out", metavar="FILE", help="where the page of several runs goes")
    parser.add_argument("--audit", action="store_true", help="prove which examples were trained, and how often")
    parser.add_argument(
        "--tensorboard", action="store_true",
        help="write what TensorBoard reads, too, from the record; builds the task for its model's graph",
    )  # fmt: skip
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object: that of `squall train --json`, and report, the page; with --audit what it proves;"
        " of several runs a list of them",
    )  # fmt: skip


def _report(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    paths = [Path(run_dir) for run_dir in options.run_dirs]
    for path in paths:
        if not (path / "run.sqlite").exists():
            raise ValueError(f"{path} holds no run: there is no run.sqlite in it")
    if options.audit and (options.out or options.tensorboard):
        raise ValueError("--audit writes nothing: leave --out and --tensorboard out")
    if options.out and len(paths) == 1:
        raise ValueError("--out is for the page of several runs; one run's is report.html in its directory")
    documents, lines = _audits(paths) if options.audit else _pages(paths, options.out, options.tensorboard)
    if options.json:
        return 0, json.dumps(documents if len(paths) > 1 else documents[0]) + "\n"
    return 0, "".join(f"{line}\n" for line in lines)


def _audits(paths: Sequence[Path]) -> tuple[list[dict[str, Any]], list[str]]:
    """Each run's proof, for programs and for people."""
    from squall.report import Reader, audit

    documents, lines = [], []
    for path in paths:
        with closing(Reader(path / "run.sqlite")) as reader:
            found = audit(reader)
        named = {"run_directory": str(path)} if len(paths) > 1 else {}
        documents.append({**named, **found.to_json_dict()})
        lines.append(f"{path}:\n{found}" if named else str(found))
    return documents, lines


def _pages(paths: Sequence[Path], out: str | None, tensorboard: bool) -> tuple[list[dict[str, Any]], list[str]]:
    """Each run's summary, and the files that were written."""
    from squall.report import write_report
    from squall.report.together import write_together
    from squall.run import Run

    page = write_report(paths[0]) if len(paths) == 1 else write_together(paths, out).page
    documents, lines = [], [str(page)]
    for path in paths:
        run = Run(path)
        document = {**run.summary().to_json_dict(), "run_directory": str(path), "report": str(page)}
        if tensorboard:
            lines.append(str(run.tensorboard()))
            document["tensorboard"] = lines[-1]
        documents.append(document)
    return documents, lines
