"""`squall run`: a user's own script, once per replica, seen from the launching process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from squall.attending import attend, finish
from squall.launchers.local import LocalRun
from squall.plan import Settings, last_snapshots, make_plan
from squall.run import Run, ScriptCode, new_directory, write_plan
from squall.runtime.arena import SHARED_MEMORY
from squall.runtime.lock import hold
from squall.runtime.optimizers import check_optimizers
from squall.runtime.snapshot import Snapshots
from squall.strategies import Strategy
from squall.strategies.work import Loop
from squall.usercode.sources import read


def script_code(
    script: Path,
    arguments: Sequence[str],
    strategy: Strategy,
    settings: Settings,
    *,
    optimizer_chosen: bool,
    seed: int = 0,
    device: str = "cpu",
    until: str | None = None,
    patience: int | None = None,
    text: str | None = None,
) -> ScriptCode:
    """What `run_script` will run. Raises `ValueError` for a setting that is wrong.

    Args:
        script: a Python file that calls `squall.join`.
        arguments: its own, as in `sys.argv[1:]`.
        strategy: that the replicas train with.
        settings: as of `fit`.
        optimizer_chosen: the strategy's optimizer counts; else the one that the script gives to `join`.
        seed: of the data order, and of chance when the script begins; it may seed anew what it makes before it joins.
        device: as of `fit`.
        until: as of `fit`, of a metric that the script logs.
        patience: as of `fit`, in the metric of `until`, else in the loss that the script logs.
        text: of the script; read from its file by default.
    """
    if text is None:
        text = read(str(script))
    if text is None:
        raise ValueError(f"{script} is no file: give the Python script that calls squall.join")
    recipe = strategy.recipe()
    if recipe.alone or settings.launcher != "local":
        raise ValueError(f"{type(strategy).__name__} runs in one process: start the script with python instead")
    if not isinstance(recipe.work, Loop):
        raise ValueError(f"{type(strategy).__name__} computes a batch many times over, which no loop does: use fit")
    if last_snapshots(settings.keep_schedule):
        raise ValueError(
            f"keep_schedule is {settings.keep_schedule!r}: a script's loop may hold anything, so its replay begins"
            " where the run did: give gigabytes, or None for all"
        )
    plan = make_plan(
        strategy, settings, epochs=None, steps=None, until=until, patience=patience, seed=seed, device=device
    )
    check_optimizers(recipe)
    return ScriptCode(
        script=script.resolve(), text=text, arguments=list(arguments), strategy=strategy, settings=settings, plan=plan,
        optimizer_chosen=optimizer_chosen,
    )  # fmt: skip


def resumed_script(
    code: ScriptCode, strategy: Strategy, until: str | None = None, patience: int | None = None
) -> ScriptCode:  # fmt: skip
    """The code of a script's run, with what is to be different put in."""
    plan = code["plan"]
    if until is None and plan.until is not None:
        until = f"{plan.until[0]}={plan.until[1]}"
    return script_code(
        code["script"], code["arguments"], strategy, code["settings"],
        optimizer_chosen=code["optimizer_chosen"], seed=plan.seed, device=plan.device, until=until,
        patience=plan.patience if patience is None else patience, text=code["text"],
    )  # fmt: skip


def run_script(
    code: ScriptCode, directory: str | Path | None, *, local: LocalRun | None, commanded_at: float, again: bool = False
) -> Run:
    """Start a script with replicas; what it prints goes where this process prints.

    Args:
        code: from `script_code`.
        directory: of the run; a new one under runs/ by default.
        local: the nursery, where it was started early.
        commanded_at: when the user gave the command, seconds since 1970.
        again: go on with the run in `directory` from its last snapshot.

    Raises:
        ValueError: the directory cannot be used; nothing was launched.
        SquallError: the script failed, or a process that cannot be done without.
    """
    local = local or LocalRun()
    message = {
        "plan": code["plan"], "commanded_at": commanded_at, "shared_memory": str(SHARED_MEMORY),
        "script": str(code["script"]), "text": code["text"], "arguments": code["arguments"],
        "optimizer_chosen": code["optimizer_chosen"],
    }  # fmt: skip
    try:
        local.prepare({"strategy": code["strategy"]}, message)
        path = Path(directory) if again and directory is not None else new_directory(directory)
        with hold(path) as lock:
            snapshot = Snapshots(path).newest() if again else None
            run = Run(path)
            try:
                write_plan(path, code)
                attend(local, path, snapshot, lock, code["settings"].progress)
            finally:
                finish(run, again)
            return run
    finally:
        local.close()
