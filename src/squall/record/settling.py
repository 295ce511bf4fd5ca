"""What becomes of a record when nobody writes into it any more."""

import sqlite3
from contextlib import closing, suppress
from pathlib import Path


def settle(path: Path) -> None:
    """Fold the write-ahead log into the file, once nobody uses it: a finished run's record is one file to copy."""
    # An error: somebody else reads it. Then it stays as it is, which is no less valid.
    with suppress(sqlite3.Error), closing(sqlite3.connect(path)) as db:
        db.execute("PRAGMA journal_mode = DELETE")
