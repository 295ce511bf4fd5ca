"""What the doctor says of several machines that do not go together."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from squall.doctor import Finding
from squall.launchers.joining.hello import Hello
from squall.survey.messages import Called, Looked
from squall.survey.verdict import checkup_of


class Told:
    """A survey of two machines whose answers are given."""

    def __init__(
        self, *, missing: str = "", refused: list[str] | None = None, clocks: Mapping[int, float] | None = None,
        links: Mapping[tuple[int, int], Called] | None = None, lost: Mapping[int, str] | None = None,
        findings: list[Finding] | None = None,
    ) -> None:  # fmt: skip
        self.machines = {0: None, 1: None}
        self.missing, self.remedy = missing, "call it"
        self.refused, self.lost = refused or [], lost or {}
        self._clocks = clocks or {0: 0.0, 1: 0.1}
        self._links = {(0, 1): Called("", 1e-3, 1e9), (1, 0): Called("", 1e-3, 1e9)} if links is None else links
        self._findings = findings or []

    def gather(self, wait_s: float) -> None:
        pass

    def ask(self, kind: type[Looked], questions: Mapping[int, Any]) -> dict[int, Looked]:
        hello = Hello(squall="1", torch="2", python="3", machine="host", cores=4)
        return {number: Looked(hello, self._findings) for number in questions}

    def clocks(self) -> Mapping[int, float]:
        return self._clocks

    def links(self, seconds: float) -> Mapping[tuple[int, int], Called]:
        return self._links


def told(**found: Any) -> list[Finding]:
    return checkup_of(Told(**found), 0.0)  # type: ignore[arg-type]


def test_all_is_well_in_a_line_a_machine_and_a_link() -> None:
    findings = told(findings=[Finding("memory", True, "8 GiB")])
    assert [finding.name for finding in findings] == ["0: host", "1: host", "0 - 1", "verdict"]
    assert all(finding.ok for finding in findings)
    assert "memory 8 GiB" in findings[0].found


@pytest.mark.parametrize(
    ("found", "name", "ok", "text"),
    [
        ({"missing": "1 of 3 did not come"}, "machines", False, "1 of 3 did not come"),
        ({"refused": ["machine b has torch 2.1"]}, "machines", False, "torch 2.1"),
        ({"lost": {1: "b"}}, "1: b", False, "lost"),
        ({"clocks": {0: 0.0, 1: -90.0}}, "1: host, clock", None, "90 s behind"),
        ({"clocks": {0: 0.0, 1: 4e5}}, "1: host, clock", False, "not valid"),
        ({"findings": [Finding("memory", None, "little", "buy")]}, "0: host, memory", None, "little"),
        ({"links": {(0, 1): Called("timed out"), (1, 0): Called("", 1e-3, 1e9)}}, "0 -> 1", False, "timed out"),
        ({"links": {(0, 1): Called("", 0.1, 1e9), (1, 0): Called("", 0.1, 1e9)}}, "0 - 1", None, "100 ms"),
        ({"links": {(0, 1): Called("", 1e-3, 1e6), (1, 0): Called("", 1e-3, 1e9)}}, "0 - 1", None, "1 MB/s there"),
    ],
)  # fmt: skip
def test_what_falls_short_has_a_line_and_a_remedy(found: dict[str, Any], name: str, ok: bool | None, text: str) -> None:
    findings = told(**found)
    (finding,) = [finding for finding in findings if finding.name == name]
    assert finding.ok is ok
    assert text in finding.found
    assert finding.remedy
    verdict = findings[-1]
    assert verdict.name == "verdict"
    assert verdict.ok is (ok is not False)
