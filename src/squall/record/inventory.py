"""What runs where when it begins, of a run on several machines: a fact of its record, for people."""

import msgspec


class Inventory(msgspec.Struct, frozen=True):
    """Why it is so, and of each machine its number, its name, what it has, and what runs there.

    `plaintext`: what goes between them is not encrypted.
    """

    why: str = ""
    machines: list[tuple[int, str, str, str]] = []
    plaintext: bool = False
