"""Where a replay can begin in the midst of a run: at its last snapshots (`--keep-schedule last:3`).

    schedule/0/from-12/shard-0.0               what the shard did behind snapshot 12, up to the next one
                       shard-0.0.safetensors   what it held then: its part of the snapshot, by a second name
                       shard-0.0.json          its version then, and how many fetches of each replica it had answered
                       shard-0.0.replica-1.0.48001.safetensors     a push from before, that it applied behind (below)
    schedule/0/replica-1.0+2                   the third part of a long schedule: a replica knows of no snapshots

Replicas that do not wait for each other pass no moment together, so a replay begins at a consistent cut (Chandy and
Lamport, "Distributed Snapshots", 1985). A shard's is its own part of the snapshot. A replica's is the first fetch that
every shard has answered behind its part: what it computes from there on follows from the shards. What was pushed before
that and is applied behind a shard's part cannot be computed again, so the shard keeps it. When it answers a replica and
finds that all shards have their parts, the replica's next fetch is behind all of them, and one push more may still have
a gradient in it from before.

Every process removes its own files when n newer snapshots are there, and a replica those of the processes before it in
its slot. Shard 0 removes older attempts of which the end alone is kept, too: a replay begins behind them.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from zlib import crc32

import msgspec
from safetensors import SafetensorError, safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

from squall.protocol.effects import Term
from squall.protocol.nodes import Node
from squall.runtime.schedule import Damaged
from squall.runtime.snapshot import checksum_of
from squall.runtime.store import Store


class ShardCut(msgspec.Struct, frozen=True):
    """A shard's place in its schedule when it had written its part of a snapshot."""

    version: int
    fetches: dict[str, int]  # of each replica, answered in this attempt
    checksum: int  # CRC-32 of that part


def home(attempt: Path, number: int) -> Path:
    return attempt / f"from-{number}"


def numbers(attempt: Path) -> list[int]:
    """Snapshots that something is kept of, oldest first. Others may be removing it, and all of the attempt."""
    try:
        names = [name.partition("-") for name in os.listdir(attempt)]
    except FileNotFoundError:
        return []
    return sorted(int(number) for kind, _, number in names if kind == "from")


def complete(attempt: Path, shards: int) -> list[int]:
    """Snapshots that every shard has kept its part of, oldest first."""
    return [number for number in numbers(attempt) if has_all(attempt, number, shards)]


def has_all(attempt: Path, number: int, shards: int) -> bool:
    return all(told(attempt, number, shard).exists() for shard in range(shards))


def told(attempt: Path, number: int, shard: int) -> Path:
    """Where a shard's cut is; the last of its files to come."""
    return home(attempt, number) / f"{Node('shard', shard)}.json"


def cuts_at(attempt: Path, number: int, shards: int) -> list[ShardCut]:
    """Of all shards. Raises `Damaged`."""
    found = []
    for path in (told(attempt, number, shard) for shard in range(shards)):
        try:
            found.append(msgspec.json.decode(path.read_bytes(), type=ShardCut))
        except (OSError, msgspec.DecodeError) as error:
            raise Damaged(f"{path} cannot be read: {error}") from error
    return found


def fetches_before(cuts: Iterable[ShardCut], node: Node) -> int:
    """A replica's cut is the first fetch behind these."""
    return max(cut.fetches.get(str(node), 0) for cut in cuts)


def shard_logs(attempt: Path, node: Node, number: int | None) -> list[Path]:
    """The parts of a shard's schedule from a snapshot on, None: from the attempt's start."""
    first = attempt if number is None else home(attempt, number)
    later = [home(attempt, after) / str(node) for after in numbers(attempt) if number is None or after > number]
    return [first / str(node), *(path for path in later if path.exists())]


def replica_logs(attempt: Path) -> dict[Node, list[Path]]:
    """The parts of every replica's schedule."""
    found: dict[Node, list[tuple[int, Path]]] = {}
    for path in attempt.glob("replica-*"):
        name, _, part = path.name.partition("+")
        found.setdefault(Node.parse(name), []).append((int(part or 0), path))
    return {node: [path for _, path in sorted(found[node])] for node in sorted(found)}


def kept_push(attempt: Path, number: int, shard: Node, owner: Node, clock: int) -> Path:
    return home(attempt, number) / f"{shard}.{owner}.{clock}.safetensors"


def kept_state(attempt: Path, number: int, shard: Node, cut: ShardCut) -> dict[str, Tensor]:
    """What the shard held. Raises `Damaged`."""
    path = home(attempt, number) / f"{shard}.safetensors"
    try:
        found = checksum_of(path)
    except OSError as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if found != cut.checksum:
        raise Damaged(f"{path} is damaged: its checksum is {found:08x}, and was {cut.checksum:08x}")
    return load_file(path)


def keep_push(path: Path, push: dict[str, Tensor]) -> None:
    """Its checksum goes into the file's metadata. Raises `OSError`, and for a full disk safetensors' own error."""
    partial = path.with_name(f"{path.name}.partial")
    try:
        save_file(push, partial, {"checksum": _checksum(push)})
        os.chmod(partial, 0o600)
        partial.rename(path)
    finally:
        partial.unlink(missing_ok=True)


def read_push(path: Path) -> dict[str, Tensor]:
    """Raises `Damaged`."""
    try:
        with safe_open(path, framework="pt") as file:
            told = (file.metadata() or {}).get("checksum")
            push = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  # not a dict
    except FileNotFoundError:
        raise Damaged(f"{path} is missing") from None
    except (OSError, SafetensorError) as error:
        raise Damaged(f"{path} cannot be read: {error}") from error
    if _checksum(push) != told:
        raise Damaged(f"{path} is damaged: its checksum is {_checksum(push)}, and was {told}")
    return push


def _checksum(push: dict[str, Tensor]) -> str:
    """CRC-32, of the names, too."""
    checksum = 0
    for name in sorted(push):
        checksum = crc32(push[name].numpy().data, crc32(name.encode(), checksum))
    return f"{checksum:08x}"


def put_back(path: Path, term: Term, store: Store) -> None:
    """Lay a push that was kept where the shard looks for it. Raises `Damaged`."""
    kept, part = read_push(path), slice(store.start, store.stop)
    store.arena.gradient(term.slot, term.buffer)[part] = kept["gradient"]
    if "weights" in kept:
        store.arena.weights(term.slot, 0)[part] = kept["weights"]
