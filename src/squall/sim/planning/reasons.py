"""Why the first of a ranking is first, in words made from its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from squall.report.words import clock, number, percent, rate_text
from squall.sim.planning.entries import ALIKE, RankingEntry

if TYPE_CHECKING:
    from squall.sim.planning.ranking import Ranking

COMPARED = 3  # other strategies that the reason names
FULL = 0.8  # of an interface or a shard: then it decides the speed
MARKED = 0.05  # a difference of shares that is worth a word


def reason(ranking: Ranking) -> str:
    """One paragraph; every figure in it is in the ranking."""
    first = ranking.first
    others = _others(ranking)
    sentences = [_first(first, ranking.target), *_with_more(ranking), *_without(ranking)]
    if first.trial is not None and first.reached_s is None:
        return " ".join([sentences[0], _none_arrived(ranking), *_left_out(ranking)])
    alike = [entry for entry in others if _slower(entry, first) <= 1 + ALIKE]
    if alike:
        named = " and ".join(f"{entry.candidate} ({_value(entry)})" for entry in alike[:COMPARED])
        sentences.append(f"Within {ALIKE:.0%} of it, so as good as far as this can tell: {named}.".replace("%", " %"))
    behind = [entry for entry in others if entry not in alike][: max(1, COMPARED - len(alike))]
    sentences += [_behind(entry, first) for entry in behind]
    if first.survival.left < 1 - MARKED:
        sentences.append(_failures(first))
    return " ".join([*sentences, _caution(ranking), *_left_out(ranking)])


def _left_out(ranking: Ranking) -> list[str]:
    """A strategy that was asked for must not be missing without a word."""
    unfit: dict[str, list[str]] = {}
    for family, why in ranking.unfit.items():
        unfit.setdefault(why, []).append(family)
    sentences = [f"Not ranked: {', '.join(families)}. {why}." for why, families in unfit.items()]
    if not ranking.left_out:
        return sentences
    return [
        *sentences,
        f"Not ranked: {', '.join(ranking.left_out)}. A budget of {ranking.budget} has room for one replica, which is"
        " plain training whatever the strategy, and tried once: a larger --budget ranks more.",
    ]


def _others(ranking: Ranking) -> list[RankingEntry]:
    """The best of each other strategy; of the first's own, only another setting that was tried as well."""
    found: dict[str, RankingEntry] = {}
    for entry in ranking.shown[1:]:
        if entry.candidate.family != ranking.first.candidate.family:
            found.setdefault(entry.candidate.family, entry)
    return list(found.values())


def _first(first: RankingEntry, target: tuple[str, float] | None) -> str:
    if first.candidate.recipe.alone:
        goal = "trains" if target is None or first.reached_s is None else (
            f"reaches {target[0]} {target[1]:g} in {clock(first.reached_s)}, sooner than any with several processes, at"
        )  # fmt: skip
        more = ", more than any with several processes" if goal == "trains" else ""
        return f"Stay with one process: {first.candidate} {goal} {_rate(first)} examples/s{more}."
    if target is not None and first.reached_s is not None:
        return (
            f"{first.candidate} is first: it reaches {target[0]} {target[1]:g} in {clock(first.reached_s)},"
            f" at {_rate(first)} examples/s, and its replicas wait {percent(first.speed.idle, 1)} of their time."
        )
    return (
        f"{first.candidate} is first: it trains {_rate(first)} examples/s, and its replicas wait"
        f" {percent(first.speed.idle, 1)} of their time."
    )


def _with_more(ranking: Ranking) -> list[str]:
    """What the first would gain or lose with the most replicas that were tried."""
    first = ranking.first
    same = [entry for entry in ranking.entries if entry.candidate.name == first.candidate.name]
    most = max(same, key=lambda entry: (entry.candidate.recipe.replicas, entry.useful))
    replicas = most.candidate.recipe.replicas
    if replicas == first.candidate.recipe.replicas:
        return []
    wait = (
        f", waiting {percent(most.speed.idle, 1)} of their time" if most.speed.idle > first.speed.idle + MARKED else ""
    )
    return [f"With {replicas} replicas it would train {_rate(most)} examples/s{wait}."]


def _without(ranking: Ranking) -> list[str]:
    """What one process does, where it is not the first and its own line would not say so."""
    found = next((entry for entry in ranking.entries if entry.candidate.recipe.alone), None)
    if found is None or found is ranking.first or not found.useful:
        return []
    ratio = ranking.first.useful / found.useful
    return [f"One process alone trains {_rate(found)} examples/s: the first is {ratio:.1f} times as fast."]


