"""A language model of Python, trained on the source of its standard library: text that every machine has.

    python examples/stdlib_lm.py      (or, without the sample at its end: squall train examples/stdlib_lm.py)
    squall train examples/stdlib_lm.py --parts 2              each replica is a pipeline of two processes
    squall train examples/stdlib_lm.py:in_slices --parts 2    its two processes share each feed-forward layer

The model is a small transformer over bytes, so there is no tokenizer. It is judged by the bits it needs for a
byte of files it never saw. For scale: 8 knows nothing, 4.8 knows how often each byte occurs.
"""

from __future__ import annotations

import math
import sysconfig
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, dropout, gelu, linear, scaled_dot_product_attention
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import TensorDataset

import squall

CONTEXT, WIDTH, HEADS, LAYERS, DROPOUT = 128, 96, 3, 3, 0.05
TRAIN_WINDOWS, HELD_OUT_WINDOWS, BATCH = 16_000, 800, 8  # a window is CONTEXT bytes
LEFT_OUT = {"test", "tests", "idlelib", "lib2to3", "encodings", "pydoc_data", "site-packages", "dist-packages"}

# Old gradients need less momentum than usual, because asynchrony adds its own, and a longer warm-up.
strategy = squall.Downpour(replicas=2, optimizer=partial(torch.optim.AdamW, lr=3e-3, betas=(0.5, 0.95)))
epochs = 1


def task() -> squall.Task:
    return squall.Task(
        model=Transformer(),
        loss=lambda model, batch: nats(model, batch).mean(),
        train=windows(source(held_out=False), TRAIN_WINDOWS),
        validate=windows(source(held_out=True), HELD_OUT_WINDOWS),
        batch_size=BATCH,
        metrics={"bits_per_byte": lambda model, batch: nats(model, batch).mean(1) / math.log(2)},
        groups=decayed_and_not,
        schedule=warm_up_then_cosine,
        clip_norm=1.0,
        split=squall.Pipeline(stages=stages, microbatches=4),
    )


def in_slices() -> squall.Task:
    """The same, but with --parts each part has some of a feed-forward layer's units (attention's 3 heads stay)."""
    return replace(task(), split=squall.Tensor({"blocks.*.up": "column", "blocks.*.down": "row"}))


def stages(model: nn.Module) -> list[nn.Module]:
    """What a pipeline may be cut between."""
    start, blocks, end = model.children()
    return [start, *blocks.children(), end]


def source(held_out: bool) -> Tensor:
    """A tenth of the standard library's files or the rest, as a hash of each path says: 1 or 8 MB, uint8 [bytes]."""
    root = Path(sysconfig.get_paths()["stdlib"])
    text = bytearray()
    for path in sorted(files(root)):
        digest = sha256(path.relative_to(root).as_posix().encode()).digest()
        if (digest[0] % 10 == 0) == held_out:
            text += path.read_bytes()
    return torch.frombuffer(text, dtype=torch.uint8)


def files(folder: Path) -> Iterator[Path]:
    for path in folder.iterdir():
        if path.suffix == ".py":
            yield path
        elif path.is_dir() and path.name not in LEFT_OUT:
            yield from files(path)


def windows(text: Tensor, count: int) -> TensorDataset:
    """Views of CONTEXT + 1 bytes, spread evenly over the text: CONTEXT to guess, and one before them."""
    return TensorDataset(text.unfold(0, CONTEXT + 1, step=(len(text) - CONTEXT - 1) // count)[:count])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, WIDTH]
        qkv = self.qkv(self.norm1(x)).unflatten(2, (3, HEADS, -1))  # [batch, time, 3, HEADS, WIDTH / HEADS]
        q, k, v = qkv.permute(2, 0, 3, 1, 4)  # each [batch, HEADS, time, WIDTH / HEADS]
        seen = scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + dropout(self.out(seen), DROPOUT, self.training)
        return x + dropout(self.down(gelu(self.up(self.norm2(x)))), DROPOUT, self.training)


class Start(nn.Module):
    """Bytes at learned positions."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.positions = nn.Embedding(256, WIDTH), nn.Embedding(CONTEXT, WIDTH)

    def forward(self, text: Tensor) -> Tensor:  # integers [batch, time] -> [batch, time, WIDTH]
        found: Tensor = self.bytes(text) + self.positions.weight[: text.shape[1]]
        return found


class End(nn.Module):
    """Out through the embedding that they came in by."""

    def __init__(self, embedding: nn.Embedding) -> None:
        super().__init__()
        self.norm, self.bytes = nn.LayerNorm(WIDTH), embedding

    def forward(self, x: Tensor) -> Tensor:  # [batch, time, WIDTH] -> logits [batch, time, 256]
        return linear(self.norm(x), self.bytes.weight)


class Transformer(nn.Module):
    """Decoder only, pre-norm."""

    def __init__(self) -> None:
        super().__init__()
        self.start = Start()
        self.blocks = nn.Sequential(*(Block() for _ in range(LAYERS)))
        self.end = End(self.start.bytes)
        for embedding in (self.start.bytes, self.start.positions):
            nn.init.normal_(embedding.weight, std=0.1)  # torch's 1.0 would start from logits of +-10

    def forward(self, text: Tensor) -> Tensor:  # integers [batch, time] -> logits [batch, time, 256]
        logits: Tensor = self.end(self.blocks(self.start(text)))
        return logits


def nats(model: nn.Module, batch: list[Tensor]) -> Tensor:
    """Surprise at each byte but a window's first: uint8 [batch, CONTEXT + 1] -> float32 [batch, CONTEXT]."""
    text = batch[0].long()
    return cross_entropy(model(text[:, :-1]).transpose(1, 2), text[:, 1:], reduction="none")


def decayed_and_not(model: nn.Module) -> list[dict[str, Any]]:
    """Weight decay is for the matrices of linear layers, not for norms, biases and embeddings."""
    matrices = [module.weight for module in model.modules() if isinstance(module, nn.Linear)]
    others = [p for p in model.parameters() if not any(p is matrix for matrix in matrices)]
    return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]


def warm_up_then_cosine(optimizer: torch.optim.Optimizer) -> LambdaLR:
    """Up over 100 updates, then down to a tenth at the end of `epochs`, if each batch is an update."""
    updates = epochs * TRAIN_WINDOWS // BATCH
    cosine = [0.55 + 0.45 * math.cos(math.pi * update / updates) for update in range(updates + 1)]
    return LambdaLR(optimizer, lambda update: min(1.0, (update + 1) / 100) * cosine[min(update, updates)])


@torch.no_grad()
def write(model: nn.Module, start: str, count: int) -> str:
    """Go on from `start` by `count` bytes, a bit less daring than the model's own odds (temperature 0.8)."""
    text = torch.tensor([[*start.encode()]])
    for _ in range(count):
        odds = (model(text[:, -CONTEXT:])[:, -1] / 0.8).softmax(1)
        text = torch.cat([text, torch.multinomial(odds, 1)], dim=1)
    return bytes(text[0].tolist()).decode(errors="replace")


if __name__ == "__main__":
    run = squall.fit(task, strategy, epochs=epochs)
    print(run.summary(), write(run.model, start="def ", count=400), sep="\n")
