"""A script with a generator and its critic, each with an optimizer of its own, that steps on a batch once or twice."""

import sys

import torch
from torch import nn

import squall

torch.manual_seed(0)
data = torch.utils.data.TensorDataset(torch.randn(600, 6) + 2)
generator = nn.Sequential(nn.Linear(3, 32), nn.BatchNorm1d(32), nn.Tanh(), nn.Linear(32, 6))
critic = nn.Sequential(nn.Linear(6, 400), nn.LeakyReLU(), nn.Linear(400, 1))
optimizers = [torch.optim.Adam(model.parameters(), lr=lr, betas=(0.5, 0.9)) for model, lr in
              ((generator, 0.002), (critic, 0.01))]  # fmt: skip
session = squall.join([generator, critic], optimizers)
of_generator, of_critic = session.optimizers
for number, (real,) in enumerate(session.batches(data, batch_size=20, epochs=int(sys.argv[1]))):
    of_critic.zero_grad()
    (critic(generator(torch.randn(len(real), 3)).detach()).mean() - critic(real).mean()).backward()
    of_critic.step()
    if number % 3 != 1:
        of_generator.zero_grad()
        (-critic(generator(torch.randn(len(real), 3))).mean()).backward()
        of_generator.step()
    if number % 10 == 0:
        for group in of_critic.param_groups:
            group["lr"] *= 0.9
