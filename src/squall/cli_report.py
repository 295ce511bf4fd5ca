"""`squall report` and `squall doctor`: what they are asked, and what they print."""

from __future__ import annotations

import argparse
import dataclasses
import json
from contextlib import closing
from pathlib import Path
from typing import Any


def add_report(commands: Any) -> None:
    """`commands` is what `add_subparsers` returns."""
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


def add_doctor(commands: Any) -> None:
    """`commands` is what `add_subparsers` returns."""
    parser = commands.add_parser("doctor", help="check this machine, and say what to do about what is found")
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object: findings, each with name, ok (true, false, or null for a warning), found, remedy",
    )  # fmt: skip


def _doctor(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from rich.console import Console

    from squall.doctor import checkup, render

    findings = checkup()
    status = 1 if any(finding.ok is False for finding in findings) else 0
    if options.json:
        return status, json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}) + "\n"
    render(findings, Console())
    return status, ""
