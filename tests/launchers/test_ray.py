"""A run on the nodes of a Ray cluster, which are processes of this machine; its machines have their own arenas."""

from __future__ import annotations

import importlib.util
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from squall import Downpour, Settings
from squall.launchers.head import head_of
from squall.plan import make_plan
from squall.report import Reader
from squall.report.coverage import audit
from tests.launchers.processes import FILE, START_S, Started, wait_for


class Cluster:
    """Three nodes with a processor each; this machine's own is the first."""

    def __init__(self) -> None:
        from ray.cluster_utils import Cluster

        self.ray = Cluster(initialize_head=True, head_node_args={"num_cpus": 1})
        self.others = [self.ray.add_node(wait=False, num_cpus=1) for _ in range(2)]
        self.ray.wait_for_nodes()

    def train(self, directory: Path, *flags: str) -> Started:
        environment = {**os.environ, "RAY_ADDRESS": self.ray.address}
        command = ["train", str(FILE), "--run-dir", str(directory), "--launcher", "ray", *flags]
        return Started(directory, *command, env=environment)

    def has_nothing_left(self) -> bool:
        state = self.ray.global_state
        actors = [actor for actor in state.actor_table(None).values() if actor["State"] != "DEAD"]
        groups = [group for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
        return not actors and not groups


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster()
    yield found
    found.ray.shutdown()


def test_a_run_is_on_three_nodes_and_leaves_nothing_on_them(cluster: Cluster, run_dir: Path) -> None:
    run = cluster.train(run_dir, "--replicas", "3", "--shards", "2", "--threads", "1")
    status, out, err = run.finish()
    assert status == 0, err
    assert "machine 2" in out
    assert ": machine 1 has joined" in err
    assert ": machine 2 has joined" in err
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete
    wait_for(cluster.has_nothing_left, START_S, "the cluster to be as it was")
    assert run.gone()


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which is not installed: pip install 'squall-train\[ray\]'"):
        launched()


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        address = f"127.0.0.1:{server.getsockname()[1]}"
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=rf"Ray was not reached at {address} \(RAY_ADDRESS\): .*refused: look whether"):
        launched()


def launched() -> None:
    strategy = Downpour(replicas=2)
    head_of(make_plan(strategy, Settings(launcher="ray")), strategy.recipe())
