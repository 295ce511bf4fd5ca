"""The files of a prediction: a model's outputs as they come, a file for each range, and in the end in order in one.

    answers/000000000000-000000004096.npz   what replicas have answered so far; gone when all of it is in one file
    predictions.npy                         all of it; of several outputs `predictions.NAME.npy` each

With format "arrow" names end in `.arrow`, and several outputs are columns of one file. A file is whole when it has its
name, so what is here is what counts: a prediction that goes on deals what no file has.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from io import BytesIO
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from numpy.lib.format import open_memmap

from squall.errors import SquallError
from squall.protocol.ledger import gaps
from squall.protocol.nodes import Node
from squall.runtime.disk import written
from squall.runtime.snapshot import sync

FORMATS = ("numpy", "arrow")
ONE = "predictions"  # the column of a model that returns one tensor, and the name of what is written in the end
Columns = Mapping[str, np.ndarray[Any, Any]]  # name -> [examples, ...]
_RANGE = re.compile(r"(\d{12,})-(\d{12,})\.(npz|arrow)")


def described(directory: Path) -> dict[str, Any] | None:
    """The settings of the prediction that was begun there; None where there is none."""
    try:
        plan = msgspec.json.decode((directory / "run.json").read_bytes())["plan"]
    except (OSError, msgspec.DecodeError, KeyError):
        return None
    settings: dict[str, Any] = plan["strategy_fields"]
    return settings if plan["strategy"] == "Prediction" else None


def modelless(directory: Path) -> str:
    """Why there is no model in the directory, with the remedy, if it holds predictions."""
    found = described(directory)
    return f"{directory} holds predictions, and no model: name what made them, {found['model']}" if found else ""


class Answers:
    """Of one prediction, in its directory."""

    def __init__(self, directory: Path, format: str) -> None:
        self.directory = directory
        self._arrow = format == "arrow"
        self._folder = directory / "answers"

    def encoded(self, columns: Columns) -> memoryview:
        """The file of a range."""
        file = BytesIO()
        if self._arrow:
            from squall.runtime import arrow_files

            arrow_files.write(file, [columns])
        else:
            np.savez(file, allow_pickle=False, **columns)
        return file.getbuffer()

    def write(self, start: int, stop: int, file: memoryview) -> None:
        """Bring the file of a range onto the disk. Raises `ValueError` with the remedy where that refuses it."""
        path = self._path(start, stop)
        with written(path):
            self._folder.mkdir(exist_ok=True)
            with _appears(path) as beside:
                beside.write_bytes(file)

    def arrives(self, start: int, stop: int, sender: Node, at: int, piece: memoryview, last: bool) -> None:
        """Bring a piece of such a file onto the disk, where it has its name when the last one is there.

        A piece may come again, from the same sender. Raises `ValueError` as `write` does.
        """
        path = self._path(start, stop)
        beside = path.with_name(f".{sender}")
        if at and not beside.exists():
            return  # it was whole
        with written(path):
            self._folder.mkdir(exist_ok=True)
            with open(os.open(beside, os.O_WRONLY | os.O_CREAT | (0 if at else os.O_TRUNC), 0o600), "wb") as file:
                file.seek(at)
                file.write(piece)
            if last:
                sync(beside)
                os.replace(beside, path)

    def _path(self, start: int, stop: int) -> Path:
        return self._folder / f"{start:012d}-{stop:012d}.{'arrow' if self._arrow else 'npz'}"

    def found(self) -> list[tuple[int, int]]:
        """The ranges that there are files of, in order. They overlap where a replica died before it could tell."""
        return [(start, stop) for start, stop, _ in self._files()]

    def _files(self) -> list[tuple[int, int, Path]]:
        there = self._folder.iterdir() if self._folder.is_dir() else ()
        named = [(match, path) for path in there if (match := _RANGE.fullmatch(path.name))]
        return sorted((int(match[1]), int(match[2]), path) for match, path in named)

    def put_together(self, examples: int) -> list[Path]:
        """Write all answers in order into one file, or one for each output, and remove the files of ranges.

        Raises `SquallError` where ranges lack, or have other outputs than others.
        """
        if missing := gaps(self.found(), examples):
            raise SquallError(f"{self._folder} has no answers for examples {missing[0][0]} to {missing[0][1]}")
        whole = self._arrow_file() if self._arrow else self._numpy_files(examples)
        shutil.rmtree(self._folder)
        return whole

    def _arrow_file(self) -> list[Path]:
        from squall.runtime import arrow_files

        path = self.directory / f"{ONE}.arrow"
        with written(path), _appears(path) as beside:
            arrow_files.write(beside, (columns for _, columns in self._in_order()))
        return [path]

    def _numpy_files(self, examples: int) -> list[Path]:
        _, first = next(self._in_order())
        names = {name: ONE if name == ONE else f"{ONE}.{name}" for name in first}
        paths = {name: self.directory / f"{file}.npy" for name, file in names.items()}
        with written(self.directory), ExitStack() as all_of_them:
            wholes = {}
            for name, path in paths.items():
                beside, shape = all_of_them.enter_context(_appears(path)), (examples, *first[name].shape[1:])
                wholes[name] = open_memmap(beside, mode="w+", dtype=first[name].dtype, shape=shape)
                with beside.open("r+b") as file:  # a full disk is an error here, and not a signal that kills below
                    os.posix_fallocate(file.fileno(), 0, os.fstat(file.fileno()).st_size)
            for start, columns in self._in_order():
                for name, values in columns.items():
                    wholes[name][start : start + len(values)] = values
            for whole in wholes.values():
                whole.flush()
        return list(paths.values())

    def _in_order(self) -> Iterator[tuple[int, Columns]]:
        """The answers that each file has beyond those before it, and where they begin."""
        at, first = 0, None
        for start, stop, path in self._files():
            if stop <= at:
                continue
            columns = {name: values[max(at - start, 0) :] for name, values in self._read(path).items()}
            kinds = {name: f"{values.dtype}{list(values.shape[1:])}" for name, values in columns.items()}
            first = first or kinds
            if kinds != first:
                raise SquallError(
                    f"the model's outputs are {kinds} for examples {start} to {stop}, and {first} for others: return"
                    " tensors of one shape, padded where they differ"
                )
            yield max(at, start), columns
            at = stop

    def _read(self, path: Path) -> Columns:
        if path.suffix == ".arrow":
            from squall.runtime import arrow_files

            return arrow_files.read(path)
        with np.load(path) as columns:
            return dict(columns)


@contextmanager
def _appears(path: Path) -> Iterator[Path]:
    """The file has its name when all of it is on the disk."""
    beside = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        yield beside
        sync(beside)
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
