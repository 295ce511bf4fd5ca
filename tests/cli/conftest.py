from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from squall.runtime.lock import holders
from squall.runtime.running import kill
from tests.cli.detached import detached
from tests.launchers.processes import Started, wait_for


@pytest.fixture
def directory(tmp_path: Path) -> Iterator[Path]:
    """Of a run of which nothing is left behind the test."""
    path = tmp_path / f"run-{uuid4().hex[:8]}"
    yield path
    kill(path)
    wait_for(lambda: not holders(path / "lock"), 10, "all processes to end")


@pytest.fixture
def endless(directory: Path) -> Started:
    return detached(directory, "--epochs", "100000", "--snapshot-every-s", "0.5")
