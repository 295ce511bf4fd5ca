"""Messages of all-reduce, between the coordinator and replicas that have no shards."""

from __future__ import annotations

from squall.protocol.messages import Address, Count, Lease, Stats, Struct, Weights
from squall.protocol.nodes import Node


class Place(Struct, frozen=True, array_like=True, gc=False):
    """Where a member is, and how it is called from other machines."""

    machine: Count
    address: Address = ""


class Form(Struct, frozen=True, tag="form", array_like=True, gc=False):
    """All members of the newest view have left their old group: form a new one, and go on from round `clock`.

    `behind`: members whose weights are older. They get those of `source`. `places` are those of the view's members, in
    their order, where the run has several machines.
    """

    number: Count  # of the view
    clock: Count
    examples: Count  # that are in the weights
    source: Node
    behind: tuple[Node, ...] = ()
    places: tuple[Place, ...] = ()


class Turn(Struct, frozen=True, tag="turn", array_like=True, gc=False):
    """A round of the group: the replica's own batch of it, and how many examples all have together."""

    clock: Count
    lease: Lease | None
    examples: Count


class Finished(Struct, frozen=True, tag="turn!", array_like=True, gc=False):
    """The replica's weights have moved by this round."""

    clock: Count
    stats: Stats


class ShowWeights(Struct, frozen=True, tag="show", array_like=True, gc=False):
    """Put the weights into the evaluator's buffer, for this evaluation."""

    number: Count


class Shown(Struct, frozen=True, tag="show!", array_like=True, gc=False):
    """They are there."""

    number: Count
    weights: Weights


class Broken(Struct, frozen=True, tag="broken", array_like=True, gc=False):
    """The group of this view cannot go on; nor can the run, where a share of the optimizer's state is `lost`."""

    number: Count
    why: str
    lost: bool = False


Message = Form | Turn | Finished | ShowWeights | Shown | Broken
