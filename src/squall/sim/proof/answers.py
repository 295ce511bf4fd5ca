"""Worlds where nothing is trained: which there are, their hosts, and what must hold of what they answer.

A host's disk is the list of the ranges that it has files of. It stays, as files do, and each life goes on from it.
"""

from __future__ import annotations

import dataclasses

from squall.protocol import events
from squall.protocol.answering.coordinator import AnswerCoordinator
from squall.protocol.answering.effects import Answer, KeepAnswers, WriteAnswers
from squall.protocol.answering.replica import Answerer
from squall.protocol.effects import Effect, Payload, Transmit
from squall.protocol.events import Event
from squall.protocol.leases import Leases
from squall.protocol.ledger import gaps
from squall.protocol.machine import Machine
from squall.protocol.messages import PIECE_BYTES, Grant, Lease, Left, Progress
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import AnswersFound, LeaseEnded, WorkReported
from squall.sim.proof.broken import Broken
from squall.sim.proof.chaos import PREDICTION, Chaos, chaos
from squall.sim.proof.coordinator_phantom import CoordinatorPhantom
from squall.sim.proof.hung import SLOW_S
from squall.sim.proof.memory import File
from squall.sim.proof.phantom_hosts import PhantomHosts
from squall.sim.proof.phantoms import COMPUTE_S, NOTHING, PIECES, Phantom
from squall.sim.proof.runs import ADDRESS, ChaoticRun

Span = tuple[int, int]  # examples [start, stop)
LONGER = 8  # times as many examples as the world trains on in each epoch


def answering(seed: int) -> Chaos:
    """The machines, the network and the faults of world `seed`, in which a model's outputs are all that is wanted."""
    world = chaos(seed)
    # Who is slow there has so much more to do that the run would take too long.
    paces = tuple(min(pace, SLOW_S / LONGER) for pace in world.paces) if world.watched else world.paces
    return dataclasses.replace(
        world, paces=paces, strategy=PREDICTION, shards=0, epochs=1, examples=LONGER * world.examples, parts=1,
        spread_parts=False, snapshot_every_s=None, evaluate=False, evaluate_every_s=None, scripted=False, keeps=False,
        breaks_at=None, loaders=0,
    )  # fmt: skip


# ---------------------------------------------------------------- hosts


class AnswerPhantomHosts(PhantomHosts):
    disk_of_run: list[Span]  # on the coordinator's machine

    def make(self, node: Node, version: int, file: File | None) -> Phantom:
        self.prices[Answer] = lambda node, effect, begins: self.compute_s(node)
        self.prices[KeepAnswers] = lambda node, effect, begins: COMPUTE_S / 10
        return CollectingPhantom(self, node) if node == COORDINATOR else AnswererPhantom(self, node)


