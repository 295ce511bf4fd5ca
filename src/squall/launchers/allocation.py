"""Which machine of an allocation this is, by the variables of what has started the command on each of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import NamedTuple

Variables = Mapping[str, str]


class Allocation(NamedTuple):
    kind: str  # who has made it
    rank: int  # of this machine; 0 has the run
    machines: int
    head: str  # host of the first


def allocation(variables: Variables) -> Allocation:
    """Raises `ValueError` where nothing is detected, or it is more than one process a machine."""
    for kind, (sign, read) in KINDS.items():
        if sign in variables:
            try:
                return Allocation(kind, *read(variables))
            except (KeyError, IndexError) as error:
                raise ValueError(f"machines is auto, and {kind} has set {sign} without {error}: {REMEDY}") from None
    signs = ", ".join(f"{sign} ({kind})" for kind, (sign, _) in KINDS.items())
    raise ValueError(f"machines is auto, and nothing says which machines there are (looked for {signs}): {REMEDY}")


def _slurm(variables: Variables) -> tuple[int, int, str]:
    """`srun --ntasks-per-node=1`, which is what one machine each comes to."""
    if variables["SLURM_NTASKS"] != variables["SLURM_NNODES"]:
        raise ValueError("srun has started several tasks on a machine: use srun --ntasks-per-node=1")
    return int(variables["SLURM_NODEID"]), int(variables["SLURM_NNODES"]), first_host(variables["SLURM_JOB_NODELIST"])


def _torchrun(variables: Variables) -> tuple[int, int, str]:
    if variables["LOCAL_WORLD_SIZE"] != "1":
        raise ValueError("torchrun has started several processes on a machine: use torchrun --nproc-per-node=1")
    return int(variables["GROUP_RANK"]), int(variables["GROUP_WORLD_SIZE"]), variables["MASTER_ADDR"]


def _skypilot(variables: Variables) -> tuple[int, int, str]:
    nodes = variables["SKYPILOT_NODE_IPS"].split()
    return int(variables["SKYPILOT_NODE_RANK"]), len(nodes), nodes[0]


def _kubernetes(variables: Variables) -> tuple[int, int, str]:
    """Pods of an Indexed Job have no variable for their number: `SQUALL_MACHINES` is set in its file."""
    index, host = variables["JOB_COMPLETION_INDEX"], variables["HOSTNAME"]
    head = f"{host.removesuffix(f'-{index}')}-0"
    return int(index), int(variables["SQUALL_MACHINES"]), f"{head}.{variables['SQUALL_SERVICE']}"


def first_host(nodes: str) -> str:
    """ "node[07-09,12],gpu1" -> "node07"."""
    prefix, numbers = re.match(r"([^\[,]*)(?:\[(\w+))?", nodes).groups()  # type: ignore[union-attr]  # it always matches
    return prefix + (numbers or "")


KINDS: dict[str, tuple[str, Callable[[Variables], tuple[int, int, str]]]] = {
    "SkyPilot": ("SKYPILOT_NODE_RANK", _skypilot),
    "torchrun": ("TORCHELASTIC_RUN_ID", _torchrun),
    "Kubernetes": ("JOB_COMPLETION_INDEX", _kubernetes),
    "SLURM": ("SLURM_NODEID", _slurm),
}
REMEDY = "start it on one machine with --machines N --listen HOST:PORT, and squall join on the others"
