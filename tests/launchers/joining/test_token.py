"""The token: for its user alone, from a file or the environment, and in no message."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from squall.launchers.joining.token import VARIABLE, Token, find_token
from squall.transports.certificates import Identity, fingerprint

ROOT = Identity.new_root("a run")


def test_a_token_is_read_as_it_was_written_into_a_file_of_its_users_own(tmp_path: Path) -> None:
    token, file = Token.new(ROOT), tmp_path / "token"
    file.write_text("an older one, which others may read")
    file.chmod(0o644)
    token.write(file)
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert find_token(str(file)) == token
    assert token.fingerprint == fingerprint(ROOT.root)
    assert Token.new(ROOT).secret != token.secret
    assert token.secret not in f"{token} {token!r}"


def test_the_environments_token_is_taken_out_of_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    token = Token.new(ROOT)
    token.write(tmp_path / "token")
    monkeypatch.setenv(VARIABLE, (tmp_path / "token").read_text())
    assert find_token(None) == token
    assert VARIABLE not in os.environ
    with pytest.raises(ValueError, match="--token-file FILE"):
        find_token(None)


@pytest.mark.parametrize("damage", [lambda t: t[:-3], lambda t: t.replace("squall-1", "squall-2"), lambda t: "\0é" * 9])
def test_what_is_no_token_is_refused_without_a_word_of_it(
    damage: object, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = Token.new(ROOT)
    token.write(tmp_path / "token")
    assert callable(damage)
    (tmp_path / "token").write_text(damage((tmp_path / "token").read_text()))
    with pytest.raises(ValueError, match=f"{tmp_path}/token holds no token of this version") as raised:
        find_token(str(tmp_path / "token"))
    assert token.secret not in str(raised.value)
    with pytest.raises(ValueError, match=r"nothing cannot be read: No such file"):
        find_token(str(tmp_path / "nothing"))
    monkeypatch.setenv(VARIABLE, "x")
    with pytest.raises(ValueError, match=f"{VARIABLE} holds no token"):
        find_token(None)
