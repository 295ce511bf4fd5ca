"""What a backup's host makes of a shard's updates is what the shard has."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from squall.plan import make_plan
from squall.protocol.backup import TakeCopy
from squall.protocol.copied import CopyMore, CopyTo
from squall.protocol.effects import Apply, Payload, Term
from squall.protocol.events import CopyKnown, CopyTaken, Event
from squall.protocol.nodes import Node
from squall.runtime import kinds, shard_state, whole
from squall.runtime.backing import BackupHost
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job, private_job
from squall.runtime.machines import legacy_of, with_legacies
from squall.settings import Settings
from squall.strategies import AsynchronousSGD, DelayedProximal, Downpour, Strategy
from squall.vector import Layout
from tests.tasks import regression

BACKUP = Node("backup", 0, 1)
BEGUN = 2  # updates of the shard before it has a backup
REPLICAS = [Node("replica", slot) for slot in (0, 1)]
COMPENSATED = AsynchronousSGD(
    replicas=2, staleness="compensate", compensation=1.0, adaptive=0.9, optimizer=partial(torch.optim.SGD, lr=0.1)
)
ADAM = Downpour(replicas=2, optimizer=partial(torch.optim.AdamW, lr=0.1, weight_decay=0.1))


def beside(strategy: Strategy, directory: Path) -> Job:
    """A shard's, with a backup on the same machine, so in the same memory."""
    torch.manual_seed(0)
    task = regression()()
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    plan = make_plan(strategy, Settings(copies=2, threads=1))
    job = replace(private_job(plan, strategy, task, layout, directory), scratch=directory)
    return replace(with_legacies(job), backups={BACKUP: legacy_of(job, layout.length, apart=True)})


class Pair:
    """A shard's host, and its backup's, which is behind."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.shard, self.backup = ShardHost(job, 0), BackupHost(job, BACKUP)
        self._owed: list[Apply | Payload] = []  # that the backup has not carried out

    def give(self) -> None:
        """What the shard is, without numbers."""
        self._owed.clear()
        state = kinds.machine(self.job, Node("shard", 0))._bare()  # type: ignore[attr-defined]
        self._take(self.shard.perform(CopyTo(BACKUP, state=state, number=1), 0.0))

    def give_more(self) -> bool:
        """Whether there is still more."""
        return not self._take(self.shard.perform(CopyMore(BACKUP, 1), 0.0)).last

    def _take(self, known: Event | None) -> CopyKnown:
        assert isinstance(known, CopyKnown)
        taken = self.backup.perform(TakeCopy(Payload("copy", BACKUP, known.size, 1, 0)), 0.0)
        assert isinstance(taken, CopyTaken), taken
        return known

    def delivers(self, replica: Node) -> None:
        payload = Payload("weights", replica, 0, 0, 0)
        self.shard.attach(payload)
        self._owed.append(payload)

    def applies(self, replica: Node, clock: int) -> None:
        effect = Apply((Term(replica, 0, 1.0, clock),), 0.5, clock)
        self.shard.perform(effect, 0.0)
        self._owed.append(effect)

    def follows(self) -> None:
        for each in self._owed:
            if isinstance(each, Payload):
                self.backup.attach(each)
            else:
                self.backup.perform(each, 0.0)
        self._owed.clear()

    def same(self) -> bool:
        legacy = self.job.backups[BACKUP]
        assert legacy.weights is not None
        return torch.equal(self.shard.store.weights, legacy.weights)


@pytest.mark.parametrize("strategy", [COMPENSATED, ADAM], ids=["compensated", "adam"])
@pytest.mark.parametrize("piece", [3, 1 << 20])
def test_a_backup_that_is_behind_makes_the_updates_that_its_shard_has_made(
    strategy: Strategy, piece: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also before it has all numbers, and of pushes that are corrected with weights that lie nowhere else any more."""
    monkeypatch.setattr(shard_state, "PIECE", piece)
    pair = Pair(beside(strategy, tmp_path))
    generator = torch.Generator().manual_seed(0)
    for replica in REPLICAS:
        pair.delivers(replica)
    for clock in itertools.count(1):
        for replica in REPLICAS:
            pair.job.arena.gradient(replica.index, 0).normal_(generator=generator)
        for replica in REPLICAS:  # of the second one the basis is not what the shard has
            pair.applies(replica, clock)
            pair.delivers(replica)
        if clock == BEGUN:
            pair.give()
        elif clock > BEGUN:
            pair.follows()
            if not pair.give_more():
                break
    assert (clock - BEGUN > 2) == (piece < pair.job.layout.length)
    assert pair.same()
    pair.applies(REPLICAS[0], clock + 1)
    assert not pair.same()
    pair.follows()
    assert pair.same()


