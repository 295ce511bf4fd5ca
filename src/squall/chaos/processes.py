"""The processes of a run, found from outside: what the launching process has started, and what those have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

ROLES = ("replica", "shard", "backup", "evaluator", "coordinator", "deputy", "nursery", "loader")
ANY = "any"


class Found(NamedTuple):
    """One that lives. The kernel gives a pid again, but not with the same start."""

    pid: int
    started: str
    name: str  # such as "shard 0"; "" while it has none
    run: str = ""  # name of the run's directory

    @property
    def role(self) -> str:
        return self.name.partition(" ")[0]

    @property
    def lives(self) -> bool:
        return _started(self.pid) == self.started

    def __str__(self) -> str:
        return f"{self.name or 'a process'} (pid {self.pid})"


class Family:
    """All that some processes have started, directly or not. It knows them behind the deaths of their parents, too."""

    def __init__(self, root: int) -> None:
        self._roots = {root}
        self._seen: dict[tuple[int, str], Found] = {}

    def adopt(self, roots: Iterable[int]) -> None:
        """What these have started as well."""
        self._roots |= set(roots)

    def look(self) -> list[Found]:
        """Those that live, without those that have started all."""
        for pid in _below([*self._roots, *(found.pid for found in self._seen.values() if found.lives)]):
            if started := _started(pid):
                self._seen[pid, started] = Found(pid, started, *_name(pid))
        return [found for found in self._seen.values() if found.lives]

    def of(self, role: str) -> list[Found]:
        """Who could be hit: those of the role, or of any."""
        return [found for found in self.look() if found.name and role in (found.role, ANY)]


def _below(roots: list[int]) -> Iterator[int]:
    for root in roots:
        with suppress(OSError):  # it has ended meanwhile
            for thread in list(Path(f"/proc/{root}/task").iterdir()):
                with suppress(OSError):
                    found = [int(pid) for pid in (thread / "children").read_text().split()]
                    yield from found
                    yield from _below(found)


def _name(pid: int) -> tuple[str, str]:
    """As processes of a run call themselves: "squall shard 0 of RUN"; and RUN."""
    with suppress(OSError):
        title = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        kind, _, rest = title.partition(" ")
        name, of, run = rest.partition(" of ")
        if kind == "squall" and of and name.partition(" ")[0] in ROLES:
            return name, run
    return "", ""


def _started(pid: int) -> str:
    """When, in the kernel's count; empty if it is gone, or dead and merely not collected."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return "" if fields[0] in "ZX" else fields[19]
    return ""
