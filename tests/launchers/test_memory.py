"""Where memory runs out: all of /dev/shm, a container's memory, or what one process may have."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from functools import partial
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from uuid import uuid4

import pytest
import torch

import squall
from squall.record.rows import EventRow
from squall.report import Reader, audit
from tests import deep
from tests.launchers import blobs
from tests.launchers.processes import Started, training_all, wait_for
from tests.warm import be_squall
from tests.warm import squall as command

CLONE_NEWNS = 0x20000
SHARED_MEMORY = "/dev/shm"
ENDLESS = ("--epochs", "100000", "--shards", "2", "--restarts", "0")
CGROUPS = Path("/sys/fs/cgroup")


def ends_well(run: Started) -> str:
    """Interrupt it; nothing was missed. Returns what it has told."""
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.finish()
    assert status == 130, err
    with closing(Reader(run.directory / "run.sqlite")) as reader:
        assert not any(part.missed for part in audit(reader).parts)
    return err


# ---------------------------------------------------------------- shared memory


def be_apart(size: str, kept: str, arguments: list[str], out: Connection, err: Connection) -> None:
    """`squall` with a /dev/shm of its own, but for the directory `kept`, which may be in the other one."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(CLONE_NEWNS):
        raise OSError(ctypes.get_errno(), "unshare")
    mount("--make-rprivate", "/")
    mount("--bind", kept, "/mnt")
    mount("-t", "tmpfs", "-o", f"size={size}", "tmpfs", SHARED_MEMORY)
    os.makedirs(kept, exist_ok=True)
    mount("--bind", "/mnt", kept)
    be_squall(arguments, out, err)


def mount(*arguments: str) -> None:
    subprocess.run(["mount", *arguments], check=True)


def fill(directory: Path) -> None:
    with suppress(OSError), (directory / "filler").open("wb", buffering=0) as file:
        while file.write(bytes(1 << 12)):
            pass
    assert os.statvfs(directory).f_bavail == 0


@pytest.mark.parametrize(("size", "fits"), deep.sweep([("64m", True), ("16k", False)], 1))
def test_all_are_succeeded_while_shared_memory_is_full(tmp_path: Path, size: str, fits: bool) -> None:
    if os.geteuid() or subprocess.run(["unshare", "-m", "true"], check=False, capture_output=True).returncode:
        pytest.skip("needs the right to mount")
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", *ENDLESS, be=partial(be_apart, size, str(tmp_path)))
    with training_all(run, 2):
        fill(Path(f"/proc/{run.process.pid}/root{SHARED_MEMORY}"))
        run.kill_shard("shard 1")
        wait_for(lambda: run.replaced("shard 1"), 20, "a successor")
        for role, what in (("coordinator", "coordinator 0"), ("replica 0", "replica 0"), ("evaluator", "evaluator 2")):
            run.kill(role)
            wait_for(lambda what=what: run.replaced(what), 20, f"another {role}")
        run.goes_on()
        assert ("cannot hold the arena" in ends_well(run)) != fits


@pytest.fixture
def endless(tmp_path: Path) -> Iterator[Started]:
    run = Started.train(tmp_path / f"run-{uuid4().hex[:8]}", *ENDLESS)
    with training_all(run, 2):
        yield run


def test_what_processes_share_is_reserved_and_those_die_first_whose_loss_costs_least(endless: Started) -> None:
    """No page that they touch later can be refused by a file system, which would be SIGBUS."""
    for role, pid in endless.processes().items():
        assert [*unreserved(pid)] == []
        first = Path(f"/proc/{pid}/oom_score_adj").read_text() == "1000\n"
        assert first == role.startswith(("replica", "evaluator"))


def unreserved(pid: int) -> Iterator[str]:
    """Mappings of files that are shared, writable, and not all on their disk or in their memory."""
    maps = Path(f"/proc/{pid}/maps").read_text().splitlines()  # before their files: these grow, and never become less
    files = {os.readlink(path): path.stat() for path in Path(f"/proc/{pid}/fd").iterdir() if path.exists()}
    for line in maps:
        span, rights, _, _, _, *names = line.split(maxsplit=5)
        if "w" not in rights or "s" not in rights or names == ["/dev/zero (deleted)"]:  # memory of the kernel's own
            continue
        start, stop = (int(end, 16) for end in span.split("-"))
        found = files.get(names[0]) or Path(names[0]).stat()
        if 512 * found.st_blocks < stop - start:
            yield line


