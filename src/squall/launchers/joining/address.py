"""Where a run listens for machines that join it."""

from __future__ import annotations

import errno
import socket
from urllib.parse import urlsplit

Address = tuple[str, int]  # host and port


def parse_address(text: str, name: str) -> Address:
    """ "10.0.0.1:7700", "[::1]:7700". Raises `ValueError`, which calls the argument by its name."""
    try:
        parts = urlsplit(f"//{text}")
        if parts.netloc == text and parts.hostname and parts.port is not None and parts.username is None:
            return parts.hostname, parts.port
    except ValueError:
        pass
    raise ValueError(f"{name} {text!r} is no HOST:PORT: write an address and a port, such as 10.0.0.1:7700")


def written(address: Address) -> str:
    host, port = address
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def bound(address: Address) -> socket.socket:
    """A socket that listens there. Raises `ValueError` with the remedy."""
    try:
        return socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET)
    except OSError as error:
        remedies = {
            errno.EADDRINUSE: "another program listens there: choose another port, or end it (ss -tlnp shows which)",
            errno.EADDRNOTAVAIL: "this machine has no such address: choose one that `ip address` shows, or 0.0.0.0",
            errno.EACCES: "ports below 1024 are the system's: choose a higher one",
        }  # fmt: skip
        why = remedies.get(error.errno or 0, f"{error.strerror}: give an address of this machine")
        raise ValueError(f"listen {written(address)}: {why}") from None
