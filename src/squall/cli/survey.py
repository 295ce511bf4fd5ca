"""`--cluster` of `squall doctor` and `squall measure`: several machines, which join as for a run."""

from __future__ import annotations

import argparse
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from squall.cli.flags import add_launcher, add_machines
from squall.cli.machines import WAIT_S, settle

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun
    from squall.survey.survey import Survey

SETTINGS = ("machines", "listen", "launcher", "cores", "packed", "plaintext")


def add_survey_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("several machines, which join as for a run")
    group.add_argument("--cluster", action="store_true", help="of all of them, and of the links between them")
    add_machines(group)
    add_launcher(group, "local", "ray", text="local (others join by squall join), or ray (default: local)")
    group.add_argument(
        "--wait", type=float, metavar="SECONDS", help=f"for machines to join (default: 60, with auto {WAIT_S:g})"
    )
    parser.set_defaults(replicas=None)


def elsewhere(options: argparse.Namespace) -> tuple[int, str] | None:
    """As `settle`; the flags are for --cluster alone. Raises `ValueError`."""
    if not options.cluster and any(
        getattr(options, name) not in (None, False, "local") for name in (*SETTINGS, "wait")
    ):
        raise ValueError("these flags are for several machines: add --cluster, or leave them out")
    if options.wait is None:
        options.wait = WAIT_S if options.machines == "auto" else 60.0
    return settle(options) if options.cluster else None


def surveyed(
    options: argparse.Namespace, local: LocalRun | None, code: dict[str, Any], message: dict[str, Any]
) -> AbstractContextManager[Survey]:
    """The machines, once they have joined."""
    from squall.settings import Settings
    from squall.survey.survey import surveying

    return surveying(Settings(**{name: getattr(options, name) for name in SETTINGS}), code, message, local)
