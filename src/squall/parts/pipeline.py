"""One process of a pipeline: its stages, by torch's schedules, on the microbatches of each batch."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import msgspec
import torch
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import get_schedule_class

from squall.parts.agreement import clip_together, settle
from squall.parts.microbatches import given, in_pieces, shapes, taken
from squall.parts.neighbours import Neighbours, lost_neighbours
from squall.parts.shares import Share
from squall.parts.stages import Stage, chain_of, cut_chain
from squall.runtime.inside import Computed, Inside, computing, dense
from squall.runtime.seeds import mix, seed_everything
from squall.splits import Pipeline
from squall.task import Batch, Task, loss_and_extras

SCHEDULES = {
    "gpipe": "GPipe", "1f1b": "1F1B", "interleaved": "Interleaved1F1B", "zero-bubble": "InterleavedZeroBubble",
}  # fmt: skip
ANY_NUMBER = {1: "GPipe", 2: "LoopedBFS"}  # of microbatches, by stages a part: for what is left of an epoch
KEPT = 4  # schedules; each holds the activations that it receives


class Pipelined(Inside):
    """Of the stages that begin at `starts` of the model's chain, every one that is this part's turn."""

    looked = True

    def __init__(
        self, task: Task, shares: Sequence[Share], starts: Sequence[int], neighbours: Neighbours, device: torch.device
    ) -> None:  # fmt: skip
        """`shares` are all parts'."""
        assert isinstance(task.split, Pipeline)
        self._split, self._neighbours, self._device = task.split, neighbours, device
        self._rows = task.batch_size // task.split.microbatches
        self._stages = cut_chain(chain_of(task.split, task.model), starts)
        held: dict[str, list[int]] = {}
        for part, share in enumerate(shares):
            for span in share.reads.parameters:
                held.setdefault(span.name, []).append(part)
        self._tied = [(name, parts) for name, parts in held.items() if len(parts) > 1]
        self._parameters = dict(task.model.named_parameters())
        self._foreign = [name for name, parts in held.items() if neighbours.part not in parts]
        self._places = _Places([self._parameters[span.name] for span in shares[neighbours.part].writes.parameters])
        self._runs: OrderedDict[Any, _Run] = OrderedDict()

    def compute(self, task: Task, model: nn.Module, batch: Batch, seed: int, into: Sequence[Tensor] | None) -> Computed:
        self._places.begin(into)
        cut = in_pieces(batch, self._rows)
        examples = sum(count for count, _ in cut)
        pieces, shares = [piece for _, piece in cut], [count / examples for count, _ in cut]
        whole = examples // self._rows
        results: list[_Result] = []
        for start, stop in ((0, whole), (whole, len(pieces))):
            if start < stop:
                at = _At(task, model, pieces[start:stop], shares[start:stop], seed, start)
                results += self._run(at)(at)
        self._places.end()
        gradients = self._gradients()
        teller = (len(self._stages) - 1) % self._neighbours.parts
        loss = sum(result.loss for result in results)
        in_place = into is not None and task.clip_norm is None
        return settle(self._neighbours, gradients, loss, _summed(results), teller, at_the_end=in_place)

    def clip(self, gradients: Sequence[Tensor], most: float) -> float:
        return clip_together(self._neighbours, gradients, most)

    def agreed(self, value: float) -> float:
        return self._neighbours.agreed(value)[0]

    def _run(self, at: _At) -> _Run:
        """The schedule for microbatches of these shapes."""
        key = len(at.pieces), shapes(at.pieces[0])
        if key not in self._runs:
            numbers = range(self._neighbours.part, len(self._stages), self._neighbours.parts)
            turns = [_Turns(self._stages[i], i, len(self._stages), self._device) for i in numbers]
            name = SCHEDULES[self._split.schedule]
            if len(at.pieces) < self._split.microbatches:
                name = ANY_NUMBER[self._split.stages_each]
            self._runs[key] = _Run(name, turns, len(at.pieces), self._neighbours)
            if len(self._runs) > KEPT:
                self._runs.popitem(last=False)
        self._runs.move_to_end(key)
        return self._runs[key]

    def _gradients(self) -> list[Tensor]:
        """Of what this part writes, those of tied parameters summed over the parts."""
        dense([self._parameters[span.name] for span in self.reads.parameters])
        if used := [name for name in self._foreign if self._parameters[name].grad is not None]:
            raise ValueError(
                f"Task.loss uses {', '.join(used[:3])} beside calling the model, and with squall.Pipeline another part"
                " has that: put it into the model's forward (weight decay into the optimizer), or train without parts"
            )
        sent = []
        for name, (owner, *others) in self._tied:
            parameter = self._parameters[name]
            if self._neighbours.part in others:
                gradient = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.contiguous()
                sent.append(self._neighbours.sending(gradient, owner))
            elif self._neighbours.part == owner:
                for part in others:
                    theirs = self._neighbours.receive(torch.empty_like(parameter.data), part)
                    if parameter.grad is None:
                        parameter.grad = theirs
                    else:
                        parameter.grad.add_(theirs)
        for wait in sent:
            wait()
        fresh = (self._parameters[span.name].grad for span in self.writes.parameters)
        return [gradient for gradient in fresh if gradient is not None]


