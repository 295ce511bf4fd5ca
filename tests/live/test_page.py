"""The page in a real browser."""

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from squall.live.server import bound, link, new_token, serve
from squall.record.rows import (
    ActivityRow,
    EventRow,
    LeaseRow,
    MemberRow,
    MetricRow,
    PartRow,
    ProgressRow,
    StalenessRow,
    StateRow,
)
from squall.record.writer import Record
from tests.live.browser import CHROMIUM, DRIVER, Browser, browser

pytestmark = pytest.mark.skipif(
    not (CHROMIUM and DRIVER), reason="there is no Chromium: apt-get install chromium chromium-driver"
)
PIXELS = """
const canvas = document.querySelector('#timeline canvas'), pen = canvas.getContext('2d')
const data = pen.getImageData(0, 0, canvas.width, canvas.height).data, found = {}
for (let i = 0; i < data.length; i += 4) {
  const key = [data[i], data[i + 1], data[i + 2]].join(' ')
  if (data[i + 3] === 255) found[key] = (found[key] ?? 0) + 1
}
return found
"""
COMPUTING, WAITING = "47 158 110", "229 72 77"


@pytest.fixture(scope="module")
def page() -> Iterator[Browser]:
    with browser() as made:
        yield made


def begin(directory: Path, replicas: int, seconds: float = 12.0) -> None:
    """The first replica computes all of the time, and the others wait for three quarters of it."""
    with closing(Record(directory / "run.sqlite")) as record:
        for key, value in {"status": "running", "strategy": "synchronous", "replicas": str(replicas), "shards": "2",
                           "epochs": "5", "examples_per_epoch": "100000"}.items():  # fmt: skip
            record.add(StateRow(key, value))
        for replica in range(replicas):
            record.add(MemberRow(f"replica-{replica}.0", 100 + replica, 0.0, "joined", ""))
        for quarter in range(1, round(4 * seconds)):
            add_work(record, quarter / 4, replicas)
        record.add(MetricRow(3.0, 0, 1000, 10, "accuracy", 0.875))
        record.add(EventRow(2.0, "warning", "<b>something</b> & more"))


def add_work(record: Record, at: float, replicas: int) -> None:
    for replica in range(replicas):
        waits = 0.1875 if replica else 0.0
        record.add(ProgressRow(at, replica, 32, 1, 1 / at, 0.25 - waits, waits, 10**6, 10**6, round(4 * at)))
        record.add(StalenessRow(at, replica, replica % 3, 2))
        awaited = "shard 0" if replica else ""
        record.add(ActivityRow(
            at, 0, f"replica-{replica}.0", 0.25, 0.25 - waits, 0, 0, waits, awaited, waits, 10**7
        ))  # fmt: skip
    for shard in range(2):
        record.add(ActivityRow(at, 0, f"shard-{shard}.0", 0.25, 0, 0.05, 0.02, 0.1, "replica 1", 0.1, 10**6))


@pytest.fixture
def shown(tmp_path: Path, page: Browser) -> Any:
    def show(replicas: int, width: int = 1300) -> Path:
        directory = tmp_path / "a run"
        directory.mkdir()
        begin(directory, replicas)
        listener, token = bound(7880), new_token()
        Thread(target=serve, args=(directory, listener, token), daemon=True).start()
        page.open(link(listener, token), width)
        page.wait("return document.querySelectorAll('#replicas tr').length", lambda rows: rows == replicas + 1)
        return directory

    return show


@pytest.mark.parametrize("replicas", [2, 8, 64])
def test_the_page_shows_who_computes_and_who_waits(page: Browser, shown: Any, replicas: int) -> None:
    shown(replicas)
    pixels = page.says(PIXELS)
    assert pixels[COMPUTING] > 1000
    assert pixels[WAITING] > 1000
    text = page.says("return document.body.innerText")
    for words in ("a run", "synchronous", "0.875", "waiting 75 % for shard 0", "<b>something</b> & more"):
        assert words in text
    assert page.says("return document.querySelectorAll('.u-wrap canvas').length") >= 5
    assert page.says("return document.body.scrollWidth <= innerWidth")
    fetched = page.says("return performance.getEntriesByType('resource').map(each => new URL(each.name).origin)")
    assert len(fetched) > 4
    assert set(fetched) == {page.says("return location.origin")}, "nothing comes from elsewhere"
    assert page.log() == []


