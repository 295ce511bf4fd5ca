import pytest

from squall.protocol.effects import EvaluateModel
from squall.protocol.evaluator import Evaluator
from squall.protocol.events import ModelEvaluated, Started, StopRequested, TimePassed
from squall.protocol.messages import Evaluate, Evaluated, Exchange, Exchanged, Join, Stop, Weights
from squall.protocol.nodes import COORDINATOR, Node
from tests.protocol.steps import give, kinds, sent, shard_nodes, tell

S0, S1 = shard_nodes(2)


def evaluator() -> Evaluator:
    machine = Evaluator(Node("evaluator", 3), shards=2, pid=99)
    assert sent(give(machine, Started()), Join) == [(COORDINATOR, Join(99))]
    return machine


def test_it_fetches_from_every_shard_and_tells_what_is_in_the_weights_that_it_measured() -> None:
    machine = evaluator()
    asked = sent(tell(machine, COORDINATOR, Evaluate(4)), Exchange)
    assert [to for to, _ in asked] == [S0, S1]
    assert all(message.weights == 0 and message.gradient == -1 for _, message in asked)
    assert tell(machine, S1, Exchanged(0, 71, examples=710), 9.0) == []
    assert tell(machine, S0, Exchanged(0, 70, examples=700), 10.0) == [EvaluateModel(0)]
    answer = give(machine, ModelEvaluated({"loss": 0.5, "accuracy": 0.75}), 12.5)
    evaluated = Evaluated(4, Weights(70, 700, age_s=2.5), {"loss": 0.5, "accuracy": 0.75})
    assert sent(answer, Evaluated) == [(COORDINATOR, evaluated)]


def test_one_evaluation_after_the_other() -> None:
    machine = evaluator()
    for number, version in ((0, 10), (1, 20)):
        tell(machine, COORDINATOR, Evaluate(number))
        tell(machine, S0, Exchanged(0, version))
        assert kinds(tell(machine, S1, Exchanged(0, version))) == ["EvaluateModel"]
        ((_, answer),) = sent(give(machine, ModelEvaluated({})), Evaluated)
        assert (answer.number, answer.weights.updates) == (number, version)


@pytest.mark.parametrize("asked", [False, True])
def test_it_ends_when_told_to(asked: bool) -> None:
    machine = evaluator()
    if asked:
        tell(machine, COORDINATOR, Evaluate(0))
    assert kinds(tell(machine, COORDINATOR, Stop())) == ["End"]


def test_it_waits_for_no_time_and_knows_no_other_event() -> None:
    machine = evaluator()
    assert machine.wake_at is None
    assert give(machine, TimePassed()) == []
    with pytest.raises(AssertionError, match="does not know"):
        machine.on(StopRequested("no"), 0.0)
