"""Deaths in a row, for real: a place is given up before the run is, and no evaluator is a reason to end."""

from __future__ import annotations

import os
from contextlib import closing
from pathlib import Path
from uuid import uuid4

from squall.protocol.replacing import LOST_IN_A_ROW
from squall.record.rows import EventRow, MemberRow, ProgressRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers.processes import Started, wait_for

FILE = Path(__file__).with_name("dying.py")


@deep.only
def test_a_run_outlives_a_place_where_nobody_lives_many_kills_of_the_other_and_every_evaluator(tmp_path: Path) -> None:
    enough, directory = tmp_path / "enough", tmp_path / f"run-{uuid4().hex[:8]}"
    flags = ("--run-dir", str(directory), "--epochs", "12", "--replicas", "2")
    run = Started(directory, "train", str(FILE), *flags, env={**os.environ, "ENOUGH": str(enough)})
    try:
        for kills in range(LOST_IN_A_ROW + 2):  # each when it has trained
            name = f"replica-0.{kills}"
            run.wait_rows(MemberRow, lambda row, name=name: (row.node, row.change) == (name, "joined"))
            seen = len(run.rows(ProgressRow))
            wait_for(lambda seen=seen: len(run.rows(ProgressRow)) > seen, 20, f"{name} to train")
            run.kill("replica 0")
        lost = f"was lost {LOST_IN_A_ROW} times in a row, last: killed by SIGKILL"
        given_up = f"replica 1 {lost}; the others go on without it"
        run.wait_rows(EventRow, lambda row: (row.kind, row.text) == ("warning", given_up))
        enough.touch()
        status, out, err = run.finish()
    finally:
        run.process.kill()
        run.process.communicate()
    assert status == 0, err
    assert "finished: all data is trained" in out
    assert f"warning {given_up}" in err
    assert f"warning evaluator 2 {lost}; the final weights are not evaluated" in err
    with closing(Reader(directory / "run.sqlite")) as reader:
        assert audit(reader).complete
