"""A `cluster.toml`: read with a complaint for whatever is wrong in it, and written.

docs/cluster.md describes the format for its users.
"""

from __future__ import annotations

import dataclasses
import json
import math
import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from squall.sim.cluster.file_parts import read_split, split_lines
from squall.sim.cluster.jitter import Constant, Jitter, LogNormal, Pareto, Trace, read_trace
from squall.sim.cluster.parts import BETWEEN, ROLES, WITHIN, FailureLaw, MachineKind, Overhead, Preemption
from squall.sim.cluster.tables import Document, Table
from squall.sim.cluster.units import BANDWIDTH, TIME, write_bandwidth, write_time

if TYPE_CHECKING:
    from squall.sim.cluster.model import Cluster

MOST_MACHINES, MOST_CORES, MOST_ELEMENTS, MOST_SLOWDOWN = 10**6, 4096, 10**12, 10**6


class Value(NamedTuple):
    """How the value of a key is read and written."""

    read: Callable[[Table, str], Any]
    write: Callable[[Any], str]
    suffix: str = ""  # of the part's field, whose name is otherwise the key


Values = Mapping[str, Value]  # the keys of a table, in the order in which they are read and written


def _quoted(text: str) -> str:
    return json.dumps(text, ensure_ascii=False)  # TOML's basic strings, but for the character 127


def _time_text(seconds: float) -> str:
    return _quoted(write_time(seconds))


def _rate(bits: bool) -> Value:
    return Value(partial(Table.quantity, units=BANDWIDTH), lambda rate: _quoted(write_bandwidth(rate, bits)))


def _number(within: Callable[[float], bool], what: str, example: str) -> Value:
    return Value(partial(Table.number, within=within, what=what, example=example), repr)


def _whole(most: int) -> Value:
    return Value(partial(Table.whole, most=most), str)


_TIME = Value(partial(Table.quantity, units=TIME), _time_text, "_s")
_TIME_FROM_0 = Value(partial(Table.quantity, units=TIME, zero=True), _time_text, "_s")
_WORD = Value(Table.word, _quoted)


def _fields(table: Table, values: Values, required: Iterable[str] = ()) -> dict[str, Any]:
    """A part's fields, as far as the table has them."""
    table.expect(values, required)
    return {key + value.suffix: value.read(table, key) for key, value in values.items() if key in table.values}


def _written(part: object, values: Values) -> dict[str, str]:
    """The lines of a part: key -> value, without what has its default."""
    found = {key: getattr(part, key + value.suffix) for key, value in values.items()}
    silent = (None, (), math.inf, ROLES, Overhead())
    return {key: values[key].write(value) for key, value in found.items() if value not in silent}


def _inline(lines: Mapping[str, str]) -> str:
    return f"{{ {', '.join(f'{key} = {value}' for key, value in lines.items())} }}"


# ---------------------------------------------------------------- the values of a machine


def _name(table: Table, key: str) -> str:
    name = table.word(key)
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        table.refuse(key, f'name = "{name[:40]}" has other characters', "use letters, digits, '.', '_' and '-'")
    return name


_LAWS: dict[str, tuple[type[Jitter], Values]] = {
    "constant": (Constant, {}),
    "log-normal": (LogNormal, {"sigma": _number(lambda x: 0 < x < 10, "a number above 0 and below 10", "0.2")}),
    "pareto": (Pareto, {"alpha": _number(lambda x: 1 < x < 1e6, "a number above 1 and below 1e+06", "2.5")}),
    "trace": (Trace, {"file": _WORD}),
}


def _jitter(table: Table, key: str) -> Jitter:
    table = table.table(key)
    if not table.values:
        return Constant()
    if "law" not in table.values:
        table.refuse(None, "jitter has no law", 'write for example jitter = { law = "log-normal", sigma = 0.2 }')
    law, values = _LAWS[table.word("law", tuple(_LAWS))]
    table.expect(("law", *values), required=values)
    return _trace(table) if law is Trace else law(**{key: value.read(table, key) for key, value in values.items()})


def _trace(table: Table) -> Trace:
    try:
        return read_trace(table.word("file"), table.folder)
    except ValueError as error:
        what, _, remedy = str(error).rpartition(": ")
        if not what:
            raise
        table.refuse("file", what, remedy)


