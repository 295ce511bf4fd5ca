"""docs/strategies.md says what the code does."""

from __future__ import annotations

import importlib.util
from pathlib import Path

DOCS = Path(__file__).parents[2] / "docs"


def test_the_table_of_strategies_is_the_codes() -> None:
    spec = importlib.util.spec_from_file_location("docs_make", DOCS / "make.py")
    assert spec is not None
    assert spec.loader is not None
    make = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(make)
    text = (DOCS / "strategies.md").read_text()
    assert text == make.page(text), "run `make docs`"
