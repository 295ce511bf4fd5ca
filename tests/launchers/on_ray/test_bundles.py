"""What a run asks Ray for."""

from __future__ import annotations

import pytest

from squall.launchers.on_ray.bundles import Share, shares

NODES = [Share(2), Share(8), Share(4)]


def cpus(found: list[Share]) -> list[int]:
    return [share.cpus for share in found]


@pytest.mark.parametrize(
    ("wanted", "expected"), [(3, [3]), (4, [4]), (5, [4, 1]), (14, [4, 8, 2]), (16, [4, 8, 4]), (40, [4, 8, 4, 2])]
)
def test_so_many_nodes_as_the_replicas_need(wanted: int, expected: list[int]) -> None:
    assert cpus(shares(wanted, Share(4), NODES)) == expected


def test_a_node_without_room_for_the_cores_of_a_machine_is_left_out() -> None:
    assert cpus(shares(9, Share(0), NODES, cores=3)) == [0, 3, 3]


def test_where_nothing_is_free_a_machine_with_all_is_waited_for() -> None:
    assert cpus(shares(6, Share(0), [Share(0)])) == [0, 6]


def test_machines_that_were_asked_for_get_equal_parts() -> None:
    assert cpus(shares(8, Share(4), NODES, machines=4)) == [2, 2, 2, 2]
    assert cpus(shares(8, Share(0), NODES, machines=3)) == [0, 4, 4]
    assert cpus(shares(8, Share(9), NODES, machines=2, cores=6)) == [6, 6]
    assert cpus(shares(8, Share(2), NODES, machines=1)) == [2]


def test_nodes_with_gpus_come_first_and_no_machine_gets_more_than_it_has_processors() -> None:
    assert shares(6, Share(2), [Share(8), Share(4, 2), Share(1, 4)]) == [Share(2), Share(1, 1), Share(3, 2)]
    assert shares(6, Share(0), [Share(8), Share(4, 2)], machines=3) == [Share(0), Share(3, 2), Share(3, 2)]


def test_replicas_on_gpus_are_on_nodes_that_have_some() -> None:
    """Where there are none yet, a machine with one is waited for."""
    nodes = [Share(8), Share(4, 2)]
    assert shares(6, Share(2), nodes, on_gpus=True) == [Share(0), Share(4, 2)]
    assert shares(6, Share(2, 1), nodes, on_gpus=True) == [Share(2, 1), Share(4, 2)]
    assert shares(6, Share(2), [Share(8)], on_gpus=True) == [Share(0), Share(6, 1)]
