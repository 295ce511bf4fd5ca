"""What an ordinary PyTorch loop has of a training: its batches, its step, and what it measures."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn
from torch.utils.data import Dataset, Sampler

from squall.metrics import Metric
from squall.protocol.effects import Compute
from squall.runtime.batches import Steps
from squall.runtime.evaluate import evaluate
from squall.session.backend import SessionBackend
from squall.session.batches import Batches
from squall.session.optimizer import Groups, SessionOptimizer
from squall.session.script_task import no_loss
from squall.task import Batch, Task, check_data

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup


class Session:
    """One script's part in a training. `join` makes it."""

    def __init__(
        self, model: nn.Module, backend: SessionBackend, options: dict[str, Any], groups: Sequence[Groups] = ()
    ) -> None:  # fmt: skip
        """`groups` are the param groups of each optimizer; none: one optimizer with all parameters in one group.

        Raises `ValueError` for several optimizers where the strategy cannot make an update of every step.
        """
        if len(groups) > 1 and not backend.several_steps:
            raise ValueError(
                "several optimizers step one after the other on a batch, so every push must be an update of its own:"
                " use downpour, bounded_delay or asynchronous_sgd, without --overlap, and push and fetch for every"
                " batch"
            )
        self._model = model
        self._backend = backend
        self._options = options
        self._groups = list(groups) or [[{"params": list(model.parameters())}]]
        self._coming: Compute | None = None  # the next batch, not handed out yet
        self._current: Compute | None = None  # the batch that was handed out and is not stepped yet
        self._lost = False  # the gradients of the current batch were cleared
        self._stepped = False  # the current batch, by one of several optimizers
        self._again = False  # that step was not finite, so the batch will come again
        self._started = 0.0
        self._begun = False
        self._over = False  # no more batches are taken
        self._numbered = False  # a loop of steps is under way

    @property
    def rank(self) -> int:
        """Number of this replica, from 0."""
        return self._backend.rank

    @property
    def replicas(self) -> int:
        """How many replicas there are."""
        return self._backend.replicas

    @property
    def part(self) -> int:
        """Number of this process in its replica, from 0; `squall run --parts` starts several."""
        return self._backend.part

    @property
    def parts(self) -> int:
        """How many processes a replica has: each builds the whole model, and gets the same batches.

        Gradients are the sum of what the parts leave in `grad` (None adds nothing); docs/porting.md has the rest.
        """
        return self._backend.parts

    @property
    def group(self) -> ProcessGroup | None:
        """What this replica's parts talk through, torch's default group here (Gloo); None where there is one part."""
        return self._backend.group

    @property
    def is_leader(self) -> bool:
        """True in one process: the one to print, draw and save."""
        return self.rank == 0 and self.part == 0

    @property
    def status(self) -> str:
        """How the training ended: "finished", "interrupted", "nonfinite" or "failed"; until then "running"."""
        return self._backend.status

    @property
    def replayed(self) -> bool:
        """True in a replay, which runs the script again up to the end of its loop: a time not to write files."""
        return self._backend.replayed

    def batches(
        self, dataset: Dataset[Any], batch_size: int = 64, epochs: int = 1, *, shuffle: bool = True,
        sampler: Sampler[int] | Sequence[int] | None = None, **loader: Any,
    ) -> Batches:  # fmt: skip
        """This replica's share of the batches, as they are dealt: every example once an epoch, by all together.

        Call `loss.backward()` and `step(loss)` for each. When the loop is over, the model holds the final weights. To
        break out of it ends the training for all replicas; `Batches` says what a loop that is not yours has to do.

        A training that does not end well ends the loop with what `squall.fit` raises, so that code behind the loop does
        not run. Who catches it finds the end in `status`, and after an interrupt the snapshot's weights in the model.

        Args:
            dataset: a map-style dataset, the same in every replica.
            batch_size: examples in one gradient.
            epochs: passes over the dataset, by all replicas together.
            shuffle: a new random order every epoch.
            sampler: as of `squall.Task`: the order instead.
            loader: further arguments for `torch.utils.data.DataLoader`.

        Raises:
            RuntimeError: it is called a second time, or a batch was not stepped.
            ValueError: an argument is out of range, or the dataset is empty or not map-style.
            Interrupted: in the loop: Ctrl-C or SIGTERM; a `KeyboardInterrupt`.
            NotFinite: in the loop: a batch of any replica gave NaN or Inf twice.
            SquallError: in the loop: another replica's script raised, or a process was lost that is needed.
        """
        return self._begin(dataset, batch_size, epochs, shuffle=shuffle, sampler=sampler, loader=loader)

    def steps(self, count: int, examples: int = 1) -> Batches:
        """Numbers of steps, 0 to `count` - 1, for a loop that makes its batches itself: each once, by all together.

        Before each step torch, NumPy and `random` are seeded by its number, so a loop that draws its batch is replayed.
        In such a loop `evaluate` and `log` are for whoever has the step, and not for the leader.

        Args:
            count: steps, of all replicas together.
            examples: in a step; the record counts them.

        Raises:
            RuntimeError: as `batches`.
            ValueError: an argument is below 1.
        """
        for name, value in (("count", count), ("examples", examples)):
            if value < 1:
                raise ValueError(f"{name} is {value}: it must be at least 1")
        return self._begin(Steps(count * examples, examples), examples, 1, shuffle=False, loader={})

    def _begin(self, dataset: Dataset[Any], batch_size: int, epochs: int, **order: Any) -> Batches:
        if self._begun:
            raise RuntimeError("session.batches was called before: give all epochs to one call, batches(..., epochs=3)")
        if epochs < 1:
            raise ValueError(f"epochs is {epochs}: it must be at least 1")
        task = Task(model=self._model, loss=no_loss, train=dataset, batch_size=batch_size, **order, **self._options)
        check_data(task)
        self._begun = True
        self._numbered = isinstance(dataset, Steps)
        self._backend.begin(task, epochs)
        return Batches(self, -(-task.examples // batch_size), epochs)

    def _next(self) -> Compute | None:
        """Wait for the batch that comes next, which is not handed out yet; None when the training is over.

        `Batches` calls this and the next two.
        """
        self._end_steps()
        if self._current is not None and self._lost:
            self.skip()
        if self._current is not None:
            raise RuntimeError(
                "a batch was not stepped: call session.step(loss) after loss.backward(), or session.skip() to leave it"
                " out; to step once for several, take a larger batch_size and cut the batch in the loop. A framework"
                " must neither take batches ahead nor accumulate gradients (the strategy's push_every does)"
            )
        if self._coming is None and not self._over:
            self._coming = self._backend.next()
        return self._coming

    def _take(self) -> Batch:
        """Load the batch that `_next` has found, and hand it out."""
        assert self._coming is not None
        self._current, self._coming, self._started = self._coming, None, time.perf_counter()
        self._lost = self._stepped = self._again = False
        return self._backend.load(self._current)

    def _end_steps(self) -> None:
        """End the current batch, if one of several optimizers has stepped on it: no other one will."""
        if self._current is not None and (self._stepped or self._again):
            if not self._again:
                self._backend.done(self._current)
            self._current = None

    def _leave(self) -> None:
        """End this replica's part in the training: it takes no more batches."""
        if not self._over:
            self._end_steps()
            self._over, self._numbered = True, False
            self._current = self._coming = None
            self._backend.leave()

    @property
    def _speaks(self) -> bool:
        """Whether what this replica measures goes into the record."""
        return self.rank == 0 or self._numbered

    def step(self, loss: Tensor | float | None = None) -> None:
        """Push the gradients of the last batch, and fetch newer weights, as the strategy wants it.

        Args:
            loss: of the batch, for the record; a mean over its examples. None: the record has no loss for it.

        Raises:
            RuntimeError: there is no batch to step, or its loss was not propagated back.
            ValueError: the loop has set something else than a learning rate on `optimizer`.
        """
        self._step(self.optimizer, loss)

    def _step(self, optimizer: SessionOptimizer, loss: Tensor | float | None) -> None:
        """Step on the batch, which is then over; with several optimizers it is when the loop takes the next one."""
        if self._current is None:
            raise RuntimeError("session.step has no batch: take one from session.batches first, and step it once")
        factors = optimizer.factors()
        value = float(loss.detach()) if isinstance(loss, Tensor) else loss
        if len(self._groups) == 1:
            effect, self._current = self._current, None
            self._backend.accept(effect, value, self._started, factors)
        elif not self._again:
            self._stepped = True
            self._again = not self._backend.accept(self._current, value, self._started, factors, over=False)

    def _gradients_cleared(self, lost: bool) -> None:
        """The loop has cleared the gradients; `lost` if there were any, which a batch that is not stepped yet needs."""
        self._lost |= lost and self._current is not None

    def skip(self) -> None:
        """Leave out the last batch, a bad one: it is not trained, and the audit says so.

        Raises:
            RuntimeError: there is no batch to leave out.
        """
        if self._current is None:
            raise RuntimeError("session.skip has no batch: it takes the place of session.step, once for a batch")
        effect, self._current = self._current, None
        self._backend.skip(effect)

    def evaluate(
        self, dataset: Dataset[Any], metrics: Mapping[str, Metric], *, batch_size: int = 64, **loader: Any
    ) -> dict[str, float]:
        """Means of metrics over a dataset, on this replica's weights; they go into the record.

        The leader does it, in all parts of its replica; in a loop over `steps` whoever has the step. In a loop they are
        of the weights of that moment, behind it of the final ones.

        Args:
            dataset: a map-style dataset.
            metrics: as of `squall.Task`: functions of a batch, or what is fed the whole dataset and then tells.
            batch_size: batches are of four times this size.

        Returns:
            name -> value; in the other replicas an empty dict, at once.
        """
        if not self._speaks:
            return {}
        task = Task(
            model=self._model, loss=no_loss, train=dataset, validate=dataset, batch_size=batch_size, metrics=metrics,
            loader=loader,
        )  # fmt: skip
        values = evaluate(task, self._model, next(self._model.parameters()).device, loss=False)
        self.log(**values)
        return values

    def log(self, **values: float) -> None:
        """Put numbers into the run's record, where the report draws them over time.

        Only the leader's are kept; in a loop over `steps` everybody's.
        """
        if self._speaks and self.part == 0:
            self._backend.log({name: float(value) for name, value in values.items()})

    @property
    def optimizer(self) -> SessionOptimizer:
        """An optimizer whose `step` is this session's, with the param groups of the one that was given to `join`.

        A loop, or a scheduler, may set their learning rates. It counts this replica's own steps, of which there are
        fewer than updates; the numbers of `steps` are those of all replicas together.
        """
        if len(self.optimizers) > 1:
            raise RuntimeError("the session has several optimizers: step those of session.optimizers")
        return self.optimizers[0]

    @cached_property
    def optimizers(self) -> tuple[SessionOptimizer, ...]:
        """One for each that was given to `join`. A step of one leaves the groups and the state of the others alone.

        Each step is an exchange, and a batch may have several. It counts as trained with the first one.
        """
        counts = [len(groups) for groups in self._groups]
        return tuple(
            SessionOptimizer(self, groups, (sum(counts[:number]), sum(counts[number + 1 :])))
            for number, groups in enumerate(self._groups)
        )
