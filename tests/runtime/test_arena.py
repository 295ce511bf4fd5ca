"""The shared memory: private to the user, without a name, reserved at once, and nothing in it overlaps."""

from __future__ import annotations

import errno
import os
import resource
import stat
import warnings
from importlib import import_module
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import squall
from squall.runtime import arena as module
from squall.runtime.arena import SHARED_MEMORY, Arena, Shape
from tests.tasks import LOCAL, regression

SHAPE = Shape(length=1000, replicas=2, weights=2, gradients=2, groups=3)
shapes = st.builds(
    Shape, st.integers(1, 3000), st.integers(1, 4), st.sampled_from([1, 2]), st.sampled_from([1, 2]), st.integers(1, 5)
)


def buffers(arena: Arena) -> list[torch.Tensor]:
    """Every float32 buffer that the arena has."""
    shape = arena.shape
    slots = [(slot, buffer) for slot in range(shape.replicas) for buffer in range(shape.weights)]
    gradients = [(slot, buffer) for slot in range(shape.replicas) for buffer in range(shape.gradients)]
    found = [arena.weights(*place) for place in slots] + [arena.gradient(*place) for place in gradients]
    return [*found, arena.weights(shape.replicas, 0)]


@given(shapes)
def test_buffers_and_rates_do_not_overlap(shape: Shape) -> None:
    arena = Arena.private(shape)
    rates = [arena.rates(slot, b) for slot in range(shape.replicas + 1) for b in range(shape.weights)]
    tensors = [*buffers(arena), *rates]
    for number, tensor in enumerate(tensors):
        tensor.fill_(number + 1)
    for number, tensor in enumerate(tensors):
        assert (tensor == number + 1).all()
    assert all(tensor.shape == (shape.length,) and tensor.dtype == torch.float32 for tensor in buffers(arena))
    assert all(rate.shape == (shape.groups,) and rate.dtype == torch.float64 for rate in rates)


@given(shapes)
def test_buffers_begin_on_pages(shape: Shape) -> None:
    assert all(tensor.data_ptr() % 4096 == 0 for tensor in buffers(Arena.private(shape)))


def test_the_file_is_private_and_unlinked_before_it_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[int] = []
    reserve = os.posix_fallocate

    def watched(handle: int, offset: int, size: int) -> None:
        status = os.fstat(handle)
        modes.append(stat.S_IMODE(status.st_mode))
        assert status.st_nlink == 0
        assert size == SHAPE.total_bytes
        reserve(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", watched)
    arena = Arena.create(SHAPE, tmp_path, tmp_path)
    assert modes == [0o600]
    assert list(tmp_path.iterdir()) == []
    arena.weights(1, 1).fill_(2.0)
    assert arena.weights(1, 1).sum() == 2000


def test_forked_processes_share_it(tmp_path: Path) -> None:
    arena = Arena.create(SHAPE, tmp_path)
    child = os.fork()
    if child == 0:
        arena.gradient(1, 0)[7] = 5.0
        os._exit(0)
    os.waitpid(child, 0)
    assert arena.gradient(1, 0)[7] == 5.0


def refuse(handle: int, offset: int, size: int) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


def test_where_shared_memory_is_too_small_a_file_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    small = tmp_path / "shm"
    small.mkdir()
    big = Shape(length=1_000_000, replicas=2)
    mebibytes = f"{big.total_bytes / 2**20:,.0f} MiB"
    reserve = os.posix_fallocate

    def only_elsewhere(handle: int, offset: int, size: int) -> None:
        where = os.readlink(f"/proc/self/fd/{handle}")
        (refuse if where.startswith(str(small)) else reserve)(handle, offset, size)

    monkeypatch.setattr(os, "posix_fallocate", only_elsewhere)
    with pytest.warns(RuntimeWarning, match=f"{small} cannot hold the arena of {mebibytes}.*slower.*--shm-size"):
        arena = Arena.create(big, tmp_path, small)
    arena.weights(0, 0).fill_(1.0)
    assert arena.weights(0, 0).sum() == 1_000_000
    assert [path.name for path in tmp_path.iterdir()] == ["shm"]


def test_a_file_system_that_says_it_is_full_is_believed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full:
        f_bavail, f_frsize = 1, 4096

    real = os.statvfs
    monkeypatch.setattr(os, "statvfs", lambda path: Full() if path == SHARED_MEMORY else real(path))
    with pytest.warns(RuntimeWarning, match="0 MiB free"):
        Arena.create(SHAPE, tmp_path)


def test_no_room_anywhere_is_an_error_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    told = f"{tmp_path} cannot hold .*--shm-size.*; and a file under {tmp_path} .*No space left.*: free some space"
    with pytest.raises(OSError, match=told):
        Arena.create(SHAPE, tmp_path, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_file_size_is_told_with_the_remedy(tmp_path: Path) -> None:
    warnings.simplefilter("ignore")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=rf"a file under {tmp_path} .*too large\): raise the limit .*ulimit -f"):
            Arena.create(SHAPE, tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_without_an_evaluator_nothing_is_reserved_for_one(tmp_path: Path) -> None:
    def blocks(evaluated: bool) -> int:
        arena = Arena.create(SHAPE, tmp_path, used=SHAPE.spans(evaluated))
        return os.fstat(arena._handle).st_blocks * 512 if arena._handle is not None else 0

    assert blocks(evaluated=False) == blocks(evaluated=True) - SHAPE.stride == SHAPE.total_bytes - SHAPE.stride


def test_a_slot_that_is_used_later_is_reserved_then(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine reserves what begins there; without room for more, no process dies of touching it."""
    files = len(os.listdir("/proc/self/fd"))
    big = Shape(length=1_000_000, replicas=2)
    arena = Arena.create(big, tmp_path, tmp_path, used=[])

    handle = arena._handle
    assert handle is not None
    before = 512 * os.fstat(handle).st_blocks
    assert before < big.stride
    arena.reserve(1)
    assert 512 * os.fstat(handle).st_blocks - before >= 2 * big.stride
    monkeypatch.setattr(os, "posix_fallocate", refuse)
    with pytest.raises(OSError, match="No space left"):
        arena.reserve(0)
    del arena
    assert len(os.listdir("/proc/self/fd")) == files


def test_a_run_without_shared_memory_ends_well_and_says_so(
    run_dir: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], without_report: None
) -> None:
    monkeypatch.setattr(import_module("squall.train"), "SHARED_MEMORY", run_dir.parent / "nowhere")
    run = squall.fit(regression(), squall.Downpour(replicas=2), settings=LOCAL, run_dir=run_dir)
    assert run.summary().status == "finished"
    assert "nowhere cannot hold the arena of" in capfd.readouterr().err
    assert not list(run_dir.glob("squall-*"))


def test_a_run_leaves_nothing_in_shared_memory(run_dir: Path, without_report: None) -> None:
    """Nor a process of the data loader's."""
    task = regression(loader={"num_workers": 1}, train=torch.utils.data.StackDataset(*regression()().train.tensors))
    squall.fit(task, squall.Downpour(replicas=2), settings=LOCAL, run_dir=run_dir.with_name("nothing-stays"))
    assert not list(module.SHARED_MEMORY.glob("squall-*"))
    names = [path.read_bytes() for path in Path("/proc").glob("[0-9]*/cmdline") if path.exists()]
    assert not [name for name in names if b"of nothing-stays" in name]
