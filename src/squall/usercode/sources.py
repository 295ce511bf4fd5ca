"""The texts of the user's own files: kept with a run as they were, shown in its tracebacks, and compared later."""

from __future__ import annotations

import importlib.util
import linecache
import os
import sys
import sysconfig
from collections.abc import Iterator, Mapping
from difflib import SequenceMatcher
from pathlib import Path

import msgspec

_NOT_OWN = (str(Path(__file__).parents[1]) + os.sep, sysconfig.get_path("stdlib") + os.sep, "<")
_CELLS = ("<ipython-input", "<python-input")  # newer notebooks name their cells like files that do not exist


class Sources(msgspec.Struct, frozen=True):
    """The texts of the user's files when a run was started.

    Attributes:
        file: the task's or the script's, which can be read again; "" of a function that was given to `fit`.
        function: of that file, which builds the task.
        shipped: of code that is kept with the run: that file, or `__main__`, and the cells of a notebook.
        imported: of modules of the user's own, which every process of the run imports for itself.
    """

    file: str
    function: str
    shipped: dict[str, str]
    imported: dict[str, str]

    @classmethod
    def now(cls, task: str = "", shipped: dict[str, str] | None = None) -> Sources:
        """Of a run of FILE:function, or of a function that has no file.

        `shipped` are the texts of code that was kept; by default those of now, or those that `show` was given.
        """
        file, _, function = task.rpartition(":")
        shipped = _shipped(file) if shipped is None else shipped
        folders = tuple(f"{folder}{os.sep}" for folder in {os.path.dirname(file) or os.getcwd(), os.getcwd()})
        modules = (name for name in _modules() if name.startswith(folders) and name not in shipped)
        return cls(file, function, shipped, {name: text for name in modules if (text := read(name)) is not None})


def _shipped(file: str) -> dict[str, str]:
    main = os.path.abspath(getattr(sys.modules.get("__main__"), "__file__", None) or "")
    cells = [name for name in list(linecache.cache) if not os.path.exists(name)]
    texts = {name: "".join(linecache.getlines(name)) for name in [file or main, *cells] if own(name)}
    return {name: text for name, text in texts.items() if text}


def own(file: str) -> bool:
    """Whether a file is the user's own, and no part of Squall, of Python, or of an installed package."""
    if file.startswith(_NOT_OWN):
        return file.startswith(_CELLS)
    return "site-packages" not in file and "dist-packages" not in file


def read(file: str) -> str | None:
    """The text of a Python file; None where it cannot be read."""
    try:
        return importlib.util.decode_source(Path(file).read_bytes())
    except (OSError, SyntaxError, UnicodeDecodeError):
        return None


def show(texts: Mapping[str, str]) -> None:
    """Have tracebacks show these lines, whatever becomes of the files: they are of the code that runs."""
    for name, text in texts.items():
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)


def show_kept(texts: Mapping[str, str]) -> None:
    """As `show`, except for files that this process has imported itself: it has those as they are now."""
    live = set(_modules())
    show({name: text for name, text in texts.items() if name not in live})


def changes(texts: Mapping[str, str]) -> list[str]:
    """What a person is told of files that are not any more as they were: "task.py has changed ...: 12 lines"."""
    told = []
    for name, text in texts.items():
        if name.startswith("<") or "ipykernel_" in name:
            continue  # a notebook's cell, of which nobody has another text
        now, shown = read(name), os.path.relpath(name)
        shown = name if shown.startswith("..") else shown
        if now is None:
            told.append(f"{shown} is there no more")
        elif now != text:
            told.append(f"{shown} has changed since the run began: {_difference(text, now)}")
    return told


def _difference(before: str, after: str) -> str:
    matcher = SequenceMatcher(None, before.splitlines(), after.splitlines(), autojunk=False)
    parts = [(max(i2 - i1, j2 - j1), j1 + 1) for tag, i1, i2, j1, j2 in matcher.get_opcodes() if tag != "equal"]
    count = sum(lines for lines, _ in parts)
    return f"{count} line{'s' * (count != 1)}, from line {parts[0][1]} on" if parts else "ends of lines"


def _modules() -> Iterator[str]:
    """The files of the user's own modules that are imported here."""
    for module in list(sys.modules.values()):
        file = getattr(module, "__file__", None)
        if isinstance(file, str) and file.endswith(".py") and own(os.path.abspath(file)):
            yield os.path.abspath(file)
