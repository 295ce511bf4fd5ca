"""A network a twentieth of the size of that in digits.py, to be trained on what that one says of each digit.

squall train examples/digits.py --run-dir runs/digits
squall distill runs/digits examples/digits_student.py --temperature 3 --mix 0.7
"""

from __future__ import annotations

from dataclasses import replace

from digits import split as split
from digits import strategies as strategies
from digits import strategy as strategy
from digits import task as teacher
from torch import nn

import squall

epochs = 30


def task() -> squall.Task:
    model = nn.Sequential(nn.Conv2d(1, 4, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(), nn.Linear(4 * 4 * 4, 10))
    return replace(teacher(), model=model)
