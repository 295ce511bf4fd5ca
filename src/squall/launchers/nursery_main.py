"""The process that all others of a run are forked from, from its first line to its last: hear, build, launch."""

from __future__ import annotations

import os
import shutil
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch
from setproctitle import setproctitle

from squall.errors import TaskError
from squall.launchers.building import build_job, build_task
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.nursery import Nursery, hear_launch
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
    try:
        _serve(launcher, {**message, **cloudpickle.loads(message["code"])}, sockets)
    except Exception as error:
        launcher.say(kind="failed", error=str(error), task=isinstance(error, TaskError))
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _serve(launcher: ControlPipe, message: dict[str, Any], sockets: Path) -> None:
    """Build the task while the launcher checks it, and go on when the launcher says so."""
    if "script" in message:
        serve_script(launcher, message, sockets)
        return
    task = build_task(message)
    check_optimizers(message["strategy"].recipe())  # what a first step imports is imported here, once for all
    order = hear_launch(launcher)
    if order is None:
        return
    directory = Path(order["directory"])
    setproctitle(f"squall nursery of {directory.name}")
    job = attempts.begin(build_job(message, task, directory, order["snapshot"]))
    Nursery(launcher, job, sockets).run()
