"""What a student's loss is made of, and what its batches are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset, TensorDataset

import squall
from squall.lessons import Collated, Lesson, Mixed, heard, logits, softened, taught
from squall.task import first_batch


def loss(model: nn.Module, batch: Any) -> Tensor:
    return cross_entropy(model(batch[0]), batch[1])


def batch_of(examples: int = 5) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(examples, 3, generator=generator), torch.arange(examples) % 4]


def test_the_loss_is_that_of_the_paper() -> None:
    """(1 - mix) H(labels, student) + mix T^2 KL(teacher at T || student at T), the mean over the batch."""
    model, batch, teacher = nn.Linear(3, 4), batch_of(), torch.randn(5, 4)
    total, told = Mixed(loss, temperature=3.0, mix=0.25, dim=-1)(model, Lesson(batch, teacher))
    student = model(batch[0])
    hard = -student.log_softmax(1)[range(5), batch[1]].mean()
    there, here = (teacher / 3).softmax(1), (student / 3).softmax(1)
    soft = (there * (there.log() - here.log())).sum(1).mean()
    assert torch.allclose(total, 0.75 * hard + 0.25 * 9 * soft, atol=1e-6)
    assert torch.allclose(told["labels"], hard)
    assert torch.allclose(told["teacher"], 9 * soft, atol=1e-6)


def test_at_a_high_temperature_the_gradient_is_the_difference_of_the_outputs() -> None:
    """Hinton et al. 2015, section 2.1: of outputs with mean zero, 1 / classes times it."""
    student = torch.randn(2, 5, dtype=torch.float64)
    teacher = torch.randn(2, 5, dtype=torch.float64)
    student, teacher = student - student.mean(1, keepdim=True), teacher - teacher.mean(1, keepdim=True)
    student.requires_grad_()
    high = 1000.0
    (high**2 * softened(student, teacher, high, 1)).backward()
    assert student.grad is not None
    assert torch.allclose(student.grad * 2, (student.detach() - teacher) / 5, atol=2e-3)


def test_classes_lie_along_the_dimension_that_is_named() -> None:
    student, teacher = torch.randn(2, 7, 3, 3), torch.randn(2, 7, 3, 3)
    moved = softened(student.movedim(1, -1), teacher.movedim(1, -1), 2.0, -1)
    assert torch.allclose(softened(student, teacher, 2.0, 1), moved, atol=1e-6)
    assert float(softened(student, student.half(), 2.0, 1)) == pytest.approx(0.0, abs=1e-5)


def test_a_validation_batch_is_judged_by_the_student_s_own_loss() -> None:
    model, batch = nn.Linear(3, 4), batch_of()
    assert torch.equal(Mixed(loss, 2.0, 0.9, -1)(model, batch), loss(model, batch))


def test_the_output_is_heard_while_the_loss_runs() -> None:
    model, batch = nn.Linear(3, 4), batch_of()
    returned, output = heard(loss, model, batch)
    assert torch.equal(output, model(batch[0]))
    assert torch.equal(returned, loss(model, batch))
    assert not model._forward_hooks
    with pytest.raises(ValueError, match="calls the model 2 times for a batch"):
        heard(lambda model, batch: model(batch[0]).sum() + model(batch[0]).sum(), model, batch)
    with pytest.raises(ValueError, match="calls the model 0 times"):
        heard(lambda model, batch: batch[0].sum(), model, batch)


def test_what_counts_of_an_output() -> None:
    found = torch.zeros(2, 3)
    assert all(logits(each) is found for each in (found, (found, 1), [found], {"loss": 1, "logits": found}))
    with pytest.raises(ValueError, match="a model's output is dict: distillation needs a tensor, or its `logits`"):
        logits({"scores": found})


class Words(Dataset[dict[str, Any]]):
    """Items of different lengths, which a function of the user's pads."""

    def __len__(self) -> int:
        return 6

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"length": index + 1}


def padded(items: list[dict[str, Any]]) -> dict[str, Tensor]:
    longest = max(item["length"] for item in items)
    return {"mask": torch.tensor([[i < item["length"] for i in range(longest)] for item in items])}


@pytest.mark.parametrize("loader", [{}, {"num_workers": 1}])
def test_batches_are_the_student_s_own_with_the_teacher_s_rows(loader: dict[str, Any], tmp_path: Path) -> None:
    np.save(tmp_path / "said.npy", np.arange(12, dtype=np.float16).reshape(6, 2))
    task = squall.Task(
        model=nn.Linear(3, 4), loss=loss, train=Words(), validate=Words(), batch_size=4,
        loader={"collate_fn": padded, **loader},
    )  # fmt: skip
    found = taught(lambda: task, tmp_path / "said.npy", 2.0, 0.5, -1)
    lesson = first_batch(found, found.train)
    assert isinstance(lesson, Lesson)
    assert lesson.batch["mask"].sum(1).tolist() == [1, 2, 3, 4]
    assert lesson.outputs.tolist() == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert found.validate is not None
    assert first_batch(found, found.validate)["mask"].shape == (4, 4)


def test_a_tensor_dataset_gives_a_batch_at_once() -> None:
    data = TensorDataset(torch.arange(10.0))
    task = squall.Task(model=nn.Linear(3, 4), loss=loss, train=data)
    assert Collated(task, data).__getitems__([3, 1])[0][0].tolist() == [3.0, 1.0]


def test_outputs_of_another_training_set_are_refused(tmp_path: Path) -> None:
    task = squall.Task(model=nn.Linear(3, 4), loss=loss, train=TensorDataset(*batch_of()))
    with pytest.raises(ValueError, match="is not on this machine"):
        taught(lambda: task, tmp_path / "said.npy", 2.0, 0.5, -1)
    np.save(tmp_path / "said.npy", np.zeros((7, 4), dtype=np.float16))
    with pytest.raises(ValueError, match="has 5 examples, and the teacher answered 7"):
        taught(lambda: task, tmp_path / "said.npy", 2.0, 0.5, -1)
