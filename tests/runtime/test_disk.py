import errno
import os
from pathlib import Path

import pytest

from squall.run import new_directory
from squall.runtime.disk import Telling, written


@pytest.mark.parametrize(
    ("number", "remedy"),
    [
        (errno.EFBIG, r"File too large\): raise the limit on the size of files \(ulimit -f unlimited"),
        (errno.ENOSPC, r"No space left on device\): free some space"),
        (errno.EROFS, r"Read-only file system\): choose another run directory"),
    ],
)
def test_a_refused_file_is_named_with_the_remedy(number: int, remedy: str) -> None:
    with (
        pytest.raises(ValueError, match=f"run/code.pickle cannot be written .{remedy}"),
        written(Path("run/code.pickle")),
    ):
        raise OSError(number, os.strerror(number))


def test_a_directory_that_cannot_be_made_is_a_wrong_setting() -> None:
    with pytest.raises(ValueError, match="/proc/run cannot be written"):
        new_directory("/proc/run")


def test_what_is_told_to_a_full_disk_is_lost_and_ends_nothing() -> None:
    with open("/dev/full", "w") as full:
        told = Telling(full)
        assert told.write("a warning\n") == 10
        told.flush()
        with pytest.raises(OSError, match="No space left"):
            full.flush()
        assert told.fileno() == full.fileno()
        os.dup2(os.open(os.devnull, os.O_WRONLY), full.fileno())  # so that it can be closed
