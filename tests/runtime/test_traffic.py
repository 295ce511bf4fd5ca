"""What machines send each other is in the record by link, while the run goes on."""

import itertools
import json
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import squall
from squall.launchers.inline import LoneChannel
from squall.parts.shares import shares
from squall.plan import make_plan
from squall.protocol.effects import End, Payload
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import MemberJoined, MemberLeft, MemberReplaced, TrainingBegan, WorkReported
from squall.report import Reader
from squall.runtime.job import private_job
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.traffic import TELL_EVERY_S, TrafficHost
from squall.vector import Layout
from tests.parts.test_spread import SPLITS, model_task
from tests.runtime.test_lies import SITE
from tests.tasks import INLINE, regression


class Counted:
    """Shard 0 and replica 0 are on machine 0, shard 1 and replica 1 on the other one: half of each exchange crosses."""

    def __init__(self, run_dir: Path, task: squall.Task | None = None, starts: tuple[int, ...] = ()) -> None:
        """`starts`: of the stages of a task that is split, into two parts."""
        run_dir.mkdir()
        strategy, task = squall.Downpour(replicas=2, shards=2), task or regression()()
        plan = make_plan(strategy, INLINE, Aims(epochs=1))
        self.layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
        job = private_job(plan, strategy, task, self.layout, run_dir)
        job = replace(job, shares=shares(task, self.layout, starts, 2) if starts else ())
        self.ranges = job.ranges
        self.recorder, self.directory = CoordinatorHost(job, LoneChannel()), run_dir
        self.host = TrafficHost(self.recorder, job, replace(SITE, seats=dict(SITE.seats)))

    def state(self) -> dict[str, str]:
        self.recorder.record.commit(0.0, force=True)
        with closing(Reader(self.directory / "run.sqlite")) as reader:
            return reader.state()


def test_bytes_are_told_by_link_and_every_second(run_dir: Path) -> None:
    counted = Counted(run_dir)
    host, state, layout = counted.host, counted.state, counted.layout
    near, far = json.loads(state()["shard_bytes"])
    assert near + far == 4 * layout.length
    host.perform(TrainingBegan(), 1.0)
    host.perform(WorkReported(Node("replica", 0), Stats(16, 1, pushes=2, fetches=1)), 1.0)
    assert json.loads(state()["links"]) == [[0, 1, 2 * far], [1, 0, far]]
    host.perform(WorkReported(Node("replica", 1), Stats(16, 1, pushes=1, fetches=1)), 1.0 + TELL_EVERY_S / 2)
    assert json.loads(state()["links"]) == [[0, 1, 2 * far], [1, 0, far]], "not at each report"
    host.perform(WorkReported(Node("replica", 1), Stats(16, 1, pushes=1, fetches=0)), 1.0 + TELL_EVERY_S)
    assert json.loads(state()["links"]) == [[0, 1, 2 * far + near], [1, 0, far + 2 * near]]
    host.perform(WorkReported(Node("replica", 1), Stats(16, 1, pushes=0, fetches=1)), 1.0 + TELL_EVERY_S)
    host.perform(End("finished"), 1.0 + TELL_EVERY_S)
    told = state()
    assert json.loads(told["links"]) == [[0, 1, 2 * (far + near)], [1, 0, far + 2 * near]]
    assert json.loads(told["traffic"])["0"] == [2 * (far + near), far + 2 * near]


def test_what_goes_on_to_a_shards_backup_counts_and_where_the_shard_is_when_that_has_taken_over(run_dir: Path) -> None:
    """Shard 0's backup is on machine 1, where replica 1 is, which gives its pushes to both of them in one."""
    counted = Counted(run_dir)
    near, _ = json.loads(counted.state()["shard_bytes"])
    backup = Node("backup", 0)

    times = itertools.count(1.0, TELL_EVERY_S)

    def links(replica: int, stats: Stats) -> list[list[int]]:
        counted.host.perform(WorkReported(Node("replica", replica), stats), next(times))
        found: list[list[int]] = json.loads(counted.state()["links"])
        return found

    counted.host.perform(MemberJoined(backup, 7, 1, ()), 1.0)
    pushed = Stats(16, 1, pushes=3, fetches=0)
    far = json.loads(counted.state()["shard_bytes"])[1]
    assert links(0, pushed) == [[0, 1, 3 * far + 3 * near], [1, 0, 0]]
    assert links(1, pushed) == [[0, 1, 3 * far + 3 * near], [1, 0, 3 * near]]
    counted.host.perform(MemberReplaced(Node("shard", 0), "machine 1, by its backup"), 2.0)
    counted.host.perform(MemberLeft(backup), 2.0)
    assert links(1, pushed) == [[0, 1, 3 * far + 3 * near], [1, 0, 3 * near]], "both shards are on its machine"
    assert links(0, pushed) == [[0, 1, 6 * far + 6 * near], [1, 0, 3 * near]]
    assert counted.state()["copied"] == str(3 * near), "of replica 0, to a backup that was on neither's machine"


def test_what_another_part_pushes_goes_on_to_a_backup_beside_it_as_well(run_dir: Path) -> None:
    """Replica 0 is on machine 0, as shard 0 is, and its other part on machine 1, as the shard's backup is."""
    how, _, starts = SPLITS["pipeline"]
    counted = Counted(run_dir, model_task(how), starts)
    counted.host.perform(MemberJoined(Node("replica", 0), 8, 0, (1,)), 1.0)
    counted.host.perform(MemberJoined(Node("backup", 0), 7, 1, ()), 1.0)
    counted.host.perform(WorkReported(Node("replica", 0), Stats(16, 1, pushes=3, fetches=0)), 1.0)
    pushes = [Payload("gradient", Node("replica"), 0, 0, 0, part=part) for part in (0, 1)]
    first, other = (4 * counted.ranges(push).count for push in pushes)
    assert other > 0
    assert counted.state()["copied"] == str(3 * (first + other))
