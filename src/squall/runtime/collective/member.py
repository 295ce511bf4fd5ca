"""A replica of all-reduce, or a part of one: a model, its optimizer, and how both get to snapshots and newcomers."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

import torch
from torch import Tensor, nn

from squall.protocol.effects import Compute, Step
from squall.protocol.messages import Factors
from squall.runtime.backward import Backward
from squall.runtime.compute import all_finite
from squall.runtime.inside import local
from squall.runtime.job import Job
from squall.runtime.optimizers import bare_step, build_optimizer, first_state, rates_scaled
from squall.runtime.rates import Schedule
from squall.runtime.states import SETTINGS, STATE, group_of
from squall.strategies.work import Collective
from squall.vector import Span, count_in, put_count

_RATES = ("lr", "momentum")  # a schedule sets them


class Member:
    """Computes gradients of its own batch, and moves its weights by the mean of all members' gradients.

    The parameters are views of one vector, float32 [length], whose tail has the model's buffers. In a replica of more
    parts than one all share the vector, and each is a member that answers for its share of it.
    """

    def __init__(self, job: Job, slot: int) -> None:
        work = job.recipe.work
        assert isinstance(work, Collective)
        self.task, self.alone = job.task, job.alone
        self.device = job.device(slot)
        self.vector = job.initial.to(self.device, copy=True) if job.own is None else job.own
        self.backward = Backward(job.task, job.layout, [self.vector], job.plan.seed, self.device, job.inside)
        self.layout = self.backward.layout  # what it answers for
        self.batches = self.backward.batches
        self.backward.on_vector.use(0)
        # Fused optimizers take no DTensors, and read memory in one piece: slices are stepped beside their place.
        own = self.backward.parameters
        self._slices = {id(p): (local(p), nn.Parameter(local(p).clone())) for p in own if local(p) is not p}
        self.parameters = [self._slices[id(p)][1] if id(p) in self._slices else p for p in own]
        here = {id(p): stepped for p, stepped in zip(own, self.parameters)}
        groups = [{**g, "params": [here[id(p)] for p in g["params"] if id(p) in here]} for g in job.task.param_groups()]
        self._factory = work.optimizer
        self.optimizer = build_optimizer(work.optimizer, groups)
        self._stepped: dict[tuple[int, tuple[int, ...]], Mapping[str, Tensor]] = {}  # by param group and shape
        self.schedule = Schedule(job.task, self.optimizer) if job.task.schedule is not None else None
        if self.backward.inside.speaks:
            job.keep(self.schedule)
        self._begun = self._numbers()
        self._step = bare_step(self.optimizer, tracked=True)
        self.clock = 0  # rounds that have moved it
        if job.restored is not None:
            tensors = job.restored.tensors
            self.take_up({**tensors, "weights": self._held(tensors["weights"])}, job.restored.updates)

    # ------------------------------------------------------------ steps

    def load(self, effect: Step) -> object:
        """The member's own batch, or None."""
        if effect.start == effect.stop:
            for parameter in self.parameters:
                parameter.grad = None
            return None
        place = effect.epoch, effect.start, effect.stop
        return self.backward.load(Compute(*place, 0, accumulate=False, local_step=False))

    def share(self, effect: Step) -> float:
        """Of the member's examples in all of the step."""
        return (effect.stop - effect.start) / effect.examples

    def look(self) -> bool:
        """Whether the gradients that are there are finite; they are clipped then."""
        finite = self.backward.finish()
        for parameter in self.parameters:
            if parameter.grad is None:  # no member's batch has used it
                parameter.grad = torch.zeros_like(parameter)
        return finite and all_finite([p.grad for p in self.parameters if p.grad is not None])

    def move(self, factors: Factors = ()) -> None:
        """One step on the gradients that `look` has found finite; `factors` are of the step's learning rates."""
        for place, beside in self._slices.values():
            beside.data.copy_(place)
        with rates_scaled(self.optimizer, 1.0, factors):
            self._step()
        for place, beside in self._slices.values():
            place.copy_(beside.data)
        self.pass_by()

    def pass_by(self) -> None:
        """A round is over, in which nothing has moved."""
        if self.schedule is not None:
            self.schedule.step()
        self.clock += 1

    def buffer_changes(self, share: float) -> Tensor | None:
        """What the batch has done to the model's buffers, times `share`: float64, floating ones and then counts.

        None: it has none.
        """
        layout, changes = self.layout, list[Tensor]()
        if not layout.buffers and not layout.counters:
            return None
        changed = torch.zeros_like(self.vector)
        layout.write_buffers(self.backward.on_vector.model, changed)
        for new, old in zip(layout.regions(changed, "buffers"), layout.regions(self.vector, "buffers")):
            changes.append(torch.where(new == old, 0.0, new.double() - old))  # a mask of infinities stays
        for now, then in zip(layout.counter_views(changed), layout.counter_views(self.vector)):
            changes.append((count_in(now) - count_in(then)).flatten())
        return torch.cat(changes) * share

    def move_buffers(self, changes: Tensor | None) -> None:
        """Add the sum of what all members' batches have done to them."""
        if changes is None:
            return
        floats, counters = self.layout.regions(self.vector, "buffers"), self.layout.counter_views(self.vector)
        added = changes.split([*map(len, floats), *(view.numel() // 2 for view in counters)])
        for own, more in zip(floats, added):
            own.copy_(own.double() + more)
        for own, more in zip(counters, added[len(floats) :]):
            count = count_in(own)
            put_count(own, count + more.view_as(count))

    def look_again(self) -> None:
        """A forward pass may have changed the model's buffers: they are the vector's again."""
        self.backward.on_vector.use(0)

    # ------------------------------------------------------------ state

    def state(self) -> dict[str, Tensor]:
        """Weights, and the optimizer's state, on the CPU; names are those of a snapshot (`runtime/states.py`)."""
        weights = self._held(self.vector).detach().cpu().contiguous()
        return {"weights": weights, **self.states(range(len(self.parameters))), **self.settings()}

    def states(self, numbers: Iterable[int]) -> dict[str, Tensor]:
        """The optimizer's state of these parameters, counted as in the layout."""
        tensors: dict[str, Tensor] = {}
        for number in numbers:
            for key, value in self.optimizer.state[self.parameters[number]].items():
                if value is not None:
                    tensors[f"{STATE}:{self.layout.parameters[number].name}:{key}"] = torch.as_tensor(value)
        return {name: tensor.detach().cpu().contiguous() for name, tensor in tensors.items()}

    def could_have(self, number: int, key: str, value: Tensor) -> bool:
        """Whether that may be a parameter's state.

        It has the shape and type of the own; where there is none, of what a step on a copy makes, else any element's.
        """
        parameter = self.parameters[number]
        known = self.optimizer.state.get(parameter, {}).get(key)
        if known is None:
            known = self._after_a_step(number).get(key)
        if known is not None:
            known = torch.as_tensor(known)
            return value.shape == known.shape and value.dtype == known.dtype
        return value.shape in (parameter.shape, ())

    def _after_a_step(self, number: int) -> Mapping[str, Tensor]:
        parameter, at = self.parameters[number], group_of(self.layout.parameters[number], self.layout)
        kind = at, tuple(parameter.shape)
        if kind not in self._stepped:
            self._stepped[kind] = first_state(self._factory, self.optimizer.param_groups[at], parameter)
        return self._stepped[kind]

    def settings(self) -> dict[str, Tensor]:
        """What the optimizer has changed in its param groups."""
        tensors: dict[str, Tensor] = {}
        for group, (now, begun) in enumerate(zip(self._numbers(), self._begun)):
            changed = {key: value for key, value in now.items() if value != begun.get(key)}
            tensors |= {f"{SETTINGS}:{group}:{key}": torch.tensor(value) for key, value in changed.items()}
        return tensors

    def take_up(self, state: Mapping[str, Tensor], updates: int) -> None:
        """Go on from what `state` gave, of so many updates, or from what shards have saved."""
        regions = self.layout.regions(self.vector)
        for region, given in zip(regions, state["weights"].split([region.numel() for region in regions])):
            region.copy_(given.view_as(region))
        self.optimizer.state.clear()
        self.clock = updates
        self.put(state, {span.name for span in self.layout.parameters})
        own = {span.name: self.optimizer.state[p] for span, p in zip(self.layout.parameters, self.parameters)}
        for name, value in state.items():
            kind, _, rest = name.partition(":")
            if rest and kind not in (STATE, SETTINGS):
                for span in self.layout.parameters:
                    if group_of(span, self.layout) == int(kind):
                        part = value[span.start : span.start + span.numel].view(span.shape) if value.ndim else value
                        own[span.name][rest] = self._taken(self._own(span, part), scalar=not value.ndim)
        if self.schedule is not None:
            self.schedule.advance(updates)
        self.look_again()

    def put(self, state: Mapping[str, Tensor], names: Collection[str]) -> None:
        """Take up what `states` gave of the parameters with these names, and what `settings` gave."""
        own = {span.name: (span, self.optimizer.state[p]) for span, p in zip(self.layout.parameters, self.parameters)}
        for name, value in state.items():
            kind, _, rest = name.partition(":")
            owner, _, key = rest.rpartition(":")
            if kind == STATE and owner in names:
                span, kept = own[owner]
                kept[key] = self._taken(self._own(span, value))
            elif kind == SETTINGS:
                self.optimizer.param_groups[int(owner)][key] = value.item()

    def _held(self, vector: Tensor) -> Tensor:
        """What it answers for of a whole vector, in one piece."""
        pieces = [piece.flatten() for piece in self.layout.regions(vector)]
        return pieces[0] if len(pieces) == 1 else torch.cat([vector[:0], *pieces])

    def _own(self, span: Span, value: Tensor) -> Tensor:
        """Its slice of a value of the whole tensor's shape; another value as it is."""
        return self.layout.own_slice(span, value) if value.shape == span.shape else value

    def _taken(self, value: Tensor, scalar: bool | None = None) -> Tensor:
        """A copy where the optimizer wants it: scalars, such as its count of steps, stay on the CPU."""
        stays = value.ndim == 0 if scalar is None else scalar
        return value.clone() if stays else value.to(self.device, copy=True)

    def _numbers(self) -> list[dict[str, float]]:
        """What optimizers may count in their param groups; rates are the schedule's."""
        return [
            {key: value for key, value in group.items() if isinstance(value, int | float) and key not in _RATES}
            for group in self.optimizer.param_groups
        ]
