"""How far the epochs are that replicas have leases of: what is trained, and what is dealt."""

from __future__ import annotations

from heapq import merge

from squall.report.reader import Reader

SHOWN = 3  # epochs
Epoch = tuple[int, int, list[tuple[int, int]]]  # its number, up to where it is dealt, and ranges that are trained


def under_way(reader: Reader) -> list[Epoch]:
    """The last epoch that leases were dealt of, and the first of those before it that are not trained as a whole.

    Who holds what is dealt and not trained is not in the record, and the last leases that were dealt are not, either:
    it has what has ended.
    """
    size = int(reader.state().get("examples_per_epoch") or 0)
    if not size or not (dealt := reader.dealt(size)):
        return []
    last = (dealt - 1) // size
    done = _joined(reader, size)
    shown = [*_unfinished(done, last * size, size)[: SHOWN - 1], last]
    return [(epoch, min(size, dealt - epoch * size), _within(done, epoch, size)) for epoch in shown]


def _unfinished(done: list[tuple[int, int]], upto: int, size: int) -> list[int]:
    """The first epochs that gaps before `upto` are in."""
    found: dict[int, None] = {}
    reached = 0
    for start, stop in [*done, (upto, upto)]:
        if reached < (end := min(start, upto)):
            found.update(dict.fromkeys(range(reached // size, -(-end // size))[:SHOWN]))
        reached = max(reached, stop)
    return list(found)


def _joined(reader: Reader, size: int) -> list[tuple[int, int]]:
    """Ranges that need no further work, through all epochs, without those that touch."""
    found: list[tuple[int, int]] = []
    for start, stop in merge(reader.trained(size), reader.skipped(size)):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], stop)
        else:
            found.append((start, stop))
    return found


def _within(done: list[tuple[int, int]], epoch: int, size: int) -> list[tuple[int, int]]:
    """Their parts in that epoch, as positions in it."""
    cut = ((max(start - epoch * size, 0), min(stop - epoch * size, size)) for start, stop in done)
    return [(start, stop) for start, stop in cut if start < stop]
