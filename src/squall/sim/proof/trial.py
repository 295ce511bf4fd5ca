"""One chaotic world from its beginning to its end, through all lives of its run.

A life is one start of all processes. Behind it the run goes on, as `squall resume` lets it, from the last snapshot.
"""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable

from squall.protocol.check import check
from squall.protocol.closing import STOP_WITHIN_S
from squall.protocol.effects import Cause, Effect, End, KillMember, PublishSnapshot
from squall.protocol.events import Event, PeerRefused, StopRequested
from squall.protocol.leases import Limits
from squall.protocol.link import Linked
from squall.protocol.nodes import COORDINATOR, Node, whole
from squall.protocol.notes import Note
from squall.protocol.policy import SAVE_WITHIN_S
from squall.protocol.replacing import LOST_IN_A_ROW
from squall.runtime.driver import Host
from squall.runtime.wire import Conditions
from squall.runtime.world import World
from squall.runtime.world_nodes import Clock
from squall.sim.proof.answers import ChaoticAnswerRun
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import MORTAL, Chaos
from squall.sim.proof.chaotic_machines import without
from squall.sim.proof.excuses import excuses
from squall.sim.proof.faults import (
    Cut,
    Fault,
    FullDisk,
    Hang,
    Kill,
    Lie,
    OfMachines,
    Pause,
    Role,
    Rot,
    Skew,
    Spoil,
    Suspend,
    Tear,
    UserStop,
    Weather,
)
from squall.sim.proof.faulty_wire import FaultyWire
from squall.sim.proof.hung import Stillness
from squall.sim.proof.last_files import LastFiles
from squall.sim.proof.machines import WorldMachines
from squall.sim.proof.manners import Manners
from squall.sim.proof.mortal import dies_within, fallen, spare
from squall.sim.proof.other_runs import ChaoticBatchRun, ChaoticGroupRun
from squall.sim.proof.rotten import Rotten, allowed
from squall.sim.proof.runs import ChaoticLoopRun, ChaoticRun
from squall.sim.proof.whims import Whims
from squall.strategies.work import Answering, BatchMethod, Collective, Loop

RUNS: dict[type, type[ChaoticRun]] = {
    Loop: ChaoticLoopRun, BatchMethod: ChaoticBatchRun, Collective: ChaoticGroupRun, Answering: ChaoticAnswerRun,
}  # fmt: skip
ENDS_WITHIN_S = 120.0  # of virtual time, after the last fault has healed: machines, and then a deputy, may be given 45
EVENTS_AT_MOST = 100_000
SLACK_S = 0.1  # in what is checked of the time that a stop takes
UNSAVED = "nothing was saved"

Seen = tuple[float, Node | None, object]  # when, in seconds; who, or nobody; an event, an effect, a fault, or words


