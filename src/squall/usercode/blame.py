"""What is told of an exception in the user's code: the user's own line first, what was under way, then how it came."""

from __future__ import annotations

import re
import traceback
from collections.abc import Iterator
from typing import Any

import msgspec

from squall.runtime.disk import LARGER
from squall.usercode.sources import own

_NO_MEMORY = ("can't allocate memory", "Cannot allocate memory", "out of memory")  # as torch says it, and the kernel
_IN_TEXT = re.compile(r'^ *File "([^"]+)", line (\d+), in (\S+)\n *(.*)$', re.MULTILINE)


class Failure(msgspec.Struct, frozen=True, kw_only=True):
    """An exception as it is told to another process, to people (`str()`), and to programs.

    Attributes:
        type: of the exception.
        message: as Python shows it: type, text and notes.
        place: what was under way, such as {"role": "replica", "index": 1, "epoch": 0, "start": 96, "stop": 104}.
        file: of the innermost line of the user's own code; "" where there is none.
        line: its number.
        function: that it stands in.
        text: of that line.
        frames: all of them, and the exceptions before this one.
    """

    type: str
    message: str
    place: dict[str, int | str]
    file: str
    line: int
    function: str
    text: str
    frames: str

    def __str__(self) -> str:
        own_line = f'File "{self.file}", line {self.line}, in {self.function}\n    {self.text}\n' if self.file else ""
        return f"{own_line}{self.message}\n\n{self.frames}"


def note(error: BaseException, text: str, **place: int | str) -> None:
    """Add to an exception that passes through what was under way."""
    error.add_note(text)
    vars(error).setdefault("squall", {}).update(place)


def note_batch(error: BaseException, epoch: int, start: int, stop: int) -> None:
    note(error, f"on examples {start} to {stop} of epoch {epoch}", epoch=epoch, start=start, stop=stop)


def note_memory(error: BaseException) -> None:
    """Add the remedy to an exception, if it is one of memory that ran out."""
    text = str(error)
    if "unable to allocate shared memory" in text:  # for what a loader's process has loaded
        error.add_note(f"torch brings there what loaders load: {LARGER}, or leave num_workers out of Task.loader")
    elif isinstance(error, MemoryError) or any(words in text for words in _NO_MEMORY):
        error.add_note("memory ran out: take a smaller batch_size or fewer replicas, or cut each into --parts")


def failure(error: BaseException) -> Failure:
    """Everything that is told of an exception that was caught."""
    story = traceback.TracebackException.from_exception(error)
    message = "".join(story.format_exception_only())
    file, line, function, text = next(_own_lines(error), ("", 0, "", ""))
    return Failure(
        type=type(error).__name__, message=message.rstrip(), place=vars(error).get("squall", {}), file=file, line=line,
        function=function, text=text, frames="".join(story.format()).removesuffix(message).rstrip(),
    )  # fmt: skip


def encode(error: BaseException) -> str:
    """An exception as a text for a pipe or a file, which `decode` reads."""
    note_memory(error)
    return msgspec.json.encode(failure(error)).decode(errors="replace")


def decode(told: str) -> Failure | None:
    """What `encode` has written; None for a text that is for people."""
    try:
        return msgspec.json.decode(told, type=Failure)
    except msgspec.DecodeError:
        return None


def _own_lines(error: BaseException) -> Iterator[tuple[str, int, str, str]]:
    """(file, line, function, text) in the user's own code, innermost first."""
    for file, line, function, text in reversed(_IN_TEXT.findall(str(error))):
        if own(file):  # a loader's worker process sends its traceback as a text
            yield file, int(line), function, text
    for frame in reversed(traceback.extract_tb(error.__traceback__)):
        if own(frame.filename):
            yield frame.filename, frame.lineno or 0, frame.name, frame.line or ""


def as_json(error: BaseException) -> dict[str, Any]:
    """An exception as plain values, for programs."""
    found = getattr(error, "failure", None) or failure(error)
    plain = {name: value for name, value in msgspec.to_builtins(found).items() if name != "place" and value}
    return {**plain, **found.place}
