"""`squall measure`: what it is asked, and what it prints."""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from squall.cli.output import check_output, out_path
from squall.cli.survey import add_survey_flags, elsewhere, surveyed
from squall.version import __version__

if TYPE_CHECKING:
    from squall.launchers.local import LocalRun
    from squall.sim.cluster.measure import Measured
    from squall.sim.cluster.parts import MachineKind
    from squall.strategies import Strategy
    from squall.usercode.task_file import Loaded

_ABOUT = (
    "Measure a task on this machine (steps, alone and several at once; exchanges; memory), and write a cluster file"
    " for `squall simulate`. Nothing is trained. What one machine cannot show, links and failures, is yours to add;"
    " with --cluster others join as for a run, and links are measured as well."
)


def add(commands: Any, arguments: Sequence[str]) -> None:
    parser = commands.add_parser(
        "measure", help="write a cluster.toml from this machine, or from several", description=_ABOUT
    )
    parser.set_defaults(run=_measure)
    parser.add_argument("file", metavar="FILE[:function]", help="as of `squall train`")
    parser.add_argument(
        "--out", "--output", metavar="PATH",
        help="a directory for cluster.toml and cluster.steps.txt (the step times), or a file NAME.toml with"
        " NAME.steps.txt beside it (default: FILE's directory)",
    )  # fmt: skip
    parser.add_argument("--seconds", type=float, default=20.0, help="for all measurements together (default: 20)")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of a replica (default: 1)")
    parser.add_argument(
        "--parts", type=int, default=1, metavar="N",
        help="measure also what a batch is to N parts of a replica (see Task.split), and what they send (default: 1)",
    )  # fmt: skip
    parser.add_argument(
        "--busy", action="store_true", help="measure even if other programs leave little of the machine"
    )
    parser.add_argument("--force", action="store_true", help="write over an older output")
    parser.add_argument("--json", action="store_true", help="print one JSON object at the end, and nothing else")
    add_survey_flags(parser)


def _measure(options: argparse.Namespace, local: LocalRun | None, commanded_at: float) -> tuple[int, str]:
    if (there := elsewhere(options)) is not None:
        return there
    path = out_path(options.out, "cluster.toml", options.file)
    trace_file = f"{path.stem}.steps.txt"
    traces = [] if options.cluster else [path.parent / trace_file]
    check_output(path, options.force, beside=traces, example="cluster.toml")
    import torch

    torch.set_num_threads(1)  # a thread pool would not survive the forks
    from squall.sim.cluster.measure import measure, write
    from squall.usercode.task_file import load_task

    loaded = load_task(options.file)
    strategy = loaded.strategies[0] if loaded.strategies else None
    if options.cluster and options.parts > 1:
        raise ValueError("--parts is measured on one machine: leave it or --cluster out")
    if options.cluster:
        return _of_all(options, local, path, loaded, strategy)
    sys.stderr.write(f"squall: measuring for about {options.seconds:g} s\n")
    measured = measure(
        loaded.function, strategy, seconds=options.seconds, threads=options.threads, parts=options.parts,
        trace_file=trace_file, busy=options.busy,
    )  # fmt: skip
    comment = (
        f"{_heading(options)} Other programs had {measured.others:.0%} of the cores.\n"
        "Not measured, so put in your own: count, interface, links, failures. docs/cluster.md describes this file."
    )
    (trace,) = write(measured.cluster, path, comment)
    if options.json:
        return 0, json.dumps(_document(measured, path, trace)) + "\n"
    return 0, _summary(measured, path, trace, options.file)


