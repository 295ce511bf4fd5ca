"""What the parts of replicas do, as a user reads it: the summary's table, and the page's picture."""

from __future__ import annotations

import sqlite3
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import PartRow
from squall.report import Reader, Summary, summarize
from squall.report.parts import SHOWN, bubble_of
from tests.report.conftest import state, write
from tests.report.test_html import report


def rows(replica: int, piped: bool = True) -> list[PartRow]:
    """Of two reports: the first part computes 3 of 4 s, and the second 2."""
    idle = (1.0, 2.0) if piped else (0.0, 0.0)
    return [
        PartRow(
            second, replica, part, busy / 2, (2 - idle[part] / 2) - busy / 2, idle[part] / 2, 1000 * (part + second)
        )
        for second in (1, 2)
        for part, busy in enumerate((3.0, 2.0))
    ]


def spaced(text: str) -> list[str]:
    """The lines, with one space between words."""
    return [" ".join(line.split()) for line in text.splitlines()]


def summary(path: Path) -> Summary:
    with closing(Reader(path)) as reader:
        return summarize(reader)


def test_a_summary_has_a_line_for_each_part(run_dir: Path) -> None:
    found = summary(write(run_dir / "run.sqlite", [*rows(0), *rows(1), *state(bubble=0.2)]))
    lines = spaced(str(found))
    assert "replica part computing waiting bubble memory" in lines
    assert "0 0 75 % 0 % 25 % 2 kB" in lines
    assert "1 1 50 % 0 % 50 % 3 kB" in lines
    assert "bubble 38 %; equal stages without transfers have 20 %" in lines
    assert max(map(len, str(found).splitlines())) <= 80
    assert bubble_of(found.parts) == pytest.approx((1 + 2) / 8)
    assert found.to_json_dict()["parts"][1]["bubble"] == 0.5


def test_without_a_pipeline_there_is_no_bubble(run_dir: Path) -> None:
    text = str(summary(write(run_dir / "run.sqlite", [*rows(0, piped=False), *state(bubble="")])))
    assert "0 1 50 % 50 % - 3 kB" in spaced(text)
    assert "equal stages" not in text


def test_of_many_parts_some_are_shown(run_dir: Path) -> None:
    found = summary(write(run_dir / "run.sqlite", [row for replica in range(SHOWN) for row in rows(replica)]))
    assert f"{SHOWN} more" in str(found)
    assert len(found.parts) == 2 * SHOWN
    assert f"The first {SHOWN} of {2 * SHOWN}." in report(run_dir).text


def test_the_page_draws_time_and_memory(run_dir: Path) -> None:
    assert "what parts do" not in report(run_dir).text
    write(run_dir / "run.sqlite", [*rows(0), *state(bubble=0.2)])
    page = report(run_dir)
    for text in ("what parts do", "memory of parts", "computing", "bubble", "0, part 1"):
        assert text in page.text
    assert "Bubble: 38 %; equal stages without transfers have 20 %." in page.text
    assert 'class="alert"' not in page.source


def test_a_record_of_before_there_were_parts_is_read(run_dir: Path) -> None:
    with closing(sqlite3.connect(run_dir / "run.sqlite")) as db:
        db.execute("DROP TABLE part")
    assert summary(run_dir / "run.sqlite").parts == []