def test_what_is_new_is_shown_and_a_death_and_the_end(page: Browser, shown: Any) -> None:
    directory = shown(2)
    with closing(Record(directory / "run.sqlite")) as record:
        add_work(record, 13.0, 2)
        record.add(MemberRow("replica-1.0", 101, 13.0, "lost", "replica 1: killed by SIGKILL"))
        record.add(EventRow(13.0, "lost", "replica 1: killed by SIGKILL"))
        record.commit(0.0)
        page.wait("return document.body.innerText", lambda text: text.count("replica 1: killed by SIGKILL") == 1)
        assert "dead" in page.says("return document.querySelector('#replicas').innerText")
        record.add(MemberRow("replica-1.1", 102, 13.5, "joined", ""))
        add_work(record, 13.75, 1)
        record.add(StateRow("status", "finished"))
        record.add(StateRow("reason", "all data is trained"))
    page.wait(
        "return document.getElementById('status').innerText",
        lambda text: text == "finished after 14 s: all data is trained",
    )
    assert "dead" not in page.says("return document.querySelector('#replicas').innerText")


def test_the_whole_run_can_be_looked_at_and_a_process_at_a_moment(page: Browser, shown: Any) -> None:
    directory = shown(2)
    page.says("const box = document.getElementById('window'); box.value = '0'; box.dispatchEvent(new Event('change'))")
    page.wait(PIXELS, lambda pixels: pixels.get(COMPUTING, 0) > 1000)
    page.says(
        """const canvas = document.querySelector('#timeline canvas'), box = canvas.getBoundingClientRect()
        const at = { clientX: box.x + 300, clientY: box.y + 52, bubbles: true }
        canvas.dispatchEvent(new MouseEvent('mousemove', at))"""
    )
    tip = page.wait("return document.getElementById('tip').innerText")
    assert tip.startswith("replica 1, ")
    assert "75 % waiting\n75 % for shard 0" in tip
    with closing(Record(directory / "run.sqlite")) as record:
        for quarter in range(60, 80):
            record.add(ProgressRow(quarter / 4, 1, 32, 1, 0.5, 0.25, 0, 10**6, 10**6, quarter))
            record.add(ActivityRow(quarter / 4, 0, "replica-1.0", 0.25, 0, 0.25, 0, 0, "", 0, 10**7))
        record.add(StateRow("status", "finished"))
    page.wait(
        """const canvas = document.querySelector('#timeline canvas'), box = canvas.getBoundingClientRect()
        const at = { clientX: box.right - 76 - 280 - 5, clientY: box.y + 52, bubbles: true }
        canvas.dispatchEvent(new MouseEvent('mousemove', at))
        return document.getElementById('tip').innerText""",
        lambda tip: tip == "replica 1, 20 s\n100 % applying",
    )


def test_reports_that_come_together_lie_one_behind_the_other(page: Browser, shown: Any) -> None:
    shown(2)
    ends = page.says(
        """const { endsOf } = await import('./timeline.js')
        return endsOf([[1, 0.25], [2, 0.25], [2, 0.25], [2.125, 0.25], [2.5, 0.25]]
          .map(([time_s, seconds]) => ({ time_s, seconds })))"""
    )
    assert ends == [1, 1.625, 1.875, 2.125, 2.5]


def test_parts_and_machines_have_rows(page: Browser, shown: Any) -> None:
    directory = shown(2)
    with closing(Record(directory / "run.sqlite")) as record:
        for part in range(2):
            record.add(PartRow(12.5, 0, part, 0.1, 0.1, 0.05, 10**6))
        record.add(ActivityRow(12.5, 1, "replica-1.1", 0.25, 0.25, 0, 0, 0, "", 0, 10**7))
    page.wait(PIXELS, lambda pixels: pixels.get("242 169 59", 0) > 20)  # a part without a microbatch


