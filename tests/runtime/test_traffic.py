"""What machines send each other is in the record by link, while the run goes on."""

import json
from contextlib import closing
from pathlib import Path

import squall
from squall.launchers.inline import LoneChannel
from squall.plan import make_plan
from squall.protocol.effects import End
from squall.protocol.messages import Stats
from squall.protocol.nodes import Node
from squall.protocol.notes import TrainingBegan, WorkReported
from squall.report import Reader
from squall.runtime.job import private_job
from squall.runtime.recorder import CoordinatorHost
from squall.runtime.run_plan import Aims
from squall.runtime.traffic import TELL_EVERY_S, TrafficHost
from squall.vector import Layout
from tests.runtime.test_lies import SITE
from tests.tasks import INLINE, regression


def test_bytes_are_told_by_link_and_every_second(run_dir: Path) -> None:
    """Shard 0 and replica 0 are on machine 0, shard 1 and replica 1 on the other one: half of each exchange crosses."""
    run_dir.mkdir()
    strategy, task = squall.Downpour(replicas=2, shards=2), regression()()
    plan = make_plan(strategy, INLINE, Aims(epochs=1))
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    job = private_job(plan, strategy, task, layout, run_dir)
    recorder = CoordinatorHost(job, LoneChannel())
    host = TrafficHost(recorder, job, SITE)

    def state() -> dict[str, str]:
        recorder.record.commit(0.0, force=True)
        with closing(Reader(run_dir / "run.sqlite")) as reader:
            return reader.state()

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
