"""L-BFGS by scalars against SciPy's, on vectors of NumPy."""

from __future__ import annotations

import pickle
from collections.abc import Callable

import numpy as np
import pytest
from scipy import optimize

from squall.protocol.sandblaster.messages import Calculation
from squall.protocol.sandblaster.method import (
    EvaluateTrial,
    Failed,
    Iterated,
    MethodSettings,
    MethodState,
    Minimization,
    Outcome,
    Proceed,
)

Function = Callable[[np.ndarray], tuple[float, np.ndarray]]


class Vectors:
    """A shard, in double precision, and a replica that computes in one go."""

    def __init__(self, function: Function, start: np.ndarray) -> None:
        self.function = function
        self.vectors = {"weights": start.copy()}
        self.requests: list[object] = []
        self.losses: list[float] = []
        self.pairs: list[float] = []  # s.y of each pair when it was made
        self.at_most = 1000  # iterations

    def answer(self, request: object) -> tuple[float, ...]:
        self.requests.append(request)
        match request:
            case Calculation(_, combine, rows, columns, largest):
                self._combine(combine)
                for done in combine:
                    if done.target.startswith("y"):
                        self.pairs.append(float(self.vectors[done.target] @ self.vectors["s" + done.target[1:]]))
                products = [float(self.vectors[row] @ self.vectors[column]) for row in rows for column in columns]
                return (*products, *(float(np.abs(self.vectors[name]).max()) for name in largest))
            case EvaluateTrial(_, combine):
                self._combine(combine)
                loss, self.vectors["sum"] = self.function(self.vectors["trial"])
                return (loss,)
            case Proceed():
                return (float(len(self.losses) < self.at_most),)
            case Iterated(loss):
                self.losses.append(loss)
                return ()
            case Failed():
                return ()
        raise AssertionError(request)

    def _combine(self, combine: tuple) -> None:
        for target, terms in ((c.target, c.terms) for c in combine):
            self.vectors[target] = sum(value * self.vectors[name] for name, value in terms)

    def run(self, rules: MethodSettings, state: MethodState | None = None, succeeded: bool = False) -> Outcome:
        """`succeeded`: in another process after each answer."""
        method = Minimization(state or MethodState(), rules)
        answer = None
        while True:
            try:
                answer = self.answer(method.answered(answer))
            except StopIteration as over:
                return over.value
            if succeeded:
                method = pickle.loads(pickle.dumps(method))

    @property
    def evaluations(self) -> int:
        return sum(isinstance(request, EvaluateTrial) for request in self.requests)


def rosenbrock(x: np.ndarray) -> tuple[float, np.ndarray]:
    return float(optimize.rosen(x)), optimize.rosen_der(x)


def logistic(x: np.ndarray) -> tuple[float, np.ndarray]:
    generator = np.random.default_rng(3)
    inputs = generator.normal(size=(200, 20)) * np.logspace(0, 1.5, 20)
    labels = (inputs @ generator.normal(size=20) + generator.normal(size=200) > 0).astype(float)
    logits = inputs @ x
    loss = np.mean(np.logaddexp(0, logits) - labels * logits) + 1e-3 * x @ x
    return float(loss), inputs.T @ (1 / (1 + np.exp(-logits)) - labels) / 200 + 2e-3 * x


def saddle(x: np.ndarray) -> tuple[float, np.ndarray]:
    """Curvature is negative in between."""
    return float(np.sum(np.cos(x) + 0.05 * x * x)), -np.sin(x) + 0.1 * x


CASES: dict[str, tuple[Function, np.ndarray]] = {
    "rosenbrock": (rosenbrock, np.array([-1.2, 1.0] * 5)),
    "logistic": (logistic, np.zeros(20)),
    "saddle": (saddle, np.linspace(0.1, 1.0, 8)),
}
EXACT = MethodSettings(tolerance_gradient=1e-8, tolerance_change=0.0)


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("history", [3, 10])
def test_it_ends_where_scipy_ends_and_takes_no_longer(name: str, history: int) -> None:
    function, start = CASES[name]
    options = {"maxcor": history, "gtol": 1e-8, "ftol": 0.0, "maxiter": 1000, "maxfun": 10000}
    theirs = optimize.minimize(function, start, jac=True, method="L-BFGS-B", options=options)
    ours = Vectors(function, start)
    ended = ours.run(MethodSettings(history=history, tolerance_gradient=1e-8, tolerance_change=0.0))
    assert "largest component" in ended.reason
    assert function(ours.vectors["weights"])[0] == pytest.approx(theirs.fun, rel=1e-6, abs=1e-12)
    assert ours.evaluations <= 1.5 * theirs.nfev


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sampled", [False, True])
def test_who_goes_on_in_its_place_goes_the_same_way(name: str, sampled: bool) -> None:
    """After each answer from what was kept, by way of failed searches and cleared histories too."""
    rules = MethodSettings(history=3, tolerance_gradient=1e-8, tolerance_change=0.0, sampled=sampled)
    alone, passed_on = (Vectors(*CASES[name]) for _ in range(2))
    ended = alone.run(rules)
    assert passed_on.run(rules, succeeded=True) == ended
    assert passed_on.requests == alone.requests


@pytest.mark.parametrize("history", [1, 10, 40])
def test_the_rounds_of_an_iteration_do_not_grow_with_the_history(history: int) -> None:
    ours = Vectors(*CASES["rosenbrock"])
    ours.at_most = 30
    ours.run(MethodSettings(history=history, tolerance_change=0.0))
    rounds = sum(isinstance(request, Calculation | EvaluateTrial) for request in ours.requests)
    first = 2  # evaluation and products at the start
    assert rounds == first + 30 + 2 * (ours.evaluations - 1)


