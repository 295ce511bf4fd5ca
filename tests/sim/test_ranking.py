"""The order of a ranking, the choice of what is tried for a target, and the words for it, on made-up results."""

import json

from hypothesis import given
from hypothesis import strategies as st

import squall
from squall.sim.planning.entries import RankingEntry, best_sizes, finalists
from squall.sim.planning.ranking import Ranking, ranked
from squall.sim.planning.reasons import reason
from tests.sim.plan_entries import AVERAGING, DILOCO, DOWNPOUR, SYNCHRONOUS, entry

TARGET = ("accuracy", 0.97)


def fast(entries: list[RankingEntry]) -> Ranking:
    return ranked(entries, None, 9)


@given(st.lists(st.tuples(st.floats(1, 1e6), st.sampled_from([None, 0.0, 5.0, 9.0])), min_size=1, max_size=20))
def test_the_order_is_time_to_the_target_then_what_was_tried_then_speed(
    found: list[tuple[float, float | None]],
) -> None:
    entries = [
        entry(DOWNPOUR, rate) if reached_s is None else entry(DOWNPOUR, rate, reached_s=reached_s)
        for rate, reached_s in found
    ]
    places = []
    for e in ranked(entries, TARGET, 9).entries:
        places.append((e.trial is None, e.reached_s is None, e.reached_s or 0.0, -e.useful))
    assert places == sorted(places)


def test_a_failed_trial_comes_after_those_that_were_only_slow() -> None:
    entries = [entry(DOWNPOUR, 9000, reached_s=0, status="nonfinite"), entry(SYNCHRONOUS, 10, reached_s=0)]
    assert ranked(entries, TARGET, 9).first.candidate.family == "synchronous"


def test_each_setting_is_shown_with_its_best_size() -> None:
    entries = [entry(squall.Downpour(replicas=n), 100 * n) for n in (2, 4, 8)] + [entry(SYNCHRONOUS, 300)]
    assert [e.candidate.recipe.replicas for e in best_sizes(entries)] == [8, 8]
    assert fast(entries).shown == best_sizes(entries)


def test_every_strategy_is_tried_before_one_is_tried_twice() -> None:
    entries = [entry(squall.Downpour(replicas=8, push_every=n), 1000 + n, name=f"downpour {n}") for n in (1, 8, 64)]
    entries += [entry(SYNCHRONOUS, 10), entry(DILOCO, 20)]
    chosen = finalists(entries, 4)
    assert [e.candidate.family for e in chosen] == ["downpour", "diloco", "synchronous", "downpour"]
    assert chosen[0].candidate.name == "downpour 1"  # as fast as the others, and coupled most tightly
    assert chosen[3].candidate.name == "downpour 8"


def test_a_looser_setting_is_tried_first_where_it_is_much_faster() -> None:
    entries = [entry(squall.Downpour(replicas=8, push_every=n), 1000 * n, name=f"downpour {n}") for n in (1, 8)]
    assert finalists(entries, 1)[0].candidate.name == "downpour 8"


def test_fewer_replicas_are_tried_where_more_are_hardly_faster() -> None:
    entries = [entry(squall.Synchronous(replicas=n), rate) for n, rate in ((4, 800), (7, 980), (8, 1000))]
    assert finalists(entries, 1)[0].candidate.recipe.replicas == 7


def test_the_reason_says_who_waits() -> None:
    words = reason(fast([entry(DOWNPOUR, 1000, idle=0.02), entry(SYNCHRONOUS, 500, idle=0.43)]))
    assert words.startswith(
        "downpour, 8 replicas, 1 shard is first: it trains 1,000 examples/s, and its replicas wait 2 %"
    )
    assert (
        "synchronous, 8 replicas, 1 shard trains 500 examples/s, since its replicas wait 43 % of their time for the"
        in words
    )
    assert "--until METRIC=VALUE" in words


def test_the_reason_blames_the_network_or_the_shards_where_they_are_full() -> None:
    network = reason(fast([entry(DILOCO, 1000), entry(SYNCHRONOUS, 500, idle=0.6, network=0.97)]))
    assert "for the network (the busiest interface is full for 97 % of the time)" in network
    shards = reason(fast([entry(DILOCO, 1000), entry(DOWNPOUR, 500, idle=0.6, shard_busy=0.99)]))
    assert "for the shards, which work 99 % of the time" in shards


def test_what_is_about_as_good_is_called_so() -> None:
    words = reason(fast([entry(DOWNPOUR, 1000), entry(DILOCO, 970), entry(SYNCHRONOUS, 500)]))
    assert (
        "Within 5 % of it, so as good as far as this can tell: diloco, 8 replicas, 1 shard (970 examples/s)." in words
    )


def test_the_reason_of_a_time_to_the_target_counts_examples() -> None:
    entries = [
        entry(SYNCHRONOUS, 1000, reached_s=12, examples=1000, idle=0.3),
        entry(DILOCO, 1000, reached_s=31, examples=2500),
        entry(DOWNPOUR, 1200, reached_s=20, examples=1500, staleness=7.0), entry(AVERAGING, 900, reached_s=0),
    ]  # fmt: skip
    words = reason(ranked(entries, TARGET, 9))
    assert "synchronous, 8 replicas, 1 shard is first: it reaches accuracy 0.97 in 12.0 s, at 1,000 examples/s" in words
    assert "needs 20.0 s, since it takes 1.5 times the examples at a mean staleness of 7 updates." in words
    assert "needs 31.0 s, since it takes 2.5 times the examples with 100 batches between exchanges." in words
    assert "averaging, 8 replicas, 1 shard has not arrived after 40.0 s." in words
    assert "one seed" in words


def test_the_reason_says_when_none_arrived_or_all_failed() -> None:
    late = reason(ranked([entry(SYNCHRONOUS, reached_s=0), entry(DOWNPOUR, reached_s=0)], TARGET, 9))
    assert "none of those tried reaches accuracy 0.97 within 40.0 s" in late
    failed = reason(ranked([entry(SYNCHRONOUS, reached_s=0, status="nonfinite")], TARGET, 9))
    assert "all of those tried fail: NaN in a loss" in failed


def test_failures_are_named_where_they_cost() -> None:
    words = reason(fast([entry(DOWNPOUR, 1000, left=0.8)]))
    assert "Failures cost it 20 % of its speed in the long run, most of it by replicas that are gone." in words


def test_json_holds_the_whole_ranking() -> None:
    document = json.loads(
        json.dumps(ranked([entry(SYNCHRONOUS, reached_s=3), entry(DOWNPOUR)], TARGET, 9).to_json_dict())
    )
    assert [e["strategy"] for e in document["ranking"]] == ["synchronous", "downpour"]
    assert document["ranking"][0]["seconds_to_target"] == 3
    assert document["reason"].startswith("synchronous")
