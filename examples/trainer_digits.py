"""A Hugging Face Trainer as one replica of several, or alone.

    python examples/trainer_digits.py
    squall run --replicas 2 --strategy downpour examples/trainer_digits.py

Trainer keeps its loop; the batches and the optimizer are Squall's. The digits are scikit-learn's; nothing is
downloaded. Needs: pip install 'squall-train[trainer]'
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import Dataset
from transformers import Trainer, TrainingArguments

import squall

EPOCHS = 15


class Digits(Dataset[dict[str, Tensor]]):
    """Items by the names of the model's arguments, as Trainer wants them."""

    def __init__(self, images: Tensor, labels: Tensor) -> None:
        self.images = images
        self.labels = labels

    def __len__(self) -> int:
        return len(self.labels)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"images": self.images[index], "labels": self.labels[index]}


class Network(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.layers(images)
        return {"loss": cross_entropy(logits, labels), "logits": logits}


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = (Digits(images[part], labels[part]) for part in (order[360:], order[:360]))

torch.manual_seed(0)
model = Network()
session = squall.join(model, optimizer=partial(torch.optim.Adagrad, lr=0.02))
batches = session.batches(train, batch_size=32, epochs=EPOCHS)


class SquallTrainer(Trainer):
    def get_train_dataloader(self) -> Iterable[Any]:
        return batches.epoch  # and not Trainer's own loader, which accelerate would have read ahead

    def is_local_process_zero(self) -> bool:
        return session.is_leader  # one of them logs


with tempfile.TemporaryDirectory() as directory:
    arguments = TrainingArguments(
        directory,
        num_train_epochs=EPOCHS,  # at least those of the batches
        lr_scheduler_type="constant",  # a real schedule is for squall.join
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
    )
    SquallTrainer(model, arguments, optimizers=(session.optimizer, None)).train()
batches.close()  # Trainer may have stopped by its own count: these are the final weights

if session.is_leader:
    accuracy = {"accuracy": lambda model, batch: (model(**batch)["logits"].argmax(1) == batch["labels"]).float()}
    print("after the last update:", session.evaluate(test, accuracy))
