"""`squall doctor`: what this machine has for a run, what that means, and what to do where it falls short.

Each check is a function that looks at one thing and returns a `Finding`. torch is imported inside the checks: an
installation in which it cannot be imported is one of the things to find.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import resource
import socket
import sys
import tempfile
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

CGROUP = Path("/sys/fs/cgroup")
SHARED_BYTES, SHARED_BYTES_OVERLAPPED = 20, 36  # for each parameter, with 2 replicas: 5 or 9 buffers of float32
ENOUGH_FILES = 1024
ENOUGH_SHARED_MEMORY = 2**30  # less is a warning; Docker gives a container 64 MiB unless it is told otherwise


@dataclass(frozen=True)
class Finding:
    """What one check found.

    Attributes:
        name: what was looked at.
        ok: True; None for a warning (a run works, but slower or smaller); False where a run would fail.
        found: what is there, and what it means.
        remedy: what to do about it; "" where there is nothing to do.
    """

    name: str
    ok: bool | None
    found: str
    remedy: str = ""


def checkup() -> list[Finding]:
    """Every check, in the order of `CHECKS`."""
    return [check() for check in CHECKS]


def render(findings: Iterable[Finding], console: Console) -> None:
    """Print a line for each finding, with its remedy below."""
    from rich.table import Table
    from rich.text import Text

    signs = {True: Text("ok", "green"), None: Text("warning", "yellow"), False: Text("failed", "bold red")}
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    for finding in findings:
        text = Text(finding.found)
        if finding.remedy:
            text.append(f"\n-> {finding.remedy}", "dim" if finding.ok else "bold")
        table.add_row(signs[finding.ok], finding.name, text)
    console.print(table)


# ---------------------------------------------------------------- software


def python(running: tuple[int, ...] = sys.version_info[:3], system: str = platform.system()) -> Finding:
    found = f"{'.'.join(map(str, running))} on {system} {platform.release()}"
    if running < (3, 11):
        return Finding("Python", False, f"{found}: too old", "install Python 3.11 or newer, and Squall into it")
    if system != "Linux":
        remedy = "use Linux: a container or a virtual machine will do"
        return Finding("Python", False, f"{found}: Squall's shared memory needs Linux", remedy)
    return Finding("Python", True, found)


def pytorch() -> Finding:
    try:
        import torch
    except Exception as error:  # a broken library raises whatever its loader raises
        return Finding("torch", False, f"cannot be imported: {error}", "pip install --force-reinstall torch")
    return Finding("torch", True, str(torch.__version__))


def fused_optimizers() -> Finding:
    """Make one fused step on four numbers, which must come to 1 - 0.5 x 1."""
    try:
        import torch

        parameter = torch.nn.Parameter(torch.ones(4))
        parameter.grad = torch.ones(4)
        torch.optim.SGD([parameter], lr=0.5, fused=True).step()
        right = parameter.eq(0.5).all().item()
    except Exception as error:
        found = f"torch refuses them on this CPU ({error}): the shards' updates take up to six times as long"
        return Finding("fused optimizers", None, found, "pip install -U torch")
    if not right:
        return Finding("fused optimizers", False, "a fused step was wrong", "pip install --force-reinstall torch")
    return Finding("fused optimizers", True, "the shards update in one pass over their memory")


LIBRARIES = {
    "zmq": "pyzmq", "msgspec": "msgspec", "safetensors": "safetensors", "cloudpickle": "cloudpickle",
    "numpy": "numpy", "rich": "rich", "setproctitle": "setproctitle", "matplotlib": "matplotlib",
}  # fmt: skip


def libraries(wanted: dict[str, str] = LIBRARIES) -> Finding:
    """Import each (module -> package), because one that is installed may still fail to load."""
    loaded, missing = [], {}
    for module, package in wanted.items():
        try:
            importlib.import_module(module)
            loaded.append(f"{package} {_version(package)}")
        except Exception as error:
            missing[package] = str(error)
    if missing:
        found = "; ".join(f"{package}: {error}" for package, error in missing.items())
        return Finding("libraries", False, found, f"pip install --force-reinstall {' '.join(missing)}")
    return Finding("libraries", True, ", ".join(loaded))


def extra(module: str, install: str) -> Finding:
    """An optional library. It is not imported, which can take seconds."""
    if importlib.util.find_spec(module) is None:
        return Finding(module, True, "not installed, and not needed to train on this machine", f"to add it: {install}")
    return Finding(module, True, _version(module))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "(version unknown)"


# ---------------------------------------------------------------- processors and memory


def cores(cgroup: Path = CGROUP) -> Finding:
    usable = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota, omp = _cpu_quota(cgroup), os.environ.get("OMP_NUM_THREADS")
    if quota is not None and quota < usable:
        found = f"{usable} are visible, but a cgroup allows the time of {quota:g}: more threads only hinder each other"
        remedy = f"keep replicas x --threads at {max(1, int(quota))} or below, or give the container more CPU"
        return Finding("cores", None, found, remedy)
    if usable == 1:
        found = "1: replicas take turns on it, so more of them are not faster"
        return Finding("cores", None, found, "use a machine (or an affinity mask, a container) with more cores")
    found = f"{usable} for this process; each replica gets its share of them as torch threads"
    if omp:
        found += f" (OMP_NUM_THREADS={omp} does not change that, --threads does)"
    return Finding("cores", True, found)


def _cpu_quota(cgroup: Path) -> float | None:
    """Cores' worth of time that a container may use: version 2 of cgroups, then version 1; None for no limit."""
    if text := _read(cgroup / "cpu.max"):
        quota, _, period = text.partition(" ")
    else:
        quota, period = _read(cgroup / "cpu/cpu.cfs_quota_us"), _read(cgroup / "cpu/cpu.cfs_period_us")
    try:
        return int(quota) / int(period) if int(quota) > 0 else None
    except ValueError:  # "max", or not there
        return None


