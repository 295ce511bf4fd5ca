"""A Ctrl-C where a part of the last snapshot comes by a slow link. Real processes in two network namespaces."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from benchmarks.namespaces import Link, NoNamespaces, linked
from squall.record.rows import ProgressRow
from squall.runtime.snapshot import Snapshots
from tests import deep
from tests.launchers.processes import START_S, Started, wait_for
from tests.launchers.test_machines import children

RATE = "10mbit"
TASK = """
import torch
from torch import nn
from torch.utils.data import TensorDataset

import squall


def task() -> squall.Task:
    inputs = torch.randn(256, 1000, generator=torch.Generator().manual_seed(0))
    return squall.Task(
        model=nn.Linear(1000, 1000), loss=lambda model, batch: (model(batch[0]) ** 2).mean(),
        train=TensorDataset(inputs), batch_size=16,
    )
"""  # with Adam its snapshot has 12 MB, of which half comes by the link, in 5 s


class Run(Started):
    """Two machines, a replica and a shard on each."""

    def __init__(self, link: Link, directory: Path) -> None:
        self.directory = directory / f"run-{os.getpid()}"
        task = directory / "task.py"
        directory.mkdir(exist_ok=True)
        task.write_text(TASK)
        flags = ["--replicas", "2", "--shards", "2", "--threads", "1", "--epochs", "100000", "--optimizer", "adam"]
        listen = ["--machines", "2", "--listen", f"{link.hosts[0]}:7711", "--run-dir", str(self.directory)]
        self.process = squall(link, 0, "train", str(task), *flags, *listen)  # type: ignore[assignment]
        token = self.directory / "token"
        wait_for(token.exists, START_S, "the token")
        self.other = squall(link, 1, "join", f"{link.hosts[0]}:7711", "--token-file", str(token))

    def interrupted(self) -> tuple[float, str]:
        """Seconds that a Ctrl-C takes, and what is said."""
        began = time.monotonic()
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=START_S)
        assert self.process.returncode == 130, err
        return time.monotonic() - began, err


def squall(link: Link, side: int, *arguments: str) -> subprocess.Popen[str]:
    with link.inside(side):
        return subprocess.Popen(
            [sys.executable, "-m", "squall", *arguments], stderr=subprocess.PIPE, stdout=subprocess.DEVNULL, text=True
        )


@contextmanager
def training(directory: Path) -> Iterator[Run]:
    try:
        with linked(RATE) as link:
            run = Run(link, directory)
            try:
                for replica in range(2):
                    run.wait_rows(ProgressRow, lambda row, replica=replica: row.replica == replica)  # type: ignore[misc]
                yield run
            finally:
                for process in (run.process, run.other):
                    process.kill()
                    process.communicate()
    except NoNamespaces as error:
        pytest.skip(str(error))


@deep.only
def test_what_arrives_is_saved(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        _, err = run.interrupted()
        assert re.search(r"saving what other machines have: \d of 6 MB; Ctrl-C again gives it up", err), err
        assert re.search(r"^squall: interrupted; go on from snapshot 1 with: squall resume", err, re.MULTILINE), err
        assert Snapshots(run.directory).manifest(1).final


@deep.only
def test_a_second_interrupt_gives_it_up_and_so_does_the_first_where_nothing_arrives(tmp_path: Path) -> None:
    with training(tmp_path) as run:
        read = run.process.stderr
        run.process.send_signal(signal.SIGINT)
        while "saving what other machines have" not in (line := read.readline()):
            assert line, "it has ended"
        took_s, err = run.interrupted()
        assert took_s < 3
        assert "interrupted at once; go on from the beginning" in err
    with training(tmp_path / "again") as run:
        (nursery,) = children(run.other.pid)
        for pid in (nursery, *children(nursery)):
            os.kill(pid, signal.SIGSTOP)
        took_s, err = run.interrupted()
        assert took_s < 4
        assert "did not answer in time, so that nothing was saved" in err
