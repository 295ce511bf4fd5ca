"""Cluster files: what they say, what is refused and in which line, and that writing loses nothing."""

from __future__ import annotations

import dataclasses
import math
import random
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from squall.errors import ClusterError
from squall.sim.cluster.jitter import Constant, Jitter, LogNormal, Pareto, Trace
from squall.sim.cluster.model import Cluster
from squall.sim.cluster.parts import ROLES, FailureLaw, Link, MachineKind, Overhead, Preemption
from squall.sim.cluster.split_step import ParallelStep, PipelineStep
from squall.sim.cluster.tables import Document
from squall.sim.cluster.units import BANDWIDTH, TIME, parse, write_bandwidth, write_time

EXAMPLE = """\
# Eight workers, and one machine that keeps the parameters.
[[machines]]
name = "worker"
count = 8
cores = 2
step = "12 ms"
jitter = { law = "log-normal", sigma = 0.2 }
slowdown = [1, 1.25]
exchange = [
    [1000, "58 us"],  # measured
    [1000000, "0.39 ms"],
]
roles = ["replica", "evaluator"]

[[machines]]
name = "server"
cores = 4
speed = 0.5
memory = "12 GB/s"
interface = "25 Gbit/s"
roles = ["shard", "coordinator"]

[links.between]
latency = "100 us"
jitter = "20 us"
bandwidth = "1 Gbit/s"
loss = 0.001

[failures.replica]
every = "6 h"
repair = "2 min"

[[preemptions]]
at = "30 min"
machine = "worker"
count = 2
for = "10 min"
every = "1 h"
"""


def load(text: str, folder: Path) -> Cluster:
    path = folder / "cluster.toml"
    path.write_text(text, encoding="utf-8")
    return Cluster.load(path)


def test_a_file_is_read_in_seconds_and_bytes(tmp_path: Path) -> None:
    worker = MachineKind(
        name="worker", count=8, cores=2, step_s=0.012, jitter=LogNormal(0.2), slowdown=(1.0, 1.25),
        exchange=((1000, 58e-6), (1_000_000, 390e-6)), roles=("replica", "evaluator"),
    )  # fmt: skip
    server = MachineKind(
        name="server", cores=4, speed=0.5, memory=12e9, interface=3.125e9, roles=("shard", "coordinator")
    )  # fmt: skip
    assert load(f'{EXAMPLE}\n[heartbeats]\nlost_after = "5 s"\n', tmp_path) == Cluster(
        machines=(worker, server),
        between=Link(latency_s=100e-6, jitter_s=20e-6, bandwidth=125e6, loss=0.001),
        failures={"replica": FailureLaw(every_s=21600, repair_s=120)},
        preemptions=(Preemption(at_s=1800, machine="worker", count=2, for_s=600, every_s=3600),), lost_after_s=5.0,
    )  # fmt: skip


def test_the_example_of_the_docs_is_a_cluster_file(tmp_path: Path) -> None:
    page = (Path(__file__).parents[2] / "docs" / "cluster.md").read_text(encoding="utf-8")
    example = re.search(r"```toml\n(.*?)```", page, re.DOTALL)
    assert example is not None
    cluster = load(example[1], tmp_path)
    assert [(machine.name, machine.count) for machine in cluster.machines] == [("worker", 8), ("server", 1)]
    assert cluster.preemptions[0].every_s == 7200
    for key in (*_keys(MachineKind), *_keys(Link)):
        assert f"| `{key}` |" in page, f"docs/cluster.md does not explain {key}"


def _keys(kind: type) -> list[str]:
    """As the file names a dataclass's fields."""
    return [field.name.removesuffix("_s") for field in dataclasses.fields(kind)]


