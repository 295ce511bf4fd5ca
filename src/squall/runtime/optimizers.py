"""Optimizers: built with the fastest kernels that torch has for them, and refused where they cannot serve a shard."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from squall.protocol.messages import Factors
from squall.strategies.base import Recipe
from squall.strategies.work import Answering, BatchMethod, Collective
from squall.task import OptimizerFactory

_WHOLE = "looks at all parameters together, so that its state cannot be divided: leave {} out"
_STEP_FAILURES = (TypeError, RuntimeError, NotImplementedError, ValueError, IndexError)


def build_optimizer(factory: OptimizerFactory, groups: list[dict[str, Any]]) -> Optimizer:
    """Ask for the fused kernels (up to six times faster on the CPU), and do without where torch has none."""
    chosen = factory.keywords if isinstance(factory, partial) else {}
    decided = any(name in chosen for name in ("fused", "foreach", "capturable", "differentiable"))
    with _without_compiler():
        with suppress(RuntimeError, TypeError, ValueError):
            if not decided and "fused" in inspect.signature(factory).parameters:
                return factory(_fresh(groups), fused=True)
        return factory(_fresh(groups))


@contextmanager
def _without_compiler() -> Iterator[None]:
    """In here methods of `Optimizer` do not import torch's compiler, which takes 1.2 s and 75 MB.

    They import it to be left out of what it traces, and remember that in an attribute of the function.
    """
    wrapped = [inspect.unwrap(method) for method in vars(Optimizer).values() if hasattr(method, "__wrapped__")]
    unknown = [function for function in wrapped if not hasattr(function, "__dynamo_disable")]
    for function in unknown:
        setattr(function, "__dynamo_disable", function)
    try:
        yield
    finally:
        for function in unknown:
            vars(function).pop("__dynamo_disable", None)  # another thread may have been here


def state_name(recipe: Recipe) -> str:
    """The optimizer whose state a shard's snapshot holds."""
    if isinstance(recipe.work, BatchMethod):
        return f"L-BFGS with history={recipe.work.rules.history}"
    if isinstance(recipe.work, Answering):
        return ""
    factory = recipe.work.optimizer if isinstance(recipe.work, Collective) else recipe.work.update.optimizer
    return type(check_settings(factory)).__qualname__


def in_words(recipe: Recipe) -> str:
    """The optimizer that a rate is chosen for, and the rate: "AdamW, lr 0.001"."""
    if isinstance(recipe.work, BatchMethod):
        return "L-BFGS"
    if isinstance(recipe.work, Answering):
        return ""
    factory = recipe.work.tuned
    try:
        built = build_optimizer(factory, [{"params": [nn.Parameter(torch.ones(2, 2))]}])
    except _STEP_FAILURES:
        return _name(factory)  # `check_optimizers` will say what is wrong with it
    settings = built.param_groups[0]
    shown = [f"{name} {float(settings[name]):g}" for name in ("lr", "momentum") if settings.get(name)]
    return ", ".join([type(getattr(built, "inner", built)).__name__, *shown])