def _jitter_text(jitter: Jitter) -> str:
    name, values = next((name, values) for name, (law, values) in _LAWS.items() if type(jitter) is law)
    return _inline({"law": _quoted(name)} | _written(jitter, values))


def _slowdown(table: Table, key: str) -> tuple[float, ...]:
    cores = table.values.get("cores", 1)  # which was read before
    example = f"[{', '.join(f'{1 + k / 10:g}' for k in range(min(cores, 4)))}{', ...' if cores > 4 else ''}]"
    values = table.items(key, example)
    if len(values) != cores:
        what = f"slowdown has {len(values)} factors for {cores} cores"
        table.refuse(key, what, f"give one for each number of computations at once, such as {example}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < MOST_SLOWDOWN:
            table.refuse(key, f"the factor {value!r} is impossible", f"factors are 1 or more, such as {example}")
    if values[0] != 1:
        table.refuse(key, f"the first factor is {values[0]:g}", "it is 1, of a computation that runs alone")
    return tuple(float(value) for value in values)


def _points(table: Table, key: str) -> tuple[tuple[int, float], ...]:
    example = '[[1000, "58 us"], [1000000, "0.39 ms"]]'
    points: list[tuple[int, float]] = []
    for entry in table.items(key, example):
        match entry:
            case [int(elements), time] if elements is not True and 1 <= elements <= MOST_ELEMENTS:
                if points and elements <= points[-1][0]:
                    table.refuse(key, f"{elements} elements come after {points[-1][0]}", "sort the sizes, each once")
                points.append((elements, table.to_quantity(key, time, TIME, example=example)))
            case _:
                table.refuse(key, f"{entry!r} is no pair of elements and time", f"write {key} = {example}")
    return tuple(points)


def _points_text(points: Iterable[tuple[int, float]]) -> str:
    return f"[{', '.join(f'[{elements}, {_time_text(seconds)}]' for elements, seconds in points)}]"


_OVERHEADS = dict.fromkeys(("batch", "exchange", "serve", "lease", "wake", "cold"), _TIME_FROM_0)


def _overhead(table: Table, key: str) -> Overhead:
    return Overhead(**_fields(table.table(key), _OVERHEADS))


def _roles(table: Table, key: str) -> tuple[str, ...]:
    example = '["shard", "coordinator"]'
    for role in (values := table.items(key, example)):
        if role not in ROLES:
            table.refuse(key, f"there is no role {role!r}", f"use some of {', '.join(ROLES)}")
    if len(set(values)) < len(values):
        table.refuse(key, "a role is named twice", f"write for example roles = {example}")
    return tuple(values)


# ---------------------------------------------------------------- the tables

_MACHINE: Values = {
    "name": Value(_name, _quoted),
    "count": _whole(MOST_MACHINES),
    "cores": _whole(MOST_CORES),
    "step": _TIME,
    "speed": _number(lambda x: 0 < x < 1e6, "a number above 0 and below 1e+06", "0.5"),
    "jitter": Value(_jitter, _jitter_text),
    "slowdown": Value(_slowdown, lambda factors: f"[{', '.join(map(repr, factors))}]"),
    "exchange": Value(_points, _points_text),
    "reduce": Value(_points, _points_text),
    "send": Value(_points, _points_text),
    "single": _TIME,
    "overhead": Value(_overhead, lambda overhead: _inline(_written(overhead, _OVERHEADS))),
    "memory": _rate(bits=False),
    "interface": _rate(bits=True),
    "carry": _rate(bits=False),
    "roles": Value(_roles, lambda roles: f"[{', '.join(map(_quoted, roles))}]"),
}
_LINK: Values = {
    "latency": _TIME_FROM_0,
    "jitter": _TIME_FROM_0,
    "bandwidth": _rate(bits=True),
    "loss": _number(lambda x: 0 <= x < 1, "a chance from 0 to below 1", "0.001"),
}
_HEARTBEATS: Values = {"lost_after": _TIME}
_FAILURE: Values = {"every": _TIME, "repair": _TIME_FROM_0}
_PREEMPTION: Values = {
    "at": _TIME_FROM_0, "machine": _WORD, "count": _whole(MOST_MACHINES), "for": _TIME, "every": _TIME,
}  # fmt: skip


def read_parts(path: Path) -> dict[str, Any]:
    """The fields of a `Cluster`. Raises `ClusterError`."""
    document = Document.load(path)
    root = document.root
    root.expect(("machines", "links", "failures", "preemptions", "heartbeats", "parts"))
    if not root.values.get("machines"):
        document.refuse((), "there are no machines", "begin with [[machines]] and a name")
    tables = root.tables("machines")
    machines = tuple(MachineKind(**_fields(table, _MACHINE, ["name"])) for table in tables)
    _check_together(tables, machines)
    links, failures = root.table("links"), root.table("failures")
    links.expect(("between", "within"))
    failures.expect(ROLES)
    return {
        "machines": machines,
        "between": dataclasses.replace(BETWEEN, **_fields(links.table("between"), _LINK)),
        "within": dataclasses.replace(WITHIN, **_fields(links.table("within"), _LINK)),
        "failures": {role: FailureLaw(**_fields(failures.table(role), _FAILURE, _FAILURE)) for role in failures.values},
        **_fields(root.table("heartbeats"), _HEARTBEATS),
        "split": read_split(root.table("parts")),
        "preemptions": tuple(_preemption(table, machines) for table in root.tables("preemptions")),
    }


def _preemption(table: Table, machines: tuple[MachineKind, ...]) -> Preemption:
    found = Preemption(**_fields(table, _PREEMPTION, ["at", "machine", "for"]))
    table.word("machine", [machine.name for machine in machines])
    there = next(machine.count for machine in machines if machine.name == found.machine)
    if found.count > there:
        key = "count" if "count" in table.values else None
        table.refuse(key, f"{found.count} of {there} {found.machine!r} go", f"name at most {there}")
    if found.every_s is not None and found.every_s < 1:
        table.refuse("every", "no machine comes and goes so often", "let every be 1 s or more")
    if found.every_s is not None and found.every_s < found.for_s:
        table.refuse("every", "the machines go again before they are back", "let every be at least as long as for")
    return found


def _check_together(tables: list[Table], machines: tuple[MachineKind, ...]) -> None:
    names: set[str] = set()
    for table, machine in zip(tables, machines):
        if machine.name in names:
            table.refuse("name", f"there are two machines {machine.name!r}", "give each its own name, or raise count")
        names.add(machine.name)
        if {"step", "speed"} <= set(table.values):
            table.refuse(
                "speed", "step and speed are both given", "leave one out: speed is a ratio to the first machine's"
            )
        if machine.step_s is not None and machines[0].step_s is None:
            what = f"{machine.name!r} has a step time and the first machine, {machines[0].name!r}, has none"
            table.refuse("step", what, "give the first one too, or give all machines a speed")
    for role in ROLES:
        if not any(role in machine.roles for machine in machines):
            restricted = next(table for table in tables if "roles" in table.values)
            restricted.refuse("roles", f"no machine may hold a {role}", f'add "{role}" to the roles of one')


def cluster_text(cluster: Cluster) -> str:
    """What `read_parts` reads as this cluster again, to the last bit."""
    tables = []
    for machine in cluster.machines:
        lines = _written(machine, _MACHINE)
        if machine.step_s is not None:
            del lines["speed"]
        tables.append(_text("[[machines]]", lines))
    tables += [_text("[links.between]", _written(cluster.between, _LINK))]
    tables += [_text("[links.within]", _written(cluster.within, _LINK))]
    tables += [_text("[heartbeats]", _written(cluster, _HEARTBEATS))]
    tables += [_text("[parts]", split_lines(cluster.split))] if cluster.split is not None else []
    tables += [_text(f"[failures.{role}]", _written(failure, _FAILURE)) for role, failure in cluster.failures.items()]
    tables += [_text("[[preemptions]]", _written(preemption, _PREEMPTION)) for preemption in cluster.preemptions]
    return "\n".join(tables)


def _text(header: str, lines: Mapping[str, str]) -> str:
    return "".join([f"{header}\n", *(f"{key} = {value}\n" for key, value in lines.items())])
