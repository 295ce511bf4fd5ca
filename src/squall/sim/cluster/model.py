"""A cluster that a run is simulated on: read from a `cluster.toml`, or made by code."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from squall.sim.cluster.file import cluster_text, read_parts
from squall.sim.cluster.parts import BETWEEN, WITHIN, FailureLaw, Link, MachineKind, Preemption
from squall.sim.cluster.split_step import SplitStep


@dataclass(frozen=True, kw_only=True)
class Cluster:
    """`machines` has at least one, and at least one for each role. `failures` is by role.

    A machine that goes away is taken for lost after `lost_after_s`; that a process is gone is told at once.
    """

    machines: tuple[MachineKind, ...]
    between: Link = BETWEEN  # two machines
    within: Link = WITHIN  # one machine; exchanges aside, whose time the machine knows
    failures: Mapping[str, FailureLaw] = field(default_factory=dict)
    preemptions: tuple[Preemption, ...] = ()
    lost_after_s: float = 2.0
    split: SplitStep | None = None  # of a replica of several parts; else what the task's split comes to is measured
    spread_parts: bool = False  # they lie on as many machines as possible, and not where there is room for all

    @classmethod
    def load(cls, path: str | Path) -> Cluster:
        """Raises `ClusterError`: the file says something unknown or impossible, in that line."""
        return cls(**read_parts(Path(path)))

    def to_toml(self) -> str:
        """The text of a file that loads as this cluster; a trace's own file is not written."""
        return cluster_text(self)

    @property
    def measured(self) -> bool:
        """Whether the file says how long a step takes; else it is measured where the simulation runs."""
        return self.machines[0].step_s is not None

    @property
    def parts(self) -> int:
        """Of a replica."""
        return self.split.parts if self.split is not None else 1

    def step_s(self, machine: MachineKind, own_s: float | None = None) -> float:
        """Mean seconds of a step alone on the machine. `own_s` is a step's here, for a cluster without step times."""
        first = self.machines[0].step_s if self.measured else own_s
        assert first is not None
        return machine.step_s if machine.step_s is not None else first / machine.speed
