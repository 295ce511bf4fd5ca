"""A whole run in one process and one thread, in virtual time: deterministic, for debuggers, tests and notebooks."""

from __future__ import annotations

import time
from collections.abc import Callable

from squall.evaluation_callback import EvaluationCallback
from squall.protocol.effects import Compute, End, Step
from squall.protocol.events import Event, StopRequested
from squall.protocol.link import Linked
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.runtime.circle import Circle, Groups
from squall.runtime.collective.holding import Holding
from squall.runtime.collective.host import CollectiveHost
from squall.runtime.collective.inline import InlineMember
from squall.runtime.collective.member import Member
from squall.runtime.driver import Host
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.job import Job, own_model
from squall.runtime.kinds import host, machine
from squall.runtime.machines import nodes
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.wire import Conditions
from squall.runtime.world import World
from squall.runtime.world_nodes import Premises
from squall.strategies.work import Collective

STEP_S = 0.01  # virtual seconds that every gradient takes


class LoneChannel:
    """The coordinator's channel where there are no processes: nobody dies, and the end is kept for the caller."""

    def __init__(self, watch: EvaluationCallback | None = None) -> None:
        self._watch = watch or EvaluationCallback()
        self.ended = End("failed", "the world stood still")
        self.interrupts: list[int] = []  # signals caught
        self._told = False

    def end(self, end: End) -> None:
        self.ended = end

    def saving(self, received: int, total: int) -> None:
        raise AssertionError("nothing travels to a snapshot here")

    def evaluated(self, number: int, evaluation: dict[str, float]) -> None:
        self._watch.told(evaluation)

    def poll(self) -> Event | None:
        if self._told or not (self.interrupts or self._watch.why):
            return None
        self._told = True
        return StopRequested("interrupted") if self.interrupts else self._watch.stop()


class InlineRun:
    """The world of a job. `run` trains to the end.

    `step_s` tells how many virtual seconds a node's next computation takes; the record is then in virtual time too.
    """

    def __init__(
        self, job: Job, step_s: Callable[[Node], float] | None = None, watch: EvaluationCallback | None = None
    ) -> None:  # fmt: skip
        self._job = job
        self._step_s = step_s
        self.channel = LoneChannel(watch)
        self.world = World(
            Conditions(prices={Compute: self._step, Step: self._step}), spawn=self._member, seed=job.plan.seed
        )
        self._circle = Circle(self.world)
        self.world.add(NURSERY, machine(job, NURSERY), Premises())
        for node in nodes(job):
            self.world.add(node, *self._member(node))

    def run(self) -> End:
        return run_to_end(self.world, self.channel, self.world.run)

    def _member(self, node: Node) -> tuple[Linked, Host]:
        if node == COORDINATOR:
            clock = time.monotonic if self._step_s is None else None
            return machine(self._job, node), CoordinatorHost(self._job, self.channel, clock)
        return machine(self._job, node), own_host(self._job, node, self._circle)

    def _step(self, node: Node, effect: Compute | Step, begins: float) -> float:
        step_s = self._step_s(node) if self._step_s is not None else STEP_S
        return step_s * self._job.slowness(node)


def run_to_end(world: World, channel: LoneChannel, go: Callable[[], None]) -> End:
    """Let the world `go` on in this process. What a host raises is the run's end, and raised again."""
    try:
        with collected_interrupts() as channel.interrupts:
            go()
    except Exception as error:
        world.processes[COORDINATOR].host.perform(End("failed", f"{type(error).__name__}: {error}"), world.now)
        raise
    finally:
        world.close()
    return channel.ended


def own_host(job: Job, node: Node, groups: Groups | None = None) -> Host:
    """The host of a shard, a replica or the evaluator, with a model of its own."""
    if node.role == "replica" and isinstance(job.recipe.work, Collective):
        assert groups is not None
        own = own_model(job)
        member = Member(own, node.index)
        holding = Holding(member) if job.recipe.divided else None
        return CollectiveHost(own, InlineMember(member, holding, node, groups))
    return host(job if node.role == "shard" else own_model(job), node)
