"""What is built is whole: it trains where nothing else is installed than what it says that it needs."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
from importlib.metadata import distribution
from pathlib import Path
from typing import Any
from zipfile import ZipFile

import pytest
from packaging.requirements import Requirement

from tests import deep

SOURCE = Path(__file__).parents[1]
NOT_BUILT = shutil.ignore_patterns("*.egg-info", "__pycache__")


def run(*command: object, **options: Any) -> str:
    variables = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(list(map(str, command)), env=variables, capture_output=True, text=True, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture
def wheel(tmp_path: Path) -> Path:
    """As `python -m build` makes it, with the setuptools that are here (torch needs them too): no network is needed."""
    there = tmp_path / "source"
    shutil.copytree(SOURCE / "src", there / "src", ignore=NOT_BUILT)
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(SOURCE / name, there)
    run(
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        tmp_path / "wheels",
        there,
    )
    (built,) = (tmp_path / "wheels").iterdir()
    return built


@pytest.fixture
def bare(tmp_path: Path, wheel: Path) -> Path:
    """The `bin` of an environment that has this wheel, and links to the dependencies that are installed here."""
    home = tmp_path / "bare"
    venv.create(home, symlinks=True)
    (packages,) = home.glob("lib/python*/site-packages")
    run(sys.executable, "-m", "pip", f"--python={home / 'bin' / 'python'}", "install", "--no-deps", "--no-index", wheel)
    link_dependencies("squall-train", packages, set())
    run(sys.executable, "-m", "pip", f"--python={home / 'bin' / 'python'}", "check")
    return home / "bin"


def link_dependencies(name: str, packages: Path, known: set[str]) -> None:
    for text in distribution(name).requires or ():
        needed = Requirement(text)
        if needed.name in known or (needed.marker and not needed.marker.evaluate({"extra": ""})):
            continue
        known.add(needed.name)
        found = distribution(needed.name)
        for top in {file.parts[0] for file in found.files or ()} - {"..", "__pycache__"}:
            if not (packages / top).exists():
                (packages / top).symlink_to(Path(str(found.locate_file(top))))
        link_dependencies(needed.name, packages, known)


@deep.only
def test_a_wheel_holds_the_package_and_trains_in_a_bare_environment(wheel: Path, bare: Path, tmp_path: Path) -> None:
    package = SOURCE / "src" / "squall"
    files = {f"squall/{path.relative_to(package)}" for path in package.rglob("*") if path.is_file()}
    assert {name for name in files if not name.endswith(".pyc")} <= set(ZipFile(wheel).namelist())
    example = shutil.copy(SOURCE / "examples" / "stdlib_lm.py", tmp_path)
    where = run(bare / "python", "-c", "import squall; print(squall.__file__)", cwd=tmp_path)
    assert Path(where).is_relative_to(bare.parent)
    summary = json.loads(
        run(bare / "squall", "train", example, "--steps", 4, "--json", "--run-dir", "run", cwd=tmp_path)
    )
    assert (summary["status"], summary["updates"]) == ("finished", 4)
    assert (tmp_path / "run" / "report.html").exists()
