"""Addresses: what is none is refused by its flag's name, and where nothing can be bound the message says why."""

from __future__ import annotations

import re

import pytest

from squall.launchers.joining.address import bound, parse_address, written


@pytest.mark.parametrize("text", ["10.0.0.1:7700", "[::1]:7700", "head.example.org:0"])
def test_an_address_is_read_as_it_is_written(text: str) -> None:
    assert written(parse_address(text, "--listen")) == text


@pytest.mark.parametrize(
    "text", ["", "7700", "10.0.0.1", "10.0.0.1:", ":7700", "h:99999", "::1:7700x", "a@b:1", "h:1/"]
)
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"--listen {text!r} is no HOST:PORT")):
        parse_address(text, "--listen")


def test_an_address_where_nothing_can_listen_is_named_with_the_remedy() -> None:
    with bound(("127.0.0.1", 0)) as taken:
        address = taken.getsockname()
        with pytest.raises(ValueError, match=f"listen 127.0.0.1:{address[1]}: another program listens there: choose"):
            bound(address)
    with pytest.raises(ValueError, match=r"203\.0\.113\.1:7700: this machine has no such address"):
        bound(("203.0.113.1", 7700))
    with pytest.raises(ValueError, match=r"nowhere\.invalid:7700: .*: give an address of this machine"):
        bound(("nowhere.invalid", 7700))
