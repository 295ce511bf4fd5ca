"""What the parts of replicas do with their time, and their memory, for the record."""

from __future__ import annotations

from squall.protocol.effects import Effect
from squall.protocol.events import Event
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import WorkReported
from squall.record.rows import PartRow
from squall.runtime.driver import Host, HostAround
from squall.runtime.job import Job
from squall.runtime.recorder import CoordinatorHost
from squall.splits import Pipeline

EACH = 4  # numbers of a part: see `squall.parts.spent.measured`


class PartsHost(HostAround):
    """The coordinator's. A replica tells what its parts have spent since it began; the record has what is new.

    Parts do not begin a batch at once, so one of a part's times may be less than it was: the record's is below 0 then,
    and the sums are right.
    """

    def __init__(self, host: Host, recorder: CoordinatorHost, job: Job) -> None:
        """`host` is the recorder, or one around it."""
        super().__init__(host)
        self._recorder = recorder
        self._told: dict[Node, tuple[float, ...]] = job.kept.get("parts", {})
        bubble = job.task.split.bubble(job.plan.settings.parts) if isinstance(job.task.split, Pipeline) else None
        recorder.facts(bubble="" if bubble is None else bubble)

    def perform(self, effect: Effect, now: float) -> Event | None:
        event = super().perform(effect, now)
        if isinstance(effect, WorkReported) and effect.stats.inside:
            self._add(effect.node, effect.stats)
        return event

    def keeps(self) -> dict[str, object]:
        return {**super().keeps(), "parts": self._told}

    def _add(self, node: Node, stats: Stats) -> None:
        before = self._told.get(node, (0.0,) * len(stats.inside))
        self._told[node] = stats.inside
        new = [now - then for now, then in zip(stats.inside, before)]
        for part, at in enumerate(range(0, len(new) - EACH + 1, EACH)):
            compute_s, wait_s, bubble_s, _ = new[at : at + EACH]
            memory = int(stats.inside[at + EACH - 1])
            self._recorder.record.add(
                PartRow(self._recorder.training_s, node.index, part, compute_s, wait_s, bubble_s, memory)
            )
