"""A cluster as the text of a `cluster.toml`, which `file` reads as the same cluster again."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

from squall.sim.cluster.file import OVERHEADS
from squall.sim.cluster.jitter import Jitter, LogNormal, Pareto, Trace
from squall.sim.cluster.parts import ROLES, Link, Machine, Overhead, Preemption
from squall.sim.cluster.units import write_bandwidth, write_time

if TYPE_CHECKING:
    from squall.sim.cluster.model import Cluster


def cluster_text(cluster: Cluster) -> str:
    """What `read_parts` reads as this cluster again, to the last bit."""
    parts = [_text("[[machines]]", _machine_lines(machine)) for machine in cluster.machines]
    parts += [
        _text(f"[links.{name}]", _link_lines(link))
        for name, link in (("between", cluster.between), ("within", cluster.within))
    ]
    for role, failure in cluster.failures.items():
        lines = {"every": _time(failure.every_s), "repair": _time(failure.repair_s)}
        parts.append(_text(f"[failures.{role}]", lines))
    parts += [_text("[[preemptions]]", _preemption_lines(preemption)) for preemption in cluster.preemptions]
    return "\n".join(parts)


def _text(header: str, lines: Mapping[str, str]) -> str:
    return "".join([f"{header}\n", *(f"{key} = {value}\n" for key, value in lines.items())])


def _machine_lines(machine: Machine) -> dict[str, str]:
    lines = {"name": _quoted(machine.name), "count": str(machine.count), "cores": str(machine.cores)}
    if machine.step_s is not None:
        lines["step"] = _time(machine.step_s)
    else:
        lines["speed"] = repr(machine.speed)
    lines["jitter"] = _jitter_text(machine.jitter)
    if machine.slowdown:
        lines["slowdown"] = f"[{', '.join(map(repr, machine.slowdown))}]"
    if machine.exchange:
        lines["exchange"] = f"[{', '.join(f'[{n}, {_time(s)}]' for n, s in machine.exchange)}]"
    if machine.single_s is not None:
        lines["single"] = _time(machine.single_s)
    if machine.overhead != Overhead():
        parts = [f"{key} = {_time(getattr(machine.overhead, f'{key}_s'))}" for key in OVERHEADS]
        lines["overhead"] = f"{{ {', '.join(parts)} }}"
    lines["memory"] = _quoted(write_bandwidth(machine.memory, bits=False))
    lines["interface"] = _quoted(write_bandwidth(machine.interface, bits=True))
    if machine.roles != ROLES:
        lines["roles"] = f"[{', '.join(map(_quoted, machine.roles))}]"
    return lines


def _jitter_text(jitter: Jitter) -> str:
    match jitter:
        case LogNormal(sigma):
            return f'{{ law = "log-normal", sigma = {sigma!r} }}'
        case Pareto(alpha):
            return f'{{ law = "pareto", alpha = {alpha!r} }}'
        case Trace(file):
            return f'{{ law = "trace", file = {_quoted(file)} }}'
        case _:
            return '{ law = "constant" }'


def _link_lines(link: Link) -> dict[str, str]:
    lines = {"latency": _time(link.latency_s), "jitter": _time(link.jitter_s)}
    if link.bandwidth < math.inf:
        lines["bandwidth"] = _quoted(write_bandwidth(link.bandwidth, bits=True))
    return lines | {"loss": repr(link.loss)}


def _preemption_lines(preemption: Preemption) -> dict[str, str]:
    lines = {
        "at": _time(preemption.at_s), "machine": _quoted(preemption.machine), "count": str(preemption.count),
        "for": _time(preemption.for_s),
    }  # fmt: skip
    return lines if preemption.every_s is None else lines | {"every": _time(preemption.every_s)}


def _time(seconds: float) -> str:
    return _quoted(write_time(seconds))


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML's basic strings, but for the character 127
