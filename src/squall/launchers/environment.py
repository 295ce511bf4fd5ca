"""The environment of a process whose forks train: a run's nursery, and a replay in several processes."""

from __future__ import annotations

import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import msgspec

# glibc cuts aligned memory out of a larger block, and keeps the splinters for small blocks. They lie on both sides of a
# gradient, whose place is then too small for the next one: a part touched five such places instead of one. The price is
# some percent of a small network's step.
NO_SPLINTERS = "glibc.malloc.tcache_count=0"


def environment(parts: bool = False) -> dict[str, str]:
    """The environment of this process, changed to what a process needs that forks.

    No thread pools (what is forked sets its own), asking for a GPU does not touch it, and sets of strings have one
    order, so that a script does the same again. `parts`: it forks replicas of several processes.
    """
    forking = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "SQUALL_TOKEN"}  # it is told to nobody
    if parts:
        forking["GLIBC_TUNABLES"] = ":".join(filter(None, (inherited.get("GLIBC_TUNABLES"), NO_SPLINTERS)))
    return {"PYTHONHASHSEED": "0", **inherited, **forking}


def replayed_apart(path: Path) -> bool:
    """Whether the replay of a run forks its replicas, so that it needs such an environment. This imports no torch."""
    for start in (path / "schedule").glob("*/start.json"):
        with suppress(OSError, msgspec.DecodeError):
            if msgspec.json.decode(start.read_bytes(), type=dict[str, Any]).get("forked"):
                return True
    return is_script(path)


def is_script(path: Path) -> bool:
    """Whether a directory is that of a script's run."""
    return "script" in _kept(path)


def has_parts(path: Path) -> bool:
    """Whether a directory is that of a run whose replicas have parts."""
    return int(_settings(path).get("parts", 1)) > 1


def starts_again(path: Path) -> bool:
    """Whether a directory is that of a run on one machine that starts again by itself."""
    settings = _settings(path)
    return settings.get("restarts", 0) > 0 and settings.get("launcher") != "ray" and settings.get("listen") is None


def _settings(path: Path) -> dict[str, Any]:
    found: dict[str, Any] = _kept(path).get("plan", {}).get("settings", {})
    return found


def _kept(path: Path) -> dict[str, Any]:
    """To read run.json executes nothing and imports no torch. Empty where there is none."""
    try:
        return msgspec.json.decode((path / "run.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return {}
