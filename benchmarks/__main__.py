"""`make bench`: every benchmark in turn, or those named on the command line; RESULTS.md gets what they find."""

import sys
from typing import Any

from benchmarks import (
    exchange,
    family,
    forecast,
    overhead,
    recording,
    sandblaster,
    simulation,
    small,
    startup,
    straggler,
    throughput,
    week,
)
from benchmarks.results import FILE, write

BENCHMARKS: dict[str, Any] = {
    "exchange": exchange, "overhead": overhead, "throughput": throughput, "small": small, "straggler": straggler,
    "startup": startup, "family": family, "sandblaster": sandblaster, "simulation": simulation, "forecast": forecast,
    "recording": recording, "week": week,
}  # fmt: skip

for name in sys.argv[1:] or BENCHMARKS:
    write(BENCHMARKS[name].measure())
print(f"written to {FILE}")
