"""`squall report`: the page of a run, and its audit."""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser("report", help="write a run's report.html anew")
    parser.set_defaults(run=_report)
    parser.add_argument("run_dir", metavar="RUN_DIR")
    parser.add_argument("--audit", action="store_true", help="prove which examples were trained, and how often")
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object: that of `squall train --json`, and report, the page; with --audit what it proves",
    )  # fmt: skip


def _report(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.report import Reader, audit, summarize, write_report

    path = Path(options.run_dir)
    if not (path / "run.sqlite").exists():
        raise ValueError(f"{path} holds no run: there is no run.sqlite in it")
    with closing(Reader(path / "run.sqlite")) as reader:
        if options.audit:
            found = audit(reader)
            return 0, f"{json.dumps(found.to_json_dict()) if options.json else found}\n"
        page = write_report(path)
        if not options.json:
            return 0, f"{page}\n"
        document = {**summarize(reader).to_json_dict(), "run_directory": str(path), "report": str(page)}
        return 0, json.dumps(document) + "\n"
