"""A run on the nodes of a Ray cluster, which are processes of this machine; its machines have arenas of their own."""

from __future__ import annotations

import importlib.util
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import IO, Any

import pytest

import squall
from squall import Downpour, Settings
from squall.errors import SquallError
from squall.launchers.head_of_plan import head_of
from squall.launchers.on_ray.machines import RayMachines
from squall.launchers.roster import Launched
from squall.plan import make_plan
from squall.record.rows import EventRow, MetricRow, ProgressRow
from squall.report import Reader
from squall.report.coverage import audit
from tests import deep
from tests.launchers import answered
from tests.launchers.blobs import EXAMPLES
from tests.launchers.processes import FILE, START_S, Started, send, wait_for
from tests.launchers.test_scripts import SCRIPT
from tests.launchers.test_spread_parts import PIPED
from tests.tasks import INLINE

END_S = 15.0  # a full machine takes its time; Ray takes a minute to miss its own servers
MARK = "SQUALL_TEST_RUN"  # variable by which the processes of a run are known, wherever they are


class Cluster:
    """Nodes with so many processors; this machine's own is the first."""

    def __init__(self, *cpus: int, gpus: int = 0) -> None:
        """`gpus` of the first, which Ray believes."""
        from ray.cluster_utils import Cluster

        head = {"num_cpus": cpus[0], "num_gpus": gpus, "include_dashboard": False}
        self.ray = Cluster(initialize_head=True, head_node_args=head)
        self.others = [self.ray.add_node(wait=False, num_cpus=count) for count in cpus[1:]]
        self.ray.wait_for_nodes()

    def start(self, directory: Path, *arguments: str) -> Started:
        return Started(directory, *arguments, env={**os.environ, "RAY_ADDRESS": self.ray.address})

    def train(self, directory: Path, *flags: str) -> Started:
        return self.start(directory, *train(directory, *flags))

    def has_nothing_left(self) -> bool:
        state = self.ray.global_state
        actors = [actor for actor in state.actor_table(None).values() if actor["State"] != "DEAD"]
        groups = [group for group in state.placement_group_table().values() if group["state"] != "REMOVED"]
        return not actors and not groups

    def kill(self, node: Any) -> None:
        """The node and all that has begun there, as if it were unplugged."""
        there = descendants(node.all_processes["raylet"][0].process.pid)
        self.ray.remove_node(node, allow_graceful=False)
        send(there, signal.SIGKILL)


def train(directory: Path, *flags: str) -> list[str]:
    return ["train", str(FILE), "--run-dir", str(directory), "--launcher", "ray", "--threads", "1", *flags]


def descendants(pid: int) -> list[int]:
    children = [int(child) for task in Path(f"/proc/{pid}/task").iterdir() for child in read(task / "children").split()]
    return [pid, *(found for child in children for found in descendants(child))]


def read(file: Path) -> str:
    try:
        return file.read_text()
    except OSError:
        return ""


def marked(mark: str) -> list[str]:
    return [file.parent.name for file in Path("/proc").glob("[0-9]*/environ") if f"{MARK}={mark}" in read(file)]


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    found = Cluster(1, 1, 1)
    yield found
    found.ray.shutdown()


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    return tmp_path / f"ray-{os.getpid()}"  # processes are found by its name


@deep.only
def test_a_run_is_on_three_nodes_and_leaves_nothing_on_them(cluster: Cluster, run_dir: Path) -> None:
    run = cluster.train(run_dir, "--replicas", "3", "--shards", "2")
    status, out, err = run.finish()
    assert status == 0, err
    assert "machine 2" in out
    assert ": machine 1 has joined" in err
    assert ": machine 2 has joined" in err
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete
    wait_for(cluster.has_nothing_left, START_S, "the cluster to be as it was")
    assert run.gone()


