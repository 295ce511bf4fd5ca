"""Doorbells between processes of one host: ordered, bounded, and never blocking."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from squall.protocol.nodes import Node
from squall.transports.doorbell import MAX_BYTES, Doorbell

SHARD, REPLICA = Node("shard"), Node("replica", 1, 2)


@pytest.fixture
def shard(tmp_path: Path) -> Iterator[Doorbell]:
    bell = Doorbell(SHARD, tmp_path)
    yield bell
    bell.close()


@pytest.fixture
def replica(tmp_path: Path) -> Iterator[Doorbell]:
    bell = Doorbell(REPLICA, tmp_path)
    yield bell
    bell.close()


def test_frames_come_in_order_with_their_sender(shard: Doorbell, replica: Doorbell) -> None:
    for number in range(5):
        assert replica.ring(SHARD, b"%d" % number)
    assert [shard.take() for _ in range(5)] == [(REPLICA, b"%d" % number) for number in range(5)]
    assert shard.take() is None
    assert shard.ring(REPLICA, b"answer")
    assert replica.take() == (SHARD, b"answer")


def test_the_longest_frame_arrives_whole_and_a_longer_one_is_refused(shard: Doorbell, replica: Doorbell) -> None:
    assert replica.ring(SHARD, bytes(MAX_BYTES))
    assert not replica.ring(SHARD, bytes(MAX_BYTES + 1))
    assert shard.take() == (REPLICA, bytes(MAX_BYTES))


def test_a_full_queue_is_refused_not_waited_for(shard: Doorbell, replica: Doorbell) -> None:
    rung = 0
    while replica.ring(SHARD, b"push"):
        rung += 1
        assert rung < 10_000
    assert [shard.take() for _ in range(rung + 1)] == [(REPLICA, b"push")] * rung + [None]
    assert replica.ring(SHARD, b"push")


def test_who_is_not_there_or_gone_is_refused(shard: Doorbell, replica: Doorbell) -> None:
    assert not shard.ring(Node("replica", 7), b"anyone?")
    replica.close()
    assert not shard.ring(REPLICA, b"still there?")


@pytest.mark.parametrize("name", [None, "nobody.bell", "replica-x.y.bell"])
def test_strangers_are_not_listened_to(tmp_path: Path, shard: Doorbell, name: str | None) -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as stranger:
        if name is not None:
            stranger.bind(str(tmp_path / name))
        stranger.sendto(b"hello", str(tmp_path / f"{SHARD}.bell"))
    assert shard.take() is None
