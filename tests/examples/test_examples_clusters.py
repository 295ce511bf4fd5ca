"""What examples/clusters starts on other people's clusters: commands that there are, and variables that are read."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]

from squall.cli import _parser
from squall.launchers.allocation import Allocation, allocation

CLUSTERS = Path(__file__).parents[2] / "examples" / "clusters"


def documents(name: str) -> dict[str, Any]:
    return {document["kind"]: document for document in yaml.safe_load_all((CLUSTERS / name).read_text())}


def parsed(command: list[str]) -> Any:
    program, *arguments = command
    assert program == "squall"
    return _parser(arguments).parse_args(arguments)


def test_kubernetes() -> None:
    found = documents("kubernetes.yaml")
    job, service = found["Job"], found["Service"]
    pod = job["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    options = parsed(container["command"])
    assert (options.machines, options.replicas) == ("auto", 6)
    name = job["metadata"]["name"]
    environment = {each["name"]: each.get("value", "") for each in container["env"]}
    variables = {**environment, "JOB_COMPLETION_INDEX": "2", "HOSTNAME": f"{name}-2"}
    machines = job["spec"]["completions"]
    assert allocation(variables) == Allocation("Kubernetes", 2, machines, f"{name}-0.{service['metadata']['name']}")
    assert pod["subdomain"] == service["metadata"]["name"]


def test_kuberay() -> None:
    job = documents("kuberay.yaml")["RayJob"]
    options = parsed(shlex.split(job["spec"]["entrypoint"]))
    assert options.launcher == "ray"
    cluster = job["spec"]["rayClusterSpec"]
    (workers,) = cluster["workerGroupSpecs"]
    (container,) = workers["template"]["spec"]["containers"]
    assert options.replicas == workers["replicas"] * int(container["resources"]["limits"]["cpu"])
    assert cluster["headGroupSpec"]["rayStartParams"]["num-cpus"] == "0"


def test_slurm() -> None:
    text = (CLUSTERS / "slurm.sh").read_text().replace("\\\n", " ").replace("$((2 * SLURM_NNODES))", "8")
    (line,) = (line for line in text.splitlines() if line.startswith("srun"))
    options = parsed(shlex.split(line)[2:])
    assert (options.machines, options.replicas) == ("auto", 8)
