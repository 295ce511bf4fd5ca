"""The frame that carries a message over a link, and its bytes.

Decoding is strict: a frame that is malformed or too large raises, and nothing is ever unpickled.
"""

from __future__ import annotations

from typing import Annotated

import msgspec

from squall.protocol import copy_messages, epoch_messages, loss_messages, messages, nursery_messages
from squall.protocol.answering import messages as answering
from squall.protocol.collective import messages as collective
from squall.protocol.messages import Count
from squall.protocol.sandblaster import messages as sandblaster

LOST = -1  # the sender may lack what it has not acknowledged: send it again
HAVE = -2  # the answer to that: what has come of what the other has sent
MAX_FRAME_BYTES = 4 * 1024 * 1024  # a view of 50,000 members fits; anything larger is not ours

Message = (
    messages.Message | nursery_messages.Message | sandblaster.Message | collective.Message | answering.Message
    | loss_messages.Message | copy_messages.Message | epoch_messages.Message
)  # fmt: skip

# Said again and again while it matters: it may be lost, and overtakes what waits. Its frame has number 0, and
# acknowledges nothing: a machine that is backed says it at once, and may have taken what its backup has not.
UNORDERED = (nursery_messages.Alive, copy_messages.Has, *epoch_messages.Message.__args__)


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What a wire carries: a numbered message, one that is `UNORDERED` (number 0), or an acknowledgement alone.

    That has number 0, `LOST` or `HAVE`, and no message.
    """

    number: Annotated[int, msgspec.Meta(ge=HAVE, le=1 << 53)]  # 1, 2, 3 ... per link and direction
    seen: Count  # highest number received in order on this link
    message: Message | None = None


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Frame)


def encode(frame: Frame) -> bytes:
    return _encoder.encode(frame)


def decode(data: bytes) -> Frame:
    """Raises `msgspec.DecodeError` or `ValueError` for anything that is not exactly a frame."""
    if len(data) > MAX_FRAME_BYTES:
        raise ValueError(f"a frame of {len(data)} bytes is larger than {MAX_FRAME_BYTES}")
    frame: Frame = _decoder.decode(data)
    return frame
