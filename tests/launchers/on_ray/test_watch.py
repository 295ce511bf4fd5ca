"""Whether a Ray is still there."""

from __future__ import annotations

import socket

from squall.launchers.on_ray.watch import LOOK_EVERY_S, Watch


def test_a_server_that_is_silent_for_too_long_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as other, socket.create_server(("127.0.0.1", 0)) as server:
        host, port = server.getsockname()
        watch = Watch({"raylet": other.getsockname(), "store": (host, port)}, patience_s=5.0)
        assert watch.gone(0.0) == watch.silent() == ""
        server.close()
        assert watch.silent() == f"its store does not answer at {host}:{port}"
        assert watch.gone(LOOK_EVERY_S / 2) == "", "it looks now and then"
        assert watch.gone(10.0) == "", "it may be started again"
        assert watch.gone(14.0) == ""
        assert watch.gone(15.0) == f"Ray is gone: its store does not answer at {host}:{port}"
        with socket.create_server((host, port)):
            assert watch.gone(20.0) == watch.silent() == ""
        assert watch.gone(25.0) == "", "the time counts anew"
        assert watch.gone(30.0)


def test_where_nothing_is_known_of_servers_nothing_is_missed() -> None:
    assert Watch({}, 0.0).gone(100.0) == ""