def test_step_times_follow_from_the_first_machine(tmp_path: Path) -> None:
    cluster = load(EXAMPLE, tmp_path)
    assert cluster.measured
    assert [cluster.step_s(machine) for machine in cluster.machines] == [0.012, 0.024]
    own = load('[[machines]]\nname = "a"\n[[machines]]\nname = "b"\nspeed = 2\n', tmp_path)
    assert not own.measured
    assert [own.step_s(machine, own_s=0.1) for machine in own.machines] == [0.1, 0.05]


def test_the_time_of_an_exchange_between_and_beyond_the_measured_sizes() -> None:
    machine = MachineKind(name="m", exchange=((1000, 60e-6), (3000, 100e-6)))
    times = [machine.exchange_s(elements) for elements in (0, 500, 1000, 2000, 3000, 30_000)]
    assert times == pytest.approx([50e-6, 55e-6, 60e-6, 80e-6, 100e-6, 1e-3])
    assert machine.doorbell_s == pytest.approx(50e-6, rel=0.01)
    assert MachineKind(name="m", exchange=((1000, 20e-6),)).exchange_s(1) == pytest.approx(20e-6)
    assert MachineKind(name="m", memory=12e9).exchange_s(1_000_000) == pytest.approx(50e-6 + 1e-3)


def test_the_time_of_a_round_of_all_reduce_alike() -> None:
    machine = MachineKind(name="m", reduce=((1000, 1e-3), (3000, 2e-3)))
    assert [machine.round_s(n) for n in (1, 1000, 2000, 6000)] == pytest.approx([1e-3, 1e-3, 1.5e-3, 4e-3])
    assert MachineKind(name="m", memory=14e9).round_s(1_000_000) == pytest.approx(0.5e-3 + 4e-3)


def test_computations_beyond_the_cores_share_them() -> None:
    machine = MachineKind(name="m", cores=2, slowdown=(1.0, 1.5))
    assert [machine.slowdown_of(running) for running in (1, 2, 4)] == [1.0, 1.5, 3.0]
    assert machine.slowdown_of(1, looking_out=1) == 1.0, "it has a core of its own, and leaves the memory alone"
    assert machine.slowdown_of(2, looking_out=2) == 3.0, "four share two cores"
    assert [MachineKind(name="m", cores=2).slowdown_of(running) for running in (1, 2, 4)] == [1.0, 1.0, 2.0]


# ---------------------------------------------------------------- jitter


@pytest.mark.parametrize("law", [Constant(), LogNormal(0.5), Pareto(3.0), Trace("f", (1.0, 2.0, 6.0))], ids=str)
def test_a_law_has_mean_1_and_repeats_with_its_seed(law: Jitter) -> None:
    chance = random.Random(1)
    drawn = [law.draw(chance) for _ in range(50_000)]
    assert math.fsum(drawn) / len(drawn) == pytest.approx(1, abs=0.02)
    again = random.Random(1)
    assert [law.draw(again) for _ in range(10)] == drawn[:10]


def test_laws_have_their_shapes() -> None:
    chance = random.Random(2)
    logs = [math.log(LogNormal(0.5).draw(chance)) for _ in range(20_000)]
    mean = math.fsum(logs) / len(logs)
    assert math.sqrt(math.fsum((x - mean) ** 2 for x in logs) / len(logs)) == pytest.approx(0.5, rel=0.03)
    tail = [Pareto(3.0).draw(chance) for _ in range(20_000)]
    assert min(tail) >= 2 / 3  # the scale whose mean is 1
    assert sum(x > 4 / 3 for x in tail) / len(tail) == pytest.approx(1 / 8, rel=0.1)  # twice the scale: 2 ** -3
    assert {Trace("f", (1.0, 2.0, 6.0)).draw(chance) for _ in range(100)} == {1 / 3, 2 / 3, 2.0}


