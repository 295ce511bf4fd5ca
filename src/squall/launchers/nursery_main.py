"""The process that all others of a run are forked from, from its first line to its last: hear, build, launch."""

from __future__ import annotations

import importlib
import os
import shutil
import sys
from contextlib import suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cloudpickle
import torch

from squall.errors import SquallError, TaskError
from squall.launchers import scratch
from squall.launchers.building import build_task, cut, without_gpus
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.joining.address import written
from squall.launchers.joining.call import TASK, Call
from squall.launchers.joining.joining import join
from squall.launchers.launching import Launching
from squall.launchers.orders import MODULES, Facts, Member
from squall.launchers.scripts import serve_script
from squall.runtime.backward import resolve_device
from squall.runtime.collective.process import import_beforehand
from squall.runtime.disk import Telling
from squall.runtime.interrupts import leave_signals
from squall.runtime.optimizers import check_optimizers
from squall.runtime.processes import die_with_parent
from squall.strategies.work import Collective
from squall.usercode.travelling import take_in


def main(handle: int) -> None:
    """Entry point: `handle` is the launcher's pipe."""
    leave_signals()
    sys.stderr = Telling(sys.stderr)
    torch.set_num_threads(1)  # a thread pool would not survive the forks
    launcher = ControlPipe(Connection(handle))
    try:
        message = cloudpickle.loads(launcher.connection.recv_bytes())  # from the process that started this one
    except EOFError:
        return
    die_with_parent(message["launcher"])  # while the user's code runs here, nobody listens
    if "call" in message:
        _take_part(launcher, message["call"], Path(message["own"]))
        return
    sys.path[:] = message["sys_path"]
    os.environ.update(message["environment"])
    _serve(launcher, message, Path(message["sockets"]))


def _take_part(attendant: ControlPipe, call: Call, own: Path) -> None:
    """Be this machine's nursery in a run that another machine launches; `attendant` leads to `squall join`.

    All files are kept in `own`.
    """
    scratch.share(own)
    try:
        member = join(call, lambda text: attendant.say(kind="told", text=text))
        attendant.say(kind="joined", machine=member.machine)
        head = ControlPipe(member.pipe)
        task = head.connection.recv_bytes()
        message = cloudpickle.loads(task)  # from whom the token has proved
    except EOFError:
        gone = f"the run's first machine ({written(call.head)}) is gone before the training began"
        attendant.say(kind="failed", error=gone, task=False)
    except SquallError as error:
        attendant.say(kind="failed", error=str(error), task=False)
    else:
        take_in(message["modules"], own / MODULES)
        if "plan" in message and message["plan"].settings.copies > 1:
            with suppress(OSError):  # without it none can join this machine, if the run goes on from it
                (own / TASK).write_bytes(task)
        place = Member(member.machine, member.identity, call.head[0], attendant, own, member.address)
        _serve(head, message, own / "sockets", place)
    finally:
        shutil.rmtree(own, ignore_errors=True)


def _serve(launcher: ControlPipe, message: dict[str, Any], sockets: Path, member: Member | None = None) -> None:
    try:
        _build(launcher, {**message, **cloudpickle.loads(message["code"])}, sockets, member)
    except Exception as error:
        for pipe in (launcher, *([member.attendant] if member is not None else [])):
            pipe.say(kind="failed", error=str(error), task=isinstance(error, TaskError))
    finally:
        shutil.rmtree(sockets, ignore_errors=True)


def _build(launcher: ControlPipe, message: dict[str, Any], sockets: Path, member: Member | None) -> None:
    """Build the task while the launcher checks it, and go on when the launcher says so."""
    if "survey" in message:
        from squall.survey.machine import serve  # which a run has no use for

        serve(launcher, message, member)
        return
    if member is not None:
        resolve_device(message["plan"].device)
    if "script" in message:
        serve_script(launcher, message, sockets, member)
        return
    task = build_task(message)
    recipe = message["strategy"].recipe()
    with without_gpus():  # a step would look whether a GPU records it, and what is forked then could use none
        check_optimizers(recipe)  # what a first step imports is imported here, once for all
    if isinstance(recipe.work, Collective):
        import_beforehand()
    if message["plan"].settings.parts > 1:
        importlib.import_module("squall.parts.inside")  # torch's compiler: 50 MB in each part, were it imported there
    if message["machines"]:
        starts = cut(task, message["plan"].settings) if member is None else ()
        launcher.say(kind="built", facts=Facts.of(task, starts))
    Launching(launcher, sockets, member).run(task, message)