@pytest.mark.parametrize(
    ("facts", "told"),
    [
        ({"epochs": "5", "examples_per_epoch": "1000"}, "epoch 3 of 5, 12 s, 7.8 s left"),
        ({"epochs": "", "steps": "188"}, "step 94 of 188, 12 s, 12 s left"),
        ({"epochs": "", "steps": ""}, "step 94, 12 s"),
        ({"epochs": "", "seconds": "20"}, "12 s of 20 s, 8.3 s left"),
        ({"epochs": "1", "optimizer": "", "examples_per_epoch": "10000", "found": "4000"},
         "example 7,008 of 10,000, 12 s, 5.0 s left"),
    ],
)  # fmt: skip
def test_how_far_a_run_is_is_told_of_what_ends_it(facts: dict[str, str], told: str, page: Browser, shown: Any) -> None:
    directory = shown(2)
    with closing(Record(directory / "run.sqlite")) as record:
        for key, value in facts.items():
            record.add(StateRow(key, value))
    page.wait("return document.getElementById('status').innerText", lambda text: text == told)
    cards = page.says("return document.getElementById('cards').innerText")
    assert ("training loss" in cards) == ("optimizer" not in facts), "what only answers has no loss"


def test_an_epoch_is_a_strip_of_what_is_trained_held_and_left(page: Browser, shown: Any) -> None:
    directory = shown(2)
    assert page.says("return document.getElementById('data').hidden")
    with closing(Record(directory / "run.sqlite")) as record:
        record.add(LeaseRow(0, 0, 0, 25_000, 0, 0, 0.0, 1.0, 25_000))
        record.add(LeaseRow(2, 0, 50_000, 75_000, 1, 0, 0.0, 2.0, 75_000))
    pieces = page.wait(
        "return [...document.querySelectorAll('#epochs i')].map(i => [i.className, i.style.left, i.style.width])"
    )
    assert pieces == [["dealt", "0%", "75%"], ["done", "0%", "25%"], ["done", "50%", "25%"]]
    assert "50 % done, 25 % left" in page.says("return document.getElementById('epochs').innerText")
    assert "50,000 examples" in page.says("return document.getElementById('leases').innerText")


def test_who_has_not_reported_for_long_is_told(page: Browser, shown: Any) -> None:
    """A process that was stopped seems to go on with what it did."""
    directory = shown(2)
    with closing(Record(directory / "run.sqlite")) as record:
        for tick in range(1, 42):
            at = 11.75 + tick / 4
            record.add(ProgressRow(at, 0, 32, 1, 0.5, 0.25, 0.0, 0, 0, 100))
            record.add(ActivityRow(at, 0, "replica-1.0", 0.25, 0.25, 0, 0, 0, "", 0, 10**7))
            record.add(ActivityRow(at, 0, "replica-0.0", 0.25, 0.25, 0, 0, 0, "", 0, 10**7))
    said = "return [...document.querySelectorAll('#replicas td:nth-child(2)')].map(cell => cell.innerText)"
    page.wait(said, lambda told: told == ["computing 100 %", "no report for 10 s, computing 100 %"])


def test_in_a_sum_of_all_the_last_one_is_waited_for(page: Browser, shown: Any) -> None:
    """Nobody tells of whom: who waits least is who comes last."""
    directory = shown(3)
    with closing(Record(directory / "run.sqlite")) as record:
        record.add(StateRow("strategy", "all_reduce"))
        for replica, wait_s in enumerate((0.2, 0.05, 0.25)):
            spent = ActivityRow(20.0, 0, f"replica-{replica}.0", 0.25, 0.25 - wait_s, 0, 0, wait_s, "", 0, 10**7)
            record.add(spent)
    told = page.wait(
        "return [...document.querySelectorAll('#replicas td:nth-child(2)')].map(cell => cell.innerText)",
        lambda told: told[:1] == ["waiting 80 % for replica 1"],
    )
    assert told[1:] == ["computing 80 %", "waiting 100 % for replica 1"]


def test_bytes_are_told_by_link(page: Browser, shown: Any) -> None:
    """A shard of a quarter of the model has a quarter of what a replica exchanges."""
    directory = shown(2)
    assert page.says("return [...document.querySelectorAll('#charts > figure')].every(figure => figure.hidden)")
    with closing(Record(directory / "run.sqlite")) as record:
        record.add(StateRow("shard_bytes", "[100, 300]"))
        record.add(StateRow("links", "[[0, 1, 5000000], [1, 0, 7000000]]"))
        record.commit(0.0)
        cells = "return [...document.querySelectorAll('#{}-links td')].map(cell => cell.innerText)"
        assert page.wait(cells.format("machine")) == ["0", "", "5.0 MB", "1", "7.0 MB", ""]
        add_work(record, 13.0, 2)  # now there are 48 reports of 2 MB each
        record.add(StateRow("links", "[[0, 1, 6000000], [1, 0, 7000000]]"))
        record.commit(1.0)
        told = page.wait(cells.format("shard"), lambda cells: cells[:2] == ["0", "24.0 MB, 1.8 MB/s"])
        assert told[2] == "72.0 MB, 5.4 MB/s"
        assert page.wait(cells.format("machine"))[2] == "6.0 MB, 800 kB/s"
        record.add(StateRow("status", "finished"))
    assert page.wait(cells.format("shard"), lambda cells: cells[1] == "24.0 MB")


