"""A nursery looks at its processes, and tells no more while nobody hears it."""

from __future__ import annotations

import os
import signal
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from squall import Downpour, Settings
from squall.launchers.lookout import DIES_WITHIN, LOOK_EVERY_S, UNHEARD_AT_MOST, Lookout
from squall.plan import make_plan
from squall.protocol.events import ActivitySeen, ProcessesSeen
from squall.protocol.nodes import Node
from squall.runtime.board import Board, Doing
from squall.runtime.job import private_job
from squall.vector import Layout
from tests.tasks import regression


def test_what_nobody_hears_is_told_later_at_once() -> None:
    node, lookout = Node("replica", 0), Lookout()
    lookout._board = Board(replicas=1, shards=0, now=0.0)
    lookout._board.entry(node, 0.0)
    child: Any = SimpleNamespace(node=node, pid=os.getpid())
    passed = []
    for look, unheard in enumerate([0, UNHEARD_AT_MOST, UNHEARD_AT_MOST, 0], start=1):
        seen = lookout.look(look * LOOK_EVERY_S, [child], unheard)
        passed.append(next((each.spent[0].seconds for each in seen if isinstance(each, ActivitySeen)), None))
        assert isinstance(seen[0], ProcessesSeen)  # how they stand is looked at also while nobody hears
    assert passed == [LOOK_EVERY_S, None, None, 3 * LOOK_EVERY_S]


def test_a_kill_is_laid_to_memory_while_the_kernel_has_just_killed_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    kills = 7
    monkeypatch.setattr(import_module("squall.launchers.lookout"), "memory_kills", lambda: kills)
    lookout = Lookout()
    assert lookout.explain(-signal.SIGKILL) == "killed by SIGKILL"
    kills += 1
    lookout.look(1.0, [])  # and it takes a while until that process has given all of its memory back
    assert lookout.explain(-signal.SIGKILL).startswith("killed by SIGKILL, as memory ran out: take fewer replicas")
    assert lookout.explain(-signal.SIGSEGV) == "killed by SIGSEGV"
    for look in range(DIES_WITHIN):
        lookout.look(2.0 + look, [])
    assert lookout.explain(-signal.SIGKILL) == "killed by SIGKILL"


@pytest.mark.parametrize("scripts", [False, True])
@pytest.mark.parametrize("hang_after_s", [None, 0.0, 5.0])
def test_scripts_are_watched_only_for_being_stopped_unless_their_user_says_how_long(
    run_dir: Path, scripts: bool, hang_after_s: float | None
) -> None:
    lookout, node = Lookout(scripts), Node("replica", 0)
    strategy, task = Downpour(replicas=1), regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(make_plan(strategy, Settings(hang_after_s=hang_after_s)), strategy, task, layout, run_dir)
    board = lookout.prepared(job).board
    assert board is not None
    children: Any = [SimpleNamespace(node=node, pid=os.getpid())]

    def work(now: float) -> list[str]:
        seen = [each for each in lookout.look(now, children) if isinstance(each, ProcessesSeen)]
        return [each.sights[0].work for each in seen]

    before = work(1.0)
    entry = board.entry(node, 1.0)
    entry.works()
    entry.begins(Doing.COMPUTING, 1.0, alone=True)
    computing = work(2.0)
    entry.rests()
    assert work(3.0) == ([] if hang_after_s == 0 else ["none"])
    if hang_after_s == 0:
        assert before == computing == []
    else:
        assert before == (["none"] if scripts else ["other"])
        assert computing == (["none"] if scripts and hang_after_s is None else ["step"])
