"""A run as processes on this machine, seen from the process that launches it."""

from __future__ import annotations

import math
import os
import shutil
import sys
import time
from collections.abc import Callable
from multiprocessing.connection import wait
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import cloudpickle

from squall.errors import LostAlone, ProcessLost, SquallError, TaskError
from squall.evaluation_callback import EvaluationCallback
from squall.launchers import scratch
from squall.launchers.exits import Exits
from squall.launchers.nursery_process import NurseryProcess
from squall.protocol.effects import End
from squall.runtime.processes import standing_still
from squall.usercode.shipping import ship
from squall.usercode.travelling import own_modules, script_modules

if TYPE_CHECKING:  # they import torch, as the nursery does meanwhile
    from squall.launchers.again import Again
    from squall.launchers.head import Head
    from squall.launchers.roster import Gathered, Guests

G = TypeVar("G", bound="Guests")

ANSWER_WITHIN_S = 2.0  # seconds that the nursery has to answer to a stop
SILENT_S = 5.0  # that other machines may say nothing while they hand over what they have, at an end
MOVING_SILENT_S = 30.0  # where they shall go on, and a script may take its time to come to its end
STOPPED_COLLECT_S = 0.5  # that they have for it, when somebody waits for the end
TELL_AFTER_S, TELL_EVERY_S = 2.0, 3.0  # that a snapshot is on its way, and how much of it
GONE_WITHIN_S = 10.0  # that killed processes have to give their memory back
OTHERS = "the other machines go on with the run, and squall join there says where it is kept, and how to join it"
STAY = "others of its processes do not end, so that it was not started again"
INSISTED_S = 1.0  # seconds until a run that was asked twice to stop is killed


