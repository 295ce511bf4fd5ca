"""`squall chaos`: train under faults, and see whether the run keeps its promises."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from squall.chaos.processes import ANY, ROLES


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "chaos", help="train while processes are killed, stopped or find the disk full",
        usage="%(prog)s FILE[:function] --kill ROLE [--every 2s] [flags of squall train]", allow_abbrev=False,
        description="Train as `squall train` does, with the same flags. Faults come from outside, at random moments. At"
        " the end: the audit, and whether the run's promises held (exit status 1 if not).",
    )  # fmt: skip
    parser.set_defaults(run=_chaos)
    _add_own(parser)
    parser.add_argument("file", metavar="FILE[:function]", help="as of `squall train`")
    parser.add_argument("training", nargs=argparse.REMAINDER, metavar="...", help="flags of `squall train`, such as"
                        " --strategy, --replicas, --seconds")  # fmt: skip


def _add_own(parser: argparse.ArgumentParser) -> None:
    """Beside, behind or before the file; what is given twice counts where it is given last."""
    roles = (*ROLES, ANY)
    for name, text in (("kill", "kill one of these"), ("pause", "stop one of these for a while (SIGSTOP)")):
        parser.add_argument(
            f"--{name}", action="append", choices=roles, default=argparse.SUPPRESS, metavar="ROLE",
            help=f"{text}: one of {', '.join(roles)}",
        )  # fmt: skip
    parser.add_argument(
        "--fill-disk", action="store_true", default=argparse.SUPPRESS,
        help="for a while no process can make a file longer (a limit of its own: the real disk stays as it is)",
    )  # fmt: skip
    parser.add_argument(
        "--cut", action="store_true", default=argparse.SUPPRESS,
        help="cut a machine's network for a while; who is lost so joins anew",
    )  # fmt: skip
    parser.add_argument(
        "--machines", type=int, default=argparse.SUPPRESS, metavar="N",
        help="network namespaces of this machine are the others (1; with --cut 2); one is lost where all are there",
    )  # fmt: skip
    parser.add_argument("--every", type=duration, default=argparse.SUPPRESS, metavar="2s", help="between faults (2s)")
    parser.add_argument("--lasting", type=duration, default=argparse.SUPPRESS, metavar="1s", help="of what heals (1s)")
    parser.add_argument(
        "--seed", type=int, default=argparse.SUPPRESS, help="of the faults, and of the training (default: 0)"
    )
    parser.add_argument("--run-dir", default=argparse.SUPPRESS, help="as of `squall train`")


def duration(text: str) -> float:
    """2s, 500ms, 1m or 2"""
    units = {"ms": 1e-3, "s": 1.0, "m": 60.0, "": 1.0}
    number = text.rstrip("ms")
    try:
        seconds = float(number) * units[text[len(number) :]]
    except (KeyError, ValueError):
        raise argparse.ArgumentTypeError(f"{text!r} is no time: write 2s, 500ms or 1m") from None
    if seconds <= 0:
        raise argparse.ArgumentTypeError(f"{text!r}: a time above 0, such as 2s")
    return seconds


def _chaos(options: argparse.Namespace, local: object, commanded_at: float) -> tuple[int, str]:
    from squall.chaos.faults import CUT, FILL_DISK, KILL, PAUSE, Fault
    from squall.chaos.machines import HEAD, apart
    from squall.chaos.trial import Plan, Trial
    from squall.cli.detach import wanted
    from squall.run import new_directory

    if wanted(["train", *options.training]):
        raise ValueError("--detach leaves a run alone, and chaos stays with it to the end: leave one of them out")
    own = argparse.ArgumentParser(prog="squall chaos", add_help=False, allow_abbrev=False)
    _add_own(own)
    given, training = own.parse_known_args(options.training)
    chosen = {**vars(options), **vars(given)}
    faults = [Fault(kind, role) for kind in (KILL, PAUSE) for role in chosen.get(kind, ())]
    faults += [Fault(FILL_DISK)] if chosen.get("fill_disk") else []
    faults += [Fault(CUT)] if chosen.get("cut") else []
    if not faults:
        raise ValueError("no fault is asked for: give --kill shard, --kill any, --pause replica, --fill-disk or --cut")
    machines = chosen.get("machines", 2 if chosen.get("cut") else 1)
    if machines < 1 + ("cut" in chosen):
        raise ValueError(f"--machines {machines}: of a run on one machine no network can be cut, so give 2 or more")
    if machines > 1:
        apart([sys.executable, "-m", "squall", *sys.argv[1:]])
        training += ["--machines", str(machines), "--listen", HEAD]
    plan = Plan(
        faults, every_s=chosen.get("every", 2.0), lasting_s=chosen.get("lasting", 1.0), seed=chosen.get("seed", 0),
        machines=machines,
    )  # fmt: skip
    directory = new_directory(chosen.get("run_dir"))
    command = [
        sys.executable, "-m", "squall", "train", options.file, "--run-dir", str(directory), "--seed", str(plan.seed),
        "--quiet", *training,
    ]  # fmt: skip
    trial = Trial(plan, directory, say=_say)
    outcome = trial.go(command)
    if not (outcome.injuries or outcome.ended):  # it never began, and the command has said why
        return outcome.status or 1, ""
    return 130 if trial.interrupted else int(bool(outcome.broken)), f"\n{outcome}\n"


def _say(text: str) -> None:
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()
