"""What a machine that joins says of itself, what it must have, and how it is answered."""

from __future__ import annotations

import os
import platform
import socket
from collections.abc import Callable
from typing import Annotated

import msgspec
import torch

from squall.runtime.arena import SHARED_MEMORY
from squall.transports.certificates import Identity
from squall.version import __version__

PROTOCOL = 1  # of joining; what comes later goes with Squall's version
HELLO_BYTES = 1 << 16


class Hello(msgspec.Struct, frozen=True, kw_only=True):
    """Every version of Squall can read it: fields may be added, and none is required."""

    protocol: int = 0
    squall: str = ""
    torch: str = ""
    python: str = ""
    machine: str = "without a name"
    cores: Annotated[int, msgspec.Meta(ge=1, le=1 << 16)] = 1  # that its replicas may use
    gpus: Annotated[int, msgspec.Meta(ge=0, le=1 << 10)] = 0
    number: Annotated[int, msgspec.Meta(ge=0, le=1 << 16)] = 0  # that it would like to have; 0: any
    shared_memory: int = 0  # bytes that are free
    address: str = ""  # where others reach it
    incomplete: bool = False  # it was the run's first machine, and fetches at the end what it lacks
    fetches: bool = False  # this, and takes part in nothing


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    machine: int  # its number
    identity: Identity


class Refusal(msgspec.Struct, frozen=True, tag="refusal"):
    why: str


Answer = Welcome | Refusal


def hello(address: str, cores: int | None = None) -> Hello:
    """Of this machine, which is reached at that address; `cores` are all that this process may use."""
    shared = os.statvfs(SHARED_MEMORY)
    return Hello(
        protocol=PROTOCOL, squall=__version__, torch=str(torch.__version__),
        python=".".join(platform.python_version_tuple()[:2]), machine=socket.gethostname(),
        cores=cores or len(os.sched_getaffinity(0)), gpus=torch.cuda.device_count(),
        shared_memory=shared.f_bavail * shared.f_frsize, address=address,
    )  # fmt: skip


_REMEDIES: dict[str, Callable[[str], str]] = {
    "squall": lambda version: f"install squall-train=={version}",
    "torch": lambda version: f"install torch=={version}",
    "Python": lambda version: f"use Python {version}",
    "protocol": lambda version: f"install the Squall that has protocol {version}",
}


def why_not(there: Hello, here: Hello) -> str:
    """Why a machine cannot take part in a run of this one, with the remedy; "" if it can.

    A build of torch for another processor ("2.13.0+cu128") is the same torch.
    """
    pairs = {
        "squall": (there.squall, here.squall),
        "torch": (there.torch.partition("+")[0], here.torch.partition("+")[0]),
        "Python": (there.python, here.python),
        "protocol": (str(there.protocol), str(here.protocol)),
    }
    found = [
        f"machine {there.machine} has {name} {theirs or 'unknown'}, this one {ours}: {_REMEDIES[name](ours)} there"
        for name, (theirs, ours) in pairs.items()
        if theirs != ours
    ]
    return "; ".join(found)
