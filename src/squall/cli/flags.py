"""Flags that several commands share, in groups by what they are about."""

from __future__ import annotations

import argparse
from typing import Any

from squall.cli.machines import machines

# What a user of `--keep-best` is told whose training is a script.
SAVES_ITSELF = (
    "a script saves its model itself, where session.evaluate tells more than before (session.is_leader says who)"
)


def add_limits(parser: argparse.ArgumentParser, *, time: str = "training time") -> Any:
    """Returns the group. `time` is what --seconds counts; "": there is no such flag."""
    group = parser.add_argument_group("when it ends")
    group.add_argument("--epochs", type=int, help="after so many passes over the training data")
    group.add_argument("--steps", type=int, help="after so many batches, over all replicas")
    group.add_argument("--until", metavar="METRIC=VALUE", help="when a metric is reached, such as accuracy=0.97")
    if time:
        add_seconds(group, time)
    return group


def add_seconds(group: Any, time: str = "training time") -> None:
    group.add_argument("--seconds", type=float, help=f"after so much {time}")


def add_settings(parser: argparse.ArgumentParser) -> None:
    """The flags of a run that the command carries out."""
    group = parser.add_argument_group("where and how")
    add_common(group, "processes of a replica (see Task.split)")
    add_launcher(group, "local", "inline", "ray", text="local (processes), inline (one), ray (default: local)")
    group.add_argument(
        "--evaluate-every-s", type=float, metavar="S", help="seconds between evaluations, beside each epoch's"
    )
    group.add_argument("--quiet", action="store_true", help="show no progress")
    group.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")


def add_launcher(group: Any, *names: str, text: str) -> None:
    group.add_argument("--launcher", choices=names, default="local", metavar="KIND", help=text)


def add_common(group: Any, parts: str) -> None:
    """The flags of every run, also of a script's. `parts` says what --parts does."""
    group.add_argument("--parts", type=int, default=1, metavar="N", help=parts)
    spread = "a replica's parts on as many machines as possible"
    group.add_argument("--spread-parts", action="store_true", help=spread)
    group.add_argument("--seed", type=int, default=0, help="of weights, data order, dropout (default: 0)")
    group.add_argument("--device", default="cpu", help="cpu, cuda, or cuda:1 (default: cpu)")
    group.add_argument("--threads", type=int, help="torch threads of a replica (default: cores / replicas)")
    group.add_argument(
        "--shard-threads", type=int, default=1, metavar="N", help="torch threads of a shard (default: 1)"
    )
    group.add_argument(
        "--on-nan", default="stop", metavar="stop|skip:N", help="skip: a batch that gives NaN twice, N an epoch"
    )
    add_machines(group)
    lost = "a machine is lost after S silent seconds"
    group.add_argument("--lost-after", dest="lost_after_s", type=float, default=2.0, metavar="S", help=lost)
    hang = "without a step: who hangs (default: 30; 0: nobody)"
    group.add_argument("--hang-after", dest="hang_after_s", type=float, metavar="S", help=hang)
    add_restarts(group, default=3)
    add_copies(group, default=1)
    group.add_argument("--run-dir", help="directory of the run (default: the next under runs/)")


def add_restarts(group: Any, default: int | None) -> None:
    text = "new starts after all is lost (default: 3)"
    group.add_argument("--restarts", type=int, default=default, metavar="N", help=text)


def add_copies(group: Any, default: int | None) -> None:
    text = "2: shards outlive their machines (default: 1)"
    group.add_argument("--copies", type=int, default=default, metavar="N", help=text)


def add_machines(group: Any) -> None:
    """The flags of whatever several machines do together."""
    group.add_argument("--machines", type=machines, metavar="N|auto", help="others join by squall join, or by Ray")
    group.add_argument("--listen", metavar="HOST:PORT", help="where others reach it; --replicas 2..8 grows with them")
    group.add_argument("--plaintext", action="store_true", help="between machines: no encryption (on a VPN, say)")
    group.add_argument("--cores", type=int, metavar="N", help="with Ray: of each machine (default: its replicas)")
    group.add_argument("--packed", action="store_true", help="with Ray: machines may share nodes")


def add_kept(parser: argparse.ArgumentParser) -> Any:
    """The flags of every run. Returns the group, to which a command adds what else it keeps."""
    group = parser.add_argument_group("what is kept")
    add_tensorboard(group)
    add_live(group)
    group.add_argument(
        "--keep-schedule", type=schedule, default=2.0, metavar="GB",
        help="to replay (default: 2); or all, none, last:3 snapshots",
    )  # fmt: skip
    return group


def add_live(group: Any) -> None:
    group.add_argument("--live", action="store_true", help="a page that shows the run: its link is printed")


def add_tensorboard(group: Any) -> None:
    group.add_argument("--tensorboard", action="store_true", help="what TensorBoard reads, in RUN/tensorboard")


def add_snapshots(group: Any, unit: str = "seconds") -> None:
    group.add_argument(
        "--snapshot-every-s", type=float, default=60.0, metavar="S", help=f"{unit} between snapshots (default: 60)"
    )


def schedule(text: str) -> float | str | None:
    """all, none, 1.5, or last:3"""
    if text.startswith("last:"):
        return text  # `Settings` looks at it
    try:
        return {"all": None, "none": 0.0}[text] if text in ("all", "none") else float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not all, none, gigabytes such as 1.5, or last:3") from None


def ratio(text: str) -> float:
    """0.1 or 0.1x"""
    return float(text.removesuffix("x"))


def add_keep_best(group: Any) -> None:
    group.add_argument("--keep-best", metavar="METRIC", help="the best evaluation's weights, too (best.safetensors)")


def add_patience(group: Any, judged: str = " (see --keep-best)") -> None:
    group.add_argument("--patience", type=int, metavar="N", help=f"after N evaluations no better{judged}")
