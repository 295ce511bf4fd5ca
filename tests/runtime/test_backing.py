"""What a backup's host makes of a shard's updates is what the shard has."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from squall.plan import make_plan
from squall.protocol.backup import TakeCopy
from squall.protocol.copied import CopyTo
from squall.protocol.effects import Apply, Payload, Term
from squall.protocol.events import CopyKnown, CopyTaken
from squall.protocol.nodes import Node
from squall.runtime import kinds
from squall.runtime.backing import BackupHost
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job, private_job
from squall.runtime.machines import legacy_of, with_legacies
from squall.settings import Settings
from squall.strategies import AsynchronousSGD, Downpour, Strategy
from squall.vector import Layout
from tests.tasks import regression

BACKUP = Node("backup", 0, 1)
REPLICAS = [Node("replica", slot) for slot in (0, 1)]
COMPENSATED = AsynchronousSGD(
    replicas=2, staleness="compensate", compensation=1.0, adaptive=0.9, optimizer=partial(torch.optim.SGD, lr=0.1)
)
ADAM = Downpour(replicas=2, optimizer=partial(torch.optim.Adam, lr=0.1))


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
        """All that the shard is."""
        state = kinds.machine(self.job, Node("shard", 0))._bare()  # type: ignore[attr-defined]
        known = self.shard.perform(CopyTo(BACKUP, state=state), 0.0)
        assert isinstance(known, CopyKnown)
        taken = self.backup.perform(TakeCopy(Payload("copy", BACKUP, known.size, 0, 0)), 0.0)
        assert isinstance(taken, CopyTaken), taken

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
def test_a_backup_that_is_behind_makes_the_updates_that_its_shard_has_made(strategy: Strategy, tmp_path: Path) -> None:
    """Also of pushes that are corrected with weights in whose place the shard has written later ones since."""
    pair = Pair(beside(strategy, tmp_path))
    generator = torch.Generator().manual_seed(0)
    for replica in REPLICAS:
        pair.delivers(replica)
    pair.give()
    pair.follows()
    for clock in range(1, 4):
        for replica in REPLICAS:
            pair.job.arena.gradient(replica.index, 0).normal_(generator=generator)
        for replica in REPLICAS:  # of the second one the basis is not what the shard has
            pair.applies(replica, clock)
            pair.delivers(replica)
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
    pair.applies(REPLICAS[0], 1)
    pair.follows()
    successor = ShardHost(replace(job, legacies=dict(enumerate(job.backups.values()))), 0, goes_back=False)
    pair.applies(REPLICAS[1], 1)
    job.arena.weights(1, 0).fill_(7.0)  # whatever lies in the slot on that machine
    successor.perform(Apply((Term(REPLICAS[1], 0, 1.0, 1),), 0.5, 1), 0.0)
    assert torch.equal(successor.store.weights, pair.shard.store.weights)
