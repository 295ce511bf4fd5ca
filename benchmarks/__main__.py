"""`make bench`: every benchmark in turn, or those named on the command line; RESULTS.md gets what they find."""

import sys
from typing import Any

from benchmarks import (
    all_reduce,
    columns,
    copies,
    exchange,
    family,
    forecast,
    forecast_links,
    forecast_parts,
    gpu,
    inference,
    links,
    live,
    machines,
    overhead,
    parts,
    predict,
    ray_start,
    recording,
    sandblaster,
    simulation,
    small,
    spread_parts,
    startup,
    straggler,
    succession,
    throughput,
    week,
)
from benchmarks.gpu import NoGpu
from benchmarks.namespaces import NoNamespaces
from benchmarks.results import FILE, write

BENCHMARKS: dict[str, Any] = {
    "exchange": exchange, "overhead": overhead, "throughput": throughput, "small": small, "straggler": straggler,
    "startup": startup, "family": family, "sandblaster": sandblaster, "simulation": simulation, "forecast": forecast,
    "recording": recording, "all-reduce": all_reduce, "parts": parts, "columns": columns, "week": week, "links": links,
    "machines": machines, "spread-parts": spread_parts, "ray-start": ray_start, "forecast-links": forecast_links,
    "forecast-parts": forecast_parts, "predict": predict, "inference": inference, "live": live,
    "succession": succession, "copies": copies, "gpu": gpu,
}  # fmt: skip

if unknown := [name for name in sys.argv[1:] if name not in BENCHMARKS]:
    sys.exit(f"no benchmark {', '.join(unknown)}: there are {', '.join(BENCHMARKS)}; without a name all are run")
for name in sys.argv[1:] or BENCHMARKS:
    try:
        write(BENCHMARKS[name].measure())
    except (NoNamespaces, NoGpu) as error:
        print(f"{name} is left out: {error}")
print(f"written to {FILE}")
