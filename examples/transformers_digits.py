"""A model of Hugging Face transformers: pretrained without labels, saved, loaded from its folder, and fine-tuned.

    python examples/transformers_digits.py              leaves what it has learned in runs/vit-digits
    python examples/transformers_digits.py FOLDER

A small vision transformer is made from a config. It learns to fill in parts of digits that it does not see;
`save_pretrained` writes it, and `from_pretrained` reads it as the body of a classifier, which learns from 500 digits
with labels. Both are trained by replicas in processes of their own. What is written at the end is an ordinary folder of
transformers. The digits are scikit-learn's; nothing is downloaded. Needs: pip install 'squall-train[trainer]'
"""

from __future__ import annotations

import os
import sys
from functools import partial
from pathlib import Path
from typing import Any

os.environ["HF_DEACTIVATE_ASYNC_LOAD"] = "1"  # from_pretrained leaves threads behind, which a task may not

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from transformers import ViTConfig, ViTForImageClassification, ViTForMaskedImageModeling
from transformers.utils import logging

import squall

PATCHES = 16  # of 2 x 2 pixels
LABELLED = 500  # digits that the classifier learns from
strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.AdamW, lr=3e-3))


def pretraining() -> squall.Task:
    """Half of each digit's patches are hidden, and the model says what is there."""
    config = ViTConfig(
        image_size=8, patch_size=2, encoder_stride=2, num_channels=1, hidden_size=32, num_hidden_layers=2,
        num_attention_heads=4, intermediate_size=64,
    )  # fmt: skip
    images, _ = digits()
    return squall.Task(
        model=ViTForMaskedImageModeling(config), loss=hidden_loss, train=TensorDataset(images[360:]), batch_size=32
    )


def hidden_loss(model: nn.Module, batch: list[Tensor]) -> Tensor:
    hidden = torch.rand(len(batch[0]), PATCHES) < 0.5  # by the run's seed, as all chance
    loss: Tensor = model(pixel_values=batch[0], bool_masked_pos=hidden).loss
    return loss


def fine_tuning(folder: Path) -> squall.Task:
    """The body is the folder's, the head is new."""
    logging.set_verbosity_error()  # that the head is new we know
    logging.disable_progress_bar()
    images, labels = digits()
    return squall.Task(
        model=ViTForImageClassification.from_pretrained(folder, num_labels=10),
        loss=lambda model, batch: model(pixel_values=batch[0], labels=batch[1]).loss,
        train=TensorDataset(images[360 : 360 + LABELLED], labels[360 : 360 + LABELLED]),
        validate=TensorDataset(images[:360], labels[:360]),
        batch_size=16,
        metrics={"accuracy": lambda model, batch: (model(pixel_values=batch[0]).logits.argmax(1) == batch[1]).float()},
    )


def digits() -> tuple[Tensor, Tensor]:
    """Images float32 [1797, 1, 8, 8], -1 to 1, in an order by chance, and labels int64 [1797]."""
    found = load_digits()
    order = torch.randperm(len(found.target), generator=torch.Generator().manual_seed(0))
    images = torch.tensor(found.images, dtype=torch.float32).unsqueeze(1) / 8 - 1
    return images[order], torch.tensor(found.target)[order]


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    body, tuned = folder / "pretrained", folder / "fine-tuned"
    pretrained: Any = squall.fit(pretraining, strategy, epochs=20).model
    pretrained.save_pretrained(body)
    run = squall.fit(partial(fine_tuning, body), strategy, epochs=30, keep_best="accuracy")
    print(run.summary())
    best: Any = run.best
    best.save_pretrained(tuned)
    model = ViTForImageClassification.from_pretrained(tuned).eval()
    images, labels = digits()
    with torch.no_grad():
        right = (model(pixel_values=images[:360]).logits.argmax(1) == labels[:360]).float().mean().item()
    print(f"accuracy of {tuned}: {right:.4f}")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "runs/vit-digits"))
