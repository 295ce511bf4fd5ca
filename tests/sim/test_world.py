"""The world itself: its clock, its network, its processes; and that a seed gives one trace."""

import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from squall.protocol.effects import Compute, Effect, End, Send
from squall.protocol.events import (
    Event,
    GradientComputed,
    MessageArrived,
    ProcessEnded,
    Started,
    StopRequested,
    TimePassed,
)
from squall.protocol.link import RESEND_AFTER_S, Linked
from squall.protocol.messages import Join, Stop
from squall.protocol.nodes import COORDINATOR, NURSERY, Node
from squall.protocol.notes import TrainingOver
from squall.runtime.driver import Host
from squall.runtime.wire import Conditions, Network
from squall.runtime.world import World
from squall.sim.proof.phantoms import COMPUTE_S
from squall.strategies import Downpour, Synchronous
from tests import deep
from tests.sim.sim_bench import Bench

FAULTY = Network(latency_s=0.001, jitter_s=0.004, loss=0.02, duplication=0.02)
PEER = Node("replica", 0)


@dataclass
class Script:
    """A machine that does what it was told to for a kind of event, and remembers."""

    effects: dict[type, list[Effect]] = field(default_factory=dict)
    wake_at: float | None = None
    node: Node = field(default_factory=lambda: Node("replica"))
    seen: list[tuple[float, Event]] = field(default_factory=list)

    def on(self, event: Event, now: float) -> list[Effect]:
        self.seen.append((now, event))
        if type(event) is TimePassed:
            self.wake_at = None
        return self.effects.get(type(event), [])

    def times(self, kind: type) -> list[float]:
        return [now for now, event in self.seen if type(event) is kind]


class Hands(Host):
    """A host that answers Compute, and has news from outside once."""

    def __init__(self, *news: Event) -> None:
        self.news = list(news)
        self.attached: list[object] = []
        self.done: list[Effect] = []

    def attach(self, payload: object) -> None:
        self.attached.append(payload)

    def perform(self, effect: Effect, now: float) -> Event | None:
        self.done.append(effect)
        return GradientComputed(0.5, True, 2.0) if isinstance(effect, Compute) else None

    def poll(self) -> Event | None:
        return self.news.pop() if self.news else None


def pair(
    sender: Script, receiver: Script, network: Network, seed: int = 0, notice_s: float = 0.0,
    nursery: Script | None = None,
) -> World:  # fmt: skip
    world = World(Conditions(network, {Compute: lambda node, effect, begins: 2.0}, notice_s), seed=seed)
    world.add(COORDINATOR, Linked(receiver), Hands())
    world.add(PEER, Linked(sender), Hands())
    if nursery is not None:
        world.add(NURSERY, Linked(nursery), Hands())
    return world


def say(count: int) -> dict[type, list[Effect]]:
    return {Started: [Send(COORDINATOR, Join(number)) for number in range(count)]}


def test_the_clock_jumps_to_the_next_event_and_latency_is_kept() -> None:
    coordinator = Script(wake_at=7.5)
    world = pair(Script(say(1)), coordinator, Network(latency_s=0.25))
    world.run(until=lambda: len(coordinator.seen) == 3)
    assert coordinator.times(Started) == [0.0]
    assert coordinator.times(MessageArrived) == [0.25]
    assert coordinator.times(TimePassed) == [7.5]
    assert world.now == 7.5


def test_a_busy_process_hears_of_things_when_it_is_done() -> None:
    batch = Compute(0, 0, 4, 0, accumulate=False, local_step=False)
    replica = Script({Started: [batch]})
    world = pair(replica, Script({Started: [Send(PEER, Stop())]}), Network(latency_s=0.5))
    world.run(until=lambda: len(replica.seen) == 3)
    assert [type(event) for _, event in replica.seen] == [Started, GradientComputed, MessageArrived]
    assert replica.times(GradientComputed) == replica.times(MessageArrived) == [2.0]


def test_frames_overtake_each_other_and_get_lost_but_messages_do_not() -> None:
    coordinator = Script()
    world = pair(Script(say(60)), coordinator, Network(0.01, jitter_s=0.5, loss=0.3, duplication=0.3), seed=3)
    world.run(until=lambda: len(coordinator.times(MessageArrived)) == 60 or world.now > 200)
    pids = [event.message.pid for _, event in coordinator.seen if isinstance(event, MessageArrived)]
    assert pids == list(range(60))