@deep.only
@pytest.mark.parametrize("strategy", ["downpour", "all_reduce"])
def test_a_replica_has_its_parts_on_several_nodes(cluster: Cluster, run_dir: Path, strategy: str) -> None:
    flags = ("--strategy", strategy, "--replicas", "1", "--parts", "2", "--spread-parts", "--threads", "1")
    where = ("--run-dir", str(run_dir), "--launcher", "ray", "--epochs", "1")
    status, _, err = cluster.start(run_dir, "train", str(PIPED), *where, *flags).finish()
    assert status == 0, err
    assert re.search(r"^ +0: .* replica 0$", err, re.MULTILINE), err
    assert re.search(r"^ +1: .* part 1 of replica 0$", err, re.MULTILINE), err
    with closing(Reader(run_dir / "run.sqlite")) as reader:
        assert audit(reader).complete
    wait_for(cluster.has_nothing_left, START_S, "the cluster to be as it was")


@deep.only
def test_answers_of_other_nodes_come_to_the_directory_whole_and_in_order(cluster: Cluster, tmp_path: Path) -> None:
    trained = squall.fit(answered.task, Downpour(), run_dir=tmp_path / "run", settings=INLINE)
    out = tmp_path / f"answers-{os.getpid()}"
    (tmp_path / "go").touch()
    flags = ["--out", str(out), "--launcher", "ray", "--replicas", "3", "--threads", "1", "--batch-size", "1"]
    run = Started(
        out, "predict", str(trained.directory), answered.__file__, *flags,
        env={**os.environ, "RAY_ADDRESS": cluster.ray.address, "HOLDS": str(tmp_path)},
    )  # fmt: skip
    status, _, err = run.finish()
    assert status == 0, err
    assert {row.replica for row in run.rows(ProgressRow)} - {0}  # type: ignore[attr-defined]  # on other nodes
    found = squall.Predictions(out).load()
    assert isinstance(found, dict)
    assert found["number"].tolist() == list(range(answered.EXAMPLES))
    with closing(Reader(out / "run.sqlite")) as reader:
        assert audit(reader).complete
    wait_for(cluster.has_nothing_left, START_S, "the cluster to be as it was")


@deep.only
def test_what_a_script_measures_is_recorded_though_its_leader_is_on_another_machine(run_dir: Path) -> None:
    """The launching machine has the coordinator alone: nothing that scripts say is said there."""
    found = Cluster(0, 1, 1)
    try:
        flags = ["--run-dir", str(run_dir), "--launcher", "ray", "--replicas", "2", "--shards", "2", "--threads", "1"]
        run = found.start(run_dir, "run", *flags, SCRIPT, "--epochs", "2")
        status, _, err = run.finish()
        assert status == 0, err
        assert re.search(r"^ +0: .* coordinator$", err, re.MULTILINE), err
        with closing(Reader(run_dir / "run.sqlite")) as reader:
            assert audit(reader).complete
            metrics = reader.rows(MetricRow)
        assert metrics[-1].examples == 2 * EXAMPLES, "what the leader measures behind its loop is of the final weights"
    finally:
        found.ray.shutdown()


@deep.only
def test_a_run_that_waits_for_room_says_what_is_missing_and_may_be_ended(cluster: Cluster, run_dir: Path) -> None:
    run = cluster.train(run_dir, "--replicas", "8", "--machines", "3")
    while "Ray has no room yet for 2 machines with 4 CPUs each beside this one" not in (line := read_line(run)):
        assert line, "the run has ended"
    run.process.send_signal(signal.SIGINT)
    status, _, err = run.finish()
    assert status == 130
    assert "interrupted before the training began" in err
    wait_for(cluster.has_nothing_left, START_S, "the cluster to be as it was")


def read_line(run: Started) -> str:
    return run.process.stderr.readline()


