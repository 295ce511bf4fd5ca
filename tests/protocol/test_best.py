"""What evaluations decide: a target, the best so far, and patience; in the machines that do so."""

import math

import pytest

from squall.protocol.best import Best, Goal, better
from squall.protocol.effects import Cause, Effect, End, KeepWeights, Send
from squall.protocol.evaluations import Evaluations
from squall.protocol.evaluator import Evaluator
from squall.protocol.events import ModelEvaluated, TimePassed, WeightsKept
from squall.protocol.leases import Limits
from squall.protocol.messages import Evaluate, Evaluated, Exchanged, Stop, Weights
from squall.protocol.nodes import COORDINATOR, Node
from squall.protocol.notes import Remark
from tests.protocol.office import Office
from tests.protocol.steps import give, kinds, sent, shard_nodes, tell

S0, S1 = shard_nodes(2)


@pytest.mark.parametrize(
    ("until", "values", "why"),
    [
        (None, {}, ""),
        (("loss", 0.5), {"loss": 0.51}, ""),
        (("loss", 0.5), {"loss": 0.5}, "loss 0.5000 reached 0.5"),
        (("accuracy", 0.9), {"accuracy": 0.89}, ""),
        (("accuracy", 0.9), {"accuracy": 0.95}, "accuracy 0.9500 reached 0.9"),
        (("loss", 0.5), {"loss": math.nan}, ""),
        (("accuracy", 0.9), {"loss": 0.95}, ""),
    ],
)
def test_a_target(until: tuple[str, float] | None, values: dict[str, float], why: str) -> None:
    verdict = Best(Goal(), until).judge(values)
    assert verdict == ((Cause.REACHED, why) if why else None)


def test_a_loss_is_better_when_it_is_lower_and_nan_never() -> None:
    assert better("loss", 0.4, 0.5)
    assert not better("accuracy", 0.4, 0.5)
    assert better("accuracy", 0.4, None)
    assert not better("loss", math.nan, None)
    assert better("loss", 7.0, math.nan)


def test_patience_counts_evaluations_without_a_better_one() -> None:
    best = Best(Goal("accuracy", patience=2), None)
    for accuracy in (0.5, 0.4, 0.6, 0.6):  # the same is not better
        assert best.judge({"accuracy": accuracy}) is None
    assert best.judge({"loss": 1.0}) is None, "what does not measure it does not count"
    verdict = best.judge({"accuracy": math.nan})
    assert verdict == (Cause.PATIENCE, "accuracy was not better than 0.6000 in 2 evaluations in a row")


def test_a_metric_that_is_never_a_number_wears_patience_out() -> None:
    best = Best(Goal(patience=1), None)
    assert best.judge({"loss": math.nan}) == (Cause.PATIENCE, "loss was not a number in 1 evaluation in a row")


def test_a_run_that_goes_on_knows_the_best_so_far() -> None:
    assert Best(Goal("accuracy", patience=1, best=0.9), None).judge({"accuracy": 0.8}) is not None


def test_a_coordinator_ends_the_run_and_still_measures_the_final_weights() -> None:
    office = Office(limits=Limits(), goal=Goal("accuracy", patience=2), evaluate_every_s=1.0)
    (a,) = office.join(0)
    for now, accuracy in ((1.0, 0.5), (2.0, 0.5), (3.0, 0.4)):
        assert not office.heard(a, Stop)
        office.now = now
        office.give(TimePassed())
        office.evaluated(accuracy=accuracy)
    assert office.heard(a, Stop) == [Stop()]
    office.leave(a)
    office.evaluated(accuracy=0.45)
    (end,) = [effect for effect in office.snapshot() if isinstance(effect, End)]
    assert (end.status, end.cause) == ("finished", Cause.PATIENCE)


def test_the_evaluator_is_told_the_best_of_all_that_are_kept() -> None:
    office = Office(limits=Limits(), goal=Goal("accuracy", keep=True), evaluate_every_s=1.0)
    office.join(0)
    asked = []
    for now, accuracy, error in ((1.0, 0.5, ""), (2.0, 0.6, "the disk is full"), (3.0, 0.55, ""), (4.0, 0.1, "")):
        office.now = now
        office.give(TimePassed())
        number, best = [(m.number, m.best) for _, m in office.said if isinstance(m, Evaluate)][-1]
        asked.append(best)
        office.tell(office.evaluator, Evaluated(number, Weights(5, 50, 0.0), {"accuracy": accuracy}, error))
        assert office.remarks("error") == [f"the best weights could not be kept: {error}"] * (error != "")
    assert asked == [None, 0.5, 0.5, 0.55]


def test_weights_that_are_kept_on_a_lost_machine_are_the_best_no_longer_and_patience_goes_on() -> None:
    evaluations = Evaluations(Node("evaluator", 1), Best(Goal("accuracy", keep=True, patience=2, best=0.9), None))
    effects: list[Effect] = []
    evaluations.moved(effects)
    assert [effect.text for effect in effects if isinstance(effect, Remark)] == [
        "the best weights so far, of accuracy 0.9000, are on the machine that was lost: from now on the best since then"
        " are kept"
    ]
    asked: list[float | None] = []
    for accuracy in (0.5, 0.6):
        found: list[Effect] = []
        evaluations.ask(found)
        (question,) = [effect.message for effect in found if isinstance(effect, Send)]
        assert isinstance(question, Evaluate)
        asked.append(question.best)
        verdict = evaluations.answered(Evaluated(question.number, Weights(1, 1, 0.0), {"accuracy": accuracy}), found)
    assert asked == [None, 0.5]
    assert verdict is not None, "neither was better than 0.9"


def test_a_target_is_reached_also_where_the_weights_could_not_be_kept() -> None:
    best = Best(Goal("accuracy", keep=True, patience=1, best=0.5), ("accuracy", 0.9))
    assert best.judge({"accuracy": 0.4}, kept=False) is None
    verdict = best.judge({"accuracy": 0.95}, kept=False)
    assert verdict is not None
    assert (verdict[0], best.value) == (Cause.REACHED, 0.5)


def test_an_evaluator_keeps_what_is_better_before_it_tells() -> None:
    machine = Evaluator(Node("evaluator", 3), shards=2, keep="accuracy")
    for number, (accuracy, best, kept) in enumerate([(0.5, None, True), (0.4, 0.5, False), (0.6, 0.5, True)]):
        tell(machine, COORDINATOR, Evaluate(number, best))
        tell(machine, S0, Exchanged(0, 70, examples=700))
        tell(machine, S1, Exchanged(0, 71, examples=710))
        effects = give(machine, ModelEvaluated({"accuracy": accuracy}))
        if kept:
            assert effects == [KeepWeights(0, "accuracy", accuracy, 70, 700)]
            effects = give(machine, WeightsKept("the disk is full"))
        ((_, told),) = sent(effects, Evaluated)
        assert (told.number, told.values, told.error) == (number, {"accuracy": accuracy}, "the disk is full" * kept)


def test_an_evaluator_that_was_not_asked_to_keeps_nothing() -> None:
    machine = Evaluator(Node("evaluator", 3), shards=1)
    tell(machine, COORDINATOR, Evaluate(0))
    tell(machine, S0, Exchanged(0, 1))
    assert kinds(give(machine, ModelEvaluated({"loss": 0.1}))) == ["Evaluated"]