class _Places:
    """Where gradients are summed over microbatches: each is put there as it comes, and its memory is free again."""

    def __init__(self, parameters: Sequence[nn.Parameter]) -> None:
        self._parameters = parameters
        self._places: dict[int, Tensor] = {}  # by the parameter's identity
        self._begun: set[int] = set()
        for parameter in parameters:
            parameter.register_post_accumulate_grad_hook(self._put)

    def begin(self, into: Sequence[Tensor] | None) -> None:
        self._places = {} if into is None else {id(p): place for p, place in zip(self._parameters, into)}
        self._begun.clear()

    def end(self) -> None:
        """Every gradient is its parameter's again. Schedules that part the backward pass have left some there."""
        for parameter in self._parameters:
            if id(parameter) in self._begun:
                place = self._places[id(parameter)]
                if parameter.grad is not None:
                    place.add_(parameter.grad)
                parameter.grad = place

    def _put(self, parameter: Tensor) -> None:
        place, gradient = self._places.get(id(parameter)), parameter.grad
        if place is None or gradient is None or gradient.is_sparse:
            return
        if id(parameter) in self._begun:
            place.add_(gradient)
        else:
            place.copy_(gradient)
            self._begun.add(id(parameter))
        parameter.grad = None


class _Result(msgspec.Struct, frozen=True):
    """Of a microbatch, its share of the batch's loss, and of each number beside it."""

    loss: float
    extras: dict[str, float] | None


class _At:
    """What the stages of this process are at: microbatches of one shape, and what came of them."""

    def __init__(
        self, task: Task, model: nn.Module, pieces: Sequence[Batch], shares: Sequence[float], seed: int, first: int
    ) -> None:  # fmt: skip
        self.task, self.model, self.pieces, self.shares = task, model, pieces, shares
        self.seed = seed  # of the batch
        self.first = first  # how many of the batch's microbatches are before these
        self.results: dict[int, _Result] = {}
        self.failed: Exception | None = None  # torch makes its own exception of the user's


