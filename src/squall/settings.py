"""How a run is carried out, beside what it trains: what a user may set, checked when it is set."""

from __future__ import annotations

import dataclasses
from typing import Any

from squall.checks import require
from squall.launchers.joining.address import parse_address

QUARANTINED = 3  # batches of any epoch, at least, that `on_nan="skip"` leaves out before it ends the run
LAUNCHERS = ("local", "inline", "ray")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Settings:
    """How a run is carried out, beside what it trains. The defaults suit most runs.

    Args:
        launcher: "local" (processes on this machine), "inline" (everything in this process, deterministic) or "ray"
            (processes on the nodes of a Ray cluster; without one, a Ray is started here).
        parts: processes of each replica, on which its model lies as `Task.split` says; 1 ignores that.
        spread_parts: a replica's parts lie on as many machines as possible, for models whose training fits on none (the
            weights have to fit on each). Otherwise they lie together where a machine has cores for all of them. None:
            always, as those of a script's replica.
        threads: torch threads of each process of a replica; None: the cores divided among them.
        shard_threads: torch threads of each shard. More than one make updates of millions of elements faster where
            cores are idle while replicas wait, and far slower where they are not.
        machines: how many machines train; the others join by `squall join`, and training begins when all are there.
            None: this one alone; with Ray so many nodes that each replica has a processor, if they are there.
        listen: "HOST:PORT", where this machine listens for the others. With Ray it need not be said.
        cores: with Ray: processors of each machine; None: one for each of its replicas.
        packed: with Ray: machines are on few nodes, and not each on a node of its own where that goes.
        least_replicas: training begins when there is room (cores) for so many of the strategy's replicas, and others
            start as machines join; None: with all of them, whatever cores there are.
        plaintext: what goes between machines is not encrypted, for networks that are already, such as a VPN. All
            processes still prove who they are.
        lost_after_s: a machine that is not heard of for so many seconds is taken for lost, and its work done elsewhere.
        hang_after_s: a process that makes no step for so many seconds, and for ten times as long as its steps usually
            take, is killed and replaced; ten times as long at its start, and never where it waits for others. None: 30;
            0: never. A script's replica is left alone unless it is stopped (SIGSTOP) or this is given.
        seconds: end after so much training time.
        evaluate_every_s: evaluate so often, in seconds, beside the evaluation after each epoch.
        snapshot_every_s: seconds between snapshots; None: only at the end. A run that begins again by itself makes its
            first after half a second (more where it is large), and each of the next after twice as long, up to this.
        keep_schedule: gigabytes that the schedule, which a replay needs, may take; None: no limit, 0: there is none.
            It is kept from the beginning, because a replay begins there, and ends where it has that size. "last:3"
            keeps its end: what a replay needs that begins at one of the last three snapshots. Not for
            SingleProcess, Sandblaster, AllReduce, replicas with an optimizer of their own, and more than four pushes a
            fetch.
        progress: show progress while the run goes on.
        live: serve a page that shows the run while it goes on, on 127.0.0.1, and print its link.
        on_nan: what becomes of a batch that gives NaN or Inf twice. "stop": it ends the run. "skip": it is left out,
            and named in the audit; of an epoch at most a thousandth of the batches, or three: the next one ends the
            run. "skip:20": another limit. Skipping is not for AllReduce, SingleProcess and Sandblaster.
        tensorboard: write event files for TensorBoard into the run's directory, under tensorboard/, while the run goes
            on; of a run that is in one process, at its end. Needs the extra `tensorboard`.
        copies: processes that hold each shard. With 2 what a shard has acknowledged outlives its machine: a backup on
            another machine has it before it is said, and takes over. Both are on this one where there is no other. Not
            for AllReduce, whose members all have the weights.
        restarts: how often in a row, without a new snapshot between, a run starts again by itself from its newest
            snapshot when what it cannot go on without was lost: its nursery, or a machine with a shard; 0: never.
        slow: for experiments: the last replica computes at this fraction of its speed, such as 0.1.
    """

    launcher: str = "local"
    parts: int = 1
    spread_parts: bool | None = False
    threads: int | None = None
    shard_threads: int = 1
    machines: int | None = None
    listen: str | None = None
    cores: int | None = None
    packed: bool = False
    least_replicas: int | None = None
    plaintext: bool = False
    lost_after_s: float = 2.0
    hang_after_s: float | None = None
    seconds: float | None = None
    evaluate_every_s: float | None = None
    snapshot_every_s: float | None = 60.0
    keep_schedule: float | str | None = 2.0
    on_nan: str = "stop"
    progress: bool = True
    tensorboard: bool = False
    live: bool = False
    copies: int = 1
    restarts: int = 3
    slow: float | None = None

    def __post_init__(self) -> None:
        if self.launcher not in LAUNCHERS:
            raise ValueError(f"launcher is {self.launcher!r}: use one of {', '.join(LAUNCHERS)}")
        threads, slow = self.threads, self.slow
        require("parts", self.parts, isinstance(self.parts, int) and self.parts >= 1, "at least 1, and whole")
        if self.parts > 1 and self.launcher == "inline":
            raise ValueError(f"parts is {self.parts}, and an inline run is in one process: leave one of them out")
        if self.spread_parts and not (self.parts > 1 and self.several):
            raise ValueError("spread_parts is for replicas of several parts on several machines: leave it out")
        require("threads", threads, threads is None or threads >= 1, "at least 1, or None to divide the cores")
        require("shard_threads", self.shard_threads, self.shard_threads >= 1, "at least 1")
        require("slow", slow, slow is None or 0 < slow <= 1, "above 0 and at most 1, such as 0.1")
        require("copies", self.copies, self.copies in (1, 2), "1 or 2")
        if self.copies > 1 and self.launcher == "inline":
            raise ValueError(f"copies is {self.copies}, and an inline run is in one process: leave one of them out")
        require("restarts", self.restarts, isinstance(self.restarts, int) and self.restarts >= 0, "0, or more")
        machines = self.machines
        require("machines", machines, machines is None or machines >= 1, "at least 1")
        require("cores", self.cores, self.cores is None or self.cores >= 1, "at least 1")
        if self.launcher != "ray" and (self.cores is not None or self.packed):
            raise ValueError("cores and packed are for the launcher ray: leave them out")
        if self.several and self.launcher == "inline":
            raise ValueError("machines or listen is given, and an inline run is in one process: leave one out")
        if self.listen is not None:
            parse_address(self.listen, "listen")
        elif self.several and self.launcher != "ray":
            raise ValueError(f"machines is {machines}: say where others reach this one: listen='10.0.0.1:7700'")
        if self.plaintext and not self.several:
            raise ValueError("plaintext is for what goes between machines, and there is one: leave it out")
        if self.least_replicas is not None and self.listen is None:
            raise ValueError("replicas are a range, which grows as machines join: say where, listen='10.0.0.1:7700'")
        kept = self.keep_schedule
        if not (self.last_snapshots if isinstance(kept, str) else kept is None or kept >= 0):
            raise ValueError(
                f"keep_schedule is {kept!r}: give gigabytes, 0 for none, None for all, or 'last:3' for what a replay"
                " from the last three snapshots needs"
            )
        kind, colon, count = self.on_nan.partition(":")
        if self.on_nan != "stop" and not (kind == "skip" and (_counts(count) or not colon)):
            raise ValueError(f"on_nan is {self.on_nan!r}: use 'stop', 'skip', or 'skip:20' for at most 20 an epoch")
        hang = self.hang_after_s
        require("hang_after_s", hang, hang is None or hang >= 0, "positive, 0 for never, or None")
        for name in ("lost_after_s", "seconds", "evaluate_every_s", "snapshot_every_s"):
            value = getattr(self, name)
            require(name, value, value is None or value > 0, "positive, or None")

    @property
    def several(self) -> bool:
        """Machines may come beside this one."""
        return self.launcher == "ray" or (self.machines or 1) > 1 or self.listen is not None

    @property
    def last_snapshots(self) -> int:
        """How many snapshots a replay may begin at, of "last:3"; 0: it begins where the run did."""
        kind, _, count = self.keep_schedule.partition(":") if isinstance(self.keep_schedule, str) else ("", "", "")
        return int(count) if kind == "last" and count.isdecimal() else 0

    def quarantine(self, batches: int) -> int:
        """How many of so many batches of an epoch may be left out since they gave NaN or Inf twice."""
        kind, _, count = self.on_nan.partition(":")
        return int(count) if count else max(QUARANTINED, batches // 1000) if kind == "skip" else 0

    @property
    def given(self) -> int | None:
        """Cores of a machine that Ray gives; None: it gives none. Where only replicas decide, each has one."""
        return None if self.launcher != "ray" else (self.machines and self.cores) or 1


def _counts(text: str) -> bool:
    return text.isdecimal() and int(text) >= 1


def with_given(settings: Settings | None, **given: Any) -> Settings:
    """Settings in which those that are given, and not None, are put in."""
    return dataclasses.replace(settings or Settings(), **{k: v for k, v in given.items() if v is not None})
