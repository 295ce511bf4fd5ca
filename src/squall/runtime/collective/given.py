"""What a member of all-reduce gives others of its state. They look at it before they use any of it.

Members on other machines may be broken, or another program: what is no state breaks the group, and nobody's process.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from safetensors.torch import load, save
from torch import Tensor

from squall.runtime.collective.member import Member
from squall.runtime.groups import Group
from squall.runtime.mesh_group import MeshGroup
from squall.runtime.places import state_bytes_at_most
from squall.runtime.states import SETTINGS, STATE
from squall.transports.mesh import MeshBroken

TOLD = 200  # characters of what another one has named


def broadcast_state(
    group: Group | MeshGroup, source: int, given: dict[str, Tensor] | None, member: Member, whole: bool = False
) -> dict[str, Tensor]:  # fmt: skip
    """What the member in place `source` gives; all others give None. The tensors are on the CPU.

    `whole`: it is all of the state, with the weights. Raises `MeshBroken` for what is no state.
    """
    raw = bytearray(save(given)) if given is not None else bytearray()
    size = torch.tensor([len(raw)], device=member.device)
    dist.broadcast(size, group=group.torch, group_src=source)
    if not 0 <= int(size) <= state_bytes_at_most(member.layout.length):
        raise MeshBroken(f"{group.members[source]} gives a state of {int(size)} bytes")
    data = torch.frombuffer(raw, dtype=torch.uint8) if given is not None else torch.empty(int(size), dtype=torch.uint8)
    data = data.to(member.device)
    dist.broadcast(data, group=group.torch, group_src=source)
    if given is not None:
        return given
    try:
        found = load(data.cpu().numpy().tobytes())
    except (SafetensorError, KeyError, ValueError) as error:  # also for a type that torch has not
        raise MeshBroken(f"what {group.members[source]} gives is no state: {str(error)[:TOLD]}") from error
    if wrong := _misfit(found, member, whole):
        raise MeshBroken(f"what {group.members[source]} gives is no state of this model: {wrong[:TOLD]!r}")
    return found


def _misfit(state: Mapping[str, Tensor], member: Member, whole: bool) -> str:
    """What does not belong there."""
    parameters = {span.name: number for number, span in enumerate(member.layout.parameters)}
    held = sum(region.numel() for region in member.layout.regions(member.vector))
    numbers = {str(number): group for number, group in enumerate(member.optimizer.param_groups)}
    if ("weights" in state) != whole:
        return "weights"
    for name, value in state.items():
        kind, _, rest = name.partition(":")
        owner, _, key = rest.rpartition(":")
        if name == "weights":
            fits = value.shape == (held,) and value.dtype == member.vector.dtype
        elif kind == SETTINGS:
            at = numbers.get(owner, {})
            fits = isinstance(at.get(key), int | float) and value.numel() == 1
        else:
            fits = kind == STATE and owner in parameters and member.could_have(parameters[owner], key, value)
        if not fits:
            return name
    return ""
