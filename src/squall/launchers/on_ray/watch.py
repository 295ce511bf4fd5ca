"""Whether the Ray that provides a run's machines is still there: what one is asked that is gone waits for a minute."""

from __future__ import annotations

import socket

from squall.launchers.joining.address import Address, written

LOOK_EVERY_S = 1.0
CALL_S = 1.0  # that it has to take a call


class Watch:
    """Calls the servers of a Ray now and then."""

    def __init__(self, servers: dict[str, Address], patience_s: float) -> None:
        """`servers` by their names; `patience_s` is how long one may be silent."""
        self._servers = servers
        self._patience_s = patience_s
        self._look_at = 0.0
        self._since: float | None = None  # when one of them was first found silent

    def silent(self) -> str:
        """Calls them: which does not answer, and where; "" if all do."""
        for name, address in self._servers.items():
            try:
                socket.create_connection(address, CALL_S).close()
            except OSError:
                return f"its {name} does not answer at {written(address)}"
        return ""

    def gone(self, now: float) -> str:
        """Why Ray is gone, in words; "" while it may be there."""
        if now < self._look_at:
            return ""
        self._look_at = now + LOOK_EVERY_S
        silent = self.silent()
        if not silent:
            self._since = None
        elif self._since is None:
            self._since = now
        late = self._since is not None and now >= self._since + self._patience_s
        return f"Ray is gone: {silent}" if late else ""
