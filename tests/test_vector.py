"""Names <-> elements <-> shards, for models of any shape."""

import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from squall.vector import ALIGN, Layout, Slice, count_in

shapes = st.lists(st.lists(st.integers(1, 7), max_size=3).map(tuple), min_size=1, max_size=12)


class Heap(nn.Module):
    """Parameters of the given shapes."""

    def __init__(self, shapes: list[tuple[int, ...]]) -> None:
        super().__init__()
        self.all = nn.ParameterList([nn.Parameter(torch.randn(shape)) for shape in shapes])


def layout_of(model: nn.Module, groups: list[list[nn.Parameter]] | None = None) -> Layout:
    return Layout.of(model, groups or [[p for p in model.parameters() if p.requires_grad]])


@given(shapes, st.integers(1, 4), st.integers(1, 9), st.data())
def test_ranges_and_pieces_partition_the_vector(
    shapes: list[tuple[int, ...]], groups: int, shards: int, data: st.DataObject
) -> None:
    model = Heap(shapes)
    members: list[list[nn.Parameter]] = [[] for _ in range(groups)]
    for parameter in model.parameters():
        members[data.draw(st.integers(0, groups - 1))].append(parameter)
    layout = Layout.of(model, members)

    starts = [span.start for span in layout.parameters]
    assert all(start % ALIGN == 0 for start in starts)  # 64 bytes
    assert all(a.start + a.numel <= b.start for a, b in pairwise(layout.parameters))
    assert layout.elements == sum(p.numel() for p in model.parameters())

    ranges = [layout.shard_range(shard, shards) for shard in range(shards)]
    assert (ranges[0][0], ranges[-1][1]) == (0, layout.length)
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = [stop - start for start, stop in ranges]
    assert max(sizes) - min(sizes) <= ALIGN

    for start, stop in ranges:
        pieces = layout.pieces(start, stop)
        assert sum(piece.stop - piece.start for piece in pieces) == stop - start
        assert all(a.stop == b.start for a, b in pairwise(pieces))
        for piece in pieces:
            for span in layout.parameters:
                if piece.start <= span.start < piece.stop:
                    owner = next(i for i, group in enumerate(members) if any(p is _named(model, span) for p in group))
                    assert piece.group == owner


def _named(model: nn.Module, span: object) -> nn.Parameter:
    return dict(model.named_parameters())[span.name]


@given(shapes, st.randoms(use_true_random=False))
def test_a_model_written_and_read_is_the_same_model(shapes: list[tuple[int, ...]], chance: object) -> None:
    torch.manual_seed(chance.randrange(10**6))
    source, target = Heap(shapes), Heap(shapes)
    layout = layout_of(source)
    vector = torch.full((layout.length,), float("nan"))
    layout.write_model(source, vector)
    assert torch.isfinite(vector).all()  # padding is zero
    layout.read_model(vector, target)
    for a, b in zip(source.parameters(), target.parameters()):
        assert torch.equal(a, b)
    for view, parameter in zip(layout.views(vector), layout.parameters_of(source)):
        assert view.shape == parameter.shape
        assert view.untyped_storage().data_ptr() == vector.untyped_storage().data_ptr()


def test_groups_lie_one_after_the_other_each_in_the_models_order() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    weights = [model[1].weight, model[0].weight]  # in the user's order
    layout = Layout.of(model, [weights, [model[0].bias, model[1].bias]])
    assert [span.name for span in layout.parameters] == ["0.weight", "1.weight", "0.bias", "1.bias"]
    assert layout.group_starts == (0, 32)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.out = nn.Linear(4, 6, bias=False)
        self.out.weight = self.embed.weight


def test_tied_weights_are_there_once() -> None:
    model = Tied()
    layout = layout_of(model)
    assert [span.name for span in layout.parameters] == ["embed.weight"]
    layout.read_model(torch.ones(layout.length), model)
    assert torch.equal(model.out.weight, torch.ones(6, 4))


def test_frozen_parameters_are_not_in_the_vector() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    model[0].requires_grad_(False)
    before = model[0].weight.clone()
    layout = layout_of(model)
    assert [span.name for span in layout.parameters] == ["1.weight", "1.bias"]
    layout.read_model(torch.zeros(layout.length), model)
    assert torch.equal(model[0].weight, before)
    assert not model[1].weight.any()