class _Run:
    """A schedule of torch's for so many microbatches of one shape."""

    def __init__(self, name: str, turns: Sequence[_Turns], count: int, neighbours: Neighbours) -> None:
        stages = [_TimedStage(turn, neighbours) for turn in turns]
        self._spent, self._used = neighbours.spent, False
        own: Any = stages[0] if len(stages) == 1 else stages
        self._turns = turns
        self._schedule: Any = get_schedule_class(name)(own, count, lambda loss, _: loss, scale_grads=False)
        # torch cuts these; the first stage and the last have the microbatches already.
        self._numbers = torch.arange(count)
        self._arguments = [self._numbers] if any(stage.is_first for stage in stages) else []
        self._target = self._numbers if any(stage.is_last for stage in stages) else None

    def __call__(self, at: _At) -> list[_Result]:
        for turn in self._turns:
            turn.begin(at)
        try:
            with lost_neighbours(), self._spent.in_schedule(counts=self._used):
                self._schedule.step(*self._arguments, target=self._target, return_outputs=False)
        except RuntimeError:
            if at.failed is not None:
                raise at.failed from None
            raise
        self._used = True
        return [at.results[number] for number in sorted(at.results)]


class _TimedStage(PipelineStage):
    """A stage of torch's; its passes are computing, and all else of a schedule is waiting."""

    def __init__(self, turns: _Turns, neighbours: Neighbours) -> None:
        super().__init__(turns, turns.number, turns.stages, turns.device, group=neighbours.torch)
        self._spent = neighbours.spent

    def forward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._spent.in_stage():
            return super().forward_one_chunk(*args, **kwargs)

    def backward_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._spent.in_stage():
            return super().backward_one_chunk(*args, **kwargs)

    def backward_weight_one_chunk(self, *args: Any, **kwargs: Any) -> Any:
        with self._spent.in_stage():
            return super().backward_weight_one_chunk(*args, **kwargs)


class _Turns(nn.Module):
    """A stage as one schedule calls it: for each microbatch in turn, and once before them all, to see the shapes."""

    def __init__(self, stage: Stage, number: int, stages: int, device: torch.device) -> None:
        super().__init__()
        self.stage = stage
        self.number, self.stages, self.device = number, stages, device
        self._at: _At
        self._turn = -2

    def begin(self, at: _At) -> None:
        self._at = at
        self._turn = -1 if self._turn == -2 else 0

    def forward(self, *received: Tensor) -> Any:
        turn, self._turn = self._turn, self._turn + 1
        try:
            if turn >= 0:
                return self._compute(turn, received)
            with self._copied_buffers():  # which this pass moves, and torch goes back through it later
                return self._compute(0, received)
        except Exception as error:
            self._at.failed = error
            raise

    @contextmanager
    def _copied_buffers(self) -> Iterator[None]:
        modules = [*self.stage.modules()]
        held = [(module, name, b) for module in modules for name, b in module._buffers.items() if b is not None]
        for module, name, buffer in held:
            module._buffers[name] = buffer.clone()
        try:
            yield
        finally:
            for module, name, buffer in held:
                module._buffers[name] = buffer

    def _compute(self, turn: int, received: tuple[Any, ...]) -> Any:
        """The stage's output; the last stage's is the microbatch's share of the loss.

        What the loss function draws is the same where it gives the model its input and where it judges the output.
        """
        at, last = self._at, self.number == self.stages - 1
        chance = mix(at.seed, at.first + turn)
        kwargs: dict[str, Any] = {}
        with computing(at.task, self.device):
            if self.number == 0:
                seed_everything(chance)
                received, kwargs = given(at.task.loss, at.model, at.pieces[turn])
            seed_everything(mix(chance, self.number))
            output = self.stage(*received, **kwargs)
            if not last:
                return output
            seed_everything(chance)
            loss, extras = loss_and_extras(taken(at.task.loss, at.model, at.pieces[turn], output))
            share = at.shares[turn]
            extras = extras and {name: share * value for name, value in extras.items()}
            at.results[turn] = _Result(share * loss.item(), extras)
            return loss * share


def _summed(results: Sequence[_Result]) -> dict[str, float] | None:
    extras: dict[str, float] = {}
    for result in results:
        for name, value in (result.extras or {}).items():
            extras[name] = extras.get(name, 0.0) + value
    return extras if any(result.extras is not None for result in results) else None
