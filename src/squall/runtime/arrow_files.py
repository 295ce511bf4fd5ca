"""Columns of numbers as Arrow files. Needs the extra `arrow`, and is imported where that is asked for alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pyarrow as pa

Columns = Mapping[str, np.ndarray[Any, Any]]  # name -> [examples, ...]


def write(sink: Path | BinaryIO, batches: Iterable[Columns]) -> None:
    """One file of as many record batches; a column of several dimensions has Arrow's type of fixed-shape tensors."""
    writer = None
    try:
        for columns in batches:
            batch = pa.record_batch({name: _array(values) for name, values in columns.items()})
            writer = writer or pa.ipc.new_file(sink, batch.schema)
            writer.write_batch(batch)
    finally:
        if writer is not None:
            writer.close()


def read(path: Path) -> Columns:
    """All columns of a file, mapped into memory where Arrow can."""
    table = pa.ipc.open_file(pa.memory_map(str(path))).read_all().combine_chunks()
    return {name: _values(table.column(name)) for name in table.column_names}


def _array(values: np.ndarray[Any, Any]) -> Any:
    if values.ndim == 1:
        return pa.array(values)
    return pa.FixedShapeTensorArray.from_numpy_ndarray(np.ascontiguousarray(values))


def _values(column: Any) -> np.ndarray[Any, Any]:
    whole = column.combine_chunks()
    tensors = isinstance(whole, pa.FixedShapeTensorArray)
    values: np.ndarray[Any, Any] = whole.to_numpy_ndarray() if tensors else whole.to_numpy(zero_copy_only=False)
    return values