def memory(meminfo: Path = Path("/proc/meminfo"), cgroup: Path = CGROUP) -> Finding:
    kib = {line.partition(":")[0]: line.split()[1] for line in _read(meminfo).splitlines()}
    if "MemTotal" not in kib or "MemAvailable" not in kib:
        return Finding("memory", None, f"{meminfo} does not tell", "watch the memory of the first run")
    total, available = 1024 * int(kib["MemTotal"]), 1024 * int(kib["MemAvailable"])
    limit = _read(cgroup / "memory.max") or _read(cgroup / "memory/memory.limit_in_bytes")
    found = f"{gib(available)} available of {gib(total)}"
    if limit.isdigit() and int(limit) < total:
        found += f"; this container is killed above {gib(int(limit))}"
        available = min(available, int(limit))
    if available < 2**30:
        remedy = "end other programs, or train with fewer replicas: each holds the model, a batch and torch"
        return Finding("memory", None, f"{found}: little for several processes", remedy)
    return Finding("memory", True, found)


def shared_memory(path: Path = Path("/dev/shm")) -> Finding:
    """Replicas' weights and gradients lie there, beside the weights that are being evaluated."""
    slower = "runs work without it, through a file in the run's directory, which is slower"
    try:
        with tempfile.TemporaryFile(prefix="squall-", dir=path) as file:
            file.write(b"\0")
    except OSError as error:
        remedy = "mount it (mount -t tmpfs tmpfs /dev/shm), mode 1777"
        return Finding("shared memory", None, f"{path} cannot be written ({error.strerror}): {slower}", remedy)
    system = os.statvfs(path)
    free, size = system.f_bavail * system.f_frsize, system.f_blocks * system.f_frsize
    room, overlapped = _millions(free / SHARED_BYTES), _millions(free / SHARED_BYTES_OVERLAPPED)
    found = (
        f"{gib(free)} free of {gib(size)} in {path}: room for 2 replicas of {room} parameters"
        f" ({overlapped} with overlap)"
    )
    if free < ENOUGH_SHARED_MEMORY:
        remedy = "if the model is larger: docker run --shm-size=8g, or mount -o remount,size=8g /dev/shm"
        return Finding("shared memory", None, f"{found}; for larger ones, {slower}", remedy)
    return Finding("shared memory", True, found)


