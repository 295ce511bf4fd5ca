"""A Lightning module as one replica of several, or alone.

    python examples/lightning_digits.py
    squall run --replicas 2 --strategy downpour examples/lightning_digits.py

Lightning keeps its loop; the batches and the optimizer are Squall's. The digits are scikit-learn's; nothing is
downloaded. Needs: pip install 'squall-train[lightning]'
"""

from __future__ import annotations

from functools import partial

import lightning
import torch
from lightning.pytorch.utilities import rank_zero_only
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

EPOCHS = 15


class Digits(lightning.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))

    def forward(self, images: Tensor) -> Tensor:
        logits: Tensor = self.layers(images)
        return logits

    def training_step(self, batch: list[Tensor], index: int) -> Tensor:
        return cross_entropy(self(batch[0]), batch[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return session.optimizer


digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(images[part], labels[part]) for part in (order[360:], order[:360]))

torch.manual_seed(0)
module = Digits()
session = squall.join(module, optimizer=partial(torch.optim.Adagrad, lr=0.02))
batches = session.batches(train, batch_size=32, epochs=EPOCHS)

rank_zero_only.rank = session.rank  # one of them logs
trainer = lightning.Trainer(
    max_epochs=EPOCHS,  # at least those of the batches; but -1 would go on with empty epochs for ever
    accelerator="cpu",
    logger=False,
    enable_checkpointing=False,
    enable_progress_bar=False,
    enable_model_summary=False,
)
trainer.fit(module, batches.epoch)
batches.close()  # Lightning may have stopped by its own count: these are the final weights

if session.is_leader:
    accuracy = {"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()}
    print("after the last update:", session.evaluate(test, accuracy))
