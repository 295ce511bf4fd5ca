"""A script whose replicas may have parts, and that says itself what each of them computes."""

import argparse
import os
import time
from functools import partial

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset

import squall

options = argparse.ArgumentParser()
options.add_argument("--how", default="pipeline")
options.add_argument("--mode", default="")
options.add_argument("--slow-s", type=float, default=0.0, help="the second stage takes so much longer")
options.add_argument("--epochs", type=int, default=3)
options.add_argument("--save", help="where rank 0 puts its weights: in each part a file of its own")
options = options.parse_args()

torch.manual_seed(0)
inputs = torch.randn(92, 6)
data = TensorDataset(inputs, inputs[:, :2].sum(1, keepdim=True).sin())
front = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8) if options.how == "pipeline" else nn.Identity(), nn.Tanh())
back = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 1))
model = nn.Sequential(front, back)
if options.how == "two optimizers":
    own = [torch.optim.SGD(each.parameters(), lr=0.05, momentum=0.9) for each in (front, back)]
    session = squall.join([front, back], own)
else:
    back[0].bias = front[0].bias  # tied, so that in a pipeline two parts have a gradient of it
    session = squall.join(model, optimizer=partial(torch.optim.SGD, lr=0.05, momentum=0.9), clip_norm=0.5)
part, parts = session.part, session.parts
assert (parts == 1) == (session.group is None)


def pipeline(batch):
    """Two stages, by hand: the loss is known on the second, and its part alone gives it."""
    x, y = batch
    if part == 0:
        between = front(x)
        dist.send(between.detach(), 1, group=session.group)
        gradient = torch.empty_like(between)
        dist.recv(gradient, 1, group=session.group)
        between.backward(gradient)
        return None
    between = torch.empty(len(x) - (options.mode == "misuse"), 8)
    dist.recv(between, 0, group=session.group)
    loss = mse_loss(back(between.requires_grad_()), y)
    loss.backward()
    time.sleep(options.slow_s)  # which stands for work
    dist.send(between.grad, 0, group=session.group)
    return loss


def examples(batch):
    """Every part has some of the batch's examples, and a share of the loss."""
    x, y = batch
    mine = slice(part * len(x) // parts, (part + 1) * len(x) // parts)
    loss = mse_loss(model(x[mine]), y[mine], reduction="sum") / len(x)
    loss.backward()
    dist.all_reduce(total := loss.detach().clone(), group=session.group)
    return total


def whole(batch):
    loss = mse_loss(model(batch[0]), batch[1])
    loss.backward()
    if parts > 1 and options.mode != "same":
        for parameter in model.parameters():
            if part != 1:
                parameter.grad = None
    return loss


if options.mode == "replaced":
    front[0].weight = nn.Parameter(torch.randn(16, 6))
if options.mode == "other data" and part == 1:
    data = TensorDataset(inputs[:90], inputs[:90, :1])
compute = {"pipeline": pipeline, "whole": whole}.get(options.how, examples) if parts > 1 else whole
seen = []
for number, batch in enumerate(session.batches(data, batch_size=16, epochs=options.epochs)):
    if number == 3 and part == 1 and "RAISES" in os.environ:
        raise KeyError("in part 1, this time")
    if number == 3 and options.mode == "break":
        break
    if number == 3 and part == 1 and options.mode in ("break alone", "raise", "skip alone"):
        if options.mode == "break alone":
            break
        if options.mode == "raise":
            raise KeyError("in part 1")
        session.skip()
        continue
    if number == 3 and options.mode == "skip":
        session.skip()
        continue
    seen.append(round(float(batch[0].sum()), 4))
    if options.how == "two optimizers":
        for optimizer in session.optimizers:
            optimizer.zero_grad()
            compute(batch)
            optimizer.step()
    else:
        session.step(compute(batch))
with torch.no_grad():
    measured = session.evaluate(data, {"error": lambda _, batch: (model(batch[0]) - batch[1]).abs().mean(1)})
print(f"part {part} of {parts} of {session.rank}, leader {session.is_leader}, saw {hash(tuple(seen))}\n", end="")
if options.save and session.rank == 0:
    state = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    torch.save((state, seen, measured), f"{options.save}.{part}")