def test_a_trace_lies_beside_the_cluster_file(tmp_path: Path) -> None:
    (tmp_path / "steps.txt").write_text("# seconds\n0.01\n\n0.03  # slow\n")
    cluster = load('[[machines]]\nname = "m"\njitter = { law = "trace", file = "steps.txt" }\n', tmp_path)
    assert cluster.machines[0].jitter == Trace("steps.txt", (0.01, 0.03))


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "there is no file"),
        ("# nothing\n", "holds no times"),
        ("0\n0\n", "are 0"),
        ("1.5\n2 ms\n", r"steps\.txt, line 2, holds '2 ms'"),
        ("1.5\n-2\n", r"steps\.txt, line 2, holds '-2'"),
        ("nan\n", r"steps\.txt, line 1"),
        ("1\n" * 600_000, "larger than 1 MiB"),
    ],
)
def test_a_trace_that_is_none_is_refused(tmp_path: Path, content: str | None, complaint: str) -> None:
    if content is not None:
        (tmp_path / "steps.txt").write_text(content)
    text = '[[machines]]\nname = "m"\n\njitter = { law = "trace", file = "steps.txt" }\n'
    with pytest.raises(ClusterError, match=rf"^cluster\.toml, line 4: .*{complaint}.*: \w"):
        load(text, tmp_path)


# ---------------------------------------------------------------- what is refused

REFUSED = [  # (what stands in the example, what stands there instead, line, complaint and remedy)
    ('latency = "100 us"', "latency = 100", 24, 'latency = 100 has no unit: write for example latency = "100 us"'),
    ('latency = "100 us"', 'latency = "100"', 24, 'latency = "100" has no unit: write for example'),
    ('latency = "100 us"', 'latency = "100 usec"', 24, "the unit 'usec', which is not one of ns, us"),
    ('latency = "100 us"', 'latency = "soon"', 24, "'soon' is not a time: write for example"),
    ('latency = "100 us"', "latency = true", 24, "latency = true is not a time: write for example"),
    ('latency = "100 us"', 'latency = "-1 us"', 24, "impossible: it must be 0 or more"),
    ('latency = "100 us"', 'latency = "1e999 s"', 24, "impossible: it must be 0 or more"),
    ('bandwidth = "1 Gbit/s"', 'bandwidth = "0 Gbit/s"', 26, "impossible: it must be above 0"),
    ('bandwidth = "1 Gbit/s"', 'bandwidth = "1 Gbps"', 26, "the unit 'Gbps', which is not one of bit/s"),
    ("loss = 0.001", "loss = 1", 27, "loss = 1 is not a chance from 0 to below 1: write"),
    ("loss = 0.001", "loss = nan", 27, "loss = nan is not a chance"),
    ("loss = 0.001", "los = 0.001", 27, "unknown key 'los': did you mean 'loss'?"),
    ("loss = 0.001", "[links.outside]", 27, "unknown key 'outside': the keys here are between, within"),
    ("count = 8", "count = 0", 4, "count = 0 is not a whole number from 1 to"),
    ("count = 8", "count = 8.5", 4, "count = 8.5 is not a whole number"),
    ("cores = 2", "core = 2", 5, "unknown key 'core': did you mean 'cores'?"),
    ("cores = 4", "core = 4", 17, "unknown key 'core': did you mean 'cores'?"),
    ('step = "12 ms"', 'step = "0 ms"', 6, "impossible: it must be above 0"),
    ('step = "12 ms"', "speed = 1" + "0" * 400, 6, "is not a number above 0 and below"),
    ("speed = 0.5", 'step = "1 ms"\nspeed = 0.5', 19, "step and speed are both given: leave one out"),
    ("speed = 0.5", "speed = 0", 18, "speed = 0 is not a number above 0"),
    ("sigma = 0.2", "sigma = -0.2", 7, "sigma = -0.2 is not a number above 0"),
    ("sigma = 0.2", "alpha = 2", 7, "unknown key 'alpha': the keys here are law, sigma"),
    ('"log-normal", sigma = 0.2', '"pareto", alpha = 1', 7, "alpha = 1 is not a number above 1"),
    ('"log-normal", sigma = 0.2', '"pareto"', 7, "has no 'alpha': add alpha = ..."),
    ('"log-normal"', '"lognormal"', 7, "unknown: did you mean 'log-normal'?"),
    ('law = "log-normal", ', "", 7, "jitter has no law: write"),
    ("{ law = \"log-normal\", sigma = 0.2 }", '"log-normal"', 7, "is not a table: write"),
    ("[1, 1.25]", "[1, 1.25, 1.5]", 8, "3 factors for 2 cores: give one for each"),
    ("[1, 1.25]", "[1, 0.5]", 8, "the factor 0.5 is impossible"),
    ("[1, 1.25]", "[1.5, 2]", 8, "the first factor is 1.5: it is 1"),
    ("[1, 1.25]", "[]", 8, "not a list with something in it: write"),
    ('"58 us"', "58", 9, 'exchange = 58 has no unit: write for example exchange = [['),
    ("[1000000,", "[100,", 9, "100 elements come after 1000: sort the sizes"),
    ('[1000, "58 us"]', '[1000, "58 us", 1]', 9, "is no pair of elements and time"),
    ('["shard", "coordinator"]', '["shards"]', 21, "there is no role 'shards': use some of"),
    ('["shard", "coordinator"]', '["shard"]', 13, "no machine may hold a coordinator: add \"coordinator\""),
    ('["shard", "coordinator"]', '["shard", "shard"]', 21, "a role is named twice"),
    ('name = "server"', 'name = "worker"', 16, "there are two machines 'worker': give each its own name"),
    ('name = "server"\n', "", 15, "machines has no 'name': add name"),
    ('name = "server"', 'name = "ser ver"', 16, "other characters: use letters"),
    ("[failures.replica]", "[failures.replicas]", 29, "unknown key 'replicas': did you mean 'replica'?"),
    ('repair = "2 min"\n', "", 29, "failures.replica has no 'repair': add repair"),
    ('machine = "worker"', 'machine = "wroker"', 35, "unknown: did you mean 'worker'?"),
    ("count = 2", "count = 9", 36, "9 of 8 'worker' go: name at most 8"),
    ('every = "1 h"', 'every = "1 min"', 38, "go again before they are back: let every be"),
    ("[[preemptions]]", "[preemptions]", 33, "not a list of tables: begin each with [[preemptions]]"),
    ("[links.between]", "[link.between]", 23, "unknown key 'link': did you mean 'links'?"),
    ('every = "1 h"', "every = [", 38, "this is not TOML: "),
    ("cores = 2", "cores = ", 5, "this is not TOML: "),
    ("cores = 2", "cores = 2\ncores = 3", 6, "this is not TOML: "),
    ("cores = 2", "cores = " + "9" * 5000, 5, "this is not TOML: "),
    ("cores = 2", "cores = " + "[" * 5000, 5, "this is not TOML: "),
]  # fmt: skip