def test_the_loss_falls_with_every_iteration() -> None:
    for kind in ("strong_wolfe", "armijo"):
        ours = Vectors(*CASES["rosenbrock"])
        ours.run(MethodSettings(line_search=kind, tolerance_change=0.0))
        assert ours.losses == sorted(ours.losses, reverse=True)
        assert ours.losses[-1] < 1e-9


def test_damping_keeps_the_history_positive_definite() -> None:
    for kind in ("strong_wolfe", "armijo"):
        ours = Vectors(*CASES["saddle"])
        ended = ours.run(MethodSettings(line_search=kind, tolerance_gradient=1e-8, tolerance_change=0.0))
        assert not ended.failed
        assert ours.pairs
        assert min(ours.pairs) > 0


def test_it_goes_on_from_its_state_on_the_same_way() -> None:
    whole = Vectors(*CASES["rosenbrock"])
    whole.run(EXACT)
    function, start = CASES["rosenbrock"]
    half, state = Vectors(function, start), MethodState()
    half.at_most = 12
    assert half.run(EXACT, state).reason == "a limit is reached"
    rest = Vectors(function, start)
    rest.vectors = {name: half.vectors[name] for name in half.vectors if name not in ("trial", "sum", "direction")}
    rest.run(EXACT, state)
    assert np.allclose(half.losses + rest.losses[:8], whole.losses[:20], rtol=1e-9)


def test_a_failed_search_clears_the_history_and_failing_again_ends_the_run() -> None:
    broken = {"after": 10**9, "calls": 0}

    def function(x: np.ndarray) -> tuple[float, np.ndarray]:
        broken["calls"] += 1
        loss, gradient = rosenbrock(x)
        return (np.inf, gradient) if broken["calls"] > broken["after"] else (loss, gradient)

    broken["after"] = 20
    ours = Vectors(function, CASES["rosenbrock"][1])
    ended = ours.run(EXACT)
    failures = [request for request in ours.requests if isinstance(request, Failed)]
    assert "the history is cleared" in failures[0].text
    assert "nor without a history" in ended.reason
    assert not ended.failed, "the weights before it are as good as ever"


def test_a_loss_that_is_no_number_at_the_start_is_a_failure() -> None:
    ours = Vectors(lambda x: (np.nan, x), np.ones(3))
    ended = ours.run(EXACT)
    assert ended.failed
    assert "no finite loss and gradient where iteration 1 begins" in ended.reason


def test_where_the_slope_jumps_the_lowest_step_is_taken() -> None:
    """A loss with a kink, at which no step leaves little slope."""
    kink = lambda x: (max(x[0] - 0.3, -2 * (x[0] - 0.3)) + 1, np.array([1.0 if x[0] > 0.3 else -2.0]))  # noqa: E731
    ours = Vectors(kink, np.array([5.0]))
    ours.run(EXACT)
    assert ours.vectors["weights"][0] == pytest.approx(0.3, abs=1e-6)


@pytest.mark.parametrize("scale", [1e30, 1e-30])
def test_gradients_beyond_float32_end_the_run_without_a_crash(scale: float) -> None:
    class Coarse(Vectors):
        def answer(self, request: object) -> tuple[float, ...]:
            with np.errstate(over="ignore"):
                return tuple(float(np.float32(value)) for value in super().answer(request))

    ours = Coarse(lambda x: (float(scale * (x @ x)), 2 * scale * x), np.ones(3))
    ended = ours.run(MethodSettings(tolerance_gradient=0.0, tolerance_change=0.0))
    assert "no step was found in iteration 1" in ended.reason


def test_a_sampled_state_goes_on_with_the_whole_set() -> None:
    """Its loss is not kept, because it is of a batch that does not come again; its history is."""
    function, start = CASES["logistic"]
    sampled, state = Vectors(function, start), MethodState()
    sampled.at_most = 8
    sampled.run(MethodSettings(sampled=True, tolerance_gradient=0.0), state)
    assert state.slots
    state.loss = None
    whole = Vectors(function, start)
    whole.vectors = {name: sampled.vectors[name] for name in sampled.vectors if name not in ("trial", "sum")}
    ended = whole.run(EXACT, state)
    assert "largest component" in ended.reason
    assert function(whole.vectors["weights"])[0] == pytest.approx(_best(function, start), rel=1e-5)


def _best(function: Function, start: np.ndarray) -> float:
    return float(optimize.minimize(function, start, jac=True, method="L-BFGS-B", options={"gtol": 1e-9}).fun)


def test_both_ends_of_a_pair_are_of_the_same_batch() -> None:
    """Another function in every iteration: each pair has the curvature of one of them."""
    generator = np.random.default_rng(0)
    scales = [np.exp(generator.normal(size=6)) for _ in range(60)]
    batches: list[int] = []

    class Sampled(Vectors):
        def answer(self, request: object) -> tuple[float, ...]:
            if isinstance(request, EvaluateTrial):
                batches.append(request.batch)
                scale = scales[request.batch]
                self.function = lambda x: (float(x @ (scale * x)) / 2, scale * x)
            return super().answer(request)

    ours = Sampled(rosenbrock, np.full(6, 3.0))
    ours.at_most = 40
    ours.run(MethodSettings(sampled=True, tolerance_gradient=1e-6))
    assert batches == sorted(batches)
    assert len(set(batches)) == len(ours.losses) + (len(set(batches)) > len(ours.losses))
    assert min(ours.pairs) > 0
    assert np.abs(ours.vectors["weights"]).max() < 1e-2
