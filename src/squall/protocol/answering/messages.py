"""What replicas that answer say of what they keep, beside their reports."""

from __future__ import annotations

from typing import Annotated

import msgspec

from squall.protocol.messages import PIECE_BYTES, Count, Struct


class AnswersPiece(Struct, frozen=True, tag="answers", array_like=True, gc=False):
    """Answers that a replica has on another machine, of examples [start, stop) of a lease: a piece of their file.

    Bytes [at, at + size) of `total` travel along. `number` counts the pieces of a lease's files.
    """

    lease: Count
    start: Count
    stop: Count
    number: Count
    at: Count
    size: Annotated[int, msgspec.Meta(ge=1, le=PIECE_BYTES)]
    total: Count


class NotKept(Struct, frozen=True, tag="unkept", array_like=True, gc=False):
    """The replica cannot write its answers, on the coordinator's machine."""

    why: Annotated[str, msgspec.Meta(max_length=2000)]


Message = AnswersPiece | NotKept
