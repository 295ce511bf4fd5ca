"""L-BFGS by scalars alone: what it asks of the shards and replicas, and what it makes of their answers.

The shards hold the vectors; here are only their dot products (Chen, Wang and Zhou 2014, "Large-scale L-BFGS using
MapReduce"). An iteration with E evaluations takes 1 + 2 E rounds of messages with the shards, whatever the history.

Vectors by name: ``weights`` (accepted), ``trial`` (what replicas compute on), ``sum`` (of their gradients at trial),
``gradient`` (at weights), ``direction``, and the history's pairs ``s0 y0 s1 y1 ...``.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Generator, Sequence
from typing import Any, NamedTuple, cast

import msgspec

from squall.protocol.sandblaster.line_search import ROUNDING, SEARCHES
from squall.protocol.sandblaster.messages import Calculation, Combine

DAMPED_BELOW = 0.2  # share of the curvature that the last direction assumed (Powell 1978)
FAILURES_AT_MOST = 3  # line searches in a row, on other batches


class MethodSettings(msgspec.Struct, frozen=True):
    """The settings of the method."""

    history: int = 10
    line_search: str = "strong_wolfe"
    tolerance_gradient: float = 1e-5  # of the largest component
    tolerance_change: float = 1e-9  # of the loss, relative
    sampled: bool = False  # every iteration is on a batch of its own

    @property
    def damped(self) -> bool:
        """Curvature may turn out negative: noise, or a search that does not look at slopes."""
        return self.sampled or self.line_search != "strong_wolfe"


class MethodState(msgspec.Struct):
    """Where the method is; with the vectors `weights`, `gradient` and the pairs this is all of it."""

    iteration: int = 0
    loss: float | None = None  # at `weights`; None: not known, nor is the gradient
    slots: list[int] = []  # of the history's pairs, oldest first


class EvaluateTrial(NamedTuple):
    """Have the loss and gradient of a batch computed at `trial`, after combining; answered by [loss]."""

    batch: int
    combine: tuple[Combine, ...]


class Proceed(NamedTuple):
    """An iteration would begin; answered by [1.0], or by [0.0] where a limit is reached."""


class Iterated(NamedTuple):
    """An iteration is over, and what moves the shards' vectors follows at once; answered by []."""

    loss: float


class Failed(NamedTuple):
    """A line search found nothing; answered by []."""

    text: str


class Outcome(NamedTuple):
    """What `minimize` returns."""

    reason: str
    failed: bool = False


Request = Calculation | EvaluateTrial | Proceed | Iterated | Failed
Method = Generator[Request, Sequence[float], Outcome]


class Course(msgspec.Struct):
    """What the method knows between two iterations, beside its state."""

    dots: dict[tuple[str, str], float] = {}  # products by the names of two vectors
    failures: int = 0  # line searches in a row
    largest: float = math.inf  # component of the gradient
    begun: bool = False


class Minimization:
    """`minimize`, which can be kept as it is and goes on elsewhere: as it was between two iterations, and since."""

    def __init__(self, state: MethodState, rules: MethodSettings) -> None:
        self.state, self._rules, self._course = state, rules, Course()
        self._before = copy.deepcopy((state, self._course))  # this iteration
        self._answers: list[Sequence[float] | None] = []  # in this iteration
        self._method = minimize(self.state, rules, self._course)

    def answered(self, answer: Sequence[float] | None) -> Request:
        """What it asks for next; at first the answer is None. Raises `StopIteration` with the `Outcome`."""
        request = self._method.send(cast("Sequence[float]", answer))
        self._answers.append(answer)
        if isinstance(request, Proceed):
            self._before, self._answers = copy.deepcopy((self.state, self._course)), [None]
        return request

    def __getstate__(self) -> object:
        return self._before, self._answers, self._rules

    def __setstate__(self, kept: Any) -> None:
        self._before, answers, self._rules = kept
        self.state, self._course = copy.deepcopy(self._before)
        self._answers = []
        self._method = minimize(self.state, self._rules, self._course)
        for answer in answers:
            self.answered(answer)


