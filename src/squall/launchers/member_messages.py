"""What the nursery of a machine that has joined says to the head: a closed set, as it comes from another machine."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from squall.launchers.orders import Facts

NodeName = Annotated[str, msgspec.Meta(pattern=r"^[a-z]+-[0-9]{1,9}\.[0-9]{1,9}\Z")]
PIECE_BYTES = 1 << 20  # of a file
Count = Annotated[int, msgspec.Meta(ge=1, lt=1 << 53)]
Port = Annotated[int, msgspec.Meta(ge=1, le=65535)]


class Message(msgspec.Struct, frozen=True, tag_field="kind", tag=str.lower):
    """Its class's name, in small letters, is its kind."""


class Built(Message, frozen=True):
    facts: Facts


class Placed(Message, frozen=True):
    ports: dict[NodeName, Port]
    placing: int = 0  # the number of the message that has placed its processes


class Ready(Message, frozen=True):
    placing: int = 0


class Unready(Message, frozen=True):
    """It was ready, and leaves."""


class Scheduled(Message, frozen=True):
    """The next bytes of a process's schedule."""

    file: Annotated[str, msgspec.Meta(pattern=r"^(packed-)?(replica|shard)-[0-9]{1,9}\.[0-9]{1,9}\Z")]
    data: Annotated[bytes, msgspec.Meta(min_length=1, max_length=PIECE_BYTES)]


class Failed(Message, frozen=True):
    error: str
    task: bool


class Exited(Message, frozen=True):
    node: Annotated[
        str, msgspec.Meta(pattern=r"^(replica|part|shard|backup|evaluator|coordinator|deputy)-[0-9]{1,9}\.[0-9]{1,9}\Z")
    ]
    pid: Annotated[int, msgspec.Meta(ge=1, lt=1 << 31)]
    why: str
    traceback: str


class Listening(Message, frozen=True):
    pass


class Stopping(Message, frozen=True):
    pass


class Ended(Message, frozen=True):
    status: str
    reason: str


class Begin(Message, frozen=True):
    """Of a script: what it gives to `session.batches`."""

    examples: Count
    batch_size: Count
    epochs: Count | None
    steps: Count | None


class Leave(Message, frozen=True):
    """Of a script, whose loop takes no more batches."""

    why: str


class Logged(Message, frozen=True):
    """Of a script, behind its loop."""

    values: dict[str, float | Literal["nan", "inf", "-inf"]]


class Over(Message, frozen=True):
    """Of a script that has come to its end."""


class Script(Message, frozen=True):
    """What a script has said to its machine's nursery."""

    replica: Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
    said: Begin | Leave | Logged | Over


Said = Built | Placed | Ready | Unready | Scheduled | Failed | Exited | Listening | Stopping | Ended | Script


def understood(said: dict[str, Any]) -> bool:
    try:
        msgspec.convert(said, Said)
    except msgspec.ValidationError:
        return False
    return True
