"""Modules of the user's own are imported on a machine that does not have their files."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from squall.usercode.travelling import own_modules, take_in


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
