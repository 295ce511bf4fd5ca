"""What a page costs the training that it shows, and what processes pay for telling what they do."""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from contextlib import suppress
from functools import partial
from http.client import HTTPException
from pathlib import Path
from urllib.request import ProxyHandler, build_opener

import squall
from benchmarks.results import Section, median_ratio, rounds
from benchmarks.squall_exchange import exchange_seconds
from benchmarks.squall_training import downpour, steady, training_task
from benchmarks.workloads import speech_mlp
from squall.protocol.nodes import Node
from squall.runtime.board import Board, Doing
from squall.sim.cluster.quiet import core_s

SECONDS = 12.0
ELEMENTS = 1_000_000
_SERVED: list[float] = []  # of each run, its part of a core
TURNS = 5  # of both ends, in an exchange: compute, send and wait; apply and rest


def measure(repeats: int = 7) -> Section:
    print("live", flush=True)
    section = Section(
        "Watched",
        "Downpour of 2 replicas on 2 cores, 7.2 million parameters, with its page open and without: `squall live`"
        " serves the run to somebody who reads all of it, on the same cores. A browser there takes its own share.",
    )
    found = rounds({"alone": partial(_rate, watched=False), "watched": partial(_rate, watched=True)}, repeats)
    alone, watched = (statistics.median(found[name]) for name in ("alone", "watched"))
    ratio = median_ratio(found["watched"], found["alone"])
    section.at_least("examples a second", f"{watched:,.0f}/s", f"{alone:,.0f}/s", ratio, 0.99)
    share = 100 * statistics.median(_SERVED)
    section.below("processor time of what serves it", f"{share:.2g} % of a core", share, 1.0, "%")
    told, exchange = TURNS * _turn_s(), exchange_seconds(ELEMENTS, "sgd", 300)
    figure = f"{told * 1e6:.2g} µs of {exchange * 1e6:.0f} µs"
    section.below("the board, of an exchange of 1,000,000 elements", figure, 100 * told / exchange, 1.0, "%")
    return section


def _rate(watched: bool) -> float:
    """Examples a second."""
    settings = squall.Settings(threads=1, seconds=SECONDS, snapshot_every_s=None, progress=False)
    workload = speech_mlp()
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
        path = Path(folder) / "run"
        path.mkdir()
        server = _watch(path) if watched else None
        begun_s = core_s(server.pid) if server is not None else 0.0  # it has been imported
        began = time.monotonic()
        try:
            return steady(squall.fit(training_task(workload), downpour(workload, 2), run_dir=path, settings=settings))
        finally:
            if server is not None:
                _SERVED.append((core_s(server.pid) - begun_s) / (time.monotonic() - began))
                server.terminate()
                server.wait()


def _watch(path: Path) -> subprocess.Popen[str]:
    """`squall live` of a run that begins, and somebody who reads what it says."""
    server = subprocess.Popen([sys.executable, "-m", "squall", "live", str(path)], stdout=subprocess.PIPE, text=True)
    assert server.stdout is not None
    address = server.stdout.readline().split()[0]

    def read() -> None:
        with suppress(OSError, HTTPException), build_opener(ProxyHandler({})).open(f"{address}news") as news:
            deque(news, maxlen=0)  # until the server ends

    threading.Thread(target=read, daemon=True).start()
    return server


def _turn_s(turns: int = 100_000) -> float:
    entry = Board(2, 1, 0.0).entry(Node("replica"), 0.0)
    began = time.perf_counter()
    for _ in range(turns):
        entry.turns(Doing.COMPUTING, time.monotonic())
    return (time.perf_counter() - began) / turns