def _none_arrived(ranking: Ranking) -> str:
    assert ranking.target is not None
    name, value = ranking.target
    tried = [entry.trial for entry in ranking.shown if entry.trial is not None and not entry.failed]
    if not tried:
        return f"But all of those tried fail: {ranking.shown[0].trial.reason}." if ranking.shown[0].trial else ""
    longest = max(trial.training_s for trial in tried)
    seen = [trial.metrics[name] for trial in tried if name in trial.metrics]
    last = f" (they ended between {number(min(seen))} and {number(max(seen))})" if seen else ""
    return (
        f"But none of those tried reaches {name} {value:g} within {clock(longest)}{last}, so the order is that of"
        " examples/s: give them more --seconds, a nearer target, or other settings with --strategies."
    )


def _slower(entry: RankingEntry, first: RankingEntry) -> float:
    """How many times as long it takes as the first."""
    if first.reached_s is not None:
        return entry.reached_s / first.reached_s if entry.reached_s is not None and first.reached_s else float("inf")
    return first.useful / entry.useful if entry.useful else float("inf")


def _value(entry: RankingEntry) -> str:
    return clock(entry.reached_s) if entry.reached_s is not None else f"{_rate(entry)} examples/s"


def _rate(entry: RankingEntry) -> str:
    return rate_text(entry.useful)


def _behind(entry: RankingEntry, first: RankingEntry) -> str:
    if first.reached_s is None:
        return f"{entry.candidate} trains {_rate(entry)} examples/s{_because(entry, first)}."
    if entry.reached_s is None:
        assert entry.trial is not None
        if entry.failed:
            return f"{entry.candidate} fails ({entry.trial.reason})."
        return f"{entry.candidate} has not arrived after {clock(entry.trial.training_s)}{_because(entry, first)}."
    return f"{entry.candidate} needs {clock(entry.reached_s)}{_because(entry, first)}."


def _because(entry: RankingEntry, first: RankingEntry) -> str:
    """What sets it apart from the first, as far as its figures show."""
    causes = []
    if entry.useful < (1 - 2 * ALIKE) * first.useful:
        causes += _slow(entry, first)
    examples = _more_examples(entry, first)
    if examples is not None:
        causes.append(examples)
    return f", since {', and '.join(causes)}" if causes else ""


def _slow(entry: RankingEntry, first: RankingEntry) -> list[str]:
    """Why it trains fewer examples a second."""
    causes = []
    if entry.speed.idle > first.speed.idle + MARKED:
        causes.append(f"its replicas wait {percent(entry.speed.idle, 1)} of their time {_waits_for(entry)}")
    if entry.speed.kept < first.speed.kept - MARKED:
        causes.append(f"{percent(1 - entry.speed.kept, 1)} of what they compute comes too late and is dropped")
    if entry.survival.left < first.survival.left - MARKED:
        causes.append(f"failures cost it {percent(1 - entry.survival.left, 1)} of its speed")
    if not causes and entry.candidate.recipe.replicas < first.candidate.recipe.replicas:
        causes.append(f"it is at its best with {entry.candidate.recipe.replicas} replicas")
    return causes


def _waits_for(entry: RankingEntry) -> str:
    if entry.speed.network > FULL:
        return f"for the network (the busiest interface is full for {percent(entry.speed.network, 1)} of the time)"
    if entry.speed.shard_busy > FULL:
        return f"for the shards, which work {percent(entry.speed.shard_busy, 1)} of the time"
    recipe = entry.candidate.recipe
    if not recipe.shards:
        return "for the slowest, and for the sum of their gradients"
    return "for the slowest" if recipe.loop.exchanges.awaited and recipe.replicas > 1 else "for their exchanges"


def _more_examples(entry: RankingEntry, first: RankingEntry) -> str | None:
    """With a target: an example teaches it less."""
    if entry.trial is None or first.trial is None or entry.reached_s is None or not first.trial.examples:
        return None
    ratio = entry.trial.examples / first.trial.examples
    if ratio < 1 + 2 * ALIKE:
        return None
    stale = f" at a mean staleness of {entry.speed.staleness:.0f} updates" if entry.speed.staleness >= 1 else ""
    every = entry.candidate.recipe.work.every
    inner = f" with {every} batches between exchanges" if every > 1 else ""
    return f"it takes {ratio:.1f} times the examples{inner}{stale}"


def _failures(first: RankingEntry) -> str:
    survival = first.survival
    shares = {
        "replicas that are gone": survival.away, "waiting until that is noticed": survival.stalled,
        "work that was not yet pushed": survival.lost, "the loss of shards or the coordinator": survival.stopped,
    }  # fmt: skip
    worst = max(shares, key=lambda name: shares[name])
    return f"Failures cost it {percent(1 - survival.left, 1)} of its speed in the long run, most of it by {worst}."


def _caution(ranking: Ranking) -> str:
    if ranking.first.trial is not None:
        return "Each was trained with one seed: differences of a tenth may be chance."
    return (
        "Asynchrony and long inner loops pay for speed in what an example teaches: rank by time to a target with"
        " --until METRIC=VALUE."
    )