@pytest.mark.parametrize(("there", "instead", "line", "complaint"), REFUSED, ids=lambda x: str(x)[:30])
def test_what_is_wrong_is_refused_with_its_line_and_a_remedy(
    tmp_path: Path, there: str, instead: str, line: int, complaint: str
) -> None:
    assert EXAMPLE.count(there) == 1
    with pytest.raises(ClusterError) as caught:
        load(EXAMPLE.replace(there, instead), tmp_path)
    assert str(caught.value).startswith(f"cluster.toml, line {line}: ")
    assert complaint in str(caught.value)


PARTS = """
[parts]
shares = [0.5, 0.6]
microbatches = 8
passed = [1000]
"""


@pytest.mark.parametrize(
    ("there", "instead", "line", "complaint"),
    [
        ("shares = [0.5, 0.6]", "", 40, "parts has no 'shares': add shares"),
        ("[0.5, 0.6]", "[0.5, 0]", 41, "0 is impossible in shares: write for example shares = [0.55"),
        ("[0.5, 0.6]", "[0.5]", 41, "1 shares are no parts of a replica: give 1 for each of at least two parts"),
        ("[1000]", "[1000]\nschedule = \"zero-bubble\"", 41, "2 shares are no stages of a replica: give 2 for each"),
        ("[1000]", "[1000]\nschedule = \"zb\"", 44, "unknown: use one of 1f1b"),
        ("microbatches = 8", "microbatches = 1", 42, '1 are fewer than there are parts: make more, or use "gpipe"'),
        ("microbatches = 8\n", "", 42, "passed is of a pipeline, and there are no microbatches: add microbatches"),
        ("passed = [1000]", "", 40, "parts has no 'passed': add passed = [...], elements from"),
        ("[1000]", "[1000, 2]", 43, "2 sizes between 2 stages: give 1"),
        ("[1000]", "[-1]", 43, "-1 is impossible in passed: write for example"),
        ("passed = [1000]", "waits = [[1, 2]]", 43, "the stages of a pipeline have microbatches and no waits: leave"),
        ("microbatches = 8\npassed = [1000]", "waits = [[1, 0]]", 42, "[1, 0] is no pair of elements and messages: w"),
        ("microbatches", "microbatch", 42, "unknown key 'microbatch': did you mean 'microbatches'?"),
    ],
)  # fmt: skip
def test_parts_that_cannot_be_are_refused_alike(
    tmp_path: Path, there: str, instead: str, line: int, complaint: str
) -> None:
    assert load(EXAMPLE + PARTS, tmp_path).parts == 2
    with pytest.raises(ClusterError) as caught:
        load(EXAMPLE + PARTS.replace(there, instead), tmp_path)
    assert str(caught.value).startswith(f"cluster.toml, line {line}: ")
    assert complaint in str(caught.value)