# ---------------------------------------------------------------- memory


@contextmanager
def cgroup() -> Iterator[Path]:
    """For processes whose memory is limited together. Of version 2, or of version 1."""
    entries = [line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()]
    own = next((f"memory/{path}" for _, names, path in entries if "memory" in names.split(",")), entries[-1][2])
    made = CGROUPS / own.replace("//", "/").lstrip("/") / f"squall-{uuid4().hex[:8]}"
    try:
        made.mkdir()
    except OSError as error:
        pytest.skip(f"needs the right to make a cgroup: {error}")
    try:
        if limit_of(made) is None:
            pytest.skip("memory cannot be limited here")
        yield made
    finally:
        made.rmdir()


def limit_of(made: Path) -> Path | None:
    return next(filter(Path.exists, (made / "memory.max", made / "memory.limit_in_bytes")), None)


def be_limited(group: str, arguments: list[str], out: Connection, err: Connection) -> None:
    (Path(group) / "cgroup.procs").write_text(str(os.getpid()))
    be_squall(arguments, out, err)


def test_a_replica_that_the_kernel_kills_for_its_memory_is_replaced_and_it_is_said_why(tmp_path: Path) -> None:
    directory, leaks = tmp_path / f"run-{uuid4().hex[:8]}", tmp_path / "leaks"
    with cgroup() as group:
        flags = ("train", str(Path(__file__).with_name("leaking.py")), "--run-dir", str(directory), *ENDLESS)
        run = Started(directory, *flags, be=partial(be_limited, str(group)), env={**os.environ, "LEAKS": str(leaks)})
        with training_all(run, 2):
            kept = {role: pid for role, pid in run.processes().items() if role != "replica 0"}
            used = next(filter(Path.exists, (group / "memory.current", group / "memory.usage_in_bytes")))
            limit = limit_of(group)
            assert limit is not None
            limit.write_text(str(int(used.read_text()) + (64 << 20)))
            leaks.touch()
            killed = "replica 0: killed by SIGKILL, as memory ran out: take fewer replicas or a smaller batch_size"
            run.wait_rows(EventRow, lambda row: (row.kind, row.text) == ("lost", killed))
            leaks.unlink()
            wait_for(lambda: run.replaced("replica 0"), 20, "another")
            run.goes_on()
            assert {role: pid for role, pid in run.processes().items() if role in kept} == kept
            ends_well(run)


class Short(torch.optim.Adam):
    """Once finds no memory in the midst of an update: that is noted in the file SHORT."""

    updates = 0

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.updates += 1
        if self.updates == 100:
            with suppress(FileExistsError):
                Path(os.environ["SHORT"]).touch(exist_ok=False)
                self.param_groups[0]["params"][0].data.add_(1.0)
                raise MemoryError
        super().step(closure)


def test_a_shard_without_memory_ends_the_run_with_the_remedy_and_no_half_of_an_update_is_kept(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, without_report: None
) -> None:
    monkeypatch.setenv("SHORT", str(run_dir.with_name("short")))
    strategy = squall.Downpour(replicas=2, shards=2, optimizer=partial(Short, lr=0.05))
    settings = squall.Settings(progress=False, snapshot_every_s=0.1)
    with pytest.raises(squall.TaskError, match="memory ran out: take a smaller batch_size or fewer replicas"):
        squall.fit(blobs.task, strategy, epochs=2, run_dir=run_dir, settings=settings)
    run = squall.resume(run_dir)
    assert run.summary().status == "finished"
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete
    replayed = command("replay", run_dir, "--check")
    assert replayed.returncode == 0, replayed.stderr + replayed.stdout
    assert "the same, bit for bit" in replayed.stdout
