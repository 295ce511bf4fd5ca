"""A replica of two parts on two machines, with a link of 1 Gbit/s between them: samples a second, and what passes it.

Each part exchanges its own with the shards, of which one is on each machine. The stages of a pipeline find most of
theirs beside them; slices of a layer lie in both.
"""

from __future__ import annotations

import statistics
import tempfile
from contextlib import closing
from functools import partial
from pathlib import Path

import torch

import squall
from benchmarks.links import RATE
from benchmarks.machines import address, joined
from benchmarks.namespaces import Link, linked
from benchmarks.parts import LR, MICROBATCHES, task
from benchmarks.results import Section
from benchmarks.squall_training import STEADY_AFTER_S, steady
from squall.report import Reader, summarize

WIDTH, BLOCKS, BATCH = 1024, 4, 256
VECTOR_BYTES = 4 * 2 * BLOCKS * (WIDTH * WIDTH + WIDTH)
SECONDS = 8.0
SPLITS: dict[str, squall.splits.Split] = {
    "pipeline": squall.Pipeline(microbatches=MICROBATCHES),
    "slices": squall.Tensor({"*.up": "column", "*.down": "row"}),
}


def measure(repeats: int = 3) -> Section:
    print("spread parts", flush=True)
    section = Section(
        "A replica of two parts on two machines",
        "A perceptron with 8 layers of 1,024 (8.4 million parameters), batches of 256, one replica of two parts in two"
        " network namespaces with a link of 1 Gbit/s (tbf, both ways), a shard on each, SGD, an exchange a step:"
        f" gradients and weights of {2 * VECTOR_BYTES / 1e6:.1f} MB. What passes the link, both ways together, is also"
        " what the parts send each other, and all that TLS and TCP add.",
    )
    with linked(RATE) as link:
        for name, split in SPLITS.items():
            rates, passed = zip(*(_trained(link, split) for _ in range(repeats)))
            section.only(f"{name}, samples/s", f"{statistics.median(rates):,.0f}/s")
            section.only(f"{name}, over the link", f"{statistics.median(passed) / 1e6:.1f} MB a step")
    return section


def _trained(link: Link, split: squall.splits.Split) -> tuple[float, float]:
    """Samples a second once it is steady, and the bytes that passed the link in a step, with all that TCP adds."""
    settings = squall.Settings(
        threads=1, seconds=SECONDS + STEADY_AFTER_S, snapshot_every_s=None, progress=False, machines=2,
        listen=address(link), lost_after_s=30.0, parts=2, spread_parts=True,
    )  # fmt: skip
    strategy = squall.Downpour(replicas=1, shards=2, optimizer=partial(torch.optim.SGD, lr=LR))
    before = link.sent_bytes(0) + link.sent_bytes(1)
    with tempfile.TemporaryDirectory(prefix="squall-bench-") as folder, joined(link):
        made = partial(task, split, WIDTH, BLOCKS, BATCH)
        run = squall.fit(made, strategy, run_dir=Path(folder) / "run", settings=settings)
        passed = link.sent_bytes(0) + link.sent_bytes(1) - before
        with closing(Reader(run.directory / "run.sqlite")) as reader:
            updates = summarize(reader).updates
        assert updates
        return steady(run), passed / updates


if __name__ == "__main__":
    print(measure().markdown())