def test_who_goes_on_from_a_backup_corrects_as_its_shard_would_have(tmp_path: Path) -> None:
    job = beside(COMPENSATED, tmp_path)
    pair = Pair(job)
    for replica in REPLICAS:
        job.arena.gradient(replica.index, 0).fill_(1.0)
        pair.delivers(replica)
    pair.give()
    pair.follows()
    assert not pair.give_more()
    pair.applies(REPLICAS[0], 1)
    pair.follows()
    successor = ShardHost(replace(job, legacies=dict(enumerate(job.backups.values()))), 0, goes_back=False)
    pair.applies(REPLICAS[1], 1)
    job.arena.weights(1, 0).fill_(7.0)  # whatever lies in the slot on that machine
    successor.perform(Apply((Term(REPLICAS[1], 0, 1.0, 1),), 0.5, 1), 0.0)
    assert torch.equal(successor.store.weights, pair.shard.store.weights)


def test_an_optimizer_that_looks_at_all_elements_gets_all_of_its_state_with_them(tmp_path: Path) -> None:
    """Between the outline and the numbers its backup has made something else of it."""
    proximal = DelayedProximal(replicas=2, optimizer=partial(Norm, lr=0.1), group=4)
    pair = Pair(beside(proximal, tmp_path))
    for clock in range(1, 4):
        pair.job.arena.gradient(0, 0).fill_(clock)
        pair.applies(REPLICAS[0], clock)
        if clock == 1:
            pair.give()
        pair.follows()
    assert not pair.give_more()
    pair.applies(REPLICAS[0], 4)
    pair.follows()
    assert pair.same()


class Norm(torch.optim.SGD):
    """Its steps depend on the norms of all weights so far."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                norms = self.state[parameter].setdefault("norms", torch.zeros(()))
                norms += parameter.detach().norm()
                parameter.grad /= 1 + norms
        super().step(closure)


def spoil(tensors: dict[str, Any], how: str) -> dict[str, Any]:
    match how:
        case "a gap":
            tensors["start"] += 1
            tensors["weights"] = tensors["weights"][1:]
        case "one number for all":
            tensors["0:exp_avg"] = torch.ones(1)
        case "another type":
            tensors["weights"] = tensors["weights"].double()
        case "nothing of the state":
            del tensors["0:exp_avg"]
        case "too much":
            tensors["more"] = torch.ones(1)
    return tensors


@pytest.mark.parametrize("how", ["a gap", "one number for all", "another type", "nothing of the state", "too much"])
def test_a_piece_that_is_none_is_refused(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = Pair(beside(ADAM, tmp_path))
    pair.job.arena.gradient(0, 0).fill_(1.0)
    pair.applies(REPLICAS[0], 1)
    pair.give()
    honest = whole.of_piece
    monkeypatch.setattr(whole, "of_piece", lambda *given: spoil(honest(*given), how))
    with pytest.raises(AssertionError, match="it sends what no shard is"):
        pair.give_more()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("outline.0:exp_avg", torch.zeros(1)),  # into which a kernel would write all elements
        ("outline.0:step", torch.zeros(3)),
        ("gradient.0.-1.-1", None),
        ("gradient.9.0.-1", None),
        ("gradient.0.0.-1", torch.zeros(1)),
        ("gradient.0.0.1", torch.zeros(1)),  # of a part, and there are none
        ("gradient.0.0.-7", None),
        ("gradient.0", None),
    ],
)
def test_what_has_no_place_in_a_backup_is_refused(
    name: str, value: torch.Tensor | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    job = beside(ADAM, tmp_path)
    backed = legacy_of(job, job.layout.length)  # on another machine
    pair = Pair(replace(job, backups={BACKUP: backed}))
    pair.job.arena.gradient(0, 0).fill_(1.0)
    pair.applies(REPLICAS[0], 1)
    honest, bad = whole.of_shard, torch.zeros(job.layout.length) if value is None else value
    monkeypatch.setattr(whole, "of_shard", lambda *given: {**honest(*given), name: bad})
    with pytest.raises(AssertionError, match="it sends what no shard is"):
        pair.give()
