"""A batch in pieces, and the model's call taken out of a loss function."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from squall.parts.microbatches import given, in_pieces, taken


def test_a_piece_has_the_rows_of_its_examples_whatever_holds_them() -> None:
    batch = {
        "inputs": (torch.arange(10).view(5, 2), [torch.arange(5)]), "names": ["a", "b", "c", "d", "e"], "scale": 2.0,
        "one": torch.tensor(3),
    }  # fmt: skip
    pieces = in_pieces(batch, 2)
    assert [count for count, _ in pieces] == [2, 2, 1]
    found: Any = pieces[1][1]
    assert found["inputs"][0].tolist() == [[4, 5], [6, 7]]
    assert found["inputs"][1][0].tolist() == [2, 3]
    assert (found["names"], found["scale"], found["one"].item()) == (["c", "d"], 2.0, 3)
    assert pieces[2][1]["names"] == ["e"]  # type: ignore[call-overload,index]


@pytest.mark.parametrize("batch", [[torch.zeros(4, 2), torch.zeros(3)], "words", [1.0]])
def test_a_batch_without_rows_in_common_cannot_be_cut(batch: Any) -> None:
    with pytest.raises(ValueError, match="have collate_fn give each tensor one row an example"):
        in_pieces(batch, 2)


class Doubling(nn.Module):
    def forward(self, inputs: Tensor, *, times: int = 2) -> Tensor:
        return inputs * times


def thrice(model: nn.Module, batch: Any) -> Tensor:
    assert model.training
    try:
        return model(batch, times=3).sum()  # type: ignore[no-any-return]
    except Exception:
        return torch.tensor(-1.0)


def test_the_call_is_taken_out_and_put_back_and_the_model_is_as_before() -> None:
    model = Doubling()
    args, kwargs = given(thrice, model, torch.ones(2))
    assert (args[0].tolist(), kwargs) == ([1.0, 1.0], {"times": 3})
    assert taken(thrice, model, torch.ones(2), torch.tensor([5.0])).item() == 5.0
    assert model(torch.ones(1)).item() == 2.0


def test_a_model_that_was_given_another_forward_keeps_it() -> None:
    model = Doubling()
    model.forward = lambda inputs, times: inputs * 7  # type: ignore[method-assign]
    given(thrice, model, torch.ones(2))
    assert thrice(model, torch.ones(2)).item() == 14.0