def test_clocks_are_compared_as_they_were_told_by_the_same_time(page: Browser, shown: Any) -> None:
    shown(2)
    assert set(page.says("const { Run } = await import('./model.js'), run = new Run();" + LOCK_STEP)) == {0}


LOCK_STEP = """
const columns = { progress: ['time_s', 'replica', 'examples', 'loss', 'pushed_bytes', 'fetched_bytes', 'clock'] }
for (let tick = 1; tick < 20; tick++) {
  const progress = [0, 1, 2].map(replica => [tick + replica / 100, replica, 32, 1, 0, 0, tick])
  run.take({ columns, rows: { progress } })
}
return run.curves.slowest.y
"""


def test_an_hour_takes_no_more_memory_than_a_minute(page: Browser, shown: Any) -> None:
    """The page's own model, fed with what four reports a second are."""
    shown(2)
    script = """
    const { Run } = await import('./model.js'), run = new Run()
    const columns = { progress: ['time_s', 'replica', 'examples', 'loss', 'compute_s', 'wait_s', 'pushed_bytes',
      'fetched_bytes', 'clock'], staleness: ['time_s', 'replica', 'staleness', 'count'],
      activity: ['time_s', 'node', 'machine', 'seconds', 'compute_s', 'wait_s', 'awaited', 'awaited_s', 'memory'],
      event: ['time_s', 'kind', 'text'], metric: ['time_s', 'name', 'value'], state: ['key', 'value'] }
    const held = () => { // numbers and rows that are kept
      let count = 0
      const look = value => {
        if (value === null || typeof value !== 'object') { count += 1; return }
        for (const each of value instanceof Map ? value.values() : Object.values(value)) look(each)
      }
      look(run)
      return count
    }
    const found = []
    for (let tick = 1; tick <= 4 * 3600; tick++) {
      const at = tick / 4, rows = { progress: [], staleness: [], activity: [], event: [[at, 'snapshot', 'one']],
        metric: [[at, 'loss', 1]], state: [['links', `[[0, 1, ${tick}], [1, 0, ${tick}]]`]] }
      for (let replica = 0; replica < 4; replica++) {
        rows.progress.push([at, replica, 32, 1, 0.1, 0.1, 9, 9, tick])
        rows.staleness.push([at, replica, tick % 5, 1])
        rows.activity.push([at, `replica-${replica}.0`, 0, 0.25, 0.1, 0.1, 'shard 0', 0.1, 100])
      }
      run.take({ columns, rows })
      if (tick % (4 * 300) === 0) found.push(held())
    }
    return found
    """
    held = page.says(script)
    assert len(held) == 12
    assert max(held) < 1.3 * held[0]  # after five minutes all that is kept is full


def test_of_a_prediction_nothing_is_told_that_only_training_has(tmp_path: Path, page: Browser) -> None:
    facts = {"status": "running", "strategy": "Prediction", "optimizer": "", "epochs": "1", "replicas": "2",
             "found": "500", "examples_per_epoch": "1000"}  # fmt: skip
    with closing(Record(tmp_path / "run.sqlite")) as record:
        for key, value in facts.items():
            record.add(StateRow(key, value))
        for second in range(1, 9):
            record.add(ProgressRow(float(second), second % 2, 32, 1, math.nan, 0.9, 0.1, 0, 0))
    listener, token = bound(7880), new_token()
    Thread(target=serve, args=(tmp_path, listener, token), daemon=True).start()
    page.open(link(listener, token), 1300)
    page.wait("return document.querySelectorAll('#replicas tr').length", lambda rows: rows == 3)
    assert page.says("return document.querySelector('#status').textContent").startswith("example 756 of 1,000, 8 s")
    shown = page.says("return document.querySelector('body').innerText")
    assert "examples/s" in shown
    for word in ("loss", "staleness", "exchanged", "clock", "pushes", "Bytes a second"):
        assert word not in shown, word
