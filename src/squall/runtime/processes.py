"""What a process asks of the kernel and of the C library."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

from squall.protocol.hangs import State

PR_SET_PDEATHSIG = 1
M_TRIM_THRESHOLD, M_MMAP_MAX = -1, -4  # of glibc's mallopt
MAX_INT = 2**31 - 1
OTHER_FILES = 256  # room for what a process has open beside those that it counts


def may_open(count: int) -> bool:
    """Whether this process may have so many files open, after its own limit was raised if it was too low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    needed = count + OTHER_FILES
    if soft == resource.RLIM_INFINITY or needed <= soft:
        return True
    if hard != resource.RLIM_INFINITY and hard < needed:
        return False
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))
    return True


def ending(code: int) -> str:
    """How a process ended, for people; `code` is as `subprocess` and `os.waitstatus_to_exitcode` have it."""
    if code >= 0:
        return f"exit status {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:  # a real-time signal
        return f"killed by signal {-code}"


def identity(pid: int) -> str:
    """The process, and no later one with its number: both the number and when it began, in ticks of the kernel's clock.

    Raises `OSError` where there is none.
    """
    return f"{pid} {_stat(pid)[19]}"


def lives(process: str) -> bool:
    """Whether the process of this identity does. One that has ended does not, though nobody has waited for it."""
    pid = process.partition(" ")[0]
    with contextlib.suppress(OSError):
        return pid != "" and (stat := _stat(int(pid)))[0] not in "ZX" and f"{pid} {stat[19]}" == process
    return False


@contextlib.contextmanager
def descriptor_of(process: str) -> Iterator[int | None]:
    """A descriptor (pidfd) of the process of this identity, while it lives; None: it does not."""
    handle = None
    with contextlib.suppress(OSError, ValueError):
        handle = os.pidfd_open(int(process.partition(" ")[0]))
    try:
        yield handle if lives(process) else None
    finally:
        if handle is not None:
            os.close(handle)


def send(process: str, number: int) -> None:
    """A signal to the process of this identity, if it lives."""
    with descriptor_of(process) as handle, contextlib.suppress(ProcessLookupError):
        if handle is not None:
            signal.pidfd_send_signal(handle, number)


def _stat(pid: int) -> list[str]:
    """What the kernel tells of a process: its state, its parent, its group, its session, ..."""
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()


def standing_still(session: int) -> list[str]:
    """Processes of a session that are stopped, in words, with the remedy."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            state, _, _, its_session = _stat(int(path.name))[:4]
            if its_session == str(session) and state in "Tt":
                title = (path / "cmdline").read_text().replace("\0", " ").strip()
                found.append(f"{title} (pid {path.name}) is stopped: kill -CONT {path.name}")
    return found


STATES: dict[str, State] = {"T": "stopped", "t": "traced", "D": "disk"}


def state_of(pid: int) -> State:
    """What the kernel says of a process; one that has ended runs."""
    try:
        return STATES.get(_stat(pid)[0], "runs")
    except OSError:
        return "runs"


def state_of_parts(pid: int) -> State:
    """Of a replica of several processes, the first of which this is: the others may wait for one that is stopped."""
    if (state := state_of(pid)) == "runs":
        with contextlib.suppress(OSError):  # it has ended, or the kernel does not tell
            children = map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split())
            stopped = [child for child in children if state_of(child) == "stopped"]
            titles = [Path(f"/proc/{child}/cmdline").read_bytes() for child in stopped]  # it may be a user's own
            return "stopped" if any(b" part " in title.partition(b" of ")[0] for title in titles) else state
    return state


def available_memory() -> int:
    """Bytes of this machine's memory that processes may still have."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return 1024 * next(int(line.split()[1]) for line in lines if line.startswith("MemAvailable"))


def memory_kills() -> int:
    """How many processes of this machine the kernel has killed because memory ran out; 0 where it does not tell."""
    with contextlib.suppress(OSError):
        lines = Path("/proc/vmstat").read_text().splitlines()
        return next((int(line.split()[1]) for line in lines if line.startswith("oom_kill ")), 0)
    return 0


def killed_first() -> None:
    """Have the kernel kill this process, and not another one of its run, where memory runs out."""
    with contextlib.suppress(OSError):
        Path("/proc/self/oom_score_adj").write_text("1000")


def fork() -> int:
    """As `os.fork`; the new process dies with this one. What was written before goes out once, by this one.

    Ctrl-C waits meanwhile: Python drops an exception that comes while it calls what modules have registered for forks.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # the disk that it leads to is full
            stream.flush()
    parent = os.getpid()
    mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        pid = os.fork()
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
    if not pid:
        die_with_parent(parent)
    return pid


def die_with_parent(parent: int, number: int = signal.SIGKILL) -> None:
    """Have the kernel kill this process, or send it another signal, when its parent has gone."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, number)
    if os.getppid() != parent:  # it went before we asked
        os._exit(1)


def outlive_parent() -> None:
    """Take `die_with_parent` back: the kernel only continues this process, should it be stopped."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, signal.SIGCONT)


def private_bytes() -> int:
    """This process's own memory: private pages of the heap and of unnamed mappings.

    What is shared does not count, whoever has touched it. It takes up to 40 ms.
    """
    kib, counted = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if line.startswith("Private_"):
            kib += int(line.split()[1]) if counted else 0
        elif "-" in line[:17]:  # a mapping begins: addresses, rights, offset, device, inode, name
            name = line.split(maxsplit=5)[5:]
            counted = not name or name[0] == "[heap]"
    return kib << 10


def keep_freed_memory() -> None:
    """Let the allocator use freed memory again instead of giving it back to the kernel.

    Every step allocates its gradients anew; page faults for them would be a few percent of a large network's step.
    """
    libc = ctypes.CDLL(None)
    if hasattr(libc, "mallopt"):  # glibc
        libc.mallopt(M_MMAP_MAX, 0)  # large tensors, too, are cut from memory that is kept
        libc.mallopt(M_TRIM_THRESHOLD, MAX_INT)


def never_interrupt() -> None:
    """Have the kernel wait for an idle core when this process is woken, instead of interrupting another process.

    A replica that wakes a shard then sleeps, so that its core becomes free. Without this the shard interrupts another
    replica while that core is idle: 5 % of a large network's steps, with two replicas on two cores. A part that wakes
    another holds the connection's lock, for which Gloo's thread asks without end until it may go on: where processes
    were more than cores that made steps of pipelines and branches up to 4 times as long. Where the system has no such
    setting, nothing changes.
    """
    with contextlib.suppress(OSError, AttributeError):
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))
