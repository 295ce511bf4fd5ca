"""`squall doctor`: what is to be done about this machine."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from squall.cli.survey import add_survey_flags, elsewhere, surveyed

if TYPE_CHECKING:
    from squall.doctor import Finding
    from squall.launchers.local import LocalRun


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "doctor", help="check this machine, or a cluster, and say what to do about what is found",
        description="Check this machine; with --cluster also others, and whether they reach each other as a run needs.",
    )  # fmt: skip
    parser.set_defaults(run=_doctor)
    parser.add_argument(
        "--json", action="store_true",
        help="print one JSON object: findings, each with name, ok (true, false, or null for a warning), found, remedy",
    )  # fmt: skip
    add_survey_flags(parser)


def _doctor(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    from rich.console import Console

    from squall.doctor import checkup, render

    if (there := elsewhere(options)) is not None:
        return there
    findings = _of_all(options, local) if options.cluster else checkup()
    status = 1 if any(finding.ok is False for finding in findings) else 0
    if options.json:
        return status, json.dumps({"findings": [dataclasses.asdict(finding) for finding in findings]}) + "\n"
    render(findings, Console())
    return status, ""


def _of_all(options: argparse.Namespace, local: LocalRun | None) -> list[Finding]:
    from squall.survey.verdict import checkup_of

    with surveyed(options, local, {}, {}) as survey:
        return checkup_of(survey, options.wait)
