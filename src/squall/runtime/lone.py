"""What the one replica of `SingleProcess` works on: the weights of a shard in its own process.

It is a group of its own, so that the coordinator of all-reduce can be its own too. But it steps as a shard does, on one
flat vector, and so is the reference that one replica of any strategy with shards must equal.
"""

from __future__ import annotations

from squall.protocol.effects import (
    Apply,
    Compute,
    CutGroup,
    Effect,
    End,
    Expect,
    JoinGroup,
    LeaveGroup,
    Payload,
    Step,
    Term,
    WriteSnapshot,
)
from squall.protocol.events import Event, GradientComputed, GroupJoined, StepTaken
from squall.protocol.nodes import Node, replica_node
from squall.runtime.backward import Backward, resolve_device
from squall.runtime.batches import Key
from squall.runtime.compute import Gradients
from squall.runtime.driver import Host
from squall.runtime.hosts import ShardHost
from squall.runtime.job import Job
from squall.runtime.recording import recorded
from squall.runtime.store import Store

REPLICA, SHARD = replica_node(0, 0), Node("shard", 0)


class LoneHost(Host):
    """A replica that computes on the very weights of the shard."""

    def __init__(self, job: Job, store: Store) -> None:
        device = resolve_device(job.plan.device)
        backward = Backward(job.task, job.layout, [store.weights], job.plan.seed, device)
        self.training = Gradients(backward, [job.arena.gradient(0, 0)], [job.arena.rates(0, 0)])
        self._behind = True  # the model shows something else than the weights

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Compute():
                if self._behind:
                    self.training.use(0)
                answer = self.training.compute(effect)
                # A forward pass may have put a NaN into BatchNorm's statistics; a GPU computes on a copy.
                self._behind = not answer.finite or self.training.device.type != "cpu"
                return answer
            case Expect(epoch, start, stop):
                self.training.batches.expect(Key(epoch, start, stop))
            case End():
                self.training.batches.close()
            case _:
                raise AssertionError(f"a lone replica cannot {effect!r}")
        return None


class LoneReplica(Host):
    """A step is one batch and one update. Their schedules are kept as a replica's and a shard's are."""

    def __init__(self, job: Job) -> None:
        shard = ShardHost(job, 0)
        self._shard, self._replica = recorded(shard, job, SHARD), recorded(LoneHost(job, shard.store), job, REPLICA)
        self._group = 0

    def attach(self, payload: Payload) -> None:
        self._shard.attach(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Step():
                return self._step(effect, now)
            case JoinGroup(number):
                self._group = number
                return GroupJoined(number)
            case LeaveGroup() | CutGroup():  # a step is over when this is heard
                pass
            case Expect():
                self._replica.perform(effect, now)
            case WriteSnapshot():
                return self._shard.perform(effect, now)
            case End():
                self._replica.perform(effect, now)
                self._shard.perform(effect, now)
            case _:
                raise AssertionError(f"a lone replica cannot {effect!r}")
        return None

    def _step(self, effect: Step, now: float) -> StepTaken:
        batch = Compute(effect.epoch, effect.start, effect.stop, 0, accumulate=False, local_step=False)
        answer = self._replica.perform(batch, now)
        assert isinstance(answer, GradientComputed)
        if answer.finite:
            self._replica.attach(Payload("gradient", REPLICA, 0, effect.clock, 0))
            self._shard.perform(Apply((Term(REPLICA, 0, 1.0, effect.clock),), 1.0, effect.clock), now)
        guilty = not answer.finite
        return StepTaken(self._group, answer.loss, answer.finite, answer.seconds, 0.0, answer.extras, guilty)