def _fresh(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [dict(group) for group in groups]  # an optimizer adds its defaults to the dicts that it is given


def check_optimizers(recipe: Recipe) -> None:
    """Raise `ValueError` for an optimizer that cannot be built, or cannot run on ranges of the vector."""
    if isinstance(recipe.work, BatchMethod | Answering):
        return
    if isinstance(recipe.work, Collective):
        _check_step(recipe.work.optimizer, torch.ones(2, 4))
        if recipe.divided:
            _check_apart(recipe.work.optimizer, "shard_optimizer")
        return
    update, local = recipe.loop.update, recipe.loop.local
    if local is not None:
        _check_step(local.optimizer, torch.ones(2, 4))
    if update.elementwise:
        check_elementwise(update.optimizer)
    else:
        _check_step(update.optimizer, torch.ones(8))


def _check_step(factory: OptimizerFactory, weights: Tensor) -> None:
    check_settings(factory)
    try:
        _optimized(factory, [weights], [torch.ones_like(weights)])
    except _STEP_FAILURES as error:
        raise ValueError(f"{_name(factory)} cannot step on a gradient alone: use SGD or AdamW ({error})") from error


def check_in_parts(recipe: Recipe, sliced: bool) -> None:
    """Raise `ValueError` for an optimizer that each part of a replica cannot have of its tensors, or slices of them."""
    if not isinstance(recipe.work, Collective):
        return
    factory = recipe.work.optimizer
    _check_apart(factory, "parts")
    if sliced and not elementwise(factory):
        raise ValueError(
            f"{_name(factory)} is not elementwise, and each part has slices of tensors: use for example SGD, Adagrad or"
            " AdamW, or a split that leaves tensors whole (squall.Pipeline, squall.Branches)"
        )


def _check_apart(factory: OptimizerFactory, setting: str) -> None:
    """Raise `ValueError` unless a tensor moves as it does beside another when the optimizer steps on it alone."""
    found, whole = [], f"{_name(factory)} {_WHOLE.format(setting)}"
    for others in (True, False):
        first, second = (nn.Parameter(torch.full((2, 4), value)) for value in (1.0, 3.0))
        optimizer = build_optimizer(factory, [{"params": [first]}, {"params": [second]}])
        if not others:
            optimizer.param_groups[0]["params"] = []
        for gradient in (1.0, -0.5, 0.25):
            first.grad, second.grad = torch.full((2, 4), 10 * gradient), torch.full((2, 4), gradient)
            try:
                bare_step(optimizer, tracked=True)()
            except _STEP_FAILURES as error:
                raise ValueError(f"{whole} ({error})") from error
        found.append(second.detach())
    if not torch.equal(*found):
        raise ValueError(whole)


def check_elementwise(factory: OptimizerFactory) -> None:
    """Raise `ValueError` unless two halves of a vector, optimized apart, end where the whole does.

    A shard holds an arbitrary range of the parameters, so an optimizer that looks at a whole tensor (LBFGS, Muon,
    Adafactor, LARS) would compute something else on every number of shards.
    """
    check_settings(factory)
    name = _name(factory)
    start = torch.tensor([0.5, -1.0, 2.0, 0.25, -0.125, 3.0, -2.0, 1.0])
    gradients = [torch.tensor([1.0, -2.0, 0.5, 4.0, -1.0, 0.25, 2.0, -8.0]), torch.arange(-3.0, 5.0)]
    remedy = (
        f"{name} is not elementwise: shards hold ranges of the vector, use for example SGD, Adagrad or AdamW, or"
        " AllReduce, which has no shards"
    )
    try:
        whole = _optimized(factory, [start], gradients)
        halves = _optimized(factory, [start[:4], start[4:]], gradients)
    except _STEP_FAILURES as error:
        raise ValueError(f"{remedy} ({error})") from error
    if not torch.allclose(whole, halves, rtol=1e-4):
        raise ValueError(remedy)


def elementwise(factory: OptimizerFactory) -> bool:
    """Whether shards can have it."""
    try:
        check_elementwise(factory)
    except ValueError:
        return False
    return True


def state_vectors(factory: OptimizerFactory) -> int:
    """How many numbers of each element the first step adds to the optimizer's state."""
    parameter = nn.Parameter(torch.ones(8))
    optimizer = build_optimizer(factory, [{"params": [parameter]}])
    parameter.grad, before = torch.ones(8), len(optimizer.state[parameter])
    bare_step(optimizer, tracked=True)()
    state = optimizer.state[parameter].values()
    return sum(isinstance(value, Tensor) and value.shape == parameter.shape for value in state) if not before else 0


def first_state(factory: OptimizerFactory, group: Mapping[str, Any], like: Tensor) -> dict[str, Tensor]:
    """What a step makes of the state of a parameter like this one, in its param group, on torch's device for shapes.

    Empty where the optimizer does not step on one alone.
    """
    parameter = nn.Parameter(torch.zeros_like(like))
    parameter.grad = torch.zeros_like(like)
    try:
        optimizer = build_optimizer(factory, [{**group, "params": [parameter]}])
        bare_step(optimizer, tracked=True)()
        state = optimizer.state[parameter].items()
        return {key: torch.as_tensor(value).to("meta") for key, value in state if value is not None}
    except _STEP_FAILURES:
        return {}


def _name(factory: OptimizerFactory) -> str:
    inner = getattr(factory, "func", factory)
    return str(getattr(inner, "__name__", inner))


def check_settings(factory: OptimizerFactory) -> Optimizer:
    """The optimizer on a parameter of its own. Raises `ValueError` for one that can be built on none.

    Some refuse a flat one (Muon), so a matrix is tried as well.
    """
    for shape in ((8,), (2, 4)):
        try:
            return build_optimizer(factory, [{"params": [nn.Parameter(torch.ones(shape))]}])
        except _STEP_FAILURES as error:
            reason = str(error)
    raise ValueError(f"the optimizer {_name(factory)} cannot be built: {reason}")


def _optimized(factory: OptimizerFactory, parts: list[Tensor], gradients: list[Tensor]) -> Tensor:
    results = []
    at = 0
    for part in parts:
        parameter = nn.Parameter(part.clone())
        optimizer = build_optimizer(factory, [{"params": [parameter]}])
        step = bare_step(optimizer, tracked=True)
        for gradient in gradients:
            parameter.grad = gradient[at : at + len(part)].clone()
            step()
        results.append(parameter.detach())
        at += len(part)
    return torch.cat(results)


@contextmanager
def rates_scaled(optimizer: Optimizer, rate: float, factors: Factors) -> Iterator[None]:
    """In here all learning rates are `rate` times themselves, and of each group its factor.

    The parameters of groups with None have no gradient in here, so a step leaves them and their state alone.
    """
    rates = [group["lr"] for group in optimizer.param_groups]
    wanted = factors or (1.0,) * len(rates)
    for group, before, factor in zip(optimizer.param_groups, rates, wanted):
        group["lr"] = before * rate * (1.0 if factor is None else factor)
    left_out = [p for group, factor in zip(optimizer.param_groups, wanted) if factor is None for p in group["params"]]
    gradients = [parameter.grad for parameter in left_out]
    for parameter in left_out:
        parameter.grad = None
    try:
        yield
    finally:
        for parameter, gradient in zip(left_out, gradients):
            parameter.grad = gradient
        for group, before in zip(optimizer.param_groups, rates):
            group["lr"] = before


def bare_step(optimizer: Optimizer, tracked: bool = False) -> Callable[[], Any]:
    """The step without torch's profiler record around it, which takes longer than a small fused step itself.

    Nor does it import torch's compiler, as the whole step does. A step that has hooks, was patched on the instance, or
    is not torch's own is left as it is. A scheduler's patch only notes that a step was made, so that is noted here; ask
    for the step when the scheduler is there. `tracked`: it is made where torch tracks gradients.
    """
    hooks = [getattr(optimizer, f"_optimizer_step_{when}_hooks", True) for when in ("pre", "post")]
    patch = vars(optimizer).get("step")
    noting = hasattr(patch, "_wrapped_by_lr_sched")
    if any(hooks) or (patch and not noting) or not type(optimizer).__module__.startswith("torch.optim."):
        return optimizer.step
    if noting:
        vars(optimizer)["_opt_called"] = True
    step = partial(inspect.unwrap(type(optimizer).step), optimizer)
    return torch.no_grad()(step) if tracked else step
