"""The page is served to who has the link, by this machine alone."""

import json
import logging
import threading
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from squall.live import server
from squall.live.server import HOST, bound, link, new_token, serve
from tests.live.test_feed import write


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("live") / "my-run"
    directory.mkdir()
    write(directory / "run.sqlite", 3)
    listener, token = bound(server.PORT), new_token()
    threading.Thread(target=serve, args=(directory, listener, token), daemon=True).start()
    return link(listener, token)


def ask(address: str, path: str = "", method: str = "GET", **headers: str) -> HTTPResponse:
    parts = urlsplit(address)
    connection = HTTPConnection(parts.netloc, timeout=10)
    connection.request(method, parts.path + path, headers=headers)
    return connection.getresponse()


@pytest.mark.parametrize(
    ("path", "kind"),
    [("", "text/html"), ("page.js", "text/javascript"), ("page.css", "text/css"), ("uplot.min.js", "text/javascript")],
)
def test_all_that_the_page_needs_comes_from_here(address: str, path: str, kind: str) -> None:
    answer = ask(address, path)
    assert (answer.status, answer.headers.get_content_type()) == (200, kind)
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert answer.headers["referrer-policy"] == "no-referrer"
    assert b"//" not in answer.read() or path.endswith(".js") or path == "page.css"


@pytest.mark.parametrize("path", ["", "news", "page.js", "activity"])
def test_nothing_is_served_without_the_token(address: str, path: str) -> None:
    host = f"http://{urlsplit(address).netloc}/"
    assert ask(host, path).status == 404
    assert ask(host, f"{new_token()}/{path}").status == 404
    assert ask(address, path, Host="elsewhere.example").status == 400  # a name that leads here by somebody's DNS


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE"])
def test_nothing_can_be_changed(address: str, method: str) -> None:
    for path in ("", "news", "activity", "page.js"):
        assert ask(address, path, method).status == 405


def test_no_file_beside_the_page_is_served(address: str) -> None:
    for path in ("../server.py", "%2e%2e/server.py", "..%2f..%2frun.sqlite"):
        assert ask(address, path).status == 404


def test_news_are_events_of_json(address: str) -> None:
    answer = ask(address, "news")
    assert answer.headers.get_content_type() == "text/event-stream"
    line = answer.readline()
    assert line.startswith(b"data: ")
    assert json.loads(line[6:])["name"] == "my-run"
    answer.close()


def test_handlers_of_others_logging_stay_open(tmp_path: Path) -> None:
    closed = threading.Event()

    class Handler(logging.Handler):
        def close(self) -> None:
            closed.set()
            super().close()

    handler = Handler()
    listener, token = bound(server.PORT), new_token()
    threading.Thread(target=serve, args=(tmp_path, listener, token), daemon=True).start()
    assert ask(link(listener, token), "page.js").status == 200
    assert not closed.is_set()
    handler.close()


def test_a_port_that_is_in_use_is_followed_by_the_next() -> None:
    with bound(server.PORT + 20) as first, bound(first.getsockname()[1]) as second:
        assert second.getsockname()[1] > first.getsockname()[1]
        assert first.getsockname()[0] == second.getsockname()[0] == HOST


@pytest.mark.parametrize("port", [-1, 1 << 16])
def test_what_is_no_port_is_refused(port: int) -> None:
    with pytest.raises(ValueError, match=f"port is {port}: it must be from 0 to 65535"):
        bound(port)


def test_before_there_is_a_record_the_page_is_told_to_ask_again(tmp_path: Path) -> None:
    listener, token = bound(server.PORT), new_token()
    threading.Thread(target=serve, args=(tmp_path, listener, token), daemon=True).start()
    address = link(listener, token)
    assert ask(address, "activity").status == 503
    news = ask(address, "news")
    assert news.readline() == b": not yet\n"
    news.close()


def test_a_record_that_cannot_be_read_ends_the_news(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").write_text("this is no record" * 100)
    listener, token = bound(server.PORT), new_token()
    threading.Thread(target=serve, args=(tmp_path, listener, token), daemon=True).start()
    assert ask(link(listener, token), "news").read() == b""
    assert ask(link(listener, token), "activity").status == 503


def test_where_no_port_is_free_the_remedy_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    with bound(server.PORT + 20) as taken:
        monkeypatch.setattr(server, "PORTS", 1)
        with pytest.raises(ValueError, match="--port"):
            bound(taken.getsockname()[1])
