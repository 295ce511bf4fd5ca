"""Modules of the user's own are imported on a machine that does not have their files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest

from squall.launchers.script_start import run_file
from squall.usercode.travelling import own_modules, script_modules, take_in


def test_packages_and_modules_are_found_where_their_files_are_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for path, text in {
        "nets/__init__.py": "from nets.wide import WIDTH", "nets/wide.py": "from sizes_of import *\nWIDTH = 2 * SIZE",
        "sizes_of.py": "SIZE = 21  # größe",
    }.items():  # fmt: skip
        (here / path).parent.mkdir(parents=True, exist_ok=True)
        (here / path).write_text(text, encoding="utf-8")
    monkeypatch.setattr(sys, "path", [str(here), *sys.path])
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    import nets  # type: ignore[import-not-found]

    assert nets.WIDTH == 42
    modules = own_modules()
    assert {"nets/__init__.py", "nets/wide.py", "sizes_of.py"} <= modules.keys()
    assert not [path for path in modules if path.startswith(("torch/", "squall/"))]
    there.mkdir()
    take_in(modules, there)
    assert sys.path[0] == str(there)
    found = subprocess.run([sys.executable, "-c", "import nets; print(nets.WIDTH)"], cwd=there, capture_output=True)
    assert found.stdout == b"42\n"


def test_a_script_takes_along_what_it_imports_wherever_it_does(tmp_path: Path) -> None:
    """Of what lies beside it, and nothing that is installed."""
    (tmp_path / "parts" / "without_init").mkdir(parents=True)
    files = {
        "parts/__init__.py": "", "parts/inner.py": "import later", "later.py": "import torch, nowhere",
        "broken.py": "import (", "unused.py": "", "parts/without_init/deep.py": "",
    }  # fmt: skip
    for name, text in files.items():
        (tmp_path / name).write_text(text)
    text = "import torch, squall, nowhere, broken, parts.without_init.deep\ndef main():\n    from parts import inner\n"
    found = script_modules(tmp_path / "script.py", text)
    assert found == {name: files[name] for name in files if not name.startswith(("broken", "unused"))}
    assert script_modules(tmp_path / "script.py", "import (") == {}


def test_modules_that_have_travelled_with_a_script_are_found_before_others(tmp_path: Path) -> None:
    here, there = tmp_path / "here", tmp_path / "there"
    for folder in (here, there):
        folder.mkdir()
        (folder / "travelled_with_a_script.py").write_text(f"where = {folder.name!r}")
    text = "import travelled_with_a_script\nwhere = travelled_with_a_script.where\n"
    try:
        main = run_file(here / "script.py", text, [], 0, _refused, [str(there)])
    finally:
        sys.modules.pop("travelled_with_a_script", None)
    assert main.where == "there"
    assert str(there) not in sys.path


def _refused(*_: object) -> NoReturn:
    raise AssertionError
