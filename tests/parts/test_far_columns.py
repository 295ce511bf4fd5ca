"""What another replica says of where its parts are, and how all of a replica give up together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed import distributed_c10d as c10d

from squall.parts.far_columns import PLACE_BYTES, FarColumns, read_place, written
from squall.parts.neighbours import Neighbours
from squall.protocol.collective.messages import Place
from squall.transports.mesh import MeshBroken
from tests.runtime.test_mesh_group import SOON_S, Members, two  # noqa: F401


def test_a_place_is_read_as_it_was_written() -> None:
    for place in (Place(3, "10.0.0.1:7700"), Place(0, ":7700")):
        assert read_place(written(place)) == place


@pytest.mark.parametrize(
    "said",
    [written(Place(1, address)) for address in ("node7:7700", ":7700", "10.0.0.1:0", "10.0.0.1", "")]
    + [torch.zeros(PLACE_BYTES, dtype=torch.uint8), torch.full((PLACE_BYTES,), 255, dtype=torch.uint8)],
)
def test_what_is_no_place_in_numbers_breaks_the_group(said: torch.Tensor) -> None:
    with pytest.raises(MeshBroken):
        read_place(said)


class Fellows:
    """A column in which somebody waits until it is cut."""

    def __init__(self) -> None:
        self._cut = threading.Event()

    def cut(self) -> None:
        self._cut.set()

    def left(self) -> None:
        self._cut.clear()

    def wait(self) -> None:
        assert self._cut.wait(SOON_S), "nobody has cut it"


@pytest.fixture
def no_default_group() -> Iterator[None]:
    """Neighbours make theirs torch's default one, which other tests of this process have none of."""
    yield
    c10d._update_default_pg(None)


@pytest.mark.usefixtures("no_default_group")
@pytest.mark.parametrize("when", ["before all wait", "while they wait", "when all have agreed"])
def test_a_row_gives_up_as_a_whole_or_not_at_all(two: Members, when: str) -> None:  # noqa: F811
    """The second part waits in its column until the first gives up; what that says before or behind counts alike."""
    fellows, begun = [Fellows(), Fellows()], threading.Event()
    rows: list[Any] = [None, None]

    def part(group: object, own: int) -> list[float]:
        row = rows[own] = FarColumns(Neighbours(two.groups[own], own, 2), fellows[own], Place(0, ":1"))  # type: ignore[arg-type]
        if own == 0 and when == "before all wait":
            row.cut()
        row.begin()
        if own == 0 and when == "while they wait":
            begun.wait(SOON_S)
            row.cut()
        begun.set()
        if own == 1 and when != "when all have agreed":
            fellows[1].wait()
        found = row.agreed(0.0, 1.5)
        if own == 0 and when == "when all have agreed":
            row.cut()
        return found

    found = two.all(part)
    assert found[0] == found[1]
    assert bool(found[0][0]) == (when != "when all have agreed")
    if not found[0][0]:
        assert found[0][1] == 3.0