def test_buffers_are_the_tail() -> None:
    model = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    layout = layout_of(model)
    assert [span.name for span in layout.buffers] == ["1.running_mean", "1.running_var"]
    assert [span.name for span in layout.counters] == ["1.num_batches_tracked"]
    assert layout.tail == layout.buffers[0].start == 4 * ALIGN
    assert layout.length == 7 * ALIGN
    assert [(piece.group, piece.start, piece.stop) for piece in layout.pieces(40, 100)] == [
        (0, 40, 64), (-1, 64, 96), (-2, 96, 100),
    ]  # fmt: skip
    model[1].running_var.fill_(3.0)
    model[1].num_batches_tracked.fill_(2**40 + 1)
    vector = torch.empty(layout.length)
    layout.write_model(model, vector)
    assert vector[80:85].tolist() == [3.0] * 5
    assert [count_in(view).item() for view in layout.counter_views(vector)] == [2**40 + 1]
    other = nn.Sequential(nn.Linear(3, 5), nn.BatchNorm1d(5))
    layout.read_buffers(vector, other)
    assert other[1].running_var.tolist() == [3.0] * 5
    assert other[1].num_batches_tracked == 2**40 + 1
    assert not torch.equal(other[0].weight, model[0].weight)


@pytest.mark.parametrize("shards", [1, 3, 7, 11])
def test_no_count_is_cut_in_two(shards: int) -> None:
    layout = layout_of(nn.Sequential(nn.Linear(11, 1, bias=False), nn.BatchNorm1d(1, affine=False)))
    ranges = [layout.shard_range(shard, shards) for shard in range(shards)]
    assert all((start - layout.counted) % 2 == 0 and start < stop for start, stop in ranges)
    assert (ranges[0][0], ranges[-1][1]) == (0, layout.length)


def test_a_model_of_one_scalar() -> None:
    layout = layout_of(Heap([()]))
    assert (layout.elements, layout.length) == (1, ALIGN)
    assert [layout.shard_range(shard, 3) for shard in range(3)] == [(0, 5), (5, 10), (10, 16)]
    assert layout.views(torch.arange(16.0))[0].shape == ()


def test_twenty_thousand_tensors_are_laid_out_quickly() -> None:
    model = Heap([(3,)] * 20_000)
    began = time.process_time()
    layout = layout_of(model)
    vector = torch.empty(layout.length)
    layout.write_model(model, vector)
    layout.read_model(vector, model)
    assert time.process_time() - began < 5.0
    assert layout.length == 20_000 * ALIGN


@pytest.mark.parametrize(
    ("here", "there", "lines"),
    [
        ([(2, 3)], [(2, 3)], []),
        ([(2, 3)], [(3, 2)], ["all.0: [2, 3] here, [3, 2] there"]),
        ([(2,), (4,)], [(2,)], ["all.1: [4] here, missing there"]),
        ([(2,)], [(2,), (4,)], ["all.1: missing here, [4] there"]),
    ],
)
def test_differences(here: list[tuple[int, ...]], there: list[tuple[int, ...]], lines: list[str]) -> None:
    assert layout_of(Heap(here)).differences(layout_of(Heap(there))) == lines


def test_other_groups_are_a_difference() -> None:
    model = Heap([(2,), (4,)])
    a, b = model.all
    both, apart = Layout.of(model, [[a, b]]), Layout.of(model, [[b], [a]])
    assert both.differences(apart) == ["the same tensors, in other param groups or another order"]


def test_shares_have_their_pieces_of_the_whole_vector_and_together_all_of_it() -> None:
    model = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Linear(6, 4))
    layout = Layout.of(model, [list(model.parameters())])
    vector = torch.zeros(layout.length)
    layout.write_model(model, vector)
    names = [{"0.weight", "0.bias", "1.running_mean"}, {"1.weight", "2.weight", "2.bias", "1.num_batches_tracked"}]
    slices = [{"0.weight": Slice(0, part, 2), "2.weight": Slice(1, part, 2)} for part in range(2)]
    shares = [layout.share(names[part] | {"0.weight", "2.weight"}, slices[part]) for part in range(2)]
    columns = [dict(zip((span.name for span in share.parameters), share.views(vector))) for share in shares]
    assert torch.equal(torch.cat([each["0.weight"] for each in columns], 0), model[0].weight)
    assert torch.equal(torch.cat([each["2.weight"] for each in columns], 1), model[2].weight)
    marked = torch.zeros_like(vector)
    for share in (*shares, layout.share({"1.bias", "1.running_var"})):
        for region in share.regions(marked):
            region += 1
    assert marked.max() == 1
    read = [*layout.views(marked), *(marked[span.start :][: span.numel] for span in layout.buffers)]
    assert all((view == 1).all() for view in (*read, *layout.counter_views(marked))), "each element is in one share"
    assert [region.numel() for region in layout.regions(vector)] == [layout.length]
    assert [region.numel() for region in layout.regions(vector, "parameters")] == [layout.tail]
