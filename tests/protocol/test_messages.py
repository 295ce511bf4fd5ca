"""What crosses a wire is exactly a frame, or refused."""

from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import inspect

from squall.protocol.frames import MAX_FRAME_BYTES, Frame, Message, decode, encode
from squall.protocol.messages import Grant, Join, Lease, Progress, Stats

MESSAGES = get_args(Message)


def values(kind: inspect.Type) -> st.SearchStrategy[Any]:
    """Anything that a field of this type may hold."""
    match kind:
        case inspect.IntType():
            low, high = kind.ge, kind.le
            return st.integers(-(2**63) if low is None else low, 2**63 - 1 if high is None else high)
        case inspect.FloatType():
            return st.floats(kind.ge, kind.le, allow_nan=False)
        case inspect.BoolType():
            return st.booleans()
        case inspect.BytesType():
            return st.binary(max_size=20)
        case inspect.StrType():
            return st.text(max_size=20)
        case inspect.NoneType():
            return st.none()
        case inspect.VarTupleType():
            return st.lists(values(kind.item_type), max_size=3).map(tuple)
        case inspect.DictType():
            return st.dictionaries(values(kind.key_type), values(kind.value_type), max_size=3)
        case inspect.UnionType():
            return st.one_of(*map(values, kind.types))
        case inspect.StructType():
            return st.builds(kind.cls, **{field.name: values(field.type) for field in kind.fields})
    if isinstance(kind, inspect.TupleType):
        return st.tuples(*(values(item) for item in kind.item_types))
    raise AssertionError(kind)


messages = st.one_of(*(values(inspect.type_info(kind)) for kind in MESSAGES))
counts = st.integers(0, 2**53)


@given(st.builds(Frame, counts, counts, st.none() | messages))
def test_round_trip(frame: Frame) -> None:
    assert decode(encode(frame)) == frame


@given(st.binary(max_size=200))
def test_garbage_is_refused_or_is_a_frame(data: bytes) -> None:
    try:
        frame = decode(data)
    except (msgspec.DecodeError, ValueError):
        return
    assert isinstance(frame, Frame)


@given(st.builds(Frame, counts, counts, messages), st.data())
def test_a_frame_that_is_cut_short_is_refused(frame: Frame, data: st.DataObject) -> None:
    whole = encode(frame)
    cut = data.draw(st.integers(0, len(whole) - 1))
    with pytest.raises((msgspec.DecodeError, ValueError)):
        decode(whole[:cut])
    with pytest.raises((msgspec.DecodeError, ValueError)):
        decode(whole + b"\x00")


@pytest.mark.parametrize(
    "frame",
    [
        {"number": 1, "seen": 0},  # not array-like
        [1],
        ["1", 0, None],
        [1.5, 0, None],
        [-3, 0, None],
        [1, -1, None],
        [1, 0, ["nonsense", 1]],
        [1, 0, ["join", "7"]],
        [1, 0, ["join", None]],
        [1, 0, ["join"]],
        [1, 0, ["welcome", -1]],
        [1, 0, ["lease", 1, [0, 0, -4, 4]]],
        [1, 0, ["progress", [[1, 2], [3]], []]],
        [1, 0, ["evaluate!", 1, 1, {"loss": "low"}]],
    ],
)
def test_wrong_types_are_refused(frame: object) -> None:
    with pytest.raises(msgspec.ValidationError):
        decode(msgspec.msgpack.encode(frame))


def test_a_frame_that_is_too_large_is_refused_before_it_is_read() -> None:
    with pytest.raises(ValueError, match=f"{MAX_FRAME_BYTES + 1} bytes is larger than {MAX_FRAME_BYTES}"):
        decode(bytes(MAX_FRAME_BYTES + 1))


def test_every_message_has_its_own_tag_and_is_frozen() -> None:
    tags = [kind.__struct_config__.tag for kind in MESSAGES]
    assert len(set(tags)) == len(tags)
    assert all(kind.__struct_config__.frozen for kind in (*MESSAGES, Lease, Stats, Frame))


def test_a_message_is_small() -> None:
    """A doorbell: what goes with every exchange must cost next to nothing."""
    grant = encode(Frame(1000, 1000, Grant(Lease(1000, 10, 50_000, 51_024))))
    progress = encode(Frame(1000, 1000, Progress((), Stats(64, 1, 0.5, 0.1, 0.1, 1, 1, 1, {3: 1}))))
    assert len(encode(Frame(0, 1000))) <= 6
    assert len(encode(Frame(1, 1, Join(4_000_000)))) <= 16
    assert len(grant) < 40
    assert len(progress) < 80
