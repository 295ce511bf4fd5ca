"""What a nursery is told before its processes begin."""

from __future__ import annotations

import pytest

from squall.errors import SquallError
from squall.launchers.orders import _addresses
from squall.protocol.nodes import COORDINATOR, Node


def test_addresses_are_numbers_when_processes_dial() -> None:
    told = {"coordinator-0.0": ("", 7), "shard-0.0": ("127.0.0.2", 8)}
    found = _addresses(told, "localhost")
    assert found[COORDINATOR] in (("127.0.0.1", 7), ("::1", 7))
    assert found[Node("shard")] == ("127.0.0.2", 8)


@pytest.mark.parametrize("host", ["nowhere.invalid", "a..b"])
def test_an_address_that_is_not_known_here_ends_the_launch_with_the_remedy(host: str) -> None:
    with pytest.raises(SquallError, match=f"{host}.*--address"):
        _addresses({"shard-0.0": (host, 7)}, "localhost")
