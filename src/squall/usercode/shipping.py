"""The user's own functions as bytes: for the processes of a run, and for a later `resume` or `replay`.

A packed run is three pickles, one behind the other, so that each can be read without what follows: the texts of the
user's files, the settings, and the task, which cannot be unpickled where its modules are not any more what they were.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from typing import Any

import cloudpickle

from squall.usercode.sources import Sources, show_kept


def ship(code: object) -> bytes:
    """Closures, notebook cells and `__main__` included. Raises `ValueError` for what no other process could have."""
    try:
        shipped: bytes = cloudpickle.dumps(code)
    except Exception as error:  # whatever a `__reduce__` raises
        raise ValueError(
            f"the task cannot be shipped to other processes ({error}): make what it holds, such as a lock or a"
            " connection, inside the task function, and open files where they are read"
        ) from error
    return shipped


def pack(code: Mapping[str, Any]) -> bytes:
    """A `run.Code` or `run.ScriptCode`, with the texts of now. Raises `ValueError` as `ship` does."""
    if "script" in code:
        sources = Sources(str(code["script"]), "", {str(code["script"]): code["text"]}, {})
    else:
        sources = Sources.now(code.get("file", ""), code.get("shipped"))
    settings = {name: value for name, value in code.items() if name not in ("task", "shipped")}
    return pickle.dumps(sources) + ship(settings) + ship(code.get("task"))


def unpack_sources(packed: bytes) -> Sources:
    sources: Sources = pickle.loads(packed)
    return sources


def unpack(packed: bytes, task: object = None) -> Any:
    """The code; with `task` in the place of the stored one, if it is given."""
    stream = io.BytesIO(packed)
    sources: Sources = pickle.load(stream)
    sources.importable()
    code = pickle.load(stream)
    if "script" in code:
        return code
    if task is not None:
        return {**code, "task": task}
    show_kept(sources.shipped)
    return {**code, "task": pickle.load(stream), "shipped": sources.shipped}