class _Moved(NamedTuple):
    change: float  # by how much of itself the loss fell
    largest: float  # component of the gradient


def minimize(state: MethodState, rules: MethodSettings, course: Course) -> Method:
    """Run until a tolerance or a limit is reached, or until line searches find nothing.

    `state` is kept up to date so that it fits the shards' vectors whenever a request has been sent, and `course` as it
    is when an iteration would begin (`Proceed`).
    """
    dots = _Dots(course.dots)
    if not course.begun and (state.slots or state.loss is not None):  # a resumed run
        names = _basis(state)
        course.largest = yield from dots.form(Calculation(rows=names, columns=names, largest=("gradient",)))
    course.begun = True
    while (yield Proceed())[0]:
        if state.loss is None or rules.sampled:
            (loss,) = yield EvaluateTrial(state.iteration, (Combine("trial", (("weights", 1.0),)),))
            if not math.isfinite(loss):
                return Outcome(f"no finite loss and gradient where iteration {state.iteration + 1} begins", failed=True)
            state.loss = loss
            taken = (Combine("gradient", (("sum", 1.0),)),)
            asked = Calculation(combine=taken, rows=("gradient",), columns=_basis(state), largest=("gradient",))
            course.largest = yield from dots.form(asked)
        if course.largest <= rules.tolerance_gradient:
            return Outcome(f"the gradient's largest component is {course.largest:.2g}")
        moved = yield from _iterate(state, rules, dots)
        if moved is not None:
            course.failures, course.largest = 0, moved.largest
            if not rules.sampled and moved.change <= rules.tolerance_change:
                return Outcome(f"the loss falls by {moved.change:.2g} of itself in an iteration")
            continue
        course.failures += 1
        text = f"no step was found in iteration {state.iteration + 1}"
        yield Failed(f"{text}: the history is cleared" if state.slots else text)
        if not state.slots and (course.failures >= FAILURES_AT_MOST or not rules.sampled):
            return Outcome(f"{text}, nor without a history" if course.failures > 1 else text)
        state.slots = []
        state.iteration += rules.sampled  # another batch
    return Outcome("a limit is reached")


class _Dots:
    """Dot products by the names of two vectors."""

    def __init__(self, values: dict[tuple[str, str], float]) -> None:
        self._values = values

    def form(self, asked: Calculation) -> Generator[Request, Sequence[float], float]:
        """Ask for products and remember them; returns the largest magnitude that was asked for."""
        answer = yield asked
        pairs = [(row, column) for row in asked.rows for column in asked.columns]
        for pair, value in zip(pairs, answer):
            self._values[pair] = self._values[pair[::-1]] = value
        return answer[-1]

    def __call__(self, a: str, b: str) -> float:
        return self._values[a, b]

    def usable(self, s: str, y: str) -> bool:
        """The pair has a curvature that float32 can hold."""
        return 0 < self(s, y) < math.inf and 0 < self(y, y) < math.inf


def _iterate(
    state: MethodState, rules: MethodSettings, dots: _Dots
) -> Generator[Request, Sequence[float], _Moved | None]:
    """One iteration; None if the line search found no step."""
    assert state.loss is not None
    terms, slope = _direction(state, dots)
    if not -math.inf < slope < 0 and state.slots:  # rounding, or a batch unlike the ones of the history
        state.slots = []
        terms, slope = _direction(state, dots)
    if not -math.inf < slope < 0:  # the gradient's square is beyond float32
        return None
    first = 1.0 if state.slots else min(1.0, 1.0 / math.sqrt(-slope))
    combine: tuple[Combine, ...] = (Combine("direction", tuple(terms.items())),)
    search = SEARCHES[rules.line_search](state.loss, slope, first)
    step = next(search)
    try:
        while True:
            move = Combine("trial", (("weights", 1.0), ("direction", step)))
            (loss,) = yield EvaluateTrial(state.iteration, (*combine, move))
            combine, slope_there = (), math.inf
            if math.isfinite(loss):
                (slope_there,) = yield Calculation(rows=("sum",), columns=("direction",))
            step = search.send((loss, slope_there))
    except StopIteration as over:
        if over.value is None:
            return None
    fall = state.loss - loss
    if abs(fall) <= ROUNDING * abs(loss):
        fall = -step * (slope + slope_there) / 2  # the slopes tell what the losses are too coarse for
    change = fall / max(abs(state.loss), abs(loss), 1e-30)
    state.loss = loss
    pair = _pair(step, slope, slope_there, rules.damped)
    return _Moved(change, (yield from _accept(state, rules, dots, step, pair)))


