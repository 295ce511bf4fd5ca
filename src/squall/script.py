"""`squall run`: a user's own script, once per replica, seen from the launching process."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from squall.launchers.local import LocalRun
from squall.plan import Settings, make_plan
from squall.run import Run, hold, new_directory, write_settings
from squall.runtime.arena import SHARED_MEMORY
from squall.runtime.store import check_optimizers
from squall.strategies import Strategy
from squall.train import attend, finish_report


def run_script(
    script: Path,
    arguments: Sequence[str],
    strategy: Strategy,
    *,
    local: LocalRun,
    commanded_at: float,
    optimizer_chosen: bool,
    seed: int = 0,
    device: str = "cpu",
    until: str | None = None,
    run_dir: str | Path | None = None,
    settings: Settings | None = None,
) -> Run:
    """Start a script with replicas; what it prints goes where this process prints.

    Args:
        script: a Python file that calls `squall.join`.
        arguments: its own, as in `sys.argv[1:]`.
        strategy: that the replicas train with.
        local: the nursery, started early.
        commanded_at: when the user gave the command, seconds since 1970.
        optimizer_chosen: the strategy's optimizer counts; else the one that the script gives to `join`.
        seed: of the data order; the script itself seeds what it makes before it joins.
        device: as of `fit`.
        until: as of `fit`, of a metric that the script logs.
        run_dir: as of `fit`.
        settings: as of `fit`.

    Raises:
        ValueError: a setting is wrong; nothing was launched.
        SquallError: the script failed, or a process that cannot be done without.
    """
    settings = settings or Settings(progress=False)
    if not script.is_file():
        raise ValueError(f"{script} is no file: give the Python script that calls squall.join")
    if strategy.in_process or settings.launcher != "local":
        raise ValueError(f"{type(strategy).__name__} runs in one process: start the script with python instead")
    plan = make_plan(strategy, settings, epochs=None, steps=None, until=until, seed=seed, device=device)
    check_optimizers(strategy.recipe())
    message = {
        "plan": plan, "commanded_at": commanded_at, "shared_memory": str(SHARED_MEMORY), "script": str(script),
        "arguments": list(arguments), "optimizer_chosen": optimizer_chosen,
    }  # fmt: skip
    try:
        local.prepare({"strategy": strategy}, message)
        path = new_directory(run_dir)
        with hold(path):
            write_settings(path, plan)
            run = Run(path)
            try:
                local.launch(path, None)
                attend(local, path, settings.progress)
            finally:
                local.close()
                finish_report(run)
            return run
    finally:
        local.close()
