"""What Squall is measured against: other ways to train the same network on the same batches.

plain       one process, an ordinary PyTorch loop
hogwild     processes that step on one shared model without locks (torch.multiprocessing)
ddp         DistributedDataParallel on Gloo, in lock step
rpc         a parameter server on torch.distributed.rpc, asynchronous
ray_actor   a parameter server that is a Ray actor, asynchronous
floor       no peer: the arithmetic and copies of an exchange, in processes that exchange nothing

All offer `samples_per_second`, all but floor `seconds_to_accuracy`; rpc, ray_actor and floor offer
`exchange_seconds`. How each number is taken is written in `common`, once for all.
"""

from __future__ import annotations


class PeerUnavailable(Exception):
    """The library that a peer is built on is not installed, or this build of torch lacks it."""
