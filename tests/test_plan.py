"""A plan is decided before anything runs: each wrong setting has an answer, and a right one prints itself."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import msgspec
import pytest
import torch
from torch.optim.lr_scheduler import ReduceLROnPlateau, StepLR

import squall
from squall.plan import check_together, make_plan, versions
from squall.runtime.run_plan import Aims, Plan
from squall.settings import Settings
from squall.task import TaskFunction
from tests.tasks import numbers, regression

SGD = partial(torch.optim.SGD, lr=0.1)


def plan(strategy: Any = squall.SingleProcess(), settings: Settings | None = None, **limits: Any) -> Plan:  # noqa: B008
    where = {name: limits.pop(name) for name in ("seed", "device") if name in limits}
    return make_plan(strategy, settings or Settings(), Aims(**limits), **where)


WRONG: dict[str, tuple[Callable[[], object], str]] = {
    "no replicas": (lambda: plan(squall.Downpour(replicas=0)), "replicas is 0: it must be at least 1"),
    "negative shards": (lambda: plan(squall.Synchronous(shards=-1)), "shards is -1: it must be at least 1"),
    "push every 0": (lambda: plan(squall.Downpour(push_every=0)), "push_every is 0: it must be at least 1"),
    "fetch every -2": (lambda: plan(squall.Downpour(fetch_every=-2)), "fetch_every is -2: it must be at least 1"),
    "negative delay": (lambda: plan(squall.Downpour(max_delay=-1)), "max_delay is -1: it must be 0 or more, or None"),
    "negative warm start": (lambda: plan(squall.Downpour(warm_start=-5)), "warm_start is -5: it must be 0 or more"),
    "no factory": (lambda: plan(squall.Downpour(optimizer="sgd")), r"partial\(torch.optim.SGD, lr=0.1\)"),
    "an optimizer": (
        lambda: plan(squall.Downpour(optimizer=SGD([torch.ones(1, requires_grad=True)]))), "must be a factory"),
    "a strategy's name": (lambda: plan("downpour"), r"squall.Downpour\(replicas=2\): got 'downpour'"),
    "a strategy's class": (lambda: plan(squall.Downpour), "strategy must be one of SingleProcess, Synchronous"),
    "no epochs": (lambda: plan(epochs=0), "epochs is 0: it must be at least 1"),
    "half an epoch": (lambda: plan(epochs=1.5), "epochs is 1.5: it must be at least 1, and whole"),
    "epochs in words": (lambda: plan(epochs="3"), "epochs is '3': it must be at least 1, and whole"),
    "a number as the target": (lambda: plan(until=0.97), "until is 0.97: write metric=value"),
    "negative steps": (lambda: plan(steps=-7), "steps is -7: it must be at least 1"),
    "until a word": (lambda: plan(until="accuracy"), "write metric=value, for example accuracy=0.97"),
    "until no number": (lambda: plan(until="accuracy=high"), "write metric=value"),
    "until no name": (lambda: plan(until="=0.9"), "write metric=value"),
    "no such device": (lambda: plan(device="abacus"), "'abacus' is not one that torch knows: use 'cpu', 'cuda'"),
    "another device": (lambda: plan(device="meta"), "replicas compute on 'cpu' or 'cuda'"),
    "no launcher": (lambda: Settings(launcher="cloud"), "launcher is 'cloud': use one of local, inline"),
    "no threads": (lambda: Settings(threads=0), "threads is 0: it must be at least 1"),
    "no threads of a shard": (lambda: Settings(shard_threads=0), "shard_threads is 0: it must be at least 1"),
    "threads where there are sums": (
        lambda: plan(squall.Sandblaster(), Settings(shard_threads=2)), "Sandblaster forms sums on the shards",
    ),
    "no time": (lambda: Settings(seconds=0.0), "seconds is 0.0: it must be positive"),
    "evaluate always": (lambda: Settings(evaluate_every_s=-1.0), "evaluate_every_s is -1.0: it must be positive"),
    "snapshot always": (lambda: Settings(snapshot_every_s=0), "snapshot_every_s is 0: it must be positive"),
}  # fmt: skip


@pytest.mark.parametrize("name", WRONG)
def test_what_is_wrong_is_named_with_the_remedy(name: str) -> None:
    make, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        make()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_gpu_that_is_not_there_is_said_to_be_missing() -> None:
    with pytest.raises(ValueError, match="torch sees no CUDA GPU here; `squall doctor` says why"):
        plan(device="cuda")


def together(task: TaskFunction, strategy: squall.Strategy, **limits: Any) -> object:
    return check_together(plan(strategy, **limits), strategy, task())


def test_more_shards_than_elements_are_refused() -> None:
    small = regression(lambda: torch.nn.Linear(6, 1, bias=False))
    with pytest.raises(ValueError, match="7 shards for 6 parameters: use at most 6 shards"):
        together(small, squall.Downpour(shards=7))
    assert together(small, squall.Downpour(shards=6)).elements == 6


def test_until_must_name_a_metric_of_the_task() -> None:
    task = regression(validate=numbers(8), metrics={"error": lambda model, batch: batch[0][:, 0]})
    with pytest.raises(ValueError, match="names the metric 'accuracy', but the task has loss, error"):
        together(task, squall.Downpour(), until="accuracy=0.9")
    with pytest.raises(ValueError, match="'loss', but the task has no validation set"):
        together(regression(), squall.Downpour(), until="loss=0.9")
    together(task, squall.Downpour(), until="loss=0.1")


def test_a_schedule_must_not_wait_for_a_metric() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau needs a metric"):
        together(regression(schedule=ReduceLROnPlateau), squall.Downpour())
    together(regression(schedule=partial(StepLR, step_size=3)), squall.Downpour())


def test_one_epoch_is_the_limit_where_none_is_given() -> None:
    assert plan().epochs == 1
    for limits in ({"steps": 5}, {"until": "loss=0.1"}):
        assert plan(**limits).epochs is None
    assert plan(settings=Settings(seconds=2.0)).epochs is None


def test_a_plan_prints_itself_and_is_plain_data() -> None:
    strategy = squall.Downpour(replicas=4, shards=2, optimizer=partial(torch.optim.Adagrad, lr=0.02))
    made = plan(strategy, Settings(threads=1), epochs=3, until="accuracy=0.97", seed=7)
    text = (
        "downpour: 4 replicas x 1 threads on cpu, 2 shards, Adagrad, lr 0.02, 3 epochs, until accuracy is 0.97, seed 7"
    )
    assert str(made) == text
    assert made.strategy_fields["optimizer"] == "Adagrad(lr=0.02)"
    assert msgspec.json.decode(msgspec.json.encode(made), type=Plan) == made
    with pytest.raises(AttributeError):
        made.seed = 8  # type: ignore[misc]


def test_the_cores_are_divided_among_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda pid: set(range(8)))
    assert [plan(squall.Downpour(replicas=n)).threads for n in (1, 2, 3, 20)] == [8, 4, 2, 1]
    assert plan(squall.Downpour(replicas=2), Settings(threads=3)).threads == 3


def test_versions_name_what_a_report_needs() -> None:
    assert versions()["torch"] == str(torch.__version__)
    assert {"squall", "python", "machine", "system"} <= set(versions())
