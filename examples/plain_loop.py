"""An ordinary PyTorch training script, with the four lines that let any number of replicas run it.

python examples/plain_loop.py                                           alone, in one process
squall run --replicas 4 --strategy downpour examples/plain_loop.py      the same script, once per replica
squall run --replicas 2 --strategy averaging --every 8 examples/plain_loop.py --epochs 30
"""

from __future__ import annotations

import argparse
from functools import partial

import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy
from torch.utils.data import TensorDataset

import squall

parser = argparse.ArgumentParser()
parser.add_argument("--epochs", type=int, default=20)
options = parser.parse_args()

digits = load_digits()
images, labels = torch.tensor(digits.data, dtype=torch.float32) / 16, torch.tensor(digits.target)
order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
train, test = (TensorDataset(images[part], labels[part]) for part in (order[360:], order[:360]))

torch.manual_seed(0)
model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
session = squall.join(model, optimizer=partial(torch.optim.SGD, lr=0.1))  # 1: was optimizer = torch.optim.SGD(...)
accuracy = {"accuracy": lambda model, batch: (model(batch[0]).argmax(1) == batch[1]).float()}

for step, batch in enumerate(session.batches(train, batch_size=32, epochs=options.epochs)):  # 2: was a DataLoader
    loss = cross_entropy(model(batch[0]), batch[1])
    loss.backward()
    session.step(loss)  # 3: was optimizer.step(); optimizer.zero_grad()
    if step % 100 == 0:
        session.evaluate(test, accuracy)

if session.is_leader:  # 4: one of them prints and saves
    print("after the last update:", session.evaluate(test, accuracy))
