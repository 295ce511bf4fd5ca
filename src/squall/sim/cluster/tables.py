"""A TOML file as a person wrote it: every complaint about a value says in which line that stands, and what to write.

tomllib keeps no line numbers. They are found when there is something to complain about, by parsing the beginning of the
file up to every line: a cut through a statement does not parse, so the last cut at which the key is not there yet is
just before its own line.
"""

from __future__ import annotations

import difflib
import math
import re
import tomllib
from collections.abc import Callable, Iterable, Sequence
from functools import reduce
from operator import getitem
from pathlib import Path
from typing import Any, NoReturn

from squall.errors import ClusterError
from squall.sim.cluster.units import NoUnit, Units, parse

MOST_BYTES = 1 << 16  # of a file: some thousand lines
Place = tuple[str | int, ...]  # such as ("machines", 0, "jitter", "sigma")


class Document:
    """The text of a file, and what it says."""

    def __init__(self, text: str, path: Path) -> None:
        """Raises `ClusterError` for what is not TOML."""
        self.text = text
        self.path = path
        try:
            self.root = Table(self, (), tomllib.loads(text))
        except (ValueError, RecursionError) as error:  # also numbers and nesting beyond what Python reads
            found = re.fullmatch(r"(.*) \(at line (\d+), column \d+\)", str(error), re.DOTALL)
            what, line = (found[1], int(found[2])) if found else (str(error), _unreadable_line(text))
            raise ClusterError(f"{path.name}, line {line}: this is not TOML: {what}: correct that line") from error

    @classmethod
    def load(cls, path: Path) -> Document:
        """Raises `ClusterError` for a file that is not there, too large, or not UTF-8."""
        if not path.is_file():
            raise ClusterError(f"{path} is no file: `squall measure FILE` writes one, and docs/cluster.md describes it")
        if path.stat().st_size > MOST_BYTES:
            limit = f"larger than {MOST_BYTES >> 10} KiB"
            raise ClusterError(f"{path} is {limit}: put machines that are alike into one [[machines]] with a count")
        try:
            return cls(path.read_text(encoding="utf-8"), path)
        except UnicodeDecodeError as error:
            raise ClusterError(f"{path} is not UTF-8 at byte {error.start}: save it as UTF-8") from error

    def line_of(self, place: Place) -> int:
        """The line, from 1 on, of the statement (a key with its value, or a table's header) that brings the place."""
        lines = self.text.split("\n")
        lacking, bound = 0, len(lines)  # the first `lacking` lines lack it; no cut from `bound` on does
        while lacking + 1 < bound:
            middle = (lacking + bound) // 2
            cut = next((n for n in range(middle, bound) if _parsed(lines[:n]) is not None), None)
            if cut is None or _holds(_parsed(lines[:cut]), place):
                bound = middle
            else:
                lacking = cut
        return lacking + 1

    def refuse(self, place: Place, what: str, remedy: str) -> NoReturn:
        raise ClusterError(f"{self.path.name}, line {self.line_of(place)}: {what}: {remedy}")


def _unreadable_line(text: str) -> int:
    """The line of a number or nesting that Python cannot read; the last line where the text ends too early."""
    lines = text.rstrip().split("\n")
    for count in range(1, len(lines) + 1):
        try:
            tomllib.loads("\n".join(lines[:count]))
        except tomllib.TOMLDecodeError:
            continue
        except (ValueError, RecursionError):
            return count
    return len(lines)


def _parsed(lines: Sequence[str]) -> dict[str, Any] | None:
    try:
        return tomllib.loads("\n".join(lines))
    except (ValueError, RecursionError):
        return None


def _holds(value: Any, place: Place) -> bool:
    try:
        reduce(getitem, place, value)
    except (KeyError, IndexError, TypeError):
        return False
    return True


