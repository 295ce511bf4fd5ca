"""From the command to the first training step of the digits example, against importing torch alone."""

from __future__ import annotations

import json
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.results import Section, rounds

EXAMPLE = Path(__file__).parents[1] / "examples" / "digits.py"


def measure(repeats: int = 5) -> Section:
    print("start-up", flush=True)
    found = rounds({"first step": _first_step, "import torch": _import_torch}, repeats)
    bounds = [1.5 * torch + 0.5 for torch in found["import torch"]]
    ratio = statistics.median(step / bound for step, bound in zip(found["first step"], bounds))
    section = Section("Start-up", "Seconds from the command to the first training step of examples/digits.py.")
    against = f"1.5 x import torch ({statistics.median(found['import torch']):.2f} s) + 0.5 s"
    section.at_most("squall train", f"{statistics.median(found['first step']):.2f} s", against, ratio, 1.0)
    return section


def _first_step() -> float:
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        command = [sys.executable, "-m", "squall", "train", str(EXAMPLE), "--epochs", "1", "--json"]
        run = subprocess.run([*command, "--run-dir", f"{folder}/run"], capture_output=True, text=True, check=True)
    return float(json.loads(run.stdout)["first_step_s"])


def _import_torch() -> float:
    began = time.perf_counter()
    subprocess.run([sys.executable, "-c", "import torch"], check=True)
    return time.perf_counter() - began


if __name__ == "__main__":
    print(measure().markdown())
