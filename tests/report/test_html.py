import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path

import pytest

from squall.record.rows import EventRow, MemberRow, MetricRow, Row, StalenessRow
from squall.report import write_report
from tests.report.conftest import state, work, write

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are balanced, and keeps the text, the tags, the ids and what they refer to."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.source = path.read_text(encoding="utf-8")
        self.open: list[str] = []
        self.words: list[str] = []
        self.tags: list[str] = []
        self.ids: list[str] = []
        self.references: list[str] = []
        self.feed(self.source)
        self.close()
        assert self.open == []
        self.text = " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.ids += [value or "" for name, value in attrs if name == "id"]
        for name, value in attrs:
            self.references += re.findall(r"#(\w+)", value or "") if name in ("href", "clip-path") else []
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag not in VOID:
            self.handle_starttag(tag, attrs)
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.words.append(data)


def report(folder: Path) -> Page:
    return Page(write_report(folder))


def test_a_finished_run_is_told_whole(run_dir: Path) -> None:
    page = report(run_dir)
    assert "accuracy 0.875 last validation" in page.text
    assert "training time 10.0 s first step after 1.5 s" in page.text
    assert "examples/s 200 2,000 examples in 40 updates" in page.text
    assert "mean staleness 0.75 3 at most" in page.text
    titles = ("loss over time", "accuracy over time", "accuracy over examples", "examples per second")
    for title in (*titles, "staleness of pushes"):
        assert title in page.text
    assert page.tags.count("svg") == 5
    assert "6.0 s lost replica-1, process 12: killed by SIGKILL" in page.text
    assert "Epochs 0 to 1: each of 1,000 examples trained exactly once." in page.text
    assert "strategy.replicas 2" in page.text
    assert "torch 2.13.0" in page.text
    assert "seed 7" in page.text
    assert 'class="alert"' not in page.source


def test_machines_are_told_with_what_ran_there_and_what_they_sent(run_dir: Path) -> None:
    assert "Machines" not in report(run_dir).text
    why, first = "replicas by cores", [0, "a", "2 cores", "coordinator, replica 0"]
    inventory = {"why": why, "machines": [first, [1, "<b>", "8 cores, 1 GPU", "shard 0, replica 1"]]}
    traffic = {"0": [1500, 64_000_000], "1": [64_000_000, 1500], "2": [7, 8]}
    write(run_dir / "run.sqlite", state(inventory=json.dumps(inventory), traffic=json.dumps(traffic)))
    page = report(run_dir)
    assert (
        "machine name has ran there at the last beginning sent received 0 a 2 cores coordinator, replica 0 1.5 kB 64 MB"
        in page.text
    )
    assert "1 <b> 8 cores, 1 GPU shard 0, replica 1 64 MB 1.5 kB" in page.text
    assert "2 nothing 7 B 8 B" in page.text
    assert "What runs where: replicas by cores." in page.text
    assert "bytes received by machine" in page.text


def test_the_page_needs_nothing_but_itself(run_dir: Path) -> None:
    page = report(run_dir)
    assert "http" not in page.source
    assert not {"script", "link", "img", "iframe"} & set(page.tags)
    assert len(page.ids) == len(set(page.ids)), "charts do not share ids"
    assert set(page.references) <= set(page.ids)
    assert "#0102" not in page.source, "every stand-in colour became a variable of the page"
    assert set(re.findall(r"var\(--([\w-]+)\)", page.source)) <= set(re.findall(r"--([\w-]+):", page.source))


def test_it_is_the_same_page_every_time(run_dir: Path) -> None:
    assert report(run_dir).source == report(run_dir).source
    assert sorted(file.name for file in run_dir.glob("report*")) == ["report.html"]


def test_text_of_others_is_escaped(run_dir: Path) -> None:
    evil = "<script>alert('x')</script> & $x_1$ \\1"
    rows: list[Row] = [EventRow(1.0, evil, evil), MemberRow(evil, 1, 1.0, evil, evil)]
    rows += [MetricRow(t, 0, 1, 1, evil, 0.5) for t in (1.0, 2.0)]
    write(run_dir / "run.sqlite", [*rows, *state(strategy=evil, status=evil)])
    (run_dir / "run.json").write_text(json.dumps({evil: {evil: evil}, "plan": [evil]}))
    page = report(run_dir)
    assert "script" not in page.tags
    assert evil in page.text


def test_a_folder_without_anything_says_what_is_missing(tmp_path: Path) -> None:
    page = report(tmp_path)
    assert "run.json is missing" in page.text
    assert "no record at" in page.text
    with pytest.raises(ValueError, match="give the folder of a run"):
        write_report(tmp_path / "nowhere")


@pytest.mark.parametrize("content", ["", "{", "[1]", "\0\0", "3"])
def test_half_written_settings_do_no_harm(run_dir: Path, content: str) -> None:
    (run_dir / "run.json").write_text(content)
    page = report(run_dir)
    assert "the plan and the versions are not known" in page.text
    assert page.tags.count("svg") == 5


def test_a_record_without_rows_says_so(tmp_path: Path) -> None:
    (tmp_path / "run.sqlite").touch()
    page = report(tmp_path)
    for sentence in ("The record is empty", "No example has been trained.", "There is no validation result."):
        assert sentence in page.text
    assert "No loss was recorded." in page.text
    assert "No lease has ended yet" in page.text


def test_a_damaged_record_is_told(run_dir: Path) -> None:
    record = run_dir / "run.sqlite"
    record.write_bytes(record.read_bytes()[:4096] + b"\xff" * 8192)
    page = report(run_dir)
    assert "Nothing of the training is known" in page.text
    assert "torch 2.13.0" in page.text


def test_a_run_under_way_says_so(tmp_path: Path) -> None:
    write(tmp_path / "run.sqlite", [*state(status="training"), work(0.0, 0, 64)])
    assert "its status was: training" in report(tmp_path).text


def test_values_that_are_not_finite_leave_the_curves(tmp_path: Path) -> None:
    rows: list[Row] = [work(t, 0, 64, math.nan) for t in (1.0, 2.0)]
    rows += [MetricRow(t, 0, 64, 1, "loss", value) for t, value in ((1.0, math.inf), (2.0, 0.5), (3.0, math.nan))]
    write(tmp_path / "run.sqlite", rows)
    page = report(tmp_path)
    assert "Not drawn because not finite: 2 values." in page.text
    assert "loss nan" in page.text


def test_many_replicas_and_wide_staleness_keep_the_page_small(tmp_path: Path) -> None:
    rows: list[Row] = [work(float(t), r, 64, 1 / t) for t in range(1, 20) for r in range(64)]
    rows += [StalenessRow(1.0, r, s * s, 1) for r in range(64) for s in range(30)]
    rows += [MemberRow(f"replica-{r}", r, 0.0, "joined", "") for r in range(500)]
    write(tmp_path / "run.sqlite", rows)
    page = report(tmp_path)
    assert "64 replicas, one line each." in page.text
    assert "the others" in page.text
    assert "The first 200 are left out." in page.text
    assert len(page.source) < 500_000
