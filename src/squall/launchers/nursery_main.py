"""The process that all others of a run are forked from, from its first line to its last: hear, build, launch."""

from __future__ import annotations

import os
import secrets
import shutil
import signal
import sys
import tempfile
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from setproctitle import setproctitle

from squall.errors import TaskError
from squall.launchers.building import build_job, build_task
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.joining import Membership
from squall.launchers.nursery import Nursery
from squall.launchers.orders import Facts, Member, hear_order
from squall.launchers.scripts import serve_script
from squall.runtime import attempts
from squall.runtime.optimizers import check_optimizers
from squall.runtime.processes import die_with_parent


def main(handle: int) -> None:
    """Entry point: `handle` is the launcher's pipe."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)  # a thread pool would not survive the forks
    launcher = ControlPipe(Connection(handle))
    try:
        message = cloudpickle.loads(launcher.connection.recv_bytes())  # from the process that started this one
    except EOFError:
        return
    sockets = Path(message["sockets"])
    die_with_parent(message["launcher"])  # while the user's code runs here, nobody listens
    sys.path[:] = message["sys_path"]
    os.environ.update(message["environment"])
    _serve(launcher, message, sockets)


def serve_member(membership: Membership, host: str) -> None:
    """Be a machine's nursery in a run that another machine launches; `host` is that machine's."""
    torch.set_num_threads(1)
    head = ControlPipe(membership.pipe)
    try:
        message = cloudpickle.loads(head.connection.recv_bytes())  # from whom the token has proved
    except EOFError:
        return
    sockets = Path(tempfile.gettempdir()) / f"squall-{secrets.token_hex(8)}"
    _serve(head, message, sockets, Member(membership.machine, membership.identity, host))


def _serve(launcher: ControlPipe, message: dict[str, Any], sockets: Path, member: Member | None = None) -> None:
    try:
        _build(launcher, {**message, **cloudpickle.loads(message["code"])}, sockets, member)
    except Exception as error:
        launcher.say(kind="failed", error=str(error), task=isinstance(error, TaskError))
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _build(launcher: ControlPipe, message: dict[str, Any], sockets: Path, member: Member | None) -> None:
    """Build the task while the launcher checks it, and go on when the launcher says so."""
    if "script" in message:
        serve_script(launcher, message, sockets)
        return
    task = build_task(message)
    check_optimizers(message["strategy"].recipe())  # what a first step imports is imported here, once for all
    if message["machines"]:
        launcher.say(kind="built", facts=Facts.of(task))
    order = hear_order(launcher, member)
    if order is None:
        return
    setproctitle(f"squall nursery of {order.directory.name}")
    job = attempts.begin(build_job(message, task, order))
    try:
        Nursery(launcher, job, sockets).run()
    finally:
        if member is not None:
            shutil.rmtree(order.directory, ignore_errors=True)
