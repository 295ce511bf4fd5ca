"""The audit: which examples of an epoch were trained, and how often, told from the leases alone.

All of it is arithmetic on ranges of positions in the epoch's shuffled order; no example is enumerated, so an
epoch of a billion examples costs as much as one of a thousand.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from squall.record import Lease
from squall.report.reader import Reader
from squall.report.words import plural

SHOWN = 6  # ranges named in one sentence


@dataclass(frozen=True, slots=True)
class Span:
    """Positions ``[start, stop)`` of an epoch's order, each trained `times` times."""

    start: int
    stop: int
    times: int

    def __len__(self) -> int:
        return self.stop - self.start

    def __str__(self) -> str:
        last = f" to {self.stop - 1:,}" if len(self) > 1 else ""
        return f"{self.start:,}{last}" + (f" ({self.times} times)" if self.times > 1 else "")


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """One epoch; `spans` cover it in order, without gap or overlap.

    `owed`: positions below it are trained, as the run says; it is 0 where the run promises nothing (yet).
    """

    epoch: int
    owed: int
    spans: tuple[Span, ...]

    @property
    def examples(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @property
    def finished(self) -> bool:
        """Nothing of it is to come."""
        return self.owed >= self.examples or not self._never

    @property
    def missed(self) -> tuple[Span, ...]:
        """Never trained, and should have been."""
        return tuple(Span(s.start, min(s.stop, self.owed), 0) for s in self._never if s.start < self.owed)

    @property
    def _never(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.times == 0)

    @property
    def repeated(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.times > 1)

    @property
    def exact(self) -> bool:
        """Whether every example was trained exactly once."""
        return not self._never and not self.repeated

    def __str__(self) -> str:
        trained = self.examples - _total(self._never)
        if self.finished:
            text = f"Epoch {self.epoch}: {trained:,} of {plural(self.examples, 'example')} trained."
        else:
            text = f"Epoch {self.epoch}, unfinished: {trained:,} of {self.examples:,} trained so far."
        if self.missed:
            text += f" Never trained: {_total(self.missed):,}, at {_places(self.missed)}."
        if self.repeated:
            text += f" Trained more than once: {_total(self.repeated):,}, at {_places(self.repeated)}."
        return text


@dataclass(frozen=True, slots=True)
class Audit:
    """What the leases prove about every epoch of which something was trained; `str` says it in sentences.

    Attributes:
        epochs: in order.
        absent: epochs that are trained, as the run says, and of which there is no lease.
        batches: what is known of a method that deals no leases, in a sentence; empty for all others.
    """

    epochs: tuple[EpochAudit, ...]
    absent: int = 0
    batches: str = ""

    @property
    def complete(self) -> bool:
        """Whether nothing is missing of what the run says it has trained."""
        return not self.absent and not any(epoch.missed for epoch in self.epochs)

    def __str__(self) -> str:
        if self.batches:
            return self.batches
        finished = sum(epoch.finished or bool(epoch.missed) for epoch in self.epochs)
        short = sum(bool(epoch.missed) for epoch in self.epochs)
        if not self.epochs and not self.absent:
            return "No lease has ended yet, so nothing is known about the examples."
        if self.complete and not finished:
            verdict = "No epoch is finished yet."
        elif self.complete:
            verdict = f"No example was missed in {plural(finished, 'finished epoch')}."
        else:
            verdict = f"{short + self.absent:,} of {plural(finished + self.absent, 'finished epoch')} missed examples."
        absent = [f"Of {plural(self.absent, 'epoch')} nothing was trained at all."] if self.absent else []
        return "\n".join([verdict, *_sentences(self.epochs), *absent])


def audit(reader: Reader) -> Audit:
    """Compare what the leases trained with what the run says of itself: why it ended.

    One that ended because all data is trained owes every example of its epochs. One that ended at its steps owes what
    it has dealt: all epochs before the last, and the last up to there. Any other stops in the middle of its leases, and
    so does one that is not over: their holes are not called missed, a resumed run fills them.
    """
    state = reader.state()
    if batch := int(state.get("batch") or 0):
        return Audit((), batches=_batches(reader, batch, state.get("strategy", "This method")))
    trained: dict[int, list[tuple[int, int]]] = defaultdict(list)
    size = int(state.get("examples_per_epoch") or 0)
    dealt = (-1, 0)  # up to which epoch and position
    for lease in reader.rows(Lease):
        trained[lease.epoch].append((lease.start, lease.trained_stop))
        dealt = max(dealt, (lease.epoch, lease.stop))
        size = max(size, lease.stop)
    owed = (0, 0)
    if state.get("ended") == "data":
        owed = (int(state.get("epochs") or 0), 0)
    elif state.get("ended") == "steps":
        owed = dealt
    found = [
        EpochAudit(epoch, size if epoch < owed[0] else owed[1] if epoch == owed[0] else 0, spans_of(ranges, size))
        for epoch, ranges in sorted(trained.items())
    ]
    return Audit(tuple(found), absent=owed[0] - sum(epoch < owed[0] for epoch in trained))


def _batches(reader: Reader, batch: int, strategy: str) -> str:
    examples = sum(work.examples for work in reader.progress())
    return (
        f"{strategy} looks at batches as a whole and has no leases: its loss and gradient were evaluated"
        f" {examples // batch:,} times on {plural(batch, 'example')}, {examples:,} in all. An evaluation counts when"
        " every shard has each portion of its batch exactly once."
    )


def spans_of(ranges: Iterable[tuple[int, int]], size: int) -> tuple[Span, ...]:
    """How often each position of ``[0, size)`` lies in one of the half-open `ranges`."""
    steps = Counter({0: 0, size: 0})  # position -> by how much the number of ranges changes there
    for start, stop in ranges:
        if start < stop:
            steps[start] += 1
            steps[stop] -= 1
    spans: list[Span] = []
    times = 0
    edges = sorted(steps)
    for start, stop in pairwise(edges):
        times += steps[start]
        if spans and spans[-1].times == times:
            start = spans.pop().start
        spans.append(Span(start, stop, times))
    return tuple(spans)


def _sentences(epochs: tuple[EpochAudit, ...]) -> list[str]:
    """One line an epoch; neighbours in which every example was trained once share a line."""
    lines: list[str] = []
    run: list[EpochAudit] = []
    for epoch in epochs:
        if run and not (epoch.exact and epoch.epoch == run[-1].epoch + 1):
            lines.append(_exactly_once(run))
            run = []
        if epoch.exact:
            run.append(epoch)
        else:
            lines.append(str(epoch))
    return [*lines, _exactly_once(run)] if run else lines


def _exactly_once(run: list[EpochAudit]) -> str:
    first, last = run[0].epoch, run[-1].epoch
    name = f"Epoch {first}" if first == last else f"Epochs {first} to {last}"
    return f"{name}: each of {plural(run[0].examples, 'example')} trained exactly once."


def _total(spans: tuple[Span, ...]) -> int:
    return sum(map(len, spans))


def _places(spans: tuple[Span, ...]) -> str:
    more = f" and {plural(len(spans) - SHOWN, 'more range')}" if len(spans) > SHOWN else ""
    return ", ".join(map(str, spans[:SHOWN])) + more