def _accept(
    state: MethodState, rules: MethodSettings, dots: _Dots, step: float, pair: tuple[tuple[str, float], ...] | None
) -> Generator[Request, Sequence[float], float]:
    """Take the step: weights, gradient and history move. Returns the gradient's largest component.

    Products of the new s with older vectors are not formed: the recursion multiplies them by zero.
    """
    assert state.loss is not None
    state.iteration += 1
    combine: tuple[Combine, ...] = (Combine("gradient", (("sum", 1.0),)), Combine("weights", (("trial", 1.0),)))
    rows: tuple[str, ...] = ("gradient",)
    slot = -1
    if pair is not None:
        slot = state.slots.pop(0) if len(state.slots) == rules.history else len(state.slots)
        state.slots.append(slot)
        s, y = Combine(f"s{slot}", (("direction", step),)), Combine(f"y{slot}", pair)
        combine, rows = (s, y, *combine), (y.target, "gradient")
    yield Iterated(state.loss)
    asked = Calculation(combine=combine, rows=rows, columns=_basis(state), largest=("gradient",))
    largest = yield from dots.form(asked)
    if pair is not None and not dots.usable(f"s{slot}", f"y{slot}"):
        state.slots = []  # the other slots would no longer be in a row
    return largest


def _pair(step: float, slope: float, slope_there: float, damped: bool) -> tuple[tuple[str, float], ...] | None:
    """y of the new pair, from the sum (at the end of the step) and the gradient (at its start); None: no pair.

    B s = -step x gradient, because the direction was -H x gradient and s is step x direction: so Powell's damping needs
    no vector that is not there. y becomes theta (sum - gradient) + (1 - theta) B s, whose s.y is at least 0.2 s.B.s.
    """
    curvature = step * (slope_there - slope)  # s.y
    assumed = -step * step * slope  # s.B.s
    theta = 1.0
    if damped and curvature < DAMPED_BELOW * assumed:
        theta = (1 - DAMPED_BELOW) * assumed / (assumed - curvature)
    elif curvature <= 1e-7 * assumed:
        return None
    return (("sum", theta), ("gradient", -theta - (1 - theta) * step))


def _basis(state: MethodState) -> tuple[str, ...]:
    return (*(f"{kind}{slot}" for slot in state.slots for kind in "sy"), "gradient")


def _direction(state: MethodState, dots: _Dots) -> tuple[dict[str, float], float]:
    """-H x gradient by the two-loop recursion on coefficients alone, and its slope."""
    pairs = [(f"s{slot}", f"y{slot}") for slot in state.slots]
    terms = {**{name: 0.0 for pair in pairs for name in pair}, "gradient": -1.0}

    def along(name: str) -> float:
        return sum(value * dots(other, name) for other, value in terms.items() if value)

    shares = {}
    for s, y in reversed(pairs):
        shares[s] = along(s) / dots(s, y)
        terms[y] -= shares[s]
    if pairs:
        s, y = pairs[-1]
        scale = dots(s, y) / dots(y, y)
        terms = {name: scale * value for name, value in terms.items()}
    for s, y in pairs:
        terms[s] += shares[s] - along(y) / dots(s, y)
    return terms, along("gradient")
