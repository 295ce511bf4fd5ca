"""What a resumed run does: the task's file or the script as it is now, or as it was; and what has changed since."""

from __future__ import annotations

import dataclasses
import sys
from contextlib import closing
from pathlib import Path
from typing import Any, cast

from squall.launchers.environment import is_script
from squall.plan import make_plan
from squall.report import Reader
from squall.runtime.answers import described
from squall.script import script_plan
from squall.settings import Settings
from squall.strategies import Strategy
from squall.task import TaskFunction
from squall.usercode.kept import Code, ScriptCode, load_code, load_sources
from squall.usercode.sources import changes, read
from squall.usercode.task_file import load_task


def code_again(directory: Path, task: TaskFunction | str | None = None, as_it_was: bool = False) -> Code | ScriptCode:
    """The code of a run that goes on. What has changed since it was last started is said on standard error.

    Args:
        directory: of the run.
        task: instead of the run's own; a text is FILE:function.
        as_it_was: no file is read again.

    Raises:
        ValueError: there is no run, or its file is gone; what the file itself raises passes through.
        RecordError: the run's record cannot be read.
    """
    if task is not None and as_it_was:
        raise ValueError("a run goes on with another task, or as it was: leave one out")
    sources = load_sources(directory)
    if (prediction := described(directory)) is not None:
        raise ValueError(f"{directory} holds predictions: {prediction['again']}")
    if (directory / "run.sqlite").exists():
        with closing(Reader(directory / "run.sqlite")) as reader:
            reader.state()
    changed = [] if task is not None else changes(sources.shipped)
    if as_it_was or not sources.file:
        changed = [f"{text}; the run goes on with it as it was" for text in changed]
    for text in [*changed, *changes(sources.imported)]:
        sys.stderr.write(f"squall: {text}\n")
    if not as_it_was and task is None and sources.file and not Path(sources.file).is_file():
        raise ValueError(f"{sources.file} cannot be read again: go on with the code that was kept, by --as-it-was")
    if is_script(directory):
        if task is not None:
            raise ValueError(f"{directory} is the run of a script, which is read again itself: leave the task out")
        script = cast(ScriptCode, load_code(directory))
        now = script["text"] if as_it_was else read(str(script["script"]))
        if now is None:
            raise ValueError(f"{script['script']} is no Python file")
        return {**script, "text": now}
    if task is None and not as_it_was and sources.function:
        task = f"{sources.file}:{sources.function}"
    if isinstance(task, str):
        loaded = load_task(task)
        return {**cast(Code, load_code(directory, loaded.function)), "file": loaded.file}
    code = cast(Code, load_code(directory, task))  # with the stored task if None is given
    if task is not None:
        code.pop("file", None)  # it is not what trains from now on
    return code


def resumed_code(
    code: Code | ScriptCode, strategy: Strategy | None, settings: Settings | None, **aims: Any
) -> Code | ScriptCode:  # fmt: skip
    """What `resume` will run: the run's own code, with what is to be different put in."""
    old = code["plan"]
    if old.simulated:
        raise ValueError("this is a simulated run, on a cluster that is not here: simulate it anew, with other limits")
    changed = code.copy()
    changed["strategy"] = strategy or code["strategy"]
    changed["settings"] = settings or code["settings"]
    make, wanted = script_plan if "script" in code else make_plan, dataclasses.replace(old.aims, **aims)
    changed["plan"] = make(changed["strategy"], changed["settings"], wanted, seed=old.seed, device=old.device)
    return changed
