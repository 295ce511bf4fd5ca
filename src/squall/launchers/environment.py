"""The environment of a process whose forks train: a run's nursery, and the replay of a script."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import msgspec


def environment() -> dict[str, str]:
    """The environment of this process, changed to what a process needs that forks.

    No thread pools (what is forked sets its own), asking for a GPU does not touch it, and sets of strings have one
    order, so that a script does the same again.
    """
    forking = {"OMP_NUM_THREADS": "1", "PYTORCH_NVML_BASED_CUDA_CHECK": "1"}
    inherited = {name: value for name, value in os.environ.items() if name != "SQUALL_TOKEN"}  # it is told to nobody
    return {"PYTHONHASHSEED": "0", **inherited, **forking}


def is_script(path: Path) -> bool:
    """Whether a directory is that of a script's run. To read run.json executes nothing and imports no torch."""
    try:
        return "script" in msgspec.json.decode((path / "run.json").read_bytes(), type=dict[str, Any])
    except (OSError, msgspec.DecodeError):
        return False
