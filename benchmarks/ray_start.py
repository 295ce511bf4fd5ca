"""From the command to the first step on a Ray cluster of three nodes, against Ray's own start and a local one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time

from benchmarks.results import Section, rounds
from benchmarks.startup import EXAMPLE

ACTORS = """
import ray
ray.init(logging_level="error")

@ray.remote
class Actor:
    def answer(self): pass

ray.get([actor.answer.remote() for actor in [Actor.options(num_cpus=1).remote() for _ in range(2)]])
"""


def measure(repeats: int = 5) -> Section:
    from ray.cluster_utils import Cluster

    print("start-up on a Ray cluster", flush=True)
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
    for _ in range(2):
        cluster.add_node(wait=False, num_cpus=1)
    cluster.wait_for_nodes()
    environment = {**os.environ, "RAY_ADDRESS": cluster.address}

    def first_step(launcher: str) -> float:
        with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder:
            command = [sys.executable, "-m", "squall", "train", str(EXAMPLE), "--epochs", "1", "--json"]
            flags = ["--replicas", "3", "--launcher", launcher, "--run-dir", f"{folder}/run"]
            run = subprocess.run([*command, *flags], capture_output=True, text=True, check=True, env=environment)
        return float(json.loads(run.stdout)["first_step_s"])

    def actors() -> float:
        began = time.perf_counter()
        subprocess.run([sys.executable, "-c", ACTORS], check=True, env=environment, capture_output=True)
        return time.perf_counter() - began

    def imports(count: int) -> float:
        began = time.perf_counter()
        processes = [subprocess.Popen([sys.executable, "-c", "import torch"]) for _ in range(count)]
        for process in processes:
            process.wait()
        return time.perf_counter() - began

    try:
        measures = {
            "ray": lambda: first_step("ray"), "local": lambda: first_step("local"), "actors": actors,
            "one": lambda: imports(1), "three": lambda: imports(3),
        }  # fmt: skip
        found = rounds(measures, repeats)
    finally:
        cluster.shutdown()
    bounds = [actor + local for actor, local in zip(found["actors"], found["local"])]
    ratio = statistics.median(ours / bound for ours, bound in zip(found["ray"], bounds))
    more = [three - one for three, one in zip(found["three"], found["one"])]
    shared = statistics.median(ours / (bound + extra) for ours, bound, extra in zip(found["ray"], bounds, more))
    section = Section(
        "Start on Ray",
        "Seconds from the command to the first step, 3 replicas of examples/digits.py. The three nodes share the cores"
        " of this machine, where three nurseries import torch at once; on machines of their own they do not wait for"
        " each other. So the second row adds what three such imports take more than one.",
    )
    against = (
        f"two actors of Ray's own ({statistics.median(found['actors']):.2f} s)"
        f" + local start ({statistics.median(found['local']):.2f} s)"
    )
    ours = f"{statistics.median(found['ray']):.2f} s"
    section.at_most("squall train --launcher ray", ours, against, ratio, 1.0)
    against += f" + two more imports of torch ({statistics.median(more):.2f} s)"
    section.compared("squall train --launcher ray, on shared cores", ours, against, shared)
    return section


if __name__ == "__main__":
    print(measure().markdown())