class Table:
    """One table of the file. Each method reads the value of a key, or refuses it with its line and a remedy."""

    def __init__(self, document: Document, place: Place, values: dict[str, Any]) -> None:
        self._document = document
        self._place = place
        self.values = values

    def refuse(self, key: str | None, what: str, remedy: str) -> NoReturn:
        """Complain of a key that is there, or of the table itself (None)."""
        self._document.refuse(self._place if key is None else (*self._place, key), what, remedy)

    def expect(self, known: Iterable[str], required: Iterable[str] = ()) -> None:
        """Refuse keys that are not known, and the lack of one that is required."""
        known = list(known)
        for key in self.values:
            if key not in known:
                self.refuse(key, f"unknown key {key!r}", _nearest(key, known, "the keys here are"))
        for key in required:
            if key not in self.values:
                self.refuse(None, f"{self.name} has no {key!r}", f"add {key} = ...")

    @property
    def folder(self) -> Path:
        """The folder that the file is in."""
        return self._document.path.parent

    @property
    def name(self) -> str:
        """As a person would call it: ``links.between``, ``machines``."""
        return ".".join(key for key in self._place if isinstance(key, str)) or "the file"

    # ------------------------------------------------------------ tables in it

    def table(self, key: str) -> Table:
        """Empty where the key is not there."""
        value = self.values.get(key, {})
        found = Table(self._document, (*self._place, key), value)
        if not isinstance(value, dict):
            self.refuse(key, f"{key} = {_shown(value)} is not a table", f"write [{found.name}]")
        return found

    def tables(self, key: str) -> list[Table]:
        """The tables [[key]]; empty where the key is not there."""
        value = self.values.get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, dict) for entry in value):
            self.refuse(key, f"{key} is not a list of tables", f"begin each with [[{key}]]")
        return [Table(self._document, (*self._place, key, i), entry) for i, entry in enumerate(value)]

    # ------------------------------------------------------------ values

    def quantity(self, key: str, units: Units, zero: bool = False) -> float:
        """A string with a unit, in the base unit; above 0, or from 0 on."""
        return self.to_quantity(key, self.values[key], units, zero)

    def to_quantity(self, key: str, value: Any, units: Units, zero: bool = False, example: str = "") -> float:
        """As `quantity`, for a value within the key's; `example` is then of the whole."""
        written = f"write for example {key} = {example or _shown(units.example)}"
        if not isinstance(value, str):
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            self.refuse(
                key, f"{key} = {_shown(value)} {'has no unit' if is_number else f'is not {units.what}'}", written
            )
        try:
            found = parse(value, units)
        except NoUnit:
            self.refuse(key, f"{key} = {_shown(value)} has no unit", written)
        except ValueError as error:
            self.refuse(key, f"{key}: {error}", written)
        if not math.isfinite(found) or found < 0 or (found == 0 and not zero):
            least = "0 or more" if zero else "above 0"
            self.refuse(key, f"{key} = {_shown(value)} is impossible: it must be {least}", written)
        return found

    def number(self, key: str, within: Callable[[float], bool], what: str, example: str) -> float:
        """A number that is `within` its limits, of which `what` tells."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int | float) or not within(value):
            self.refuse(key, f"{key} = {_shown(value)} is not {what}", f"write for example {key} = {example}")
        return float(value)

    def whole(self, key: str, most: int) -> int:
        """A whole number from 1 to `most`."""
        value = self.values[key]
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= most:
            what = f"{key} = {_shown(value)} is not a whole number from 1 to {most}"
            self.refuse(key, what, f"write for example {key} = 2")
        return value

    def word(self, key: str, known: Sequence[str] = ()) -> str:
        """A string that is not empty, one of `known` where there are such."""
        value = self.values[key]
        if not isinstance(value, str) or not value:
            written = f'write {key} = "{known[0] if known else "..."}"'
            self.refuse(key, f"{key} = {_shown(value)} is not a name", written)
        if known and value not in known:
            self.refuse(key, f"{key} = {_shown(value)} is unknown", _nearest(value, known, "use one of"))
        return value

    def items(self, key: str, example: str) -> list[Any]:
        """A list with something in it."""
        value = self.values[key]
        if not isinstance(value, list) or not value:
            self.refuse(key, f"{key} = {_shown(value)} is not a list with something in it", f"write {key} = {example}")
        return value


def _nearest(word: str, known: Sequence[str], all_of_them: str) -> str:
    near = difflib.get_close_matches(word, known, 1)
    return f"did you mean {near[0]!r}?" if near else f"{all_of_them} {', '.join(known)}"


def _shown(value: Any) -> str:
    """A value as it stands in the file, or nearly."""
    if isinstance(value, str):
        text = f'"{value}"'
    elif isinstance(value, bool):
        text = str(value).lower()
    else:
        text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
