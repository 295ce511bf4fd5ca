"""Modules of the user's own on their way to other machines, where their files are not."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable
from importlib.machinery import PathFinder
from modulefinder import ModuleFinder
from pathlib import Path
from typing import Any

from squall.usercode.sources import own, read

_PACKAGE = 5  # among the kinds of modules of `modulefinder`

Modules = dict[str, str]  # path below a folder that is looked for modules -> text


def own_modules() -> Modules:
    """What is imported here. A module that is imported later, inside a function, is not among them."""
    return _texts((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))


def script_modules(script: Path, text: str) -> Modules:
    """What a script that is not run here would import, wherever in it, of what lies beside it or is the user's own."""
    folders = [str(script.resolve().parent), *(each for each in sys.path if own(os.path.abspath(each) + os.sep))]
    finder = _Finder(folders, excludes=["squall"])
    try:
        finder.scan_code(compile(text, script, "exec"), finder.add_module("__main__"))
    except SyntaxError:
        return {}  # which its own run tells
    return _texts((name, getattr(module, "__file__", None)) for name, module in finder.modules.items())


class _Finder(ModuleFinder):
    """Python's own raises for a package without `__init__.py`, which is but a folder."""

    def find_module(self, name: str, path: Any, parent: Any = None) -> Any:
        spec = PathFinder.find_spec(name, self.path if path is None else path)
        if spec is None or spec.loader is not None:
            return super().find_module(name, path, parent)
        return None, list(spec.submodule_search_locations or ()), ("", "", _PACKAGE)

    def load_package(self, fqname: str, pathname: Any) -> Any:
        if isinstance(pathname, str):
            return super().load_package(fqname, pathname)
        module: Any = self.add_module(fqname)
        module.__path__ = pathname
        return module


def _texts(found: Iterable[tuple[str, object]]) -> Modules:
    """Of those modules, by name and file, that are the user's own."""
    texts = {}
    for name, file in found:
        if not isinstance(file, str) or name == "__main__" or not own(os.path.abspath(file)):
            continue
        ends = "/__init__.py" if os.path.basename(file) == "__init__.py" else ".py"
        if file.endswith(".py") and (text := read(file)) is not None:
            texts[name.replace(".", "/") + ends] = text
    return texts


def take_in(modules: Modules, folder: Path) -> None:
    """Have them found by imports of this process, before any that lie on this machine."""
    for path, text in modules.items():
        file = folder / path
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
