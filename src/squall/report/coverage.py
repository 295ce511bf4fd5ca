"""The audit: which examples of an epoch were trained, and how often, told from the leases alone.

All of it is arithmetic on ranges of positions in the epoch's shuffled order; no example is enumerated, so an
epoch of a billion examples costs as much as one of a thousand.
"""

from collections import Counter, defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from squall.record import Event, Lease
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
    """One epoch; `spans` cover it in order, without gap or overlap."""

    epoch: int
    finished: bool
    spans: tuple[Span, ...]

    @property
    def examples(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @property
    def never(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.times == 0)

    @property
    def repeated(self) -> tuple[Span, ...]:
        return tuple(span for span in self.spans if span.times > 1)

    @property
    def exact(self) -> bool:
        """Whether every example was trained exactly once."""
        return not self.never and not self.repeated

    def __str__(self) -> str:
        trained = self.examples - _total(self.never)
        if self.finished:
            text = f"Epoch {self.epoch}: {trained:,} of {plural(self.examples, 'example')} trained."
            if self.never:
                text += f" Never trained: {_total(self.never):,}, at {_places(self.never)}."
        else:
            text = f"Epoch {self.epoch}, unfinished: {trained:,} of {self.examples:,} trained so far."
        if self.repeated:
            text += f" Trained more than once: {_total(self.repeated):,}, at {_places(self.repeated)}."
        return text


@dataclass(frozen=True, slots=True)
class Audit:
    """What the leases prove about every epoch; `str` says it in sentences."""

    epochs: tuple[EpochAudit, ...]

    @property
    def complete(self) -> bool:
        """Whether no finished epoch misses an example."""
        return not any(epoch.finished and epoch.never for epoch in self.epochs)

    def __str__(self) -> str:
        finished = [epoch for epoch in self.epochs if epoch.finished]
        short = sum(bool(epoch.never) for epoch in finished)
        if not self.epochs:
            return "No lease has ended yet, so nothing is known about the examples."
        if not finished:
            verdict = "No epoch is finished yet."
        elif short:
            verdict = f"{short:,} of {plural(len(finished), 'finished epoch')} missed examples."
        else:
            verdict = f"No example was missed in {plural(len(finished), 'finished epoch')}."
        return "\n".join([verdict, *_sentences(self.epochs)])


def audit(reader: Reader) -> Audit:
    """Compare what the leases trained with what every epoch holds.

    An epoch counts as finished once all of it was trained, or the run is over and went beyond it. While the
    run goes on, a hole may still be under lease, so it is not called missed.
    """
    state = reader.state()
    trained: dict[int, list[tuple[int, int]]] = defaultdict(list)
    size = int(state.get("examples_per_epoch") or 0)
    for lease in reader.rows(Lease):
        trained[lease.epoch].append((lease.start, lease.trained_stop))
        size = max(size, lease.stop)
    last = max(trained, default=-1)
    planned = state.get("epochs", "")
    reached = any(event.kind == "reached" for event in reader.rows(Event))
    if state.get("status") == "finished" and planned.isdecimal() and not reached:
        last = int(planned)  # it ended because its epochs were used up, so it went beyond the last of them
    over = state.get("status") == "finished"  # what was interrupted or failed can be resumed, and its holes filled
    found = []
    for epoch in sorted(trained.keys() | (set(range(last)) if over else set())):
        spans = spans_of(trained[epoch], size)
        full = all(span.times for span in spans)
        found.append(EpochAudit(epoch, finished=full or (over and epoch < last), spans=spans))
    return Audit(tuple(found))


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