def test_step_times_need_one_of_the_first_machine(tmp_path: Path) -> None:
    text = EXAMPLE.replace('step = "12 ms"', "speed = 1").replace("speed = 0.5", 'step = "6 ms"')
    with pytest.raises(ClusterError, match=r"line 18: 'server' has a step time and the first machine, 'worker', has n"):
        load(text, tmp_path)


def test_files_that_are_none(tmp_path: Path) -> None:
    with pytest.raises(ClusterError, match=r"is no file: `squall measure FILE` writes one"):
        Cluster.load(tmp_path / "cluster.toml")
    with pytest.raises(ClusterError, match=r"line 1: there are no machines: begin with \[\[machines\]\]"):
        load("", tmp_path)
    with pytest.raises(ClusterError, match="larger than 64 KiB: put machines that are alike into one"):
        load("#" * 70_000, tmp_path)
    (tmp_path / "cluster.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="is not UTF-8 at byte 0: save it"):
        Cluster.load(tmp_path / "cluster.toml")


def test_lines_of_repeated_tables_and_of_statements_over_several_lines() -> None:
    text = 'x = """\n[[a]]\nb = 1\n"""\n[[a]]\nb = 1\n\n# b\n[[a]]\nc = [\n  [2],\n]\nb.d = { e = 1 }\n'
    document = Document(text, Path("t"))
    places = [("x",), ("a", 0), ("a", 0, "b"), ("a", 1), ("a", 1, "c", 0), ("a", 1, "b", "d", "e")]
    assert [document.line_of(place) for place in places] == [1, 5, 6, 9, 10, 13]


# ---------------------------------------------------------------- writing

seconds = st.floats(1e-9, 1e9)
rates = st.floats(1, 1e15)
parts = st.floats(1e-3, 9)
laws = st.one_of(
    st.just(Constant()), st.builds(LogNormal, parts), st.builds(Pareto, parts.map(lambda x: 1 + x)),
    st.just(Trace("steps.txt", (0.5, 1.5))),
)  # fmt: skip
links = st.builds(
    Link, latency_s=seconds | st.just(0.0), jitter_s=seconds, bandwidth=rates | st.just(math.inf),
    loss=st.floats(0, 0.999),
)  # fmt: skip


shares = st.lists(parts, min_size=2, max_size=4).map(tuple)
pairs = st.tuples(st.integers(0, 10**9) | st.floats(0, 1e9), st.integers(1, 99))
splits = st.builds(ParallelStep, shares=shares, waits=st.lists(pairs, max_size=3).map(tuple)) | shares.flatmap(
    lambda own: st.builds(
        PipelineStep, shares=st.just(own), passed=st.just(tuple(range(len(own) - 1))), microbatches=st.integers(4, 99),
        schedule=st.sampled_from(["1f1b", "gpipe"]),
    )
)  # fmt: skip


@st.composite
def machines(draw: st.DrawFn, name: str, first: bool) -> MachineKind:
    cores = draw(st.integers(1, 5))
    timed = draw(st.booleans())
    factors = draw(st.lists(st.floats(1, 99), min_size=cores - 1, max_size=cores - 1))
    sizes = sorted(draw(st.sets(st.integers(1, 10**9), max_size=4)))
    return MachineKind(
        name=name, count=draw(st.integers(1, 500)), cores=cores, step_s=draw(seconds) if first and timed else None,
        speed=1.0 if first and timed else draw(parts), jitter=draw(laws),
        slowdown=draw(st.sampled_from([(), (1.0, *factors)])), exchange=tuple((n, draw(seconds)) for n in sizes),
        reduce=tuple((n, draw(seconds)) for n in sizes[:2]), send=tuple((n, draw(seconds)) for n in sizes[:3]),
        single_s=draw(st.none() | seconds), overhead=draw(st.builds(Overhead, batch_s=seconds, lease_s=seconds)),
        memory=draw(rates), interface=draw(rates),
        roles=ROLES if first else draw(st.permutations(ROLES).map(lambda roles: tuple(roles[:2]))),
    )  # fmt: skip


@st.composite
def clusters(draw: st.DrawFn) -> Cluster:
    kinds = tuple(draw(machines(f"kind-{i}", i == 0)) for i in range(draw(st.integers(1, 3))))
    failure = st.builds(FailureLaw, every_s=seconds, repair_s=seconds | st.just(0.0))
    preemption = st.builds(
        Preemption, at_s=seconds | st.just(0.0), machine=st.just("kind-0"), count=st.integers(1, kinds[0].count),
        for_s=seconds, every_s=st.none(),
    )  # fmt: skip
    return Cluster(
        machines=kinds, between=draw(links), within=draw(links),
        failures=draw(st.dictionaries(st.sampled_from(ROLES), failure)),
        preemptions=tuple(draw(st.lists(preemption, max_size=2))), split=draw(st.none() | splits),
    )  # fmt: skip


@given(clusters())
def test_what_is_written_reads_as_the_same_cluster(cluster: Cluster) -> None:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "steps.txt").write_text("0.5\n1.5\n")
        assert load(cluster.to_toml(), Path(folder)) == cluster


@given(st.floats(0, 1e300))
def test_quantities_are_read_to_the_last_bit(value: float) -> None:
    assert parse(write_time(value), TIME) == value
    assert parse(write_bandwidth(value, bits=True), BANDWIDTH) == value
    assert parse(write_bandwidth(value, bits=False), BANDWIDTH) == value


def test_quantities_are_written_as_a_person_would() -> None:
    assert [write_time(s) for s in (0.012, 58e-6, 0.0, 90, 120, 7200, 86400, 1.5e-10)] == [
        "12 ms", "58 us", "0 s", "90 s", "2 min", "2 h", "1 d", "0.15 ns",
    ]  # fmt: skip
    assert write_bandwidth(1.25e9, bits=True) == "10 Gbit/s"
    assert write_bandwidth(12e9, bits=False) == "12 GB/s"
    assert [parse(text, BANDWIDTH) for text in ("8 kbit/s", "1 MiB/s", "1.5e3B/s")] == [1e3, 2**20, 1500]
    assert re.fullmatch(r"[\d.]+ s", write_time(61.5))
