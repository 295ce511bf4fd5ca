"""The task of `logistic`, of which shard 0 is killed once inside a change of its vectors, the one that KILLED_IN names.

That it was is noted in the file KILLED. The vector that it was writing is no number then.
"""

import math
import os
import signal
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import squall
from tests.launchers import logistic


def is_shard() -> bool:
    return Path("/proc/self/cmdline").read_bytes().startswith(b"squall shard 0 ")


def deadly(change: Any) -> Any:
    calls = 0

    def made(*given: Any, out: Tensor | None = None, **named: Any) -> Tensor:
        nonlocal calls
        calls += out is not None
        if calls == 8 and out is not None and is_shard():
            with suppress(FileExistsError):
                Path(os.environ["KILLED"]).touch(exist_ok=False)
                out.fill_(math.nan)
                os.kill(os.getpid(), signal.SIGKILL)
        result: Tensor = change(*given, out=out, **named)
        return result

    return made


def task() -> squall.Task:
    name = os.environ["KILLED_IN"]
    setattr(torch, name, deadly(getattr(torch, name)))
    return logistic.task()
