"""Peer: torchrun, which starts all processes again when one of them dies. Run as a script it is one of them."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import FileStore
from torch.nn.parallel import DistributedDataParallel

from benchmarks.peers.common import backward, batches, sgd
from benchmarks.steps import Steps
from benchmarks.workloads import digits_mlp


def train(folder: Path, replicas: int, fatal: int) -> None:
    """Rank 1 dies in its step number `fatal`, and then all come so far once more."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={replicas}"]
    command += ["--max-restarts=3", "-m", "benchmarks.peers.elastic", str(folder), str(fatal)]
    threads = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
    subprocess.run(command, check=True, capture_output=True, env={**os.environ, **threads})


def _work(folder: Path, fatal: int) -> None:
    rank, replicas, start = (int(os.environ[name]) for name in ("RANK", "WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT"))
    store = FileStore(str(folder / f"start-{start}"), replicas)  # torchrun's own still has the dead one's address
    dist.init_process_group("gloo", store=store, rank=rank, world_size=replicas)
    workload = digits_mlp()
    model = DistributedDataParallel(workload.model(), gradient_as_bucket_view=True)
    optimizer, steps = sgd(model, workload.lr), Steps(folder)
    for inputs, labels in batches(workload, rank, replicas):
        steps.begin(dies_in=fatal if rank == 1 else 0)
        backward(model, inputs, labels, 1.0)
        optimizer.step()
        over = torch.tensor(int(steps.enough(fatal)))
        dist.all_reduce(over, op=dist.ReduceOp.MAX)
        if over:
            break
    gc.collect()  # DDP's cycles would keep Gloo's threads alive past the interpreter, which can abort
    dist.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    _work(Path(sys.argv[1]), int(sys.argv[2]))
