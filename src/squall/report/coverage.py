"""The audit: which examples of an epoch were trained, and how often, told from the leases alone.

All of it is arithmetic on ranges of positions in the epochs' shuffled order, which are read in turn: no example is
enumerated and no table held, so an epoch of a billion examples costs as much as one of a thousand, and a million
epochs that are alike as much as one.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from squall.record.rows import LossRow
from squall.report.reader import Reader
from squall.report.spans import TrainedRange, coverage, padded, spans_of
from squall.report.words import ANSWERING, TRAINING, plural, words_of

SHOWN = 6  # ranges named in one sentence


@dataclass(frozen=True, slots=True)
class EpochAudit:
    """One epoch, or all from `epoch` to `last`, which are alike; `spans` cover it in order, without gap or overlap.

    `owed`: the run says that positions below it are trained; it is 0 where the run promises nothing (yet).
    `skipped`: what scripts have left out of it; `quarantined`: what was left out as it gave NaN or Inf twice.
    `noun`: what leases count; a sampler's position may be any example.
    `done`: what happens to an example; what is answered knows no epochs.
    """

    epoch: int
    last: int
    owed: int
    spans: tuple[TrainedRange, ...]
    skipped: tuple[TrainedRange, ...] = ()
    noun: str = "example"
    done: str = TRAINING.done
    quarantined: tuple[TrainedRange, ...] = ()

    def __len__(self) -> int:
        return self.last - self.epoch + 1

    @property
    def examples(self) -> int:
        return self.spans[-1].stop if self.spans else 0

    @property
    def finished(self) -> bool:
        """Nothing of it is to come."""
        return self.owed >= self.examples or not self._never

    @property
    def missed(self) -> tuple[TrainedRange, ...]:
        """Never trained, and should have been."""
        return tuple(TrainedRange(s.start, min(s.stop, self.owed), 0) for s in self._never if s.start < self.owed)

    @property
    def _never(self) -> tuple[TrainedRange, ...]:
        """Neither trained nor left out."""
        out = [(span.start, span.stop) for span in (*self.skipped, *self.quarantined)]
        known = [(span.start, span.stop) for span in self.spans if span.times]
        return tuple(span for span in spans_of([*out, *known], self.examples) if span.times == 0)

    @property
    def repeated(self) -> tuple[TrainedRange, ...]:
        return tuple(span for span in self.spans if span.times > 1)

    @property
    def exact(self) -> bool:
        """Whether every example was trained exactly once."""
        return not self._never and not self.repeated and not self.skipped and not self.quarantined

    def __str__(self) -> str:
        trained, name = sum(len(span) for span in self.spans if span.times), _name(self, self.last)
        if self.finished:
            text = f"{name}: {trained:,} of {plural(self.examples, self.noun)} {self.done}."
        else:
            text = f"{name}, unfinished: {trained:,} of {self.examples:,} {self.done} so far."
        found = {
            f"Never {self.done}": self.missed, "Left out by the script": self.skipped,
            "Left out as they gave NaN or Inf twice": self.quarantined,
            f"{self.done.capitalize()} more than once": self.repeated,
        }  # fmt: skip
        told = [f" {what}: {sum(map(len, spans)):,}, at {_places(spans)}." for what, spans in found.items() if spans]
        return text + "".join(told)


@dataclass(frozen=True, slots=True)
class Audit:
    """What the leases prove about every epoch of which something was trained; `str` says it in sentences.

    Attributes:
        parts: epochs, in order; neighbours that are alike are one.
        absent: epochs that the run calls trained and of which there is no lease.
        batches: what is known of a method that deals no leases, in a sentence; empty for all others.
        noun: what leases count: examples, or positions of a sampler's order.
        lost: what shards had applied and lost, as they died inside an update: it was dealt again. By epoch.
    """

    parts: tuple[EpochAudit, ...]
    absent: int = 0
    batches: str = ""
    noun: str = "example"
    done: str = TRAINING.done
    lost: Mapping[int, tuple[TrainedRange, ...]] = field(default_factory=dict)

    @property
    def epochs(self) -> tuple[EpochAudit, ...]:
        """Each by itself."""
        return tuple(replace(part, epoch=e, last=e) for part in self.parts for e in range(part.epoch, part.last + 1))

    def to_json_dict(self) -> dict[str, Any]:
        """`complete`, `absent`, `batches` and `parts`: epochs that are alike, each with its first and last epoch.

        Of each epoch of a part: how many `examples` it has, how many of them are `trained`, whether it is `finished`,
        and where they were `missed`, `repeated`, `skipped` or `quarantined`: [start, stop, times] in the epoch's
        order. `lost`: what shards have lost, [epoch, start, stop].
        """
        parts = [
            {
                "first": part.epoch, "last": part.last, "examples": part.examples, "finished": part.finished,
                "trained": sum(len(span) for span in part.spans if span.times),
                **{name: [[span.start, span.stop, span.times] for span in getattr(part, name)]
                   for name in ("missed", "repeated", "skipped", "quarantined")},
            }
            for part in self.parts
        ]  # fmt: skip
        lost = [[epoch, span.start, span.stop] for epoch, spans in self.lost.items() for span in spans]
        return {
            "complete": self.complete, "absent": self.absent, "batches": self.batches, "parts": parts, "lost": lost,
        }  # fmt: skip

    @property
    def complete(self) -> bool:
        """Whether nothing is missing of what the run says it has trained."""
        return not self.absent and not any(part.missed for part in self.parts)

    def __str__(self) -> str:
        if self.batches:
            return self.batches
        finished = sum(len(part) for part in self.parts if part.finished or part.missed)
        short = sum(len(part) for part in self.parts if part.missed)
        if not self.parts and not self.absent:
            return f"No lease has ended yet, so nothing is known about the {self.noun}s."
        if self.complete and not finished:
            verdict = "No epoch is finished yet."
        elif self.complete:
            verdict = f"No {self.noun} was missed in {plural(finished, 'finished epoch')}."
        else:
            verdict = (
                f"{short + self.absent:,} of {plural(finished + self.absent, 'finished epoch')} missed {self.noun}s."
            )
        absent = [f"Of {plural(self.absent, 'epoch')} nothing was trained at all."] if self.absent else []
        verdicts = [verdict] if self.done == TRAINING.done else []  # that count epochs
        lost = [
            f"Of epoch {epoch} a shard that died inside an update had lost {sum(map(len, spans)):,}, dealt again:"
            f" {_places(spans)}."
            for epoch, spans in self.lost.items()
        ]
        return "\n".join([*verdicts, *_sentences(self.parts), *lost, *absent])


def audit(reader: Reader) -> Audit:
    """Compare what the leases trained with what the run says of itself: why it ended.

    One that ended because all data is trained owes every example of its epochs. One that ended at its steps owes what
    it has dealt: all epochs before the last, and the last up to there. Any other stops in the middle of its leases, and
    so does one that is not over: their holes are not called missed, a resumed run fills them.
    """
    state = reader.state()
    if batch := int(state.get("batch") or 0):
        return Audit((), batches=_batches(reader, batch, state.get("strategy", "This method")))
    size = int(state.get("examples_per_epoch") or 0) or reader.longest()
    dealt, noun, done = reader.dealt(size), state.get("counted", "example"), words_of(state).done
    owed = (0, 0)  # all epochs before this one, and this one up to there
    if state.get("ended") == "data":
        owed = (int(state.get("epochs") or 0), 0)
    elif state.get("ended") == "steps" and dealt:
        owed = divmod(dealt, size)
    found = []
    left_out = [_by_first(reader.skipped(size, why), size) for why in ("", "nonfinite")]
    for first, last, spans in _by_epoch(coverage(reader.trained(size)), size, dealt) if size else ():
        if any(span.times for span in spans) or any(first in each for each in left_out):
            due = size if first < owed[0] else owed[1] if first == owed[0] else 0
            skipped, quarantined = (tuple(each.get(first, ())) for each in left_out)
            found.append(EpochAudit(first, last, due, spans, skipped, noun, done, quarantined))
        elif first <= owed[0] <= last and owed[1]:
            found.append(EpochAudit(owed[0], owed[0], owed[1], spans, noun=noun, done=done))
    known = sum(min(part.last + 1, owed[0]) - part.epoch for part in found if part.epoch < owed[0])
    return Audit(tuple(found), absent=owed[0] - known, noun=noun, done=done, lost=_lost(reader))


def _lost(reader: Reader) -> dict[int, tuple[TrainedRange, ...]]:
    rows: dict[int, list[tuple[int, int]]] = {}
    for row in reader.rows(LossRow):
        rows.setdefault(row.epoch, []).append((row.start, row.stop))
    return {
        epoch: tuple(span for span in coverage(sorted(ranges)) if span.times) for epoch, ranges in sorted(rows.items())
    }


def _by_first(left_out: Iterable[tuple[int, int]], size: int) -> dict[int, list[TrainedRange]]:
    found: dict[int, list[TrainedRange]] = {}
    for start, stop in left_out:
        found.setdefault(start // size, []).append(TrainedRange(start % size, start % size + stop - start, 0))
    return found


def _batches(reader: Reader, batch: int, strategy: str) -> str:
    examples = sum(work.examples for work in reader.progress())
    return (
        f"{strategy} looks at batches as a whole and has no leases: its loss and gradient were evaluated"
        f" {examples // batch:,} times on {plural(batch, 'example')}, {examples:,} in all. An evaluation counts when"
        " every shard has each portion of its batch exactly once."
    )


def _by_epoch(
    spans: Iterable[TrainedRange], size: int, dealt: int
) -> Iterator[tuple[int, int, tuple[TrainedRange, ...]]]:
    """First epoch, last, and their spans: cut at the ends of epochs, of which those within one span come together."""
    cut: list[TrainedRange] = []  # of the epoch that is not over
    for span in padded(spans, dealt + -dealt % size):
        start = span.start
        while start < span.stop:
            epoch, position = divmod(start, size)
            if not position and (whole := (span.stop - start) // size):
                yield epoch, epoch + whole - 1, (TrainedRange(0, size, span.times),)
                start += whole * size
                continue
            stop = min(span.stop, (epoch + 1) * size)
            cut.append(TrainedRange(position, stop - epoch * size, span.times))
            start = stop
            if stop == (epoch + 1) * size:
                yield epoch, epoch, tuple(cut)
                cut.clear()


def _sentences(parts: tuple[EpochAudit, ...]) -> list[str]:
    """One line an epoch; neighbours in which every example was trained once share a line."""
    lines: list[str] = []
    run: list[EpochAudit] = []
    for part in parts:
        if run and not (part.exact and part.epoch == run[-1].last + 1):
            lines.append(_exactly_once(run))
            run = []
        if part.exact:
            run.append(part)
        else:
            lines.append(str(part))
    return [*lines, _exactly_once(run)] if run else lines


def _exactly_once(run: list[EpochAudit]) -> str:
    first = run[0]
    each = f"each of {plural(first.examples, first.noun)} {first.done} exactly once."
    return f"{_name(first, run[-1].last)}: {each}"


def _name(part: EpochAudit, last: int) -> str:
    if part.done == ANSWERING.done:
        return "The data"
    return f"Epoch {part.epoch}" if part.epoch == last else f"Epochs {part.epoch} to {last}"


def _places(spans: tuple[TrainedRange, ...]) -> str:
    more = f" and {plural(len(spans) - SHOWN, 'more range')}" if len(spans) > SHOWN else ""
    return ", ".join(map(str, spans[:SHOWN])) + more
