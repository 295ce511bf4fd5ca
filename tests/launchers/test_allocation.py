"""Which machine of an allocation this is, as its variables say it."""

from __future__ import annotations

import re

import pytest

from squall.launchers.allocation import Allocation, allocation, first_host

SLURM = {"SLURM_NODEID": "1", "SLURM_NNODES": "3", "SLURM_NTASKS": "3", "SLURM_JOB_NODELIST": "gpu[07-08,11]"}
TORCHRUN = {
    "TORCHELASTIC_RUN_ID": "none", "GROUP_RANK": "0", "GROUP_WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1",
    "MASTER_ADDR": "10.0.0.1",
}  # fmt: skip
SKYPILOT = {"SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2\n"}
KUBERNETES = {
    "JOB_COMPLETION_INDEX": "12", "HOSTNAME": "digits-12", "SQUALL_MACHINES": "16", "SQUALL_SERVICE": "squall",
}  # fmt: skip


@pytest.mark.parametrize(
    ("variables", "expected"),
    [
        (SLURM, Allocation("SLURM", 1, 3, "gpu07")),
        (TORCHRUN, Allocation("torchrun", 0, 2, "10.0.0.1")),
        (SKYPILOT, Allocation("SkyPilot", 1, 2, "10.0.0.1")),
        (KUBERNETES, Allocation("Kubernetes", 12, 16, "digits-0.squall")),
        ({**SLURM, **TORCHRUN}, Allocation("torchrun", 0, 2, "10.0.0.1")),  # within an allocation
    ],
    ids=lambda value: value.kind if isinstance(value, Allocation) else "",
)
def test_what_started_the_command_says_which_machine_this_is(variables: dict[str, str], expected: Allocation) -> None:
    assert allocation({"HOME": "/root", **variables}) == expected


@pytest.mark.parametrize(
    ("variables", "error"),
    [
        ({}, "nothing says which machines there are (looked for SKYPILOT_NODE_RANK (SkyPilot), TORCHELASTIC_RUN_ID"),
        ({**SLURM, "SLURM_NTASKS": "12"}, "several tasks on a machine: use srun --ntasks-per-node=1"),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "8"}, "use torchrun --nproc-per-node=1"),
        ({"JOB_COMPLETION_INDEX": "0", "HOSTNAME": "a-0"}, "without 'SQUALL_MACHINES': start it on one machine with"),
    ],
)
def test_what_is_missing_is_said_with_the_remedy(variables: dict[str, str], error: str) -> None:
    with pytest.raises(ValueError, match=re.escape(error)):
        allocation(variables)


@pytest.mark.parametrize(
    ("nodes", "first"),
    [("node1", "node1"), ("node[07-09,12],gpu1", "node07"), ("a-b,c[1-2]", "a-b"), ("n[3]", "n3")],
)
def test_the_first_host_of_a_list_of_nodes(nodes: str, first: str) -> None:
    assert first_host(nodes) == first
