"""One process of a machine after the other sends its numbers over a slow link, and none waits for ever."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from multiprocessing import get_context
from multiprocessing.connection import Connection
from pathlib import Path

import pytest

from squall.protocol.nodes import Node
from squall.transports.lanes import FAST, PATIENCE_S, REST_S, Lane, Lanes

SHARD = Node("shard")


@dataclass(eq=False)
class Sender:
    sent_bytes: int = 0


@pytest.fixture
def lanes(tmp_path: Path) -> list[Lane]:
    """Of two processes, to one machine."""
    return [Lanes(tmp_path).to("machine-1", SHARD) for _ in range(2)]


def test_one_goes_after_the_other_whichever_process_it_is_of(lanes: list[Lane]) -> None:
    here, there = lanes
    first, second, third = Sender(), Sender(), Sender()
    assert here.take(first, 0.0)
    assert here.take(first, 0.1)
    assert not here.take(second, 0.1), "of the same process"
    assert not there.take(third, 0.1)
    here.leave(first, 0.2)
    assert there.take(third, 0.2)
    assert not here.take(second, 0.2)
    there.leave(third)
    assert here.take(second, 0.3)


def test_lanes_to_other_machines_are_others(tmp_path: Path) -> None:
    lanes = Lanes(tmp_path)
    assert lanes.to("machine-1", SHARD).take(Sender(), 0.0)
    assert lanes.to("machine-2", SHARD).take(Sender(), 0.0)


def test_who_stands_still_is_waited_for_once_and_not_again_for_some_time(lanes: list[Lane]) -> None:
    stopped, other = lanes
    assert stopped.take(Sender(), 0.0)
    waits = Sender()
    assert not other.take(waits, 0.0)
    assert not other.take(waits, PATIENCE_S)
    assert other.take(waits, 2 * PATIENCE_S), "it shares the link"
    other.leave(waits, 2 * PATIENCE_S)
    assert other.take(Sender(), REST_S)
    late = Sender()
    assert not other.take(late, 2 * PATIENCE_S + REST_S)


def test_who_needs_long_waits_for_longer(lanes: list[Lane]) -> None:
    slow, other = lanes
    sender = Sender()
    assert other.take(sender, 0.0)
    other.leave(sender, 0.5)
    assert slow.take(Sender(), 0.5)
    assert not other.take(sender, 0.5)
    assert not other.take(sender, 0.5 + 2 * PATIENCE_S)


def test_who_waits_sees_that_others_have_their_turns(tmp_path: Path) -> None:
    lanes = [Lanes(tmp_path).to("machine-1", SHARD) for _ in range(3)]
    first, second, third = Sender(), Sender(), Sender()
    assert lanes[0].take(first, 0.0)
    assert not lanes[2].take(third, 0.0)
    lanes[0].leave(first, PATIENCE_S)
    assert lanes[1].take(second, PATIENCE_S)
    assert not lanes[2].take(third, 1.5 * PATIENCE_S)
    assert not lanes[2].take(third, 2 * PATIENCE_S)
    assert lanes[2].take(third, 4 * PATIENCE_S)


def test_where_there_are_no_lanes_nobody_waits() -> None:
    lane = Lanes().to("machine-1", SHARD)
    assert lane.take(Sender(), 0.0)
    assert lane.take(Sender(), 0.0)


def test_over_a_fast_link_nobody_waits(lanes: list[Lane]) -> None:
    here, there = lanes
    sender = Sender()
    assert here.take(sender, 0.0)
    sender.sent_bytes = int(2 * FAST)
    here.leave(sender, 1.0)
    assert there.take(Sender(), 1.0)
    assert here.take(sender, 1.0)


def test_who_has_no_descriptors_left_shares_the_link(tmp_path: Path) -> None:
    lane = Lanes(tmp_path / "is not there").to("machine-1", SHARD)
    assert lane.take(Sender(), 0.0)
    assert lane.take(Sender(), 0.0)


def _hold(directory: Path, line: Connection) -> None:
    lane = Lanes(directory).to("machine-1", SHARD)
    line.send(lane.take(Sender(), 0.0))
    line.recv()


@pytest.mark.parametrize("forks", [False, True])
def test_the_kernel_opens_the_lane_of_a_process_that_dies(forks: bool, lanes: list[Lane], tmp_path: Path) -> None:
    """Also where a process that it has forked, to load data, closed its own and lives on."""
    mine, theirs = get_context("spawn").Pipe()
    holder = get_context("spawn").Process(target=_hold_and_fork if forks else _hold, args=(tmp_path, theirs))
    holder.start()
    theirs.close()
    assert mine.recv()
    sender = Sender()
    assert not lanes[0].take(sender, 0.0)
    child = mine.recv() if forks else None
    holder.kill()
    holder.join()
    assert lanes[0].take(sender, 0.0)
    if child is not None:
        os.kill(child, signal.SIGKILL)


def _hold_and_fork(directory: Path, line: Connection) -> None:
    lanes = Lanes(directory)
    line.send(lanes.to("machine-1", SHARD).take(Sender(), 0.0))
    closed, told = os.pipe()
    if (child := os.fork()) == 0:
        lanes.close()
        os.write(told, b"1")
        signal.pause()
    os.read(closed, 1)
    line.send(child)
    line.recv()
