"""What processes do, as a terminal tells it."""

import pytest

from squall.record.rows import ActivityRow
from squall.report.activity import NOW_S, Activity


def row(time_s: float, compute_s: float = 0.0, wait_s: float = 0.0, awaited: str = "") -> ActivityRow:
    return ActivityRow(time_s, 0, "replica-1.2", 0.25, compute_s, 0.0, 0.0, wait_s, awaited, wait_s, 0)


@pytest.mark.parametrize(
    ("rows", "words"),
    [
        ([row(1.0)], "rests"),
        ([row(1.0, 0.2)], "computing 80 %"),
        ([row(1.0, 0.15, 0.1, "shard 0")], "computing 60 %, waiting 40 % for shard 0"),
        ([row(1.0, 0.05, 0.2, "coordinator 0")], "waiting 80 % for coordinator"),
        ([row(1.0, 0.05, 0.2, "shard 0")], "waiting 80 % for shard 0"),
        ([row(1.0, 0.0, 0.1, "shard 0"), row(1.25, 0.0, 0.15, "shard 1")], "waiting 50 % for shard 1"),
        ([row(1.0, 0.25), row(1.5 + NOW_S, 0.0, 0.25, "shard 0")], "waiting 100 % for shard 0"),
    ],
)
def test_what_takes_most_of_the_time_lately_is_told_and_for_whom_it_waits(rows: list[ActivityRow], words: str) -> None:
    activity = Activity()
    for each in rows:
        activity.take(each)
    assert activity.now("replica 1") == words
    assert activity.now("replica 0") == ""
