"""Where the scripts of a replica's parts meet: they do the same with a batch, and their gradients are added up.

A script decides by itself what each part computes. What the parts leave in `grad` is summed in memory that they share;
None adds nothing. A buffer is what the first part that has changed it has made of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, get_args

import torch
from torch import Tensor, nn

from squall.parts.neighbours import SPEAKER, Neighbours
from squall.parts.spent import NUMBERS
from squall.runtime.inside import dense, local
from squall.vector import Layout

Word = Literal["session.batches", "the next batch", "session.step", "session.skip", "the end of its loop"]
WORDS: tuple[Word, ...] = get_args(Word)
TAG = 1 << 24  # of what sessions say, which no message of a script should have


class PartsDiffer(RuntimeError):
    """The parts of a replica do not do the same: the script's mistake."""


class Meeting:
    """One part's end. `layout` is of the whole model, which every part has."""

    def __init__(self, neighbours: Neighbours, layout: Layout) -> None:
        self._neighbours, self._layout = neighbours, layout
        self._own_bit = 1 << neighbours.part
        self._spans = (*layout.buffers, *layout.counters)
        # What is said has one length, whatever a part says: Gloo ends a process that is sent more than it waits for.
        self._room = (1 + NUMBERS) * neighbours.parts + 1 + len(layout.parameters) + len(self._spans)
        self._before: list[Tensor] = []  # the model's buffers, before the batch
        self._compared = False  # gradients of several parts, for being the same

    def meet(self, word: Word, *values: float) -> list[float]:
        """Wait until all parts have come to the same; the sums of their values, of which all give as many.

        Raises `PartsDiffer` on all parts where one does something else.
        """
        with self._neighbours.together():
            doing_now = (self._own_bit * (each == word) for each in WORDS)
            heard = self._neighbours.agreed(*doing_now, *values, *[0.0] * (self._room - len(values)))
            if (doing := {each: int(bits) for each, bits in zip(WORDS, heard) if bits}).keys() != {word}:
                told = "; ".join(f"part {', '.join(map(str, _parts(bits)))} at {each}" for each, bits in doing.items())
                raise PartsDiffer(
                    f"the parts of a replica do not do the same: {told}. Every part takes all batches, and steps, skips"
                    " and leaves them where the others do"
                )
            return heard[len(WORDS) : len(WORDS) + len(values)]

    def begin(self, model: nn.Module, examples: int, batch_size: int, epochs: int) -> None:
        """Raises `PartsDiffer` where parts train on other data, `ValueError` where the model lost its parameters."""
        parameters = dict(model.named_parameters())
        lost = [s.name for s in self._layout.parameters if not _kept(parameters.get(s.name), s.shape)]
        if lost:
            raise ValueError(
                f"{', '.join(lost[:3])} of the model that joined is another tensor now: with --parts the script's model"
                " keeps its parameters, so compute with pieces of them, or have squall.fit cut the model"
                " (Task.split=squall.Tensor, which makes DTensors)"
            )
        own = examples, batch_size, epochs
        if self.meet("session.batches", *own) != [value * self._neighbours.parts for value in own]:
            raise PartsDiffer(
                "session.batches must be given the same dataset length, batch_size and epochs in every part: part"
                f" {self._neighbours.part} has {', '.join(map(str, own))}"
            )

    def loaded(self, model: nn.Module) -> None:
        """A batch is about to be computed."""
        if self._spans:
            self._before = [buffer.clone() for buffer in self._layout.buffers_of(model)]

    def add_up(self, model: nn.Module, vector: Tensor, loss: float | None) -> tuple[list[Tensor | None], float | None]:
        """All gradients, as views of the vector, complete on part 0, and the loss of the first part that has one.

        Part 0's model also gets the buffers that others have changed. All parts give the same memory, float32 [length].
        """
        parameters = self._layout.parameters_of(model)
        dense(parameters)
        views = self._layout.views(vector)
        changed = [*map(_differ, self._layout.buffers_of(model), self._before)] if self._spans else []
        marks = (loss is not None, *(p.grad is not None for p in parameters), *changed)
        losses, bits = self._step(0.0 if loss is None else loss, marks)
        tellers, *bits = bits
        of_gradients, of_buffers = bits[: len(parameters)], bits[len(parameters) :]
        with self._neighbours.together():
            self._write_buffers(model, vector, of_buffers)
            self._write_gradients([p.grad for p in parameters], views, of_gradients)
            self._read_buffers(model, vector, of_buffers)
        found = [view if bits else None for view, bits in zip(views, of_gradients)]
        return found, losses[_parts(tellers)[0]] if tellers else None

    def _step(self, loss: float, marks: Sequence[bool]) -> tuple[list[float], list[int]]:
        """The loss of each part, and the parts that have each mark; part 0 also hears how all have spent their time."""
        parts, part, spent = self._neighbours.parts, self._neighbours.part, self._neighbours.spent
        own = [0.0] * ((1 + NUMBERS) * parts)
        own[part] = loss
        if part != SPEAKER:
            spent.count()
            at = parts + NUMBERS * part
            own[at : at + NUMBERS] = spent.told()
        told = self.meet("session.step", *own, *(self._own_bit * mark for mark in marks))
        if part == SPEAKER:
            spent.count()
            for other, numbers in self._neighbours.others.items():
                numbers[:] = told[parts + NUMBERS * other :][:NUMBERS]
        return told[:parts], [int(bits) for bits in told[len(own) :]]

    def _write_gradients(
        self, gradients: Sequence[Tensor | None], views: Sequence[Tensor], bits: Sequence[int]
    ) -> None:
        """Each is written by the first part that has it; to that the others add theirs, one part after the other."""
        part, parts = self._neighbours.part, self._neighbours.parts
        own = [
            (gradient, view, _parts(having), span.name)
            for gradient, view, having, span in zip(gradients, views, bits, self._layout.parameters)
            if gradient is not None
        ]
        if first := [(view, gradient) for gradient, view, having, _ in own if having[0] == part]:
            torch._foreach_copy_([view for view, _ in first], [gradient for _, gradient in first])
        token = torch.empty(1)
        if part != SPEAKER:
            self._neighbours.receive(token, part - 1)
        for gradient, view, having, name in own:
            if having[0] != part:
                if not self._compared and having[1] == part:
                    self._compare(gradient, view, name)
                view += gradient.to(view.device)
        self._compared = True
        self._neighbours.send(token, (part + 1) % parts)
        if part == SPEAKER:
            self._neighbours.receive(token, parts - 1)

    def _compare(self, gradient: Tensor, other: Tensor, name: str) -> None:
        """Two parts that have computed the same, which the sum would count twice: on the first batch that shows."""
        if torch.equal(gradient.cpu(), other) and gradient.count_nonzero():
            raise ValueError(
                f"two parts of a replica left the same gradient of {name}, and gradients of parts are added up: where"
                " parts compute the same, set the parameter's grad to None in all but one of them"
            )

    def _write_buffers(self, model: nn.Module, vector: Tensor, bits: Sequence[int]) -> None:
        if own := self._of_part(bits, self._neighbours.part):
            self._layout.share(own).write_buffers(model, vector)

    def _read_buffers(self, model: nn.Module, vector: Tensor, bits: Sequence[int]) -> None:
        if self._neighbours.part == SPEAKER and (others := self._of_part(bits, None)):
            self._layout.share(others).read_buffers(vector, model)

    def _of_part(self, bits: Sequence[int], part: int | None) -> frozenset[str]:
        """The buffers that this part has written; None: any but the first."""
        owners = ((span.name, _parts(b)[0]) for span, b in zip(self._spans, bits) if b)
        return frozenset(name for name, owner in owners if (owner != SPEAKER if part is None else owner == part))


def _parts(bits: int) -> list[int]:
    return [part for part in range(bits.bit_length()) if bits >> part & 1]


def _kept(parameter: Tensor | None, shape: tuple[int, ...]) -> bool:
    return parameter is not None and local(parameter) is parameter and tuple(parameter.shape) == shape


def _differ(one: Tensor, other: Tensor) -> bool:
    return not torch.equal(one, other)
