"""The message of replicas that answer on another machine than the coordinator's."""

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


Message = AnswersPiece
