"""Groups of one machine: whoever leaves one, at whatever moment, keeps nobody waiting, and the next group forms."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from squall.protocol.effects import JoinGroup
from squall.protocol.nodes import replica_node
from squall.runtime.collective.adding import add_up
from squall.runtime.collective.meeting import NearFellows
from squall.transports.mesh import MeshBroken

NODES = tuple(replica_node(slot, 0) for slot in range(3))
SOON_S = 10.0
AT = range(1, 16)  # which sum of another member the one that leaves does not wait for


@pytest.mark.parametrize("elements", [10, 100_000])
def test_whoever_leaves_while_sums_are_under_way_keeps_nobody_waiting(tmp_path: Path, elements: int) -> None:
    """Torch's Gloo does not tell all of them, and those wait for ever."""
    fellows = [NearFellows(node, tmp_path, torch.device("cpu")) for node in NODES]

    def sums(own: int, number: int, leaves_at: threading.Event) -> int:
        """How many there are until the group is broken."""
        group = fellows[own].form(JoinGroup(number, NODES, NODES[0], transfer=False, clock=0), own)
        ones = torch.ones(elements), torch.ones(3, dtype=torch.float64)
        count = 0
        while not add_up(group, *ones):
            count += 1
            if own == 1 and count == number:
                leaves_at.set()
        group.close()
        fellows[own].left()
        return count

    with ThreadPoolExecutor(3) as pool:
        for number in AT:
            leaves_at = threading.Event()
            members = [pool.submit(sums, own, number, leaves_at) for own in range(3)]
            assert leaves_at.wait(SOON_S)
            fellows[0].cut()
            counts = [member.result(SOON_S) for member in members]
            assert counts[1] >= number
            assert max(counts) - min(counts) <= 1, "nobody has a sum that needs another's next one"


def test_where_no_socket_can_be_made_the_group_is_broken_and_not_the_process(tmp_path: Path) -> None:
    fellows = NearFellows(NODES[0], tmp_path, torch.device("cpu"))
    (tmp_path / "1-0-0").touch()
    with pytest.raises(MeshBroken, match=r"the group cannot form: .*Address already in use"):
        fellows.form(JoinGroup(1, NODES[:1], NODES[0], transfer=False, clock=0), 0)


def test_a_group_that_was_cut_before_it_formed_does_not_form(tmp_path: Path) -> None:
    fellows = NearFellows(NODES[0], tmp_path, torch.device("cpu"))
    fellows.cut()
    with pytest.raises(RuntimeError, match="the connections were cut"):
        fellows.form(JoinGroup(1, NODES[:1], NODES[0], transfer=False, clock=0), 0)
    fellows.left()
    assert fellows.form(JoinGroup(2, NODES[:1], NODES[0], transfer=False, clock=0), 0).members == NODES[:1]
