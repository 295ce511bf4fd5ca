"""One process of a replica of parallel branches: its own of them, and all that they share.

All parts run the whole forward and backward pass. A call of a branch is put off until the model does something with
what a branch has returned; then each part computes its own calls and gets the outputs of the others'. On the way back
each part gets the gradients of the others' inputs. So what the branches share is computed by all, on the same numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from squall.parts.agreement import clip_together, settle
from squall.parts.neighbours import SPEAKER, Neighbours
from squall.runtime.inside import Computed, Inside, computing, dense
from squall.runtime.seeds import chance_kept, mix, seed_everything
from squall.splits import Branches
from squall.task import Batch, Task, loss_and_extras

DTYPES = (torch.float32, torch.float64, torch.bfloat16, torch.float16)
MOST_DIMENSIONS = 8


class Branched(Inside):
    """Branch number `part` of the task's split. It changes the task's model."""

    looked = True

    def __init__(self, task: Task, neighbours: Neighbours, device: torch.device) -> None:
        assert isinstance(task.split, Branches)
        self._neighbours, self._device = neighbours, device
        self._calls = _Calls(neighbours)
        self._parameters = dict(task.model.named_parameters())
        for owner, name in enumerate(task.split.names):
            for module in entrances(task.model.get_submodule(name)):
                module.forward = partial(self._calls.put_off, owner, module.forward)

    def compute(self, task: Task, model: nn.Module, batch: Batch, seed: int, into: Sequence[Tensor] | None) -> Computed:
        self._calls.begin(seed)
        with computing(task, self._device):
            loss, extras = loss_and_extras(task.loss(model, batch))
            loss = self._calls.resolved(loss)
        loss.backward()
        self._calls.end()
        dense([self._parameters[span.name] for span in self.writes.parameters])
        fresh = [self._parameters[span.name].grad for span in self.writes.parameters]
        return settle(self._neighbours, [g for g in fresh if g is not None], loss.item(), extras, SPEAKER)

    def clip(self, gradients: Sequence[Tensor], most: float) -> float:
        return clip_together(self._neighbours, gradients, most)

    def agreed(self, value: float) -> float:
        return self._neighbours.agreed(value)[0]


class _PutOff(Tensor):
    """What a branch will return. Whatever is done with it has all calls computed that are put off."""

    calls: _Calls
    number: int

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map(_resolve, (args, kwargs or {}))
        return func(*args, **kwargs)


def _resolve(value: Any) -> Any:
    return value.calls.resolved(value) if isinstance(value, _PutOff) else value


class _Call:
    """Of a branch: whose it is, what it takes, and what it has returned."""

    def __init__(self, owner: int, forward: Callable[..., Any], arguments: Any) -> None:
        self.owner, self.forward = owner, forward
        self.leaves, self.form = pytree.tree_flatten(arguments)
        self.passed: list[int] = [i for i, leaf in enumerate(self.leaves) if _differentiable(leaf)]
        self.link: Tensor | None = None  # makes autograd come back to the inputs when it is done with the output
        self.output: Tensor | None = None


def _differentiable(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


class _Calls:
    """The calls of all branches in one pass over the model, in the order in which the model makes them."""

    def __init__(self, neighbours: Neighbours) -> None:
        self.neighbours = neighbours
        self._made: list[_Call] = []
        self._computed = 0
        self._seed = 0
        self._sending: list[tuple[Callable[[], None], Tensor]] = []

    def begin(self, seed: int) -> None:
        self._seed = seed
        self._made, self._computed = [], 0

    def end(self) -> None:
        """Nothing is on its way any more."""
        for wait, _ in self._sending:
            wait()
        self._sending = []
        self._made = []

    def put_off(self, owner: int, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Tensor:
        arguments = pytree.tree_map(_resolve, (args, kwargs))
        self._made.append(_Call(owner, forward, arguments))
        put_off = torch.Tensor._make_subclass(_PutOff, torch.empty(0))
        put_off.calls, put_off.number = self, len(self._made) - 1
        return put_off

    def resolved(self, value: Tensor) -> Tensor:
        if not isinstance(value, _PutOff):
            return value
        self._compute()
        output = self._made[value.number].output
        assert output is not None
        return output

    def _compute(self) -> None:
        """Every call that is put off.

        Autograd goes back in the opposite order: this part's own calls first, and then it waits for the others'.
        """
        waiting = [*enumerate(self._made)][self._computed :]
        self._computed = len(self._made)
        for _, call in waiting:
            if call.passed:
                call.link, *passed = _entered(self, call, *(call.leaves[i] for i in call.passed))
                for i, leaf in zip(call.passed, passed):
                    call.leaves[i] = leaf
        for number, call in waiting:
            if call.owner == self.neighbours.part:
                call.output = self._own(number, call)
        for _, call in waiting:
            if call.owner != self.neighbours.part:
                call.output = self._foreign(call)

    def _own(self, number: int, call: _Call) -> Tensor:
        """Computed here, and sent to the others. What it draws is its own; what is shared draws alike on all parts."""
        args, kwargs = pytree.tree_unflatten(call.leaves, call.form)
        with chance_kept(gpus_too=False):
            seed_everything(mix(self._seed, self.neighbours.part, number))
            output = call.forward(*args, **kwargs)
        shape = [*output.shape, *[-1] * (MOST_DIMENSIONS - output.ndim)]
        head = torch.tensor([DTYPES.index(output.dtype), output.requires_grad, *shape])
        self.send_all(head, output.detach().contiguous())
        # While it is sent, the model may change what it gets in place.
        return output.clone() if call.link is None else _tied(output, call.link)

    def _foreign(self, call: _Call) -> Tensor:
        head = self.neighbours.receive(torch.empty(2 + MOST_DIMENSIONS, dtype=torch.int64), call.owner)
        kind, wanted, *shape = head.tolist()
        empty = torch.empty([size for size in shape if size >= 0], dtype=DTYPES[kind])
        output = self.neighbours.receive(empty, call.owner)
        if call.link is not None:
            return _tied(output, call.link)
        return output.requires_grad_(bool(wanted))

    def send_all(self, *tensors: Tensor) -> None:
        """Returns at once: a part that waited here for one that waits for it would wait for ever."""
        for tensor in tensors:
            for other in range(self.neighbours.parts):
                if other != self.neighbours.part:
                    self._sending.append((self.neighbours.sending(tensor, other), tensor))


class _Entered(torch.autograd.Function):
    """The inputs of a call. Their gradients are what the owner of the call finds, on all parts."""

    @staticmethod
    def forward(ctx: Any, calls: _Calls, call: _Call, *inputs: Tensor) -> Any:
        ctx.calls, ctx.owner = calls, call.owner
        ctx.like = [(each.shape, each.dtype) for each in inputs]
        return (torch.zeros(()), *(each.view_as(each) for each in inputs))

    @staticmethod
    def backward(ctx: Any, link: Tensor, *gradients: Tensor) -> Any:
        neighbours = ctx.calls.neighbours
        if ctx.owner == neighbours.part:
            ctx.calls.send_all(*(gradient.contiguous() for gradient in gradients))
            return None, None, *gradients
        theirs = (torch.empty(shape, dtype=dtype) for shape, dtype in ctx.like)
        return None, None, *(neighbours.receive(gradient, ctx.owner) for gradient in theirs)


class _Tied(torch.autograd.Function):
    """An output whose gradient leads to the inputs of its call, whoever computes that."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, link: Tensor) -> Tensor:
        return output.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return gradient, torch.zeros(())


_entered: Callable[..., tuple[Tensor, ...]] = _Entered.apply
_tied: Callable[[Tensor, Tensor], Tensor] = _Tied.apply


def entrances(module: nn.Module) -> list[nn.Module]:
    """What of a branch the model calls: the branch, or each module of one that is a list or a dict."""
    if isinstance(module, nn.ModuleList | nn.ModuleDict):
        return [entrance for child in module.children() for entrance in entrances(child)]
    return [module]


def names_by_branch(model: nn.Module, split: Branches) -> list[set[str]]:
    """The parameters and buffers of each branch, by the names that the layout knows."""
    tensors = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    branches = [model.get_submodule(name) for name in split.names]
    return [{tensors[id(tensor)] for tensor in (*each.parameters(), *each.buffers())} for each in branches]
