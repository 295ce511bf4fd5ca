"""Plain sequential training: the baseline, and the reference that one replica of any strategy must equal.

No protocol and no process: a loop over batches that uses the same data order, seeds, kernels and record.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager

from squall.protocol.best import Best, Verdict, better
from squall.protocol.effects import (
    Apply,
    Cause,
    Compute,
    Effect,
    End,
    KeepWeights,
    Payload,
    PublishSnapshot,
    Term,
    WriteSnapshot,
)
from squall.protocol.events import Event, GradientComputed, SnapshotWritten, StopRequested
from squall.protocol.messages import Cover, Lease, Weights
from squall.protocol.nodes import Node
from squall.protocol.notes import Note, Remark, SnapshotAsked, TrainingBegan, WeightsMeasured, WorkReported
from squall.protocol.pushed_work import NO_WORK
from squall.protocol.reports import REPORT_EVERY_S, ReportSums
from squall.runtime.backward import Backward, resolve_device
from squall.runtime.best import keep
from squall.runtime.channel import Channel
from squall.runtime.compute import Gradients
from squall.runtime.driver import Host
from squall.runtime.evaluate import evaluate
from squall.runtime.hosts import ShardHost
from squall.runtime.interrupts import collected_interrupts
from squall.runtime.job import Job
from squall.runtime.machines import lease_coordinator
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.recording import recorded
from squall.runtime.store import Store

_REPLICA, _SHARD = Node("replica", 0), Node("shard", 0)


class LoneHost(Host):
    """A replica that computes on the very weights of the shard."""

    def __init__(self, job: Job, store: Store) -> None:
        device = resolve_device(job.plan.device)
        backward = Backward(job.task, job.layout, [store.weights], job.plan.seed, device)
        self.training = Gradients(backward, [job.arena.gradient(0, 0)], [job.arena.rates(0, 0)])
        self._behind = True  # the model shows something else than the weights

    def perform(self, effect: Effect, now: float) -> Event | None:
        match effect:
            case Compute():
                if self._behind:
                    self.training.use(0)
                answer = self.training.compute(effect)
                # A forward pass may have put a NaN into BatchNorm's statistics; a GPU computes on a copy.
                self._behind = not answer.finite or self.training.device.type != "cpu"
                return answer
            case End():
                self.training.batches.close()
            case _:
                raise AssertionError(f"a lone replica cannot {effect!r}")
        return None


class Sequential:
    """One training loop. How it ended is said on the channel."""

    def __init__(self, job: Job, channel: Channel) -> None:
        self._job = job
        self._paused_s = 0.0  # evaluation and snapshots are not training time
        self._host = CoordinatorHost(job, channel, self._clock)
        state = lease_coordinator(job)
        self._leases, self._policy = state.leases, state.policy
        self._snapshots = job.restored.manifest.number if job.restored is not None else 0
        shard = ShardHost(job, 0)
        self._updates = job.restored.updates if job.restored is not None else 0
        self._best = Best(self._policy.goal, self._policy.until)
        self._store = shard.store
        lone = LoneHost(job, shard.store)
        self._gradients = lone.training
        self._shard, self._replica = recorded(shard, job, _SHARD), recorded(lone, job, _REPLICA)
        self._tally = ReportSums()
        self._reported_at = 0.0
        self._interrupts: list[int] = []  # signals caught

    def run(self) -> None:
        try:
            self._run()
        finally:
            with ExitStack() as stack:
                for host in (self._shard, self._replica):
                    stack.callback(host.perform, End("finished"), 0.0)

    def _run(self) -> None:
        self._gradients.use(0)
        try:
            with collected_interrupts() as self._interrupts:
                end = self._train()
            error = self._snapshot(final=True)  # before the evaluation, which runs the user's code and may fail
            if end.status == "finished":
                self._evaluate()
        except Exception as problem:
            self._host.perform(End("failed", f"{type(problem).__name__}: {problem}"), self._clock())
            raise
        if error and end.status in ("finished", "interrupted"):
            end = End("failed", error)
        self._host.perform(end, self._clock())

    def _train(self) -> End:
        self._note(TrainingBegan())
        began = snapshot_at = evaluated_at = self._clock()
        epochs = self._leases.epochs_done()
        while (lease := self._leases.take(_REPLICA, 1, self._clock())) is not None:
            error = self._step(lease)
            now = self._clock()
            if error:
                self._leases.give_back(_REPLICA)
                return End("nonfinite", error)
            if now - self._reported_at >= REPORT_EVERY_S:
                self._report(now)
            every = self._policy.evaluate_every_s
            due = every is not None and now - evaluated_at >= every
            if (due or self._leases.epochs_done() > epochs) and self._leases.over() is None:
                epochs, evaluated_at = self._leases.epochs_done(), now
                if verdict := self._evaluate():
                    return End("failed" if verdict[0] is Cause.FAILED else "finished", verdict[1], verdict[0])
            if self._interrupts:
                return End("interrupted", "interrupted", Cause.STOPPED)
            if self._policy.seconds is not None and now - began >= self._policy.seconds:
                return End("finished", "the time given is over", Cause.SECONDS)
            if self._policy.snapshot_every_s is not None and now - snapshot_at >= self._policy.snapshot_every_s:
                self._snapshot()
                snapshot_at = self._clock()
        over = self._leases.over()
        assert over is not None
        cause, reason = over
        return End("finished", reason, cause)

    def _step(self, lease: Lease) -> str:
        """One update; the reason if the batch gave a NaN twice."""
        effect = Compute(lease.epoch, lease.start, lease.stop, 0, accumulate=False, local_step=False)
        answer = self._compute(effect)
        if not answer.finite:
            batch = f"examples {lease.start} to {lease.stop} of epoch {lease.epoch} (lease {lease.id})"
            text = f"NaN or Inf in the loss or gradient of {batch}"
            self._note(Remark("nonfinite", f"{text}; not applied, tried again"))
            answer = self._compute(effect)
            if not answer.finite:
                self._note(Remark("nonfinite", f"{text}, twice"))
                return f"{text}, and again when it was tried a second time; the weights before it are kept"
        self._updates += 1
        self._replica.attach(Payload("gradient", _REPLICA, 0, self._updates, 0))
        self._shard.perform(Apply((Term(_REPLICA, 0, 1.0, self._updates),), 1.0, self._updates), 0.0)
        ended = self._leases.done(lease.id, lease.stop, _REPLICA)
        assert ended is not None
        self._note(ended)
        cover, tally = Cover(lease.id, lease.stop), self._tally
        tally.add(NO_WORK.and_batch(cover, lease.stop - lease.start, answer.loss, (), answer.extras))
        tally.compute_s += answer.seconds
        tally.pushes += 1
        tally.staleness.append(0)
        return ""

    def _compute(self, effect: Compute) -> GradientComputed:
        answer = self._replica.perform(effect, 0.0)
        assert isinstance(answer, GradientComputed)
        return answer

    def _report(self, now: float) -> None:
        self._host.perform(WorkReported(_REPLICA, self._tally.take()), now)
        self._host.poll()
        self._reported_at = now

    def _evaluate(self) -> Verdict:
        """Why the run may end."""
        task = self._job.task
        if task.validate is None:
            return None
        with self._pause():
            self._gradients.use(0)
            values = evaluate(task, task.model, self._gradients.device)
        error = self._keep(values)
        if error:
            self._note(Remark("error", f"the best weights could not be kept: {error}"))
        verdict = self._best.judge(values, kept=not error)
        self._note(WeightsMeasured(values, Weights(self._updates, self._leases.trained, 0.0)))
        asked = self._host.poll()
        if isinstance(asked, StopRequested):
            return Cause.FAILED if asked.failed else Cause.SCRIPT, asked.why
        return verdict

    def _keep(self, values: dict[str, float]) -> str:
        """Keep the weights if they are better than those before; why that was not possible, or nothing."""
        goal = self._best.goal
        if not goal.keep or not better(goal.metric, values[goal.metric], self._best.value):
            return ""
        effect = KeepWeights(0, goal.metric, values[goal.metric], self._updates, self._leases.trained)
        with self._pause():
            return keep(self._job.directory, effect, self._store.weights, self._job.layout).error

    def _snapshot(self, final: bool = False) -> str:
        """Why it could not be written, or nothing."""
        self._snapshots += 1
        self._report(self._clock())  # so that the record tells what the snapshot holds
        self._note(SnapshotAsked(self._snapshots))
        with self._pause():
            written = self._shard.perform(WriteSnapshot(self._snapshots, self._updates), 0.0)
        assert isinstance(written, SnapshotWritten)
        if written.error:
            error = f"snapshot {self._snapshots} could not be written: {written.error}"
            self._note(Remark("error", error))
            return error
        ledger = self._leases.state()
        versions, examples, checksums = (self._updates,), (self._leases.trained,), (written.checksum,)
        published = PublishSnapshot(self._snapshots, ledger, versions, examples, {}, checksums, final)
        self._host.perform(published, self._clock())
        return ""

    def _note(self, note: Note) -> None:
        self._host.perform(note, self._clock())

    def _clock(self) -> float:
        return time.monotonic() - self._paused_s

    @contextmanager
    def _pause(self) -> Iterator[None]:
        began = time.monotonic()
        try:
            yield
        finally:
            self._paused_s += time.monotonic() - began
