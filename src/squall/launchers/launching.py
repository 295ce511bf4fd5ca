"""A nursery from its first order to its last: it launches a run, and once more when some of its machines have left."""

from __future__ import annotations

import dataclasses
import gc
from pathlib import Path
from typing import Any

from setproctitle import setproctitle

from squall.launchers.building import build_job
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.member_nursery import MemberNursery
from squall.launchers.nursery import Nursery
from squall.launchers.orders import Member, Order, Orders
from squall.launchers.script_member import ScriptMember
from squall.launchers.script_nursery import ScriptNursery
from squall.runtime import attempts
from squall.runtime.job import Job
from squall.runtime.log import log_into
from squall.runtime.optimizers import state_name
from squall.task import Task


class Launching:
    """Of a task that is built. Where it is a script's, `run` raises `Forked` in every replica."""

    def __init__(self, launcher: ControlPipe, sockets: Path, member: Member | None) -> None:
        self.orders = Orders(launcher, member)
        self._launcher = launcher
        self._sockets = sockets
        self._member = member

    def run(self, task: Task, message: dict[str, Any], order: Order | None = None) -> None:
        """`order` is the first one, where it was heard already."""
        order, by_itself = order or self.orders.next(message["plan"]), bool(message.get("by_itself"))
        while order is not None:
            setproctitle(f"squall nursery of {order.directory.name}")
            if message.get("logged") and self._member is None:
                log_into(order.directory)
            job = dataclasses.replace(build_job(message, task, order), scratch=self._sockets, by_itself=by_itself)
            if job.restored is not None:
                job.restored.manifest.check_optimizer(state_name(job.recipe))
            more = True
            if order.site is None or self.orders.may_begin():
                more = self._launch(attempts.begin(job, "script" in message), "script" in message)
            if order.site is None or not more:
                return
            order.site.close_listeners()
            del job, order
            gc.unfreeze()  # which frees it, before the next takes as much memory
            order, by_itself = self.orders.next(message["plan"]), True

    def _launch(self, job: Job, script: bool) -> bool:
        """Until all has ended here. False where there are no more orders."""
        if self._member is None:
            (ScriptNursery if script else Nursery)(self._launcher, job, self._sockets).run()
            return True
        kind = ScriptMember if script else MemberNursery
        nursery = kind(self._launcher, self._member.attendant, job, self._sockets)
        nursery.run()
        assert nursery.end is not None
        if nursery.moved:
            self.orders.tell(nursery.last_words)
            return False
        return self.orders.ended(nursery.end, nursery.leaves)
