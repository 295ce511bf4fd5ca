"""The machines of a run that Ray provides.

Ray places them on the nodes of its cluster, starts them again on another node when one dies, and shows them in its
dashboard. What the machines say to each other does not pass through it.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import socket
import time
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from squall.errors import SquallError
from squall.launchers.joining.address import Address, parse_address
from squall.launchers.on_ray.actor import MachineActor, visible_gpus
from squall.launchers.on_ray.bundles import Share, shares
from squall.launchers.on_ray.watch import Watch
from squall.launchers.roster import Launched, Room
from squall.runtime.run_plan import Plan

ANSWER_WITHIN_S = 5.0  # seconds that a cluster has to take a call
TELL_AFTER_S = 5.0  # seconds until a user who waits for room is told what is missing
LEAVE_WITHIN_S = 2.0  # seconds that machines have to end, once the run has
AGAIN_AFTER_S = 2.0  # seconds that a run goes on without a machine that has ended badly, before it joins anew
AGAIN_AT_MOST = 5  # times
LOCAL_GONE_S, GONE_S = 1.0, 30.0  # after which Ray is gone: some clusters start it again; Ray itself waits a minute
OUTLIVES = {"env_vars": {"RAY_kill_child_processes_on_worker_exit": "false"}}  # the nursery does, as Ray itself dies
OURS = {"task_events_shutdown_flush_timeout_ms": 200}  # that its end waits for what is gone; 5 s if this is not said


class RayMachines:
    """Connects to Ray, or starts one on this machine. Raises `ValueError` with the remedy where neither goes."""

    def __init__(self, plan: Plan) -> None:
        if importlib.util.find_spec("ray") is None:
            raise ValueError("the launcher is ray, which is not installed: pip install 'squall-train[ray]'")
        import ray

        self._ray: Any = ray
        self._ours = not ray.is_initialized()
        if self._ours:
            _connect(ray)
        self._node = "" if _from_outside() else ray.get_runtime_context().get_node_id()
        self._watch = Watch(_servers(ray, self._node), LOCAL_GONE_S if self._ours else GONE_S)
        self.gone = ""  # why Ray is, if it is
        self._packed = plan.settings.packed
        self._on_gpus = on_gpus = plan.device.startswith("cuda")
        free = self._free(on_gpus)
        here = Share(len(os.sched_getaffinity(0)))
        if self._node:
            own = free.pop(self._node)
            here = Share(min(here.cpus, own.cpus), own.gpus)
        cpus, nodes = plan.replicas * plan.settings.parts * plan.threads, list(free.values())
        self._shares = shares(cpus, here, nodes, plan.settings.machines, plan.settings.cores, on_gpus)
        self._group: Any = None
        self._actors: list[Any] = []
        self._joins: dict[Any, int] = {}  # what tells that a machine has ended -> its place in the list
        self._ended: dict[int, tuple[str, float]] = {}  # machines that have ended badly: how, and when that was seen
        self._again = AGAIN_AT_MOST
        self._asked: Any = None  # for the GPUs of this machine's bundle
        self._call: tuple[str, str] = ("", "")
        self._tell_at = 0.0

    @property
    def count(self) -> int:
        """Of machines, the launching one included."""
        return len(self._shares)

    @property
    def room(self) -> Room:
        """Of the launching machine: for replicas and shards, if it has processors that Ray gives."""
        cpus = self._shares[0].cpus
        return Room(cpus, self._shares[0].gpus) if cpus else Room(0, roles=("coordinator", "evaluator"))

    def known(self, launched: Launched) -> Launched | None:
        """With the GPUs of this machine that Ray has given the run: others have the rest. None: Ray has not yet."""
        if self._asked is None:
            return launched._replace(gpus="") if self._on_gpus and self._node else launched
        try:
            told, _ = self._ray.wait([self._asked], timeout=0)
            return launched._replace(gpus=self._ray.get(self._asked)) if told else None
        except self._ray.exceptions.RayError as error:
            raise SquallError(f"Ray does not say which GPUs it has given this machine ({error})") from error

    def address(self) -> Address:
        """Where this machine listens, if the user does not say."""
        return self._ray.util.get_node_ip_address(), 0

    def start(self, name: str, head: str, token: str) -> None:
        """Ask for the machines of the run of that name, which join at `head`."""
        from ray.util.placement_group import placement_group
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        own = [self._shares[0]] if self._node and self._shares[0].cpus else []
        wanted = [*own, *self._shares[1:]]
        self._call = head, token
        self._tell_at = time.monotonic() + TELL_AFTER_S
        if not wanted:
            return
        self._group = placement_group(
            [_resources(share) for share in wanted], name=f"squall {name}",
            strategy="PACK" if self._packed else "SPREAD",
            bundle_label_selector=[{"ray.io/node-id": self._node} for _ in own] + [{}] * len(self._shares[1:]),
        )  # fmt: skip
        if own and own[0].gpus:
            here = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=0)
            ask = self._ray.remote(visible_gpus).options(num_cpus=0, num_gpus=own[0].gpus, scheduling_strategy=here)
            self._asked = ask.remote()
        actor = self._ray.remote(MachineActor)
        for number, share in enumerate(self._shares[1:], start=1):
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number - 1 + len(own))
            self._actors.append(
                actor.options(
                    name=f"squall {name} machine {number}", namespace=f"squall {name} {os.urandom(8).hex()}",
                    num_cpus=share.cpus, num_gpus=share.gpus, scheduling_strategy=strategy,
                    max_restarts=-1, max_task_retries=-1, runtime_env=OUTLIVES,
                ).remote(number)
            )  # fmt: skip
            self._join(number)

    def _join(self, number: int) -> None:
        # Arguments of a call go from process to process: the token is in no table of Ray's.
        joined = self._actors[number - 1].join.remote(*self._call, self._shares[number].cpus)
        self._joins[joined] = number

    def turn(self, now: float, begun: bool) -> Iterator[str]:
        """What the user is to be told. Raises `SquallError` for a machine that does not come to the beginning."""
        if self.gone:
            return
        self.gone = self._watch.gone(now)
        if self.gone:
            if not begun:
                raise SquallError(self.gone)
            yield f"{self.gone}; the run goes on with the machines that it has, and gets no new ones"
            self.close()
            return
        if self._tell_at <= now:
            self._tell_at = float("inf")
            if self._group is not None and not (begun or self._watch.silent() or self._placed):
                yield self._missing()
        over, _ = (
            self._ray.wait(list(self._joins), num_returns=len(self._joins), timeout=0) if self._joins else ([], [])
        )
        for join in over:
            number = self._joins.pop(join)
            how = self._outcome(join)
            if how and not begun:
                raise SquallError(f"Ray's machine {number} did not join: {how}; its log, which Ray has, says more")
            if how:
                self._ended[number] = how, now
        for number, (how, seen_at) in list(self._ended.items()):
            if self._again and now >= seen_at + AGAIN_AFTER_S:
                del self._ended[number]
                self._again -= 1
                yield f"Ray's machine {number} has ended: {how}; it joins anew"
                self._join(number)

    def _outcome(self, join: Any) -> str:
        try:
            return str(self._ray.get(join))
        except self._ray.exceptions.RayError as error:
            return str(error)

    @property
    def _placed(self) -> bool:
        return str(self._ray.util.placement_group_table(self._group)["state"]) == "CREATED"

    def _missing(self) -> str:
        *_, last = self._shares
        gpus = f" and {last.gpus} GPUs" if last.gpus else ""
        free = ", ".join(str(share.cpus) for share in self._free(False).values())
        return (
            f"Ray has no room yet for {len(self._shares) - 1} machines with {last.cpus} CPUs{gpus} each beside this one"
            f" (free CPUs of its nodes: {free}): waiting for it. `ray status` shows who has what; --machines and"
            " --cores ask for other machines; Ctrl-C ends this"
        )

    def close(self) -> None:
        """The run is over, and its machines end by themselves now; or Ray is. Nothing is left in the cluster."""
        if not self._watch.silent():  # else nothing is left, or the rest goes when Ray does
            with suppress(Exception):
                self._dismiss()
        self._joins, self._actors, self._group = {}, [], None
        if self._ours or self.gone:  # Ray ends whoever speaks with it, a minute after it is gone itself
            self._ours = False
            self._ray.shutdown()

    def _dismiss(self) -> None:
        if self._joins:
            self._ray.wait(list(self._joins), num_returns=len(self._joins), timeout=LEAVE_WITHIN_S)
        for actor in self._actors:
            self._ray.kill(actor)
        if self._group is not None:
            self._ray.util.remove_placement_group(self._group)

    def _free(self, gpus: bool) -> dict[str, Share]:
        """Of each node; of all that it has, where this process is no part of the cluster."""
        nodes = {node["NodeID"]: node["Resources"] for node in self._ray.nodes() if node["Alive"]}
        if self._node:
            from ray._private.state import available_resources_per_node  # Ray's libraries use it; there is no other

            nodes = {name: found for name, found in available_resources_per_node().items() if name in nodes}
        return {n: Share(int(r.get("CPU", 0)), int(r.get("GPU", 0)) if gpus else 0) for n, r in nodes.items()}


def _resources(share: Share) -> dict[str, int]:
    return {"CPU": share.cpus, **({"GPU": share.gpus} if share.gpus else {})}


def _servers(ray: Any, node: str) -> dict[str, Address]:
    """Of Ray, which this process speaks with."""
    if not node:
        return {}  # a proxy does so
    here = next(found for found in ray.nodes() if found["NodeID"] == node)
    store = parse_address(ray.get_runtime_context().gcs_address, "Ray's address")
    return {"store (GCS)": store, "raylet": (here["NodeManagerAddress"], here["NodeManagerPort"])}


def _from_outside() -> bool:
    """Whether this process only calls the cluster (an address ray://...), and is on none of its nodes."""
    from ray.util.client import ray as client

    return bool(client.is_connected())


def _connect(ray: Any) -> None:
    """To the cluster of RAY_ADDRESS, to the one that was started on this machine, or to a new one."""
    from ray._private.utils import read_ray_address  # what `ray.init` reads, which would call a dead Ray for minutes

    address = os.environ.get("RAY_ADDRESS", "")
    called = address or read_ray_address() or ""
    try:
        gone = ":" in called and "://" not in called and not _answers(called, bool(address))
        if called and not gone:
            ray.init(logging_level=logging.WARNING)
        else:
            ray.init("local", logging_level=logging.WARNING, _system_config=OURS)
    except Exception as error:
        where = f" at {address} (RAY_ADDRESS)" if address else ""
        why = str(error).partition("\n")[0]
        remedy = "look whether `ray status` answers there" if address else "look whether `ray start --head` works here"
        raise ValueError(f"Ray was not reached{where}: {why}: {remedy}") from None


def _answers(address: str, must: bool) -> bool:
    try:
        socket.create_connection(parse_address(address, "RAY_ADDRESS"), ANSWER_WITHIN_S).close()
    except OSError:
        if must:
            raise
        return False
    return True
