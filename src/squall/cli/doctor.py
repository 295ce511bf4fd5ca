"""`squall doctor`: what is to be done about this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import Any


def add(commands: Any, arguments: Sequence[str]) -> None:
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
