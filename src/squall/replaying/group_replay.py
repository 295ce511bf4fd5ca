"""One attempt of all-reduce carried out again: its members in processes, its groups formed and its steps taken anew.

The order of a step's additions follows from who is in the group, in which order, and from the buckets that torch makes
of the gradients: of these torch decides by the order in which the first step of a group brings them, which is that of
its first member's batch. So real groups of the same members that take the same steps add up the same bits.

A step that some members have finished, and others not because one died, is taken by all: those others die as well,
or the next group gives them the weights of one who has. One that nobody finished who did anything after it is not.
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from msgspec.structs import replace
from torch import Tensor

from squall.protocol.collective.messages import Place
from squall.protocol.effects import Compute, JoinGroup, Step
from squall.protocol.events import GradientComputed, GroupJoined, StepTaken
from squall.protocol.nodes import Node
from squall.replaying.grouped import GroupedProcess, GroupedReplicas, Stepped
from squall.replaying.losses import not_there
from squall.replaying.processes import Strayed
from squall.replaying.replayed_nodes import ReplayedNode
from squall.runtime.job import Job
from squall.runtime.records import Computed, Formed, Moved, Saved
from squall.runtime.replay_starts import replica_logs

if TYPE_CHECKING:
    from squall.replaying.findings import Observer

GIVING = 1 << 32  # numbers of the replay's own groups begin there


class ReplayedMember(ReplayedNode):
    def __init__(self, node: Node, paths: list[Path], job: Job) -> None:
        super().__init__(node, paths, job)
        self.behind: dict[int, list[Compute]] = {}  # clock -> its batch of the last step

    def step(self) -> tuple[Moved | None, bool]:
        """Go on behind the step that is next: what came of it, and whether anything was done after that."""
        self.advance()
        outcome = self.record
        if not isinstance(outcome, Moved):
            return None, False
        self.advance()
        return outcome, self.record is not None


class GroupWeights:
    """What all members hold, as a shard that has all of it."""

    node = Node("shard", 0)

    def __init__(self, job: Job, updates: int) -> None:
        begun = job.restored.tensors if job.restored is not None else {"weights": job.initial}
        self.version = updates
        self.start, self.stop = 0, job.layout.length
        self.holder: GroupedProcess | None = None  # who is asked for them
        self.seen = 0  # the fingerprint that was taken last
        self._known = dict(begun)

    def state(self) -> dict[str, Tensor]:
        if self.holder is not None:
            self._known = self.holder.state()
        return self._known

    @property
    def weights(self) -> Tensor:
        return self.state()["weights"]

    def fingerprint(self) -> int:
        return self.seen


class GroupReplay:
    """`run` goes as far as the schedule leads, or the observer lets it."""

    def __init__(
        self, job: Job, schedule: Path, observer: Observer, processes: GroupedReplicas, *, updates: int = 0
    ) -> None:  # fmt: skip
        self.job = job
        self._schedule = schedule
        self._observer = observer
        self._processes = processes
        self._group: JoinGroup | None = None
        self._machines: dict[Node, int] = {}  # of members of groups between machines
        self._stopped = False
        self._why = ""
        self.replicas = {node: ReplayedMember(node, paths, job) for node, paths in replica_logs(schedule).items()}
        self._weights = GroupWeights(job, updates)
        self.shards = [self._weights]

    def run(self) -> None:
        try:
            while not self._stopped and not self._why and self._goes_on():
                pass
        finally:
            with suppress(Strayed):
                self._weights.state()
            self._weights.holder = None
            self._processes.close()

    @property
    def why(self) -> str:
        """What kept the replay from going on to the end; empty if nothing did."""
        if self._stopped or self._why:
            return "" if self._stopped else self._why
        damages = [member.damage for member in self.replicas.values() if member.damage]
        waits = (f"{m.path.name} waits at {m.record}" for m in self.replicas.values() if m.record is not None)
        fit = (f"the schedules in {self._schedule} do not fit together: {text}" for text in waits)
        return next(iter(damages), next(fit, ""))

    def _goes_on(self) -> bool:
        """Perform what is next; False when there is nothing more."""
        for member in self.replicas.values():
            while not self._stopped and isinstance(member.record, Saved):
                self._weights.holder = self._host(member.node)
                self._stopped |= self._observer.saved(self._weights, member.record)
                member.advance()
        if self._stopped:
            return False
        return (self._group is not None and self._step(self._group)) or self._form()

    # ------------------------------------------------------------ groups

    def _form(self) -> bool:
        """The next group, of those who have come to join it; it takes steps where all have."""
        for member in self.replicas.values():
            if isinstance(step := member.record, Step) and all(member.step()):  # else others had left the group
                self._why = f"{member.path} has finished step {step.clock}, which others in its group have not begun"
                return False
        found = {m.node: m.record for m in self.replicas.values() if isinstance(m.record, Formed)}
        if not found:
            return False
        group = min((formed.group for formed in found.values()), key=lambda group: group.number)
        self._machines |= {node: place.machine for node, place in zip(group.members, group.places)}
        joining = [node for node in group.members if node in found and found[node].group.number == group.number]
        if absent := [node for node in group.members if node not in self.replicas]:
            self._why = not_there(self._schedule / str(absent[0]), self.job.directory)
            return False
        self._give(group, [node for node in joining if node != group.source])
        whole = len(joining) == len(group.members)
        self._group = group if whole else None
        if whole:
            self._join(group, found[joining[0]].unused)
        for node in joining:
            self.replicas[node].advance()
        return True

    def _give(self, group: JoinGroup, takers: list[Node]) -> None:
        """The source's weights and optimizer, as in the run, in a group for this alone: some may not have lived to
        join the real one."""
        if group.transfer and takers:
            members = (group.source, *takers)
            places = [group.places[group.members.index(node)] for node in members if group.places]
            self._join(JoinGroup(GIVING + group.number, members, group.source, True, group.clock, tuple(places)))
        self._weights.version = group.clock
        self._weights.holder = self._host(takers[0] if takers else group.source)

    def _join(self, group: JoinGroup, unused: bool | None = None) -> None:
        """`unused`, of a group of the run: as it was recorded."""
        hosts = [self._host(node) for node in group.members]
        places = [Place(place.machine, host.address) for place, host in zip(group.places, hosts)]
        here = replace(group, places=tuple(places))
        for host in hosts:
            host.order(here if unused is None else Formed(here, unused))
        for host in hosts:
            if not isinstance(joined := host.answer(), GroupJoined):
                raise Strayed(f"{host.node} could not join a group again: {joined}")

    def _host(self, node: Node) -> GroupedProcess:
        return self._processes.host(self.job, node, self._machines.get(node))

    # ------------------------------------------------------------ steps

    def _step(self, group: JoinGroup) -> bool:
        """The group's next step; False where it takes no more."""
        members = [self.replicas[node] for node in group.members]
        steps = {member.node: member.record for member in members if isinstance(member.record, Step)}
        clocks = {step.clock for step in steps.values()}
        if len(steps) < len(members) or len(clocks) > 1:
            self._group = None
            return False
        outcomes: dict[Node, Moved] = {}
        went_on = False
        for member in members:
            outcome, more = member.step()
            if outcome is not None:
                outcomes[member.node] = outcome
                went_on |= more
        if len(outcomes) == len(members) or went_on:
            self._take(steps, outcomes)
        return True

    def _take(self, steps: dict[Node, Step], outcomes: dict[Node, Moved]) -> None:
        batches = {node: Compute(s.epoch, s.start, s.stop, 0, False, False) for node, s in steps.items()}
        trained = [node for node, batch in batches.items() if batch.start < batch.stop]
        guilty = [node for node in trained if node in outcomes and outcomes[node].guilty]
        finite = any(outcome.fingerprint is not None for outcome in outcomes.values())
        told = Computed(batches[(guilty or trained)[0]], finite)
        about = (guilty or trained)[0]
        if self._observer.computing(about, told, self._host(about)):
            self._stopped = True
            return
        for node, step in steps.items():
            self._host(node).order(step)
        taken = {node: self._host(node).answer() for node in steps}
        event = _taken(taken[about], about)
        self._stopped |= self._observer.computed(about, told, GradientComputed(event.loss, event.finite, 0.0))
        if not event.finite or self._stopped:
            return
        self._weights.version = next(iter(steps.values())).clock
        for node, batch in batches.items():
            self.replicas[node].behind = {self._weights.version: [batch]}
        # One of those whose weights were others than in the run, if there is one.
        finishers = sorted(outcomes, key=lambda node: taken[node].fingerprint == outcomes[node].fingerprint)
        self._weights.holder, self._weights.seen = self._host(finishers[0]), taken[finishers[0]].fingerprint
        recorded = outcomes[finishers[0]].fingerprint
        assert recorded is not None
        pushes = [(node, self._weights.version) for node in trained]
        self._stopped |= self._observer.updated(self._weights, pushes, recorded)


def _taken(stepped: Stepped, node: Node) -> StepTaken:
    if not isinstance(stepped.taken, StepTaken):
        raise Strayed(f"{node} has not come to the end of a step again: {stepped.taken}")
    return stepped.taken
