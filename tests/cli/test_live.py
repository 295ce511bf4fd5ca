"""`squall train --live` and `squall live`, as users run them."""

import re
import signal
from collections.abc import Iterable
from http.client import HTTPConnection, HTTPResponse
from pathlib import Path
from urllib.parse import urlsplit
from uuid import uuid4

import pytest

from squall.__main__ import main
from squall.record.rows import ProgressRow
from squall.record.writer import Record
from tests.launchers.processes import Started, wait_for
from tests.warm import Warm


def ask(address: str, path: str = "") -> HTTPResponse:
    parts = urlsplit(address)
    connection = HTTPConnection(parts.netloc, timeout=5)
    connection.request("GET", parts.path + path)
    return connection.getresponse()


def answers(address: str) -> bool:
    try:
        return ask(address).status == 200
    except OSError:
        return False


def address_in(lines: Iterable[str]) -> str:
    found = (re.search(r"http://127\.0\.0\.1:\d+/[\w-]+/", line) for line in lines)
    return next(match[0] for match in found if match)


def test_a_run_has_a_page_as_long_as_it_trains(tmp_path: Path) -> None:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", "--epochs", "100000", "--live")
    address = address_in(run.process.stderr)
    wait_for(lambda: answers(address), 10, "the page")
    run.wait_rows(ProgressRow, lambda row: row.replica == 0)
    page = ask(address, "news")
    assert page.readline().startswith(b"data: ")
    run.process.send_signal(signal.SIGINT)
    run.finish()
    assert not answers(address)
    assert run.gone()
    assert [path.name for path in run.directory.glob("run.sqlite*")] == ["run.sqlite"], "one file to copy"


def test_the_page_of_a_run_that_is_over_ends_by_an_interrupt(tmp_path: Path) -> None:
    Record(tmp_path / "run.sqlite").close()
    process = Warm(("live", str(tmp_path)))
    address = address_in(process.stdout)
    wait_for(lambda: answers(address), 10, "the page")
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert (process.returncode, err) == (0, "")


def test_what_is_no_run_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["live", str(tmp_path / "none")]) == 1
    assert "give the folder of a run" in capsys.readouterr().err
