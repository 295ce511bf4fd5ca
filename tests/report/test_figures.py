import re
from contextlib import closing
from pathlib import Path

import pytest

from squall.record.rows import MetricRow, Row, StalenessRow
from squall.report import Reader
from squall.report.figures import Chart, charts
from tests.report.conftest import work, write


def drawn(path: Path, rows: list[Row]) -> dict[str, Chart]:
    with closing(Reader(write(path / "run.sqlite", rows))) as reader:
        return {chart.title: chart for chart in charts(reader)}


def lines(chart: Chart) -> dict[str, list[tuple[float, float]]]:
    """The curves of a chart by their colour, as points of the picture."""
    found = {}
    for path in re.findall(r"<path ([^>]*stroke: var\(--series[^>]*)>", chart.svg):
        color = re.search(r"--(series-\d)", path)
        points = re.findall(r"[ML] ([\d.]+) ([\d.]+)", path)
        if color and len(points) > 3:  # a legend draws its handles with three
            found[color[1]] = [(float(x), float(y)) for x, y in points]
    return found


def test_an_empty_run_has_notes_in_place_of_pictures(tmp_path: Path) -> None:
    found = drawn(tmp_path, [])
    assert list(found) == ["loss over time", "metrics", "examples per second", "staleness of pushes"]
    assert all(chart.svg == "" and chart.note for chart in found.values())


def test_a_steady_replica_is_a_level_line(tmp_path: Path) -> None:
    # 0.7 s between reports fits no bin of the chart: counting naively would draw a saw.
    rows: list[Row] = [work(0.7 * (i + 1), 0, 70) for i in range(100)]
    (line,) = lines(drawn(tmp_path, rows)["examples per second"]).values()
    heights = [y for _, y in line]
    assert max(heights) - min(heights) < 0.5


def test_a_lost_replica_falls_to_the_ground(tmp_path: Path) -> None:
    rows: list[Row] = [work(float(t), r, 100) for t in range(1, 101) for r in (0, 1) if r == 0 or t <= 50]
    found = lines(drawn(tmp_path, rows)["examples per second"])
    ground = max(y for line in found.values() for _, y in line)
    assert found["series-1"][-1][1] == ground
    assert found["series-0"][-1][1] < ground - 50


def test_falling_loss_falls_on_the_page(tmp_path: Path) -> None:
    rows: list[Row] = [work(float(t), r, 100, 1000.0 / t**2) for t in range(1, 51) for r in (0, 1)]
    rows += [MetricRow(float(t), 0, t, t, "loss", 2000.0 / t**2) for t in (10, 20, 30, 40)]
    chart = drawn(tmp_path, rows)["loss over time"]
    for line in lines(chart).values():
        assert [y for _, y in line] == sorted(y for _, y in line)
    assert "mathdefault" not in chart.svg
    assert ">training<" in chart.svg
    assert ">validation<" in chart.svg


@pytest.mark.parametrize(("duration_s", "unit"), [(60, "seconds"), (3000, "minutes"), (40_000, "hours")])
def test_time_is_told_in_a_fitting_unit(tmp_path: Path, duration_s: int, unit: str) -> None:
    rows: list[Row] = [MetricRow(duration_s * i / 5, 0, i, i, "accuracy", i / 5) for i in range(6)]
    assert f">{unit}<" in drawn(tmp_path, rows)["accuracy over time"].svg


def test_one_result_is_a_dot_and_names_are_not_formulas(tmp_path: Path) -> None:
    chart = drawn(tmp_path, [MetricRow(1.0, 0, 1, 1, r"cost in $ or \$", 0.5)])[r"cost in $ or \$ over time"]
    assert "<use" in chart.svg


def test_staleness_has_a_row_for_each_replica(tmp_path: Path) -> None:
    rows: list[Row] = [StalenessRow(1.0, r, s, 5) for r in range(3) for s in range(4)]
    svg = drawn(tmp_path, rows)["staleness of pushes"].svg
    assert [f"replica {r}" in svg for r in range(4)] == [True, True, True, False]
    assert len(re.findall(r"fill: var\(--series-\d\)", svg)) == 12