# ---------------------------------------------------------------- links between processes


def local_sockets(parent: Path | None = None) -> Finding:
    """What a run does first: a private directory, and in it a socket with a name like a node's."""
    from squall.transports.doorbell import PATH_BYTES

    try:
        with tempfile.TemporaryDirectory(prefix="squall-", dir=parent) as directory:
            path = Path(directory) / "replica-999.99"
            length, mode = len(os.fsencode(path)), os.stat(directory).st_mode & 0o777
            if length > PATH_BYTES:
                found = f"socket names under {path.parent.parent} are too long: {length} bytes of {PATH_BYTES}"
                return Finding("local sockets", False, found, "set TMPDIR to a shorter path, such as /tmp")
            with socket.socket(socket.AF_UNIX) as bound:
                bound.bind(str(path))
    except OSError as error:
        remedy = "set TMPDIR to a directory on a local disk that you may write to"
        return Finding("local sockets", False, f"processes cannot find each other: {error}", remedy)
    if mode != 0o700:
        found = f"a private directory has mode {mode:03o}: other users of this machine could reach a run's sockets"
        return Finding("local sockets", False, found, "set TMPDIR to a file system that keeps Unix permissions")
    return Finding("local sockets", True, f"a run's processes, and only they, can meet under {path.parent.parent}")


def tcp(host: str = "127.0.0.1") -> Finding:
    try:
        with socket.create_server((host, 0)) as server:
            port = server.getsockname()[1]
    except OSError as error:
        found = f"no port of {host} can be bound ({error.strerror}): runs on this machine work, across machines not"
        return Finding("TCP", None, found, "allow the loopback interface in this container or sandbox")
    return Finding("TCP", True, f"ports can be bound ({host}:{port} was)")


def open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != resource.RLIM_INFINITY and soft < ENOUGH_FILES:
        allowed = "" if hard == resource.RLIM_INFINITY or hard >= ENOUGH_FILES else " (as an administrator)"
        found = f"{soft} at once: runs with many replicas or loader workers will not start"
        return Finding("open files", None, found, f"ulimit -n {4 * ENOUGH_FILES}{allowed}")
    return Finding("open files", True, "no limit" if soft == resource.RLIM_INFINITY else f"{soft:,} at once")


def gpu() -> Finding:
    try:
        import torch

        if torch.cuda.is_available():
            names = ", ".join(torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count()))
            return Finding("GPU", True, f"{names}; replicas use them with --device cuda")
        built = torch.version.cuda
    except Exception as error:
        return Finding("GPU", None, f"torch cannot ask for GPUs: {error}", "see `torch` above")
    if built is None:
        remedy = "if there is one: install torch for it, see pytorch.org/get-started"
        return Finding("GPU", True, "none: replicas compute on the CPU (this torch is built for it alone)", remedy)
    remedy = "if there is one: see whether nvidia-smi lists it, and what CUDA_VISIBLE_DEVICES is"
    return Finding("GPU", True, f"none that torch (CUDA {built}) can see: replicas compute on the CPU", remedy)


CHECKS: tuple[Callable[[], Finding], ...] = (
    python, pytorch, fused_optimizers, libraries, cores, memory, shared_memory, local_sockets, tcp, open_files,
    gpu,
    partial(extra, "ray", "pip install 'squall-train[ray]'"),
    partial(extra, "tensorboard", "pip install tensorboard"),
    partial(extra, "keras", "pip install keras"),
)  # fmt: skip


def _read(path: Path) -> str:
    """The text of a small file of the kernel; "" where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def gib(size: float) -> str:
    return f"{size / 2**30:,.1f} GiB"


def _millions(count: float) -> str:
    return f"{count / 1e6:,.0f} million"
