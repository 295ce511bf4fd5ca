"""Who goes on where machines cannot hear each other: what nurseries are asked, and answer, once for each deputy.

All of these may be lost, and are said again for as long as they matter (`frames.UNORDERED`).
"""

from __future__ import annotations

from squall.protocol.messages import Struct
from squall.protocol.nodes import Node


class Follow(Struct, frozen=True, tag="follow", array_like=True, gc=False):
    """To a nursery, of the deputy: the coordinator is silent. Will you follow me in its place?"""

    deputy: Node


class Abandon(Struct, frozen=True, tag="abandon", array_like=True, gc=False):
    """To a nursery, of the coordinator: will you never follow this deputy?"""

    deputy: Node


class Voted(Struct, frozen=True, tag="voted", array_like=True, gc=False):
    """To who asks: whether the nursery follows the deputy. It says the same for ever."""

    deputy: Node
    follows: bool


Message = Follow | Abandon | Voted
