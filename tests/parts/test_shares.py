"""What each part of a replica has of the vector, in every split."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor

import squall
from squall.parts.carrying import own_arena
from squall.parts.shares import shares
from squall.protocol.effects import End, Payload
from squall.protocol.nodes import Node
from squall.runtime import whole
from squall.runtime.arena import Shape
from squall.runtime.driver import Host
from squall.runtime.job import Job
from squall.runtime.places import Places
from squall.runtime.ranges import Block, Elements, Ranges, _within
from squall.vector import Layout
from tests.parts.replica import DOWNPOUR, job_of, replica
from tests.parts.test_slices import Embedded, Perceptron, tokens
from tests.parts.test_spread import SPLITS, model_task

REPLICA, SHARDS = Node("replica", 0), 3


def ranges_of(task: squall.Task, parts: int, starts: tuple[int, ...]) -> tuple[Layout, Ranges]:
    layout = Layout.of(task.model, [group["params"] for group in task.param_groups()])
    return layout, Ranges(layout, SHARDS, shares(task, layout, starts, parts))


def payload(kind: Any, shard: int, part: int) -> Payload:
    return Payload(kind, REPLICA, 0, 1, shard, part=part)


@given(
    start=st.integers(0, 9), length=st.integers(1, 9), rows=st.integers(1, 9), gap=st.integers(0, 9),
    ends=st.tuples(st.integers(0, 180), st.integers(0, 180)).map(sorted),
)  # fmt: skip
def test_a_shards_range_cuts_a_slice_anywhere(start: int, length: int, rows: int, gap: int, ends: list[int]) -> None:
    step, (low, high) = length + gap, ends
    block = Block(start, length, rows, step) if rows > 1 else Block(start, length)
    wanted = {at for row in range(rows) for at in range(start + row * step, start + row * step + length)}
    found = Elements([*_within(block, low, high)])
    elements = [at for run in found.runs for at in range(*run)]
    assert sorted(elements) == sorted(wanted & set(range(low, high)))
    assert found.count == len(elements)
    vector = torch.arange(200)
    assert [at for view in found.of(vector[low:], low) for at in view.flatten().tolist()] == elements


@pytest.mark.parametrize("split", SPLITS)
def test_the_gradients_of_all_parts_are_the_whole_and_no_element_is_of_two(split: str) -> None:
    how, parts, starts = SPLITS[split]
    task = model_task(how)
    layout, ranges = ranges_of(task, parts, starts)
    each = [payload("gradient", shard, part) for shard in range(SHARDS) for part in range(parts)]
    runs = sorted(run for one in each for run in ranges(one).runs)
    assert all(stop <= start for (_, stop), (start, _) in pairwise(runs))
    written = torch.zeros(layout.length)
    for start, stop in runs:
        written[start:stop] = 1
    for view in layout.views(written):
        assert view.all()


@pytest.mark.parametrize("split", SPLITS)
def test_weights_of_a_part_are_what_it_reads(split: str) -> None:
    how, parts, starts = SPLITS[split]
    task = model_task(how)
    layout, ranges = ranges_of(task, parts, starts)
    for part, share in enumerate(shares(task, layout, starts, parts)):
        found, wanted = torch.zeros(layout.length), torch.zeros(layout.length)
        for shard in range(SHARDS):
            for start, stop in ranges(payload("weights", shard, part)).runs:
                found[start:stop] = 1
        for region in share.reads.regions(wanted):
            region.fill_(1)
        assert torch.equal(found, wanted)


@pytest.mark.parametrize(
    ("model", "layers"),
    [
        (Perceptron, {"front": "gathered", "blocks.*.up": "column", "blocks.*.down": "row"}),
        (Embedded, {"embedding": "column", "up": "gathered", "down": "gathered"}),
        (Embedded, {"embedding": "row", "up": "column", "down": "row"}),
    ],
)
def test_slices_are_those_that_torch_makes(model: Any, layers: Any) -> None:
    """Shares are said without any DTensor, and have to be those that parts then make."""
    torch.manual_seed(1)
    data = tokens() if model is Embedded else torch.utils.data.TensorDataset(torch.randn(8, 6), torch.randn(8, 1))
    task = squall.Task(
        model=model(), loss=lambda m, b: m(b[0]).square().mean(), train=data, batch_size=4, split=squall.Tensor(layers)
    )  # fmt: skip

    def cut(host: Host, job: Job) -> Any:
        host.perform(End("finished"), 0.0)
        named = [(name, p) for name, p in job.task.model.named_parameters() if isinstance(p, DTensor)]
        return {name: p.placements[0].dim for name, p in named if p.placements[0].is_shard() and p.requires_grad}

    slices = shares(task, job_of(task).layout, (), 2)[1].reads.slices
    assert {name: part.dim for name, part in slices.items()} == replica(task, 2, cut)
    assert slices


def test_places_of_a_part_are_for_it_and_its_shard_alone() -> None:
    how, parts, starts = SPLITS["pipeline"]
    job = job_of(model_task(how), DOWNPOUR)
    _, ranges = ranges_of(job.task, parts, starts)
    shard, part = Node("shard", 1), Node("part", 1)
    places = Places(shard, SHARDS, ranges, job.arena.shape, memoryview(job.arena.memory), None, parts)  # type: ignore[arg-type]
    assert places(payload("gradient", 1, 1), part)
    for peer, of in ((REPLICA, 1), (part, 0), (part, -1), (Node("part", 0), 1), (Node("part", 1, 1), 1)):
        with pytest.raises(ValueError, match="between"):
            places(payload("gradient", 1, of), peer)
    with pytest.raises(ValueError, match="between"):
        places(payload("gradient", 1, 2), part)
    with pytest.raises(ValueError, match="between"):
        places(payload("gradient", 0, 1), part)


@pytest.mark.parametrize("split", SPLITS)
def test_what_parts_have_brought_of_a_push_comes_to_the_same_places_elsewhere(split: str) -> None:
    """And nothing else does: what other parts have of it may lie there already."""
    how, parts, starts = SPLITS[split]
    layout, ranges = ranges_of(model_task(how), parts, starts)
    here, there = (own_arena(Shape(layout.length, 1)) for _ in range(2))
    here.gradient(0, 0).copy_(torch.arange(layout.length) + 1.0)
    for shard in range(SHARDS):
        brought, expected = payload("gradient", shard, 1), torch.zeros(layout.length)
        whole.Whole(b"", whole.of_pushes(here, ranges, [brought])).lay(there, ranges, shard)
        for own, target in zip(ranges(brought).of(here.gradient(0, 0)), ranges(brought).of(expected)):
            target.copy_(own)
        assert torch.equal(there.gradient(0, 0), expected)
        there.gradient(0, 0).zero_()
