"""A `cluster.toml`, read with a complaint for whatever is wrong in it; `text` writes one.

docs/cluster.md describes the format for its users.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from squall.sim.cluster.jitter import Constant, Jitter, LogNormal, Pareto, Trace, read_trace
from squall.sim.cluster.parts import (
    BETWEEN,
    INTERFACE,
    MEMORY,
    ROLES,
    WITHIN,
    FailureLaw,
    Link,
    Machine,
    Overhead,
    Preemption,
)
from squall.sim.cluster.tables import Document, Table
from squall.sim.cluster.units import BANDWIDTH, TIME

LAWS = {"constant": (), "log-normal": ("sigma",), "pareto": ("alpha",), "trace": ("file",)}  # with what they need
OVERHEADS = ("batch", "exchange", "serve", "lease", "wake", "cold")
MOST_MACHINES, MOST_CORES, MOST_ELEMENTS, MOST_SLOWDOWN = 10**6, 4096, 10**12, 10**6

# ---------------------------------------------------------------- reading


def read_parts(path: Path) -> dict[str, Any]:
    """The fields of a `Cluster`. Raises `ClusterError`."""
    document = Document.load(path)
    root = document.root
    root.expect(("machines", "links", "failures", "preemptions"))
    if not root.values.get("machines"):
        document.refuse((), "there are no machines", "begin with [[machines]] and a name")
    tables = root.tables("machines")
    machines = tuple(_machine(table, path.parent) for table in tables)
    _check_together(tables, machines)
    links, failures = root.table("links"), root.table("failures")
    links.expect(("between", "within"))
    failures.expect(ROLES)
    return {
        "machines": machines,
        "between": _link(links.table("between"), BETWEEN),
        "within": _link(links.table("within"), WITHIN),
        "failures": {role: _failure(failures.table(role)) for role in failures.values},
        "preemptions": tuple(_preemption(table, machines) for table in root.tables("preemptions")),
    }


def _machine(table: Table, folder: Path) -> Machine:
    table.expect(
        (
            "name",
            "count",
            "cores",
            "step",
            "speed",
            "jitter",
            "single",
            "slowdown",
            "exchange",
            "overhead",
            "memory",
            "interface",
            "roles",
        ),
        required=["name"],
    )
    name = table.word("name")
    if not re.fullmatch(r"[\w.-]{1,100}", name):
        table.refuse("name", f'name = "{name[:40]}" has other characters', "use letters, digits, '.', '_' and '-'")
    if {"step", "speed"} <= set(table.values):
        table.refuse("speed", "step and speed are both given", "leave one out: speed is a ratio to the first machine's")
    cores = table.whole("cores", 1, MOST_CORES)
    return Machine(
        name=name,
        count=table.whole("count", 1, MOST_MACHINES),
        cores=cores,
        step_s=table.quantity("step", TIME) if "step" in table.values else None,
        speed=table.number("speed", 1.0, above=0, below=1e6, example="0.5"),
        jitter=_jitter(table.table("jitter"), folder),
        slowdown=_slowdown(table, cores),
        exchange=_exchange(table),
        single_s=table.quantity("single", TIME) if "single" in table.values else None,
        overhead=_overhead(table.table("overhead")),
        memory=table.quantity("memory", BANDWIDTH, MEMORY),
        interface=table.quantity("interface", BANDWIDTH, INTERFACE),
        roles=_roles(table),
    )


def _jitter(table: Table, folder: Path) -> Jitter:
    if not table.values:
        return Constant()
    if "law" not in table.values:
        table.refuse(None, "jitter has no law", 'write for example jitter = { law = "log-normal", sigma = 0.2 }')
    law = table.word("law", tuple(LAWS))
    table.expect(("law", *LAWS[law]), required=LAWS[law])
    match law:
        case "log-normal":
            return LogNormal(table.number("sigma", 0.0, above=0, below=10, example="0.2"))
        case "pareto":
            return Pareto(table.number("alpha", 0.0, above=1, below=1e6, example="2.5"))
        case "trace":
            return _trace(table, folder)
        case _:
            return Constant()


def _trace(table: Table, folder: Path) -> Trace:
    try:
        return read_trace(table.word("file"), folder)
    except ValueError as error:
        what, _, remedy = str(error).rpartition(": ")
        if not what:
            raise
        table.refuse("file", what, remedy)


def _slowdown(table: Table, cores: int) -> tuple[float, ...]:
    example = f"[{', '.join(f'{1 + k / 10:g}' for k in range(min(cores, 4)))}{', ...' if cores > 4 else ''}]"
    values = table.items("slowdown", example)
    if not values:
        return ()
    if len(values) != cores:
        what = f"slowdown has {len(values)} factors for {cores} cores"
        table.refuse("slowdown", what, f"give one for each number of computations at once, such as {example}")
    for value in values:
        if isinstance(value, bool) or not isinstance(value, int | float) or not 1 <= value < MOST_SLOWDOWN:
            table.refuse("slowdown", f"the factor {value!r} is impossible", f"factors are 1 or more, such as {example}")
    if values[0] != 1:
        table.refuse("slowdown", f"the first factor is {values[0]:g}", "it is 1, of a computation that runs alone")
    return tuple(float(value) for value in values)


def _exchange(table: Table) -> tuple[tuple[int, float], ...]:
    example = '[[1000, "58 us"], [1000000, "0.39 ms"]]'
    points: list[tuple[int, float]] = []
    for entry in table.items("exchange", example):
        if (
            not isinstance(entry, list)
            or len(entry) != 2
            or type(entry[0]) is not int
            or not 1 <= entry[0] <= MOST_ELEMENTS
        ):
            table.refuse("exchange", f"{entry!r} is no pair of elements and time", f"write exchange = {example}")
        if points and entry[0] <= points[-1][0]:
            table.refuse("exchange", f"{entry[0]} elements come after {points[-1][0]}", "sort the sizes, each once")
        points.append((entry[0], table.to_quantity("exchange", entry[1], TIME, example=example)))
    return tuple(points)


def _overhead(table: Table) -> Overhead:
    table.expect(OVERHEADS)
    return Overhead(**{f"{key}_s": table.quantity(key, TIME, 0.0, zero=True) for key in OVERHEADS})


def _roles(table: Table) -> tuple[str, ...]:
    example = '["shard", "coordinator"]'
    for role in (values := table.items("roles", example)):
        if role not in ROLES:
            table.refuse("roles", f"there is no role {role!r}", f"use some of {', '.join(ROLES)}")
    if len(set(values)) < len(values):
        table.refuse("roles", "a role is named twice", f"write for example roles = {example}")
    return tuple(values) or ROLES


def _link(table: Table, default: Link) -> Link:
    table.expect(("latency", "jitter", "bandwidth", "loss"))
    loss: Any = table.values.get("loss", 0)
    if isinstance(loss, bool) or not isinstance(loss, int | float) or not 0 <= loss < 1:
        table.refuse("loss", f"loss = {loss!r} is not a chance from 0 to below 1", "write for example loss = 0.001")
    return Link(
        latency_s=table.quantity("latency", TIME, default.latency_s, zero=True),
        jitter_s=table.quantity("jitter", TIME, default.jitter_s, zero=True),
        bandwidth=table.quantity("bandwidth", BANDWIDTH, default.bandwidth),
        loss=float(loss),
    )


def _failure(table: Table) -> FailureLaw:
    table.expect(("every", "repair"), required=["every", "repair"])
    return FailureLaw(every_s=table.quantity("every", TIME), repair_s=table.quantity("repair", TIME, zero=True))


def _preemption(table: Table, machines: tuple[Machine, ...]) -> Preemption:
    table.expect(("at", "machine", "count", "for", "every"), required=["at", "machine", "for"])
    name = table.word("machine", [machine.name for machine in machines])
    count = table.whole("count", 1, MOST_MACHINES)
    there = next(machine.count for machine in machines if machine.name == name)
    if count > there:
        table.refuse(
            "count" if "count" in table.values else None, f"{count} of {there} {name!r} go", f"name at most {there}"
        )
    away = table.quantity("for", TIME)
    every = table.quantity("every", TIME) if "every" in table.values else None
    if every is not None and every < 1:
        table.refuse("every", "no machine comes and goes so often", "let every be 1 s or more")
    if every is not None and every < away:
        table.refuse("every", "the machines go again before they are back", "let every be at least as long as for")
    return Preemption(at_s=table.quantity("at", TIME, zero=True), machine=name, count=count, for_s=away, every_s=every)


def _check_together(tables: list[Table], machines: tuple[Machine, ...]) -> None:
    names: set[str] = set()
    for table, machine in zip(tables, machines):
        if machine.name in names:
            table.refuse("name", f"there are two machines {machine.name!r}", "give each its own name, or raise count")
        names.add(machine.name)
        if machine.step_s is not None and machines[0].step_s is None:
            what = f"{machine.name!r} has a step time and the first machine, {machines[0].name!r}, has none"
            table.refuse("step", what, "give the first one too, or give all machines a speed")
    for role in ROLES:
        if not any(role in machine.roles for machine in machines):
            restricted = next(table for table in tables if "roles" in table.values)
            restricted.refuse("roles", f"no machine may hold a {role}", f'add "{role}" to the roles of one')
