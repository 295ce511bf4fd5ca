"""A user's own script under `squall run`, from its first line to its last: once until it joins, then once per replica.

The nursery runs the script. Where that calls `squall.join`, the nursery forks the replicas, each of which returns from
`join` into a script of its own, and stays behind as the nursery (`launchers.script_nursery`): a replacement is one more
fork from the same place.
"""

from __future__ import annotations

import signal
import sys
import traceback
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from torch import nn

from squall.errors import SnapshotMismatch, SquallError, TaskError
from squall.launchers.building import warn_of_threads, without_gpus
from squall.launchers.control_pipe import ControlPipe
from squall.launchers.launching import Launching
from squall.launchers.leaving import DONE, leave
from squall.launchers.orders import MODULES, Facts, Member
from squall.launchers.script_fellows import Fellows
from squall.launchers.script_forks import Forked
from squall.launchers.script_replica import ScriptBackend
from squall.launchers.script_start import Over, chosen, run_file
from squall.parts.meeting import PartsDiffer
from squall.parts.neighbours import NeighbourLost
from squall.runtime.interrupts import leave_signals
from squall.runtime.optimizers import check_optimizers
from squall.session.backend import SessionBackend
from squall.session.script_task import joined_task
from squall.task import OptimizerFactory
from squall.usercode.blame import encode


def serve_script(
    launcher: ControlPipe, message: dict[str, Any], sockets: Path, member: Member | None = None
) -> None:  # fmt: skip
    """Run the script; returns in the nursery only, when everything is over.

    On one machine it begins when it is known that the run may. On several the machines are compared where it joins.
    """
    launching = Launching(launcher, sockets, member)
    order = launching.orders.next(message["plan"]) if not message["machines"] else None
    if order is None and not message["machines"]:
        return
    joined: list[ScriptBackend] = []
    fellows: list[Fellows] = []  # of the process, once it is forked
    failed: list[Exception] = []  # what has gone wrong in `join`, and is not the script's

    def join(model: nn.Module, optimizer: OptimizerFactory | None, options: dict[str, Any]) -> SessionBackend:
        strategy = chosen(message["strategy"], optimizer, message["optimizer_chosen"])
        warn_of_threads("the script")
        with without_gpus():
            check_optimizers(strategy.recipe())  # what torch imports for a first step would keep others waiting
        task = joined_task(model, options)
        facts, shards = Facts.of(task), strategy.recipe().shards
        if shards > facts.layout.elements:
            raise ValueError(f"{shards} shards for {facts.layout.elements} parameters: use fewer shards")
        if message["machines"]:
            launcher.say(kind="built", facts=facts)
        own = leave_signals()
        try:
            launching.run(task, {**message, "strategy": strategy}, order)
        except Forked as forked:
            for number, handler in own.items():  # the script's, which its replicas are and the nursery is not
                signal.signal(number, handler)
            fellows.append(Fellows(forked.node, sockets))
            joined.append(replica := fellows[0].backend(forked.job, forked.pipe))
            sys.unraisablehook = partial(_unraisable, replica, fellows[0])
            return replica
        except (OSError, SquallError) as error:
            failed.append(error)
        raise Over

    path = Path(message["script"])
    try:
        ahead = [str(member.own / MODULES)] if member is not None else []
        main = run_file(path, message["text"], message["arguments"], message["plan"].seed, join, ahead)
        _end_training(joined, path)
        del main
        for others in fellows:
            others.leave()
    except Over:
        if failed:
            raise failed[0] from None
    except BaseException as error:
        if not fellows:  # still the nursery
            raise TaskError(_story(error)) from None
        _fail(joined, fellows[0], error)
    else:
        leave(DONE)


def _end_training(joined: list[ScriptBackend], path: Path) -> None:
    """End the training at the end of the script, which may still hold its batches, as cycles of frameworks do."""
    if not joined:
        raise _Unfinished(f"{path} ended without calling squall.join(model): call it before the training loop")
    (replica,) = joined
    if not replica.began:
        remedy = "iterate over session.batches, and call session.step(loss)"
        raise _Unfinished(f"{path} ended without training: {remedy}")
    if replica.status == "running" and replica.rank == replica.part == 0:
        sys.stderr.write(
            f"squall: warning: the training went on to the end of {path}: what the script measured or saved behind its"
            " loop was not of the final weights. Call close() on what session.batches has returned, behind the loop\n"
        )
    replica.leave()


def _fail(joined: Sequence[ScriptBackend], fellows: Fellows, error: BaseException) -> NoReturn:
    """End the process of a script that has raised; the nursery is told what, if it was the script."""
    for replica in joined:
        _leave_quietly(replica, error)
        replica.note(error)
    fellows.fail(error, _story(error))


def _leave_quietly(replica: ScriptBackend, error: BaseException) -> None:
    """Leave, if it is not the script that has failed: the launching process says what happened to the run."""
    over = replica.status not in ("running", "finished")
    if over and error is not replica.ended_with and not isinstance(error, SystemExit | KeyboardInterrupt):
        traceback.print_exc()  # it may come from the run's end, or hide it
    if over or (isinstance(error, KeyboardInterrupt) and (replica.status == "finished" or not replica.began)):
        leave(DONE)


def _story(error: BaseException) -> str:
    return str(error) if isinstance(error, _Unfinished | SnapshotMismatch) else encode(error)


def _unraisable(replica: ScriptBackend, fellows: Fellows, found: sys.UnraisableHookArgs) -> None:
    """Keep code behind the loop from running when the training ended badly, or an interrupt came, at a `break`.

    A `break` deletes the batches, and Python only reports an exception that is raised where something is deleted.
    """
    if isinstance(found.exc_value, KeyboardInterrupt) or (found.exc_value and found.exc_value is replica.ended_with):
        leave(DONE)
    if isinstance(found.exc_value, NeighbourLost | PartsDiffer):
        _fail([replica], fellows, found.exc_value)
    sys.__unraisablehook__(found)


class _Unfinished(Exception):
    """The script ended and has not trained."""