class LocalRun:
    """Starts the nursery as early as possible: it imports torch while the launching process checks the task."""

    def __init__(self, parts: bool = False, again: bool = False) -> None:
        """`parts`: its replicas are several processes each. `again`: the run had begun before."""
        self._parts = parts
        self._environment = dict(os.environ)
        self._start_nursery()
        self._launched = False
        self.listening = False  # whether the nursery does; before, it runs the user's code
        self._stops = 0  # how often a stop was asked for
        self._kill_at = math.inf
        self._tell_at = 0.0  # the user, how far the last snapshot is
        self.ended: End | None = None
        self._over: tuple[str, str] | None = None  # status and reason, as the nursery has told them
        self._collect_by = 0.0
        self._exits = Exits()
        self._head: Head | None = None  # of a run on several machines
        self._again: Again | None = None  # how often such a run begins again
        self._goes_back = False  # it does so as something was lost, not since a machine leaves
        self._moved = again  # it goes on, maybe on other machines than it began on
        self._task: dict[str, Any] = {}  # what every nursery is given

    def _start_nursery(self) -> None:
        # The nursery makes this directory, when it can also see to it that it is removed.
        self._sockets = scratch.new_name()
        self._nursery = NurseryProcess(self._parts)
        self._pipe = self._nursery.pipe

    def prepare(self, code: dict[str, Any], message: dict[str, Any], head: Head | None = None) -> None:
        """Have the task built, beside the check of it here. `code` holds the user's functions, shipped by value."""
        self._head, self._task = head, {**message, "code": ship(code), "machines": head is not None}
        self._give_task()

    def _give_task(self) -> None:
        changed = {k: v for k, v in os.environ.items() if self._environment.get(k) != v}  # by the user's file, say
        blob = {
            **self._task, "environment": changed, "sockets": str(self._sockets), "sys_path": sys.path,
            "launcher": os.getpid(), "by_itself": self._moved or self._task.get("by_itself", False),
        }  # fmt: skip
        self._pipe.send(cloudpickle.dumps(blob))

    def launch(self, directory: Path, snapshot: int | None, lock: int, again: Again) -> None:
        """Start the run's processes. `lock` is the descriptor of the directory's, which they will hold as well."""
        self._launched, self._again = True, again
        if self._head is not None:
            self._head.gather(self._pipe, self._task_elsewhere(), directory, snapshot, lock)
            if "script" in self._task:
                self._head.relay_scripts()
            return
        self._pipe.say(kind="launch", directory=str(directory.resolve()), snapshot=snapshot)
        self._pipe.hand(lock)

    def survey(self, guests: Callable[[Gathered], G], directory: Path) -> G:
        """Let machines in, this one first, of which nothing is launched."""
        assert self._head is not None
        found = guests(self._head.here(self._pipe))
        self._head.let_in(found, self._task_elsewhere(), directory)
        return found

    def _task_elsewhere(self) -> bytes:
        """What a nursery on another machine is given."""
        told = self._task
        modules = script_modules(told["script"], told["text"]) if "script" in told else own_modules()
        task: bytes = cloudpickle.dumps({**told, "modules": modules})
        return task

    def attend(self, timeout_s: float, watch: EvaluationCallback) -> None:
        """Wait for the nursery to say something. Raises what ended the run, if that was an error."""
        if self.ended is not None:
            return
        if self._over is not None:
            self._collect(*self._over, timeout_s)
            return
        ready = wait([self._pipe.connection, *(self._head.sources if self._head is not None else ())], timeout_s)
        self._hear_others()
        if self._pipe.connection not in ready:
            if time.monotonic() >= self._kill_at:
                self._nursery.kill()
                silent = f"; the nursery (pid {self._nursery.pid}) did not answer, and was killed"
                self.ended = End("interrupted", "interrupted" + (silent if self._stops == 1 else " at once"))
            return
        said = self._pipe.hear()
        if said is None:
            self._replace_nursery(f"the nursery (pid {self._nursery.pid}) was lost: {self._nursery.ending()}")
            return
        if self._head is not None and self._head.heard(0, said):
            return
        match said["kind"]:
            case "listening":
                self.listening = True
            case "failed":
                raise TaskError.told(said["error"]) if said["task"] else SquallError(said["error"])
            case "stopping" if self._stops == 1:
                self._kill_at = math.inf  # it sees to the others
            case "deputed" if self._head is not None:
                self._head.others_go_on = said["deputed"]
            case "saving":
                self._tell_saving(said["received"], said["total"])
            case "evaluated":
                known = watch.why
                watch.told(said["evaluation"])
                if watch.why and not known:  # once: two who both write, and do not read, would wait for each other
                    self._pipe.say(kind="leave", why=watch.why, failed=watch.error is not None)
            case "exited":
                self._exits.told.append(said)
            case "ended":
                lost = self._exits.lost(said["status"], said["reason"])
                if not (said["status"] or self._stops):
                    self._leave_to_others(lost or "the coordinator was lost")
                self._goes_back = bool(lost) and self._begins_again
                self._end_elsewhere(*(("moved", lost) if self._goes_back else (said["status"], said["reason"])))

    def _end_elsewhere(self, status: str, reason: str) -> None:
        """All has ended here, so."""
        self._over = status, reason
        patience_s = MOVING_SILENT_S if status == "moved" else SILENT_S
        self._collect_by = time.monotonic() + (STOPPED_COLLECT_S if self._stops else patience_s)
        if self._head is not None:
            self._head.over(status, reason)
        self._collect(status, reason, 0.0)

    def _tell_saving(self, received: int, total: int) -> None:
        """Bytes of the last snapshot, from other machines."""
        if time.monotonic() >= self._tell_at:
            self._tell_at = time.monotonic() + TELL_EVERY_S
            far = f": {received / 1e6:.0f} of {total / 1e6:.0f} MB" if total else ""
            again = "; Ctrl-C again gives it up" if self._stops else ""
            sys.stderr.write(f"squall: saving what other machines have{far}{again}\n")

    def _hear_others(self) -> None:
        for machine, told in self._head.turn() if self._head is not None else ():
            if told["kind"] == "exited":
                self._exits.add_far(told, machine)

    def _collect(self, status: str, reason: str, timeout_s: float) -> None:
        """All is over here; other machines may still hand over what they have."""
        if self._head is not None and not self._head.collected and time.monotonic() < self._collect_by:
            wait(self._head.sources, timeout_s)
            self._hear_others()
            if not self._stops:
                self._collect_by = max(self._collect_by, self._head.heard_at + SILENT_S)
        else:
            self._on_ended(status, reason)

    def _on_ended(self, status: str, reason: str) -> None:
        lost = self._exits.lost(status, reason)
        if lost and status != "moved":
            raise ProcessLost(lost)
        if not lost:
            self._exits.blame()
        if not status:
            raise SquallError("all processes of the run were killed")
        if status == "moved" and not self._stops:
            self._go_on(reason)
        else:
            self.ended = End("interrupted" if status == "moved" else status, reason)

    def _go_on(self, why: str) -> None:
        """Have the run begin again from its newest snapshot, in the same nurseries."""
        assert self._head is not None
        assert self._again is not None
        snapshot = self._again.lost(why) if self._goes_back else self._again.moved(why)
        self._goes_back = False
        self._over, self.listening, self._moved = None, False, True
        self._exits = Exits()
        self._head.again(snapshot)

    def _replace_nursery(self, why: str) -> None:
        """It is lost, with all that ran here. On several machines what runs elsewhere ends, and all begin again.

        Raises `ProcessLost` where nothing is to begin again from here.
        """
        self._leave_to_others(why)
        if self._head is None or not self._begins_again:
            raise ProcessLost(why)
        if not self.gone():
            raise ProcessLost(f"{why}; {STAY}")
        self._nursery.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
        self._start_nursery()
        self._moved = True
        self._give_task()
        self._head.renew(self._pipe)
        self._goes_back = True
        self._end_elsewhere("moved", why)

    def _leave_to_others(self, why: str) -> None:
        """Raises `LostAlone` where they go on without the coordinator that was here."""
        if self._head is not None and self._head.others_go_on:
            self._head.leave()  # they would take its word for the run's
            raise LostAlone(f"{why}; {OTHERS}")

    @property
    def _begins_again(self) -> bool:
        """On several machines it does, on those that stay."""
        allowed = self._again is not None and self._again.allowed and not self._stops
        return self._head is not None and self._head.begun and allowed

    @property
    def killed(self) -> bool:
        """The nursery was, and that not by anything that the user's code did to itself."""
        return self._nursery.killed

    @property
    def several(self) -> bool:
        """It may be on several machines."""
        return self._head is not None

    def gone(self) -> bool:
        """End what there still is of its processes here; whether they are gone."""
        return self._nursery.kill(GONE_WITHIN_S)

    def standing_still(self) -> list[str]:
        """Processes of the run that are stopped, in words."""
        return standing_still(self._nursery.pid)

    def stop(self) -> None:
        """Ask for a snapshot and an orderly end. Asked again, this kills what has not ended soon.

        Before the nursery listens there is nothing to keep.
        """
        if not self.listening:
            self._nursery.kill()
            self.ended = End("interrupted", f"interrupted before the training {'went on' if self._moved else 'began'}")
            return
        self._stops += 1
        self._tell_at = time.monotonic() + TELL_AFTER_S
        self._collect_by = min(self._collect_by, time.monotonic() + STOPPED_COLLECT_S)
        self._kill_at = time.monotonic() + (ANSWER_WITHIN_S if self._stops == 1 else INSISTED_S)
        self._pipe.say(kind="stop")

    def close(self) -> None:
        """Nothing is left running when this returns. May be called again."""
        if self._pipe.connection.closed:
            return
        if self._head is not None:
            self._head.close(self.ended)
        if not self._launched:
            self._nursery.kill()
        elif self.ended is None or self._head is not None:  # which may have had it launch more
            self._pipe.say(kind="kill")
        self._nursery.close()
        shutil.rmtree(self._sockets, ignore_errors=True)