@deep.only
def test_a_node_that_dies_is_replaced_and_the_others_train_on(run_dir: Path) -> None:
    """No example is lost, and the run goes on with Ray where it was interrupted."""
    found = Cluster(1, 1, 2)
    try:
        run = found.train(run_dir, "--replicas", "3", "--machines", "3", "--cores", "1", "--epochs", "100000")
        run.wait_rows(EventRow, lambda row: row.kind == "started")  # type: ignore[attr-defined]
        found.kill(found.others[0])
        run.wait_rows(EventRow, lambda row: "on machine 3, which had room" in row.text)  # type: ignore[attr-defined]
        rows = len(run.rows(ProgressRow))
        wait_for(lambda: len(run.rows(ProgressRow)) > rows + 20, START_S, "progress")
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
        assert status == 130, err
        with closing(Reader(run_dir / "run.sqlite")) as reader:
            assert audit(reader).complete
            times = sorted(row.time_s for row in reader.rows(ProgressRow))
        longest_s = max(later - earlier for earlier, later in pairwise(times))
        print(f"longest time without progress: {longest_s:.2f} s")
        assert longest_s < 2
        again = found.start(run_dir, "resume", str(run_dir), "--until", "loss=100")
        status, _, err = again.finish()
        assert status == 0, err
        assert "machine 2 has joined" in err
        wait_for(found.has_nothing_left, START_S, "the cluster to be as it was")
    finally:
        found.ray.shutdown()


@deep.only
def test_without_a_cluster_a_ray_is_started_which_ends_with_the_run(run_dir: Path) -> None:
    """Also where one was killed, which has left its address behind."""
    with TemporaryDirectory() as own:  # its sockets lie there, whose paths must be short
        (Path(own) / "ray").mkdir()
        (Path(own) / "ray" / "ray_current_cluster").write_text(nobodys_address())
        variables = {**os.environ, MARK: run_dir.name, "RAY_TMPDIR": own}
        run = Started(run_dir, *train(run_dir, "--replicas", "2", "--machines", "2", "--packed"), env=variables)
        status, _, err = run.finish()
        assert status == 0, err
        assert "machine 1 has joined" in err
        assert (Path(own) / "ray" / "session_latest").exists()
        wait_for(lambda: not marked(run_dir.name), START_S, "all of it to end")