class AnswererPhantom(Phantom):
    hosts: AnswerPhantomHosts

    def __init__(self, hosts: AnswerPhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._held: list[Span] = []
        self._files: list[File] = []  # pieces that have to travel

    def attach(self, payload: Payload) -> None:
        self.memory.write(payload, (payload.version, payload.clock, self._files.pop(0)))

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Answer(start, stop):
                self.hosts.computed += 1
                self._held.append((start, stop))
                return events.Answered(self.hosts.compute_s(self.node))
            case KeepAnswers(start, stop):
                held, self._held = self._held, []
                if (held[0][0], held[-1][1]) != (start, stop) or gaps(held, stop)[:1] not in ([], [(0, start)]):
                    raise Broken("I18", f"{self.node} keeps answers of [{start}, {stop}), and has {held}")
                if self.hosts.machine(self.node) == 0:
                    error = self.hosts.disk(start)
                    if not error:
                        self.hosts.disk_of_run.append((start, stop))
                    return events.AnswersKept(error=error)
                self._files = [File(hash((start, stop, i))) for i in range(PIECES)]
                return events.AnswersKept(PIECES * PIECE_BYTES)
        return None


class CollectingPhantom(CoordinatorPhantom):
    hosts: AnswerPhantomHosts

    def __init__(self, hosts: AnswerPhantomHosts, node: Node) -> None:
        super().__init__(hosts, node)
        self._files: dict[Node, dict[int, File]] = {}  # pieces that have come: they lie in files

    def perform(self, effect: Effect, now: float) -> Event | None:
        if not isinstance(effect, WriteAnswers):
            return super().perform(effect, now)
        node, piece = effect.node, effect.piece
        torn = self.memory.torn("piece", node.index, 0, node.index)
        came = self._files[node] = self._files.get(node, {}) if piece.at else {}
        came[piece.at] = NOTHING if torn else self.memory.pieces[node.index][2]
        if piece.at + piece.size < piece.total:
            return events.AnswersTaken(node, piece.lease)
        error = self.hosts.disk(piece.lease)
        if list(came.values()) == [File(hash((piece.start, piece.stop, i))) for i in range(PIECES)] and not error:
            self.hosts.disk_of_run += {(piece.start, piece.stop)}.difference(self.hosts.disk_of_run)
        return events.AnswersTaken(node, piece.lease, error)


# ---------------------------------------------------------------- what must hold


class AnswerAuditor:
    """Watches the lives of one run: I18."""

    def begin(self, hosts: AnswerPhantomHosts) -> None:
        self.hosts = hosts
        self._dealt: dict[int, Lease] = {}
        self._counted: list[Span] = list(hosts.disk_of_run)  # that the record calls answered
        self._found = list(hosts.disk_of_run)
        self._reported = 0

    def watch(self, now: float, node: Node, what: object) -> None:
        match what:
            case AnswersFound(ranges) if sorted(ranges) != sorted(self._found):
                raise Broken("I18", f"it goes on from {ranges}, and there are files of {self._found}")
            case Transmit(again=False):
                self._on_sent(node, what.frame.message)
            case LeaseEnded(lease, done=done) if done > lease.start:
                self._check_kept((lease.start, done), "counts as answered")
                if twice := [span for span in self._counted if max(span[0], lease.start) < min(span[1], done)]:
                    raise Broken("I18", f"[{lease.start}, {done}) counts as answered, and so does {twice[0]}")
                self._counted.append((lease.start, done))
            case WorkReported(_, stats):
                self._reported += stats.examples

    def _on_sent(self, node: Node, message: object) -> None:
        match message:
            case Grant(Lease() as lease):
                self._dealt[lease.id] = lease
            case Progress(covers) | Left(covers):
                for cover in covers:
                    self._check_kept((self._dealt[cover.lease].start, cover.upto), f"is told of by {node}")

    def _check_kept(self, span: Span, why: str) -> None:
        start, stop = span
        missing = [(a, b) for a, b in gaps(self.hosts.disk_of_run, stop) if a < stop and b > start]
        if missing:
            raise Broken("I18", f"[{start}, {stop}) {why}, and there is no file of {missing[0]}")

    def finished(self, examples: int, trained: int) -> None:
        found = examples - sum(stop - start for start, stop in gaps(self._found, examples))
        if trained != examples or gaps(self._counted, examples):
            raise Broken("I18", f"it ends with {trained} of {examples} examples, and the record has {self._counted}")
        if self._reported != examples - found:
            raise Broken("I18", f"the record tells of {self._reported} examples beside {found}, of {examples}")


class ChaoticAnswerRun(ChaoticRun):
    """A run that answers. What its lives go on from is the disk."""

    hosts: AnswerPhantomHosts
    _kind_of_hosts = AnswerPhantomHosts
    _auditor: AnswerAuditor
    _coordinator: AnswerCoordinator

    def __init__(self, chaos: Chaos) -> None:
        super().__init__(chaos)
        self._auditor = AnswerAuditor()
        self._disk: list[Span] = []

    def _begin(self) -> None:
        self.hosts.disk_of_run = self._disk
        self._auditor.begin(self.hosts)
        found, examples = sorted(self._disk), self.chaos.examples
        leases = Leases.besides(found, examples, self.chaos.batch_size)
        self._coordinator = AnswerCoordinator(self._policy, leases, found)

    def _machine(self, node: Node) -> Machine:
        return Answerer(node, self.chaos.batch_size, address=ADDRESS)

    def finished(self, lives: int, spoilt: bool) -> None:
        self._auditor.finished(self.chaos.examples, self._coordinator.trained)
