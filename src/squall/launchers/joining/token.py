"""What lets a machine into a run: a secret, and the fingerprint by which it knows the head before it tells it.

A token is read from a file or the environment, and never from a command's arguments, which everybody on a machine can
see. It stands in no message.
"""

from __future__ import annotations

import os
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from squall.transports.certificates import Identity, fingerprint

VARIABLE = "SQUALL_TOKEN"
TOKEN = "token"  # file in the run's directory
SECRET_LENGTH = 43  # characters: 32 bytes
_PATTERN = re.compile(r"squall-1\.([A-Za-z0-9_-]{43})\.([0-9a-f]{64})")
_READ_AT_MOST = 1000  # characters of a file that may be no token at all


@dataclass(frozen=True)
class Token:
    secret: str = field(repr=False)
    fingerprint: str  # of the run's root certificate

    @classmethod
    def new(cls, root: Identity) -> Token:
        """Of a run that has this root."""
        return cls(secrets.token_urlsafe(32), fingerprint(root.root))

    @classmethod
    def parse(cls, text: str, source: str) -> Token:
        """Raises `ValueError`, which names the source and not the text."""
        found = _PATTERN.fullmatch(text.strip())
        if found is None:
            raise ValueError(
                f"{source} holds no token of this version: copy the file that the run's first machine has written"
            )
        return cls(*found.groups())

    @classmethod
    def for_all(cls) -> Token:
        """For a run that is not there yet: whoever starts it makes its root from the secret."""
        secret = secrets.token_urlsafe(32)
        return cls(secret, fingerprint(Identity.new_root("squall", secret).root))

    def root(self) -> Identity:
        """Of a run that is given this token. Raises `ValueError` for that of another run."""
        root = Identity.new_root("squall", self.secret)
        if fingerprint(root.root) != self.fingerprint:
            raise ValueError(f"{VARIABLE} is the token of another run: unset it, or use what `squall token` prints")
        return root

    def text(self) -> str:
        """For a file or the environment alone."""
        return f"squall-1.{self.secret}.{self.fingerprint}"

    def write(self, file: Path) -> None:
        """For those alone who may read the user's own files."""
        file.unlink(missing_ok=True)  # it may be readable for others
        with open(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as opened:
            opened.write(f"{self.text()}\n")


def find_token(file: str | None) -> Token:
    """From the file, or from the environment, where no process that is started later finds it.

    Raises `ValueError` with the remedy.
    """
    text = os.environ.pop(VARIABLE, None)
    if file is not None:
        try:
            with open(file, errors="replace") as opened:
                return Token.parse(opened.read(_READ_AT_MOST), f"--token-file {file}")
        except OSError as error:
            raise ValueError(f"--token-file {file} cannot be read: {error.strerror}") from None
    if text is None:
        raise ValueError(
            "there is no token: copy the file that the run's first machine names, and give it by --token-file FILE;"
            f" or put its content into the environment variable {VARIABLE}"
        )
    return Token.parse(text, VARIABLE)