@deep.only
def test_machines_on_one_node_have_gpus_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launching machine's processes are not Ray's, so it asks which GPUs its bundle has."""

    class Sees:  # in place of a machine; it tells by failing
        def __init__(self, number: int) -> None:
            self.number = number

        def join(self, *call: object) -> str:
            return f"GPU {os.environ['CUDA_VISIBLE_DEVICES']}"

    monkeypatch.setattr("squall.launchers.on_ray.machines.MachineActor", Sees)
    found = Cluster(2, gpus=2)
    try:
        monkeypatch.setenv("RAY_ADDRESS", found.ray.address)
        settings = Settings(launcher="ray", machines=2, packed=True)
        machines = RayMachines(make_plan(Downpour(replicas=2), settings, device="cuda"))
        launched = Launched(Path(), None, -1)
        machines.start("gpus", "127.0.0.1:1", "token")
        wait_for(lambda: machines.known(launched), START_S, "Ray to say what this machine has")
        told: list[str] = []

        def joined() -> bool:
            try:
                told.extend(machines.turn(time.monotonic(), begun=False))
            except SquallError as error:
                told.append(str(error))
            return any("did not join" in text for text in told)

        wait_for(joined, START_S, "the other machine to say so")
        known = machines.known(launched)
        assert known is not None
        other = re.search(r"did not join: GPU (\d);", told[-1])
        assert other is not None, told
        assert {known.gpus, other[1]} == {"0", "1"}
        machines.close()
    finally:
        import ray

        ray.shutdown()
        found.ray.shutdown()


def killed(mark: str, server: str) -> None:
    """The server of the Ray that was started for the run of that mark."""
    (pid,) = [pid for pid in marked(mark) if server in read(Path(f"/proc/{pid}/cmdline"))]
    os.kill(int(pid), signal.SIGKILL)


@contextmanager
def on_its_own_ray(run_dir: Path) -> Iterator[subprocess.Popen[str]]:
    """A run that trains on two machines of a Ray that it has started. It is over, and nothing of it is left."""
    with TemporaryDirectory() as own:
        (Path(own) / "ray").mkdir()
        variables = {**os.environ, MARK: run_dir.name, "RAY_TMPDIR": own}
        flags = ["--replicas", "2", "--shards", "2", "--machines", "2", "--packed", "--epochs", "100000"]
        command = [sys.executable, "-m", "squall", *train(run_dir, *flags)]
        run = subprocess.Popen(command, env=variables, stderr=subprocess.PIPE, text=True, start_new_session=True)
        try:
            Started.wait_rows(Seen(run_dir), EventRow, lambda row: row.kind == "started")  # type: ignore[attr-defined]
            yield run
            wait_for(lambda: not marked(run_dir.name), START_S, "all of it to end")
        finally:
            run.kill()
            send(map(int, marked(run_dir.name)), signal.SIGKILL)


@deep.only
@pytest.mark.parametrize("twice", [False, True])
def test_signals_end_a_run_with_its_own_ray_soon_with_a_snapshot(run_dir: Path, twice: bool) -> None:
    """SIGTERM to all processes of a terminal's job reaches Ray's as well."""
    with on_its_own_ray(run_dir) as run:
        if twice:
            run.send_signal(signal.SIGINT)
            Started.wait_rows(Seen(run_dir), EventRow, lambda row: row.kind == "stopped")  # type: ignore[attr-defined]
            run.send_signal(signal.SIGINT)
        else:
            os.killpg(run.pid, signal.SIGTERM)
        ends(run, run_dir)


def ends(run: subprocess.Popen[str], run_dir: Path) -> None:
    began = time.monotonic()
    _, err = run.communicate(timeout=START_S)
    assert time.monotonic() - began < END_S
    assert run.returncode == 130, err
    assert f"go on from snapshot 1 with: squall resume {run_dir}" in err


def goes_on_without_ray(err: IO[str], run: Started, machines_stay: bool = True) -> None:
    assert any("Ray is gone: its" in line and "the run goes on" in line for line in err)
    for _ in range(2):
        run.goes_on()
    gone = [row for row in run.rows(EventRow) if row.kind in ("lost", "left")]  # type: ignore[attr-defined]
    assert not (machines_stay and gone)


@deep.only
@pytest.mark.parametrize("server", ["raylet", "gcs_server"])
def test_when_its_own_ray_dies_a_run_goes_on(run_dir: Path, server: str) -> None:
    with on_its_own_ray(run_dir) as run:
        killed(run_dir.name, server)
        assert run.stderr is not None
        goes_on_without_ray(run.stderr, Seen(run_dir), machines_stay=server == "gcs_server")
        run.send_signal(signal.SIGINT)
        ends(run, run_dir)


@deep.only
def test_when_the_head_of_its_cluster_dies_a_run_goes_on(run_dir: Path) -> None:
    """Half a minute later, as a cluster may start its head again; by and by Ray's servers end on the other nodes."""
    found = Cluster(1, 1)
    run = found.train(run_dir, "--replicas", "2", "--shards", "2", "--machines", "2", "--epochs", "100000")
    try:
        run.wait_rows(EventRow, lambda row: row.kind == "started")  # type: ignore[attr-defined]
        for node, server in ((found.ray.head_node, "gcs_server"), (found.others[0], "raylet")):
            process = node.all_processes[server][0].process
            process.kill()
            process.wait()
        assert run.process.stderr is not None
        goes_on_without_ray(run.process.stderr, run)
        run.process.send_signal(signal.SIGINT)
        status, _, err = run.finish()
        assert status == 130, err
        assert "nothing was saved" not in err
        wait_for(run.gone, END_S, "the processes to end")
    finally:
        for node in (found.ray.head_node, *found.others):
            node.kill_all_processes(check_alive=False, allow_graceful=False)


class Seen(Started):
    """The record of a run."""

    def __init__(self, directory: Path) -> None:
        self.directory = directory


def test_without_ray_the_remedy_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ValueError, match=r"which is not installed: pip install 'squall-train\[ray\]'"):
        launched()


def test_a_cluster_that_does_not_answer_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    address = nobodys_address()
    monkeypatch.setenv("RAY_ADDRESS", address)
    with pytest.raises(ValueError, match=rf"Ray was not reached at {address} \(RAY_ADDRESS\): .*refused: look whether"):
        launched()


def nobodys_address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as server:
        return f"127.0.0.1:{server.getsockname()[1]}"


def launched() -> None:
    strategy = Downpour(replicas=2)
    head_of(make_plan(strategy, Settings(launcher="ray")), strategy.recipe())