def _summary(measured: Measured, path: Path, trace: Path, file: str) -> str:
    from squall.report.words import size

    machine, code = measured.machine, measured.machine.overhead
    ordered = sorted(measured.steps)
    usual, slow = ordered[len(ordered) // 2], ordered[int(0.95 * len(ordered))]
    slowdown = [f"{k} at once x {factor:.3g}" for k, factor in enumerate(machine.slowdown, 1)]
    exchanges, rounds = ([f"{elements:,} elements {_time(seconds)}" for elements, seconds in points]
                         for points in (machine.exchange, machine.reduce))  # fmt: skip
    assert machine.step_s is not None
    rows = [
        ("step", f"{_time(machine.step_s)} for a batch of {measured.batch_size}: half are below {_time(usual)},"
         f" 95 % below {_time(slow)} ({len(ordered):,} measured)"),
        ("other programs", f"had {measured.others:.0%} of the cores in the moments that count"),
        ("slowdown", ", ".join(slowdown if len(slowdown) <= 8 else [slowdown[0], slowdown[-1]])),
        ("exchange", ", ".join(exchanges)),
        ("all-reduce", ", ".join(rounds) or "not measured: replicas form no group here"),
        ("overhead", f"of a replica {_time(code.batch_s)} a batch and {_time(code.exchange_s)} an exchange,"
         f" of a shard {_time(code.serve_s)} an exchange and {_time(code.wake_s)} to wake it, of the coordinator"
         f" and a replica {_time(code.lease_s)} a lease; {_time(code.cold_s)} more after a long sleep"),
        ("single process", f"{_time(machine.single_s)} for a batch" if machine.single_s else "not measured"),
        *_of_parts(measured),
        ("memory", f"{size(round(machine.memory))}/s copied by one core"),
        ("written", f"{path}, and {trace} with the step times"),
        ("not measured", f"count, interface, links and failures: put your own into {path} (docs/cluster.md)"),
        ("next", f"squall simulate {file} --cluster {path} {_next(measured)}"),
    ]  # fmt: skip
    return "".join(f" {name:<14} {text}\n" for name, text in rows)


def _of_parts(measured: Measured) -> list[tuple[str, str]]:
    if measured.split is None:
        return []
    sends = ", ".join(f"{elements:,} elements {_time(seconds)}" for elements, seconds in measured.machine.send)
    shares = ", ".join(f"{share:.0%}" for share in measured.split.shares)
    return [("parts", f"take {shares} of a step, and to send {sends}")]


def _next(measured: Measured) -> str:
    if measured.split is None:
        return f"--replicas {measured.machine.cores}"
    return f"--replicas {max(1, measured.machine.cores // measured.split.parts)} --parts {measured.split.parts}"


def _document(measured: Measured, path: Path, trace: Path) -> dict[str, Any]:
    """The JSON object; times are in seconds, `memory` is in bytes a second."""
    return {
        "cluster": str(path), "steps": str(trace), "steps_measured": len(measured.steps),
        "batch_size": measured.batch_size, "elements": measured.elements, **_figures(measured.machine),
        "others": measured.others, "parts": measured.split and dataclasses.asdict(measured.split),
    }  # fmt: skip


def _figures(machine: MachineKind) -> dict[str, Any]:
    return {
        "step_s": machine.step_s, "cores": machine.cores, "single_s": machine.single_s, "slowdown": machine.slowdown,
        "exchange": machine.exchange, "reduce": machine.reduce, "send": machine.send,
        "overhead": dataclasses.asdict(machine.overhead), "memory": machine.memory,
    }  # fmt: skip


def _of_all(
    options: argparse.Namespace, local: LocalRun | None, path: Path, loaded: Loaded, strategy: Strategy | None
) -> tuple[int, str]:  # fmt: skip
    """Measure several machines, and their links."""
    from squall.report.words import two_columns
    from squall.sim.cluster.measure import write
    from squall.survey.measured import measure_cluster
    from squall.usercode.sources import Sources

    code = {"task": loaded.function, "strategy": strategy}
    message = {"sources": Sources.now(loaded.file), "threads": options.threads, "busy": options.busy}
    with surveyed(options, local, code, message) as survey:
        found = measure_cluster(survey, options.wait, options.seconds, path.stem)
    lines = found.lines()
    told = "".join(f"{name}: {text}\n" for name, text in lines)
    others = "Not measured, so put in your own: failures, preemptions. docs/cluster.md describes this file."
    traces = write(found.cluster, path, f"{_heading(options)} Its machines and links:\n{told}{others}")
    if options.json:
        links = [{"from": here, "to": there, "round_trip_s": way.round_trip_s, "bytes_s": way.bytes_s}
                 for (here, there), way in found.links.items()]  # fmt: skip
        machines = [{"machine": number, "name": kind.name, **_figures(kind)}
                    for number, kind in zip(found.machines, found.cluster.machines)]  # fmt: skip
        return 0, json.dumps({"cluster": str(path), "machines": machines, "links": links}) + "\n"
    lines.append(("written", f"{path}, and {', '.join(trace.name for trace in traces)} with the step times"))
    lines.append(("next", f"squall plan {options.file} --cluster {path}"))
    return 0, f"{two_columns(lines)}\n"


def _heading(options: argparse.Namespace) -> str:
    """What was measured, with what, and when."""
    import torch

    now = datetime.datetime.now().astimezone().isoformat(" ", "minutes")
    return (
        f"{options.file}, measured by squall {__version__} with torch {torch.__version__} on {now};"
        f" threads of a replica: {options.threads}."
    )


def _time(seconds: float) -> str:
    from squall.sim.cluster.units import write_time

    return write_time(float(f"{seconds:.3g}"))
