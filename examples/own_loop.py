"""The trainer of a small language model, with a loop of its own and the four lines that let replicas run it.

    python examples/own_loop.py                                  alone
    squall run --replicas 2 examples/own_loop.py --steps 400     two replicas, with Downpour

No dataset: every step draws windows of the text by chance. Two param groups, learning rates by the step's number,
several backward passes a step, clipping, a gradient scaler that is off, and an evaluation every so often.
"""

from __future__ import annotations

import argparse
import math

import torch
from stdlib_lm import CONTEXT, Transformer, decayed_and_not, nats, source
from torch import Tensor

import squall  # 1: is new

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int, default=300)
parser.add_argument("--batch", type=int, default=4, help="windows in a backward pass")
parser.add_argument("--passes", type=int, default=3, help="backward passes in a step")
parser.add_argument("--rate", type=float, default=3e-3, help="the highest learning rate")
options = parser.parse_args()
highest: float = options.rate
steps: int = options.steps
warm_up, every = steps // 10, 100

torch.manual_seed(0)
texts = {"train": source(held_out=False), "held out": source(held_out=True)}
model = Transformer()
optimizer: torch.optim.Optimizer = torch.optim.AdamW(decayed_and_not(model), lr=highest, betas=(0.9, 0.95))
session = squall.join(model, optimizer)  # 2: is new
optimizer = session.optimizer  # 3: is new
scaler = torch.amp.GradScaler("cpu", enabled=False)


def draw(name: str) -> list[Tensor]:
    """Windows from anywhere in a text: [uint8 [batch, CONTEXT + 1]]."""
    starts = torch.randint(len(texts[name]) - CONTEXT, (options.batch,))
    return [torch.stack([texts[name][start : start + CONTEXT + 1] for start in starts])]


@torch.no_grad()
def bits(name: str) -> float:
    """For a byte of some windows."""
    model.eval()
    found = torch.stack([nats(model, draw(name)).mean() for _ in range(10)]).mean().item() / math.log(2)
    model.train()
    return found


def rate(step: int) -> float:
    """Up, and down along a cosine to a tenth."""
    if step < warm_up:
        return highest * (step + 1) / warm_up
    way = (step - warm_up) / (steps - warm_up)
    return highest * (0.55 + 0.45 * math.cos(math.pi * way))


for step in session.steps(steps, examples=options.batch * options.passes):  # 4: was range(steps)
    for group in optimizer.param_groups:
        group["lr"] = rate(step)
    if step % every == 0 or step == steps - 1:
        print(f"step {step}: {bits('train'):.2f} bits a byte, {bits('held out'):.2f} of held-out files", flush=True)
    for _ in range(options.passes):
        loss = nats(model, draw("train")).mean() / options.passes
        scaler.scale(loss).backward()
    scaler.unscale_(optimizer)
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