class Trial:
    """A world in which everything is checked at every event."""

    world: World

    def __init__(self, chaos: Chaos, watch: Callable[[Seen], None] | None = None, self_checks: bool = True) -> None:
        """`self_checks`: machines also check their own state (`protocol.check`), beside the auditor."""
        self.chaos = chaos
        self._self_checks = self_checks
        self.events = self.lives = 0
        self.happened = Counter("Skew" for fault in chaos.faults if isinstance(fault, Skew))  # faults, by kind
        self.run = RUNS[type(chaos.recipe.work)](chaos)
        self._watch = watch
        self._clocks = {f.part: Clock(f.rate, f.offset_s) for f in chaos.faults if isinstance(f, Skew)}
        self._rate = self._clocks.get(Role.of(COORDINATOR), Clock()).rate
        # A deputy has to hear of it, and may stand still.
        self._stop_within_s = math.inf if chaos.deputy else (STOP_WITHIN_S + SAVE_WITHIN_S) / self._rate + SLACK_S
        self._to_come = deque(sorted((f for f in chaos.faults if not isinstance(f, Skew)), key=lambda fault: fault.at))
        self._lived_s = 0.0  # in earlier lives
        self._touched = COORDINATOR
        self._rotten = Rotten(allowed(chaos.seed, chaos.recipe))
        self._whims = Whims(chaos, self._rotten)
        self._rooms = chaos.rooms  # that the next life begins on

    def go(self) -> Trial:
        """Run to the end. Raises `Broken`, or whatever a machine raises."""
        while True:
            self._begin()
            end = self._live()
            if end is not None and end.status == "finished" and end.cause is not Cause.SCRIPT:
                self.run.finished(self.lives, spoilt=self.happened["Spoil"] + self.happened["Rot"] > 0)
                return self
            self.run.over()
            stay = self._machines.stay if end is not None and end.status == "moved" else None
            self._rooms = without(stay, self.chaos) if stay else self.chaos.rooms
            self._lived_s += self.world.now

    # ------------------------------------------------------------ a life

    def _begin(self) -> None:
        chaos, saved = self.chaos, self.run.saved
        self.lives += 1
        self._machines = WorldMachines(chaos, self.lives, self._rooms, self._clocks)
        self._manners = Manners(chaos, self._machines.of, self._rooms)
        self._files = LastFiles(self._rate)
        self.run.begin(lambda: self.world.now, self._machines.of, self._rooms)
        self._rotten.begin(saved and saved.manifest, chaos.batch_size, Limits(epochs=chaos.epochs))
        hosts = self.run.hosts
        self._wire = FaultyWire(chaos.network, self._machines.of, self.run.cut)
        conditions = Conditions(self._wire, hosts.prices, chaos.notice_s, clock=self._machines.clock)
        self.world = World(conditions, seed=chaos.seed + self.lives, spawn=self._replace)
        self.world.trace = self._trace
        self._stillness = Stillness(self.world, self._machines.of, chaos)
        hosts.enter(self.world, chaos.seed + self.lives)
        hosts.compute_s = lambda node: chaos.paces[node.index]
        self._whims.begin(hosts, self.world)
        hosts.gone = self._machines.gone.__contains__
        hosts.cut_off = lambda one, other: self._wire.parted(one, other, self.world.now)
        self._slow_starts: dict[Role, float] = {}
        self._doomed = Counter[Role]()  # replacements to come that die
        self._deaths = Counter[Role]()
        self._started: list[Node] = []  # replacements, in this event
        self._healed_s = 0.0  # when all faults so far have healed
        self._stopped_at = math.inf  # by the user
        self._excused: Counter[str] = Counter()  # faults of this life, by kind
        self._note(f"life {self.lives} begins" + (f" from snapshot {saved.manifest.number}" if saved else ""))
        self._machines.open(self.world, self._wire, hosts)
        evaluators = [Node("evaluator", chaos.replicas)] if chaos.evaluate else []
        nodes = [Node(role, i) for role in ("shard", "backup")[: chaos.copies] for i in range(chaos.recipe.shards)]
        nodes = [COORDINATOR, *nodes, *(Node("replica", i) for i in range(chaos.replicas)), *evaluators]
        placed = {node for room in self._rooms for node in room.nodes} | {COORDINATOR}
        for node in [node for node in nodes if not self._rooms or node in placed]:
            self.world.add(node, *self.run.member(node), home=Node("nursery", self._machines.of(node)))

    def _live(self) -> End | None:
        """Until the run ends; None if it is cut short."""
        world = self.world
        while not world.ended:
            while self._to_come and self._to_come[0].at <= self.events:
                self._cause(self._to_come.popleft())
            if not self._machines.led:
                spare(self.run.journals)
                self._machines.orphan(max(world.now, self._healed_s))
                return None
            self._check_progress()
            world.step()
            self.events += 1
            if (nursery := world.processes.get(self._machines.home)) is not None and nursery.end:
                if self._deaths[Role.of(COORDINATOR)] < LOST_IN_A_ROW:
                    raise Broken("I5", "the coordinator is not succeeded")
                return None
            self._meet_started()
            for node in fallen(self.run.journals):
                self._strike(Role.of(node))
            place = world.processes.get(self._touched)
            if place is not None and self._self_checks:
                check(place.linked)
        end = world.processes[COORDINATOR].end
        assert end is not None
        self._check_end(end)
        spare(self.run.journals)
        self._machines.outlive(max(world.now, self._healed_s))
        return end

    def _meet_started(self) -> None:
        for node in self._started:
            part = Role.of(node)
            self.world.pause(node, self._slow_starts.get(part, 0.0))
            if self._doomed[part]:
                self._doomed[part] -= 1
                self._strike(part)
        self._started.clear()

    def _check_progress(self) -> None:
        world = self.world
        coordinator = world.processes.get(COORDINATOR)  # one that stands still is killed
        began = max(self._stopped_at, coordinator.busy_until if coordinator is not None else world.now)
        asked = self._files.asked_at + SAVE_WITHIN_S / self._rate  # behind one that has come by a slow link
        if world.now > max(began + self._stop_within_s, max(asked, self._files.waited_for) + SLACK_S):
            raise Broken("I8", f"it still goes on {world.now - began:.2f} s after the stop")
        if not world.lively:
            raise Broken("I5", "nobody has anything to do, and the run has not ended")
        if world.now > self._healed_s + ENDS_WITHIN_S:
            raise Broken("I5", f"{ENDS_WITHIN_S:.0f} s after the last fault has healed the run still goes on")
        if self.events > EVENTS_AT_MOST * (1 + 2 * self.chaos.deputy):  # which hears of each, and says so
            raise Broken("I5", f"it still goes on after {self.events - 1} events")

    def _check_end(self, end: End) -> None:
        """A run may end otherwise than finished for a reason that lies in this life's faults."""
        had, known = self._excused, (len(self.run.deputies.copied), self._machines.silenced, self._rotten.happened)
        if not excuses(self.chaos, end, had, self._deaths, *known)[end.status]:
            raise Broken("I5", f"the run ends as {end.status}: {end.reason}")
        # The coordinator may not have what has come, or not say what waits for its deputy.
        severed = had["Cut"] + had["Weather"] + had["Partition"] + self.chaos.deputy
        arrives = self._files.waited_for > self.world.now + SLACK_S
        if had["UserStop"] and UNSAVED in end.reason and arrives and not severed:
            raise Broken("I8", f"it ends without a snapshot, of which something has just come: {end.reason}")
        leaves = end.status == "moved" and end.cause is not Cause.FAILED  # who is lost leaves no time for one
        if leaves and not any(saved.final for saved in self.run.hosts.published[-1:]):
            raise Broken("I13", f"it moves without one: {end.reason}")

    # ------------------------------------------------------------ faults

    def _cause(self, fault: Fault) -> None:
        self._note(fault)
        kind = type(fault).__name__
        self.happened[kind], self._excused[kind] = self.happened[kind] + 1, self._excused[kind] + 1
        self._healed_s = max(self._healed_s, self.world.now + fault.seconds)
        match fault:
            case Weather() | Cut():
                self._wire.begin(fault, self.world.now)
            case _ if isinstance(fault, OfMachines):
                self.happened[kind] -= not self._machines.cause(fault)
            case Pause() | Hang() | Suspend():
                self._machines.silenced |= self._stillness.cause(fault)
            case Kill(_, Role("nursery", machine)):  # the kernel kills what it has forked
                self._machines.lose(machine)
            case Kill():
                self._kill(fault)
            case Lie(_, part):
                self._machines.silenced = True
                several = part.role not in ("nursery", "deputy") and self.chaos.recipe.shards > 0
                hears = Node("shard", part.index if part.role == "backup" else 0) if several else COORDINATOR
                for node in self._nodes(part):
                    self.world.post(hears, PeerRefused(node, "it lies"))
            case Spoil():
                self._whims.spoilt += 1
            case Rot():
                self._rotten.coming += 1
            case FullDisk():
                self._whims.full += 1
            case Tear(_, seconds) if isinstance(self.run, ChaoticGroupRun):
                self.run.tear(seconds)
            case UserStop():
                self.world.post(self._machines.home, StopRequested("interrupted"))
                self._stopped_at = min(self._stopped_at, self.world.now)

    def _kill(self, fault: Kill) -> None:
        self._slow_starts[fault.part], self._doomed[fault.part] = fault.seconds, fault.again
        self._excused[fault.part.role] += 1
        if not dies_within(self.run.journals, fault):
            self._strike(fault.part)

    def _strike(self, part: Role, dies: bool = False) -> None:
        """`dies`: it is killed by its nursery."""
        self._deaths[Role.of(whole(Node(part.role, part.index), self.chaos.parts))] += 1
        for node in self._nodes(part):
            if part.role in MORTAL:
                self.run.hosts.memories[node].in_use.pop(node.index, None)
            if not dies:
                self.world.kill(node, torn=node in self.run.journals and self.run.journals[node].torn is not None)

    def _nodes(self, part: Role) -> list[Node]:
        return [node for node, place in self.world.processes.items() if Role.of(node) == part and place.end is None]

    def _replace(self, node: Node) -> tuple[Linked, Host] | None:
        if self.run.backups.strayed(node) or self.run.deputies.late(self.world, node, self._machines.there):
            return None
        self._started.append(node)
        self.run.backups.clear(self.world, node)
        self.run.deputies.clear(self.world, node, self._machines.there)
        return self.run.member(node)

    def _trace(self, now: float, node: Node, what: Event | Effect) -> None:
        self._touched = node
        if self._watch is not None:
            self._watch((self._lived_s + now, node, what))
        if isinstance(what, KillMember) and what.why:
            self._excused[what.node.role] += 1
            self._strike(Role.of(what.node), dies=True)
        self._stillness.watch(node, what)
        self._manners.watch_order(node, what)
        follows = node.role == "deputy" and isinstance(what, Note | PublishSnapshot)  # its coordinator says it first
        if follows or self.run.backups.strays(node, what) or (node == COORDINATOR and self.run.repeats(what)):
            return
        self.run.backups.watch(self.world, node, what)
        self.run.deputies.watch(self.world, node, what)
        if isinstance(what, End) and self.run.deputies.saves_beside(node):
            self.world.at(self.world.now, lambda: self._machines.lose(self._machines.of(node)))
        self._machines.watch(node, what)
        self._manners.watch(node, what)
        self._files.watch(now, node, what)
        self._rotten.watch(node, what)
        self.run.watch(now, node, what)
        self._machines.watch_shown(node, what)

    def _note(self, what: object) -> None:
        if self._watch is not None:
            self._watch((self._lived_s + self.world.now, None, what))
