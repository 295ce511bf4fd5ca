"""Modules of the user's own on their way to other machines, where their files are not."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from squall.usercode.sources import own, read

Modules = dict[str, str]  # path below a folder that is looked for modules -> text


def own_modules() -> Modules:
    """What is imported here. A module that is imported later, inside a function, is not among them."""
    found = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not isinstance(file, str) or name == "__main__" or not own(os.path.abspath(file)):
            continue
        ends = "/__init__.py" if os.path.basename(file) == "__init__.py" else ".py"
        if file.endswith(".py") and (text := read(file)) is not None:
            found[name.replace(".", "/") + ends] = text
    return found


def take_in(modules: Modules, folder: Path) -> None:
    """Have them found by imports of this process, before any that lie on this machine."""
    for path, text in modules.items():
        file = folder / path
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
    sys.path.insert(0, str(folder))
