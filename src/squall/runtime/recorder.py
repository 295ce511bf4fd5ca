"""The coordinator's host: keeps the run's record, and makes snapshots visible."""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Sequence

import msgspec
from msgspec import UNSET, UnsetType

from squall.protocol import notes
from squall.protocol.effects import Effect, End, PublishSnapshot
from squall.protocol.events import Event
from squall.protocol.ledger import Ledger
from squall.protocol.messages import Stats, Weights
from squall.protocol.nodes import Node
from squall.record import rows
from squall.record.rows import RecordError
from squall.record.writer import Record
from squall.runtime.channel import Channel
from squall.runtime.divergence import Divergence
from squall.runtime.driver import Host
from squall.runtime.facts import facts_of
from squall.runtime.folding import Folding
from squall.runtime.job import Job
from squall.runtime.left_out import LeftOut
from squall.runtime.machines import left_out
from squall.runtime.optimizers import state_name
from squall.runtime.pauses import Pauses
from squall.runtime.snapshot import SNAPSHOTS, Manifest, Snapshots
from squall.runtime.thinning import Thinning
from squall.runtime.told import rows_of_work, rows_told


class CoordinatorHost(Host):
    """Turns notes into rows. The time axis is training time: it begins when the first replica is welcomed.

    What it knows follows from the effects that it was given and from when that was, so one that goes on in the place of
    another is given them again (`take_again`), and the record knows which of their rows it has.
    """

    def __init__(self, job: Job, channel: Channel, clock: Callable[[], float] | None = None) -> None:
        self._job = job
        self._channel = channel
        self._clock = clock  # real seconds: machines may live in virtual time, the record's readers do not
        self._again = False  # it is given what the one before it has carried out
        if (kept := job.kept.get("recorder")) is None:
            self._begin(job)
        else:
            self.__dict__.update(kept)
            self.record.path, self._snapshots.directory = job.directory / "run.sqlite", job.directory / SNAPSHOTS
            self.record.go_on()

    def _begin(self, job: Job) -> None:
        self.record = Record(job.directory / "run.sqlite")
        if job.restored is not None and isinstance(waiting := job.restored.manifest.rows, bytes):
            self.record.take_in(job.restored.manifest.number, waiting)
        self._pauses = Pauses(self.record, job)
        self._leases = Folding(self.record, job.task.examples)
        self._snapshots = Snapshots(job.directory)
        self._kept = self._snapshots.numbers()  # snapshots that a resume may go back to
        self._trained_s = job.restored.manifest.trained_s if job.restored is not None else 0.0  # by earlier processes
        self._reports = Thinning(self.record, self._trained_s, self._snapshots)
        self._begun: float | None = None
        self._stopped: float | None = None  # the clock stands still while the final weights are evaluated
        self._now = self._asked_s = 0.0  # the second: training time when the snapshot under way was asked for
        self._left_out = LeftOut(left_out(job))
        self._stepped = self._complained = False  # the second: that the record cannot be written
        self._unpublished = ""  # why the newest snapshot could not be made visible
        self.facts(**facts_of(job))
        first = self.record.fact("first_loss") if job.restored is not None else None
        self._divergence = Divergence(float(first) if first and first != "nan" else None)
        if job.restored is not None:
            self._rewind(job.restored.manifest)
        else:  # what is there is of an attempt that has left no snapshot
            self.record.rewind(-math.inf, 0, 0, [])
        self.record.told = 1

    def keeps(self) -> dict[str, object]:
        own = {"_job", "_channel", "_clock"}
        return {"recorder": {name: value for name, value in self.__dict__.items() if name not in own}}

    def take_again(self, host: Host, since: Sequence[tuple[Effect, float]]) -> None:
        """Be where the one before was, which has carried these out: `host` is this one, or one around it."""
        self._again = True
        for effect, now in since:
            if isinstance(effect, notes.Note | PublishSnapshot):
                host.perform(effect, now)
        self._again = self._snapshots.elsewhere = False

    def follow(self) -> None:
        """From now on it is given what is carried out by a coordinator on another machine."""
        self._again = self._snapshots.elsewhere = True

    def _rewind(self, manifest: Manifest) -> None:
        """The record goes back to the snapshot as the weights do; leases held then end as they are in it."""
        ledger = msgspec.convert(manifest.ledger, Ledger)
        self._left_out.known(self.record.skips(int(lease) for lease in ledger.leases))
        self.record.rewind(manifest.asked_s, ledger.next_id, ledger.dealt_upto, [int(lease) for lease in ledger.held])
        self._book(manifest.ledger, manifest.progress, manifest.trained_s, reported=manifest.final)

    def _book(self, ledger: dict[str, object], progress: dict[str, int], at: float, reported: bool = False) -> None:
        """Add rows for the trained parts of leases that had not ended when a snapshot was made.

        `reported`: what was trained after the ledger's moment is in the record already.
        """
        for name, (epoch, start, done, stop, replica) in msgspec.convert(ledger, Ledger).leases.items():
            upto = max(done, progress.get(name, done))
            if upto > start:
                self.record.add(rows.LeaseRow(int(name), epoch, start, stop, replica, 0, at, at, upto))
            examples = upto - done - self._left_out.within(int(name), done, upto)
            if examples > 0 and not reported:
                batches = -(-examples // self._job.task.batch_size)
                self.record.add(rows.ProgressRow(at, replica, examples, batches, math.nan, 0.0, 0.0, 0, 0))

    def poll(self) -> Event | None:
        self._now = self._now if self._clock is None else self._clock()  # nothing may have been performed for long
        self._commit()
        return self._channel.poll()

    def _commit(self, force: bool = False) -> None:
        """A full disk or a locked file must not end a training, nor hold it up: the rows wait."""
        try:
            if self.record.commit(self._now, force):
                self._reports.look(self.training_s)
        except RecordError as error:
            self._complain(error)

    def _complain(self, error: RecordError) -> None:
        if not self._complained:
            self._complained = True
            sys.stderr.write(f"squall: warning: {error}; training goes on, and the rows are kept until they can\n")

    def perform(self, effect: Effect, now: float) -> Event | None:
        self._now = self._clock() if self._clock is not None and not self._again else now
        self.record.told += 1
        match effect:
            case _ if isinstance(effect, notes.Note):
                self._note(effect)
            case PublishSnapshot():
                self._publish(effect)
            case End():
                self._finish(effect)
            case _:
                raise AssertionError(f"the coordinator cannot {effect!r}")
        if isinstance(effect, notes.Urgent) and not self._again:
            self._commit(force=True)
        return None

    @property
    def training_s(self) -> float:
        return self._training_s(self._now)

    def _training_s(self, at: float) -> float:
        if self._begun is None:
            return self._trained_s
        return self._trained_s + max(0.0, (at if self._stopped is None else min(at, self._stopped)) - self._begun)

    def _note(self, note: notes.Note) -> None:
        match note:
            case notes.WorkReported(node, stats):
                self._stats(node, stats)
            case notes.ActivityTold() if self._begun is None or self._stopped is not None:
                pass  # it is of no time that counts
            case notes.LeaseEnded():
                self._lease(note)
            case notes.BatchLeftOut(node, batch, nonfinite):
                why = "nonfinite" if nonfinite else ""
                skip = rows.SkipRow(batch.lease, batch.epoch, batch.start, batch.stop, node.index, why)
                self._left_out.add(skip)
                self.record.add(skip)
            case notes.EvaluationAsked(number):
                self.facts(evaluating=number)
            case notes.WeightsMeasured(values, weights):
                self.facts(evaluating="")
                self._measured(values, weights)
            case notes.IterationDone(number, loss, trained):
                epoch = trained // self._job.task.examples
                self.record.add(rows.MetricRow(self.training_s, epoch, trained, number, "objective", loss))
            case notes.SnapshotAsked(number):
                self._asked_s = self.training_s
                self.record.seal()
                self._leases.asked(number)
                self._reports.asked(self._asked_s)
            case notes.Saving(received, total):
                if not self._again:
                    self._channel.saving(received, total)
            case notes.TrainingBegan():
                self._begun = self._now
                facts, text = self._pauses.ends()
                self.facts(**facts, began_at=time.time() - self._trained_s)
                self._event("started", text)
            case notes.TrainingOver():
                self._stopped = self._now
            case notes.AnswersFound(ranges, examples):
                self.facts(found=examples)
                self._leases.found(ranges)
            case _:
                for row in rows_told(note, self.training_s):
                    self.record.add(row)

    def _stats(self, node: Node, stats: Stats) -> None:
        recipe = self._job.recipe
        bytes_each = round(4 * self._job.layout.length * recipe.carried)
        loss = stats.loss_sum / stats.examples if stats.examples else math.nan
        self._judge(self._divergence.trained(loss))
        if stats.batches and not self._stepped:
            self._stepped = True
            self.facts(first_loss=self._divergence.first or loss)
            if not self._pauses.moved:
                self.facts(first_step_s=time.time() - self._job.commanded_at)
        for row in rows_of_work(node, stats, self.training_s, bytes_each, recipe.work.blocks):
            self.record.add(row)

    def _lease(self, ended: notes.LeaseEnded) -> None:
        dealt, holder = ended.lease, ended.holder
        granted = ended.granted_s - (self._begun or 0.0) + self._trained_s
        lease = rows.LeaseRow(
            dealt.id, dealt.epoch, dealt.start, dealt.stop, holder.index, holder.incarnation, max(0.0, granted),
            self.training_s, ended.done,
        )  # fmt: skip
        self._leases.add(lease, alone=self._left_out.ended(lease))  # whose number is needed

    def _measured(self, values: dict[str, float], weights: Weights) -> None:
        epoch = (weights.examples + self._left_out.examples) // self._job.task.examples
        at = self._training_s(self._now - weights.age_s)
        for name, value in values.items():
            self.record.add(rows.MetricRow(at, epoch, weights.examples, weights.updates, name, value))
        if "loss" in values:
            self._judge(self._divergence.measured(values["loss"]))
        told = {"time_s": at, "epoch": epoch, "examples": weights.examples, "updates": weights.updates, **values}
        if not self._again:
            self._channel.evaluated(self.record.told, told)

    def _judge(self, changed: bool) -> None:
        """Tell that the run diverges, once, or does no more. If it does so anew it is told again."""
        if changed:
            self.facts(diverged=self._divergence.text)
            self._event("diverged", self._divergence.text or "no more: the loss is as it was at first, or less")

    def _publish(self, effect: PublishSnapshot) -> None:
        self.facts(updates=max(effect.versions), snapshot=effect.number)
        if effect.final:
            self._book(effect.ledger, effect.progress, self.training_s)
        manifest = Manifest(
            effect.number, self._job.layout, effect.versions, effect.ledger, effect.progress, self._asked_s,
            self.training_s, state_name(self._job.recipe), effect.checksums, effect.final, effect.examples,
            self._secured(),
        )  # fmt: skip
        self.record.told += 1  # the rows so far are written
        try:
            path = self._snapshots.visible(effect.number) if self._again else self._snapshots.publish(manifest)
        except OSError as error:
            self._unpublished = f"snapshot {effect.number} could not be written: {error}"
            self._event("error", self._unpublished)
            return
        self._unpublished = ""
        self._kept = [*self._kept, effect.number][-rows.KEEP :]
        self.record.published()
        self._leases.published(self._kept)
        self._reports.published()
        self._event("snapshot", f"snapshot {effect.number} in {path}")

    def _secured(self) -> bytes | UnsetType:
        """Write all rows before the snapshot appears. Those that cannot be written are returned, to travel in it."""
        if self._again:
            return UNSET
        try:
            self.record.secure()
        except RecordError as error:
            self._complain(error)
            return self.record.waiting()
        return UNSET

    def _finish(self, end: End) -> None:
        if self._unpublished and end.status in ("finished", "interrupted", "moved"):
            end = End("failed", self._unpublished)
        self._judge(end.status == "finished" and self._divergence.ended())
        self.facts(
            training_s=self.training_s, diverged=self._divergence.text, evaluating="", status=end.status,
            ended=end.cause, reason=end.reason,
        )  # fmt: skip
        if end.status == "moved":
            self.facts(**Pauses.begins(self._now - (self._stopped or self._now)))
        kinds = {"finished": "finished", "interrupted": "stopped", "moved": "leaves"}
        self._event(kinds.get(end.status, "error"), end.reason)
        try:
            self.record.close()
        except RecordError as error:
            end = End("failed", str(error))
        self._channel.end(end)

    def facts(self, **values: object) -> None:
        for key, value in values.items():
            self.record.add(rows.StateRow(key, str(value)))

    def _event(self, kind: str, text: str) -> None:
        self.record.add(rows.EventRow(self.training_s, kind, text))
