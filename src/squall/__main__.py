"""`squall`, and `python -m squall`: the command line as a process of its own."""

import atexit
import os
import sys
import threading
from typing import NoReturn

from squall.cli import main
from squall.runtime.disk import Telling


def entry() -> NoReturn:
    """Run the command, and end as Python does, but for taking the modules apart.

    With torch that takes half a second to a second, for which nobody should wait behind Ctrl-C.
    """
    sys.stderr = Telling(sys.stderr)
    status = main()
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads, as the interpreter would
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:  # nobody reads it any more, or its disk is full
            status = status or 1
    os._exit(status)


if __name__ == "__main__":
    entry()