def test_the_last_words_of_a_process_arrive_though_their_frame_was_lost() -> None:
    lost: list[Effect] = []
    coordinator = Script()
    world = pair(Script({Started: [Send(COORDINATOR, Join(7)), End("finished")]}), coordinator, Network(0.01))
    carry = world._arrivals
    world._arrivals = lambda *frame: carry(*frame) if lost else lost.append(frame) or ()
    world.run(until=lambda: world.processes[PEER].over)
    assert coordinator.times(MessageArrived) == [pytest.approx(RESEND_AFTER_S + 0.01)]
    assert len(lost) == 1


def test_a_killed_process_hears_nothing_more_and_its_nursery_is_told() -> None:
    replica, nursery = Script({}, wake_at=1.0), Script({ProcessEnded: [End("finished")]})
    world = pair(replica, Script(), Network(), notice_s=0.25, nursery=nursery)
    world.run(at_most=3)
    world.kill(PEER, "killed by SIGKILL")
    world.kill(PEER, "a second time is nothing")
    world.run()
    assert [type(event) for _, event in replica.seen] == [Started]
    assert nursery.seen[-1] == (0.25, ProcessEnded(PEER, "killed by SIGKILL"))
    assert len(nursery.times(ProcessEnded)) == 1


def test_a_process_whose_work_is_over_is_not_lost() -> None:
    nursery = Script()
    world = pair(Script({Started: [End("finished")]}), Script(), Network(), nursery=nursery)
    world.run(at_most=3)
    world.kill(PEER)
    world.run()
    assert nursery.times(ProcessEnded) == []


def test_news_from_outside_reach_the_machine() -> None:
    machine, hands = Script({StopRequested: [TrainingOver(), End("interrupted")]}), Hands(StopRequested("ctrl-c"))
    world = World()
    world.add(COORDINATOR, Linked(machine), hands)
    world.run()
    assert [type(event) for _, event in machine.seen] == [Started, StopRequested]
    assert [type(effect) for effect in hands.done] == [TrainingOver, End]


def test_timers_do_not_pile_up() -> None:
    bench = Bench(Downpour(replicas=2).recipe(), network=Network(latency_s=0.001), examples=4000)
    bench.go()
    waiting = [event for *_, event in bench.world._queue if type(event) is TimePassed]
    assert bench.world.now > 500 * COMPUTE_S
    assert len(waiting) < 60  # a few for each of the five nodes, whatever the run's length


# ---------------------------------------------------------------- one seed, one trace

_HASH = """
import sys
sys.path.insert(0, sys.argv[1])
from tests.sim.test_world import trace_of
print(trace_of("downpour", 5), trace_of("synchronous", 5))
"""


def trace_of(name: str, seed: int) -> str:
    """Hash of everything that happens in a run with faults and two kills."""
    strategy = {"downpour": Downpour, "synchronous": Synchronous}[name](replicas=3, shards=2)
    bench = Bench(strategy.recipe(), network=FAULTY, seed=seed, notice_s=0.002, keep_trace=True)
    bench.go({60: lambda b: b.kill("replica", 1), 120: lambda b: b.kill("replica", 2)})
    assert bench.digest is not None
    return bench.digest.hexdigest()


@pytest.mark.parametrize("name", ["downpour", "synchronous"])
def test_the_same_seed_gives_the_same_trace_and_another_one_does_not(name: str) -> None:
    assert trace_of(name, 5) == trace_of(name, 5)
    assert trace_of(name, 5) != trace_of(name, 6)


def test_no_trace_depends_on_the_interpreters_hash_seed() -> None:
    here = str(Path(__file__).parent)
    traces = []
    for hash_seed in deep.sweep(("1", "2"), 1):  # and here it is another one
        environment = {**os.environ, "PYTHONHASHSEED": hash_seed}
        run = [sys.executable, "-c", _HASH, here]
        traces.append(subprocess.run(run, env=environment, capture_output=True, text=True, check=True).stdout.split())
    assert traces == [[trace_of("downpour", 5), trace_of("synchronous", 5)]] * len(traces)
