"""Reading linked tensors: rows and columns straight from their file into a new array.

Files are read, never mapped: a mapped file that shrinks kills the process.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diffract_dask.errors import LinkBrokenError
from diffract_dask.sources import dtypes

if TYPE_CHECKING:
    from diffract_dask.catalog import Location

__all__ = ["check", "fingerprint", "read_columns", "read_rows"]

_READ_BYTES = 16 * 2**20


def fingerprint(start: int, content: bytes) -> str:
    """Return ``"start+length:hash"`` for the bytes of a file that say where tensors lie."""
    return f"{start}+{len(content)}:{xxhash.xxh3_128_hexdigest(content)}"


def check(location: Location) -> bool:
    """Return whether the file is as it was recorded: same size and time of change.

    False means that its content may have changed, though the tensors still lie where they did: hash it again.

    Raises
    ------
    LinkBrokenError
        The file is missing, has shrunk, or lays out its tensors differently now.
    """
    with _opened(location) as file:
        found = os.fstat(file)
        if (found.st_size, found.st_mtime_ns) == (location.size, location.mtime_ns):
            return True
        if found.st_size < location.size:
            raise _shrunk(location, found.st_size)
        place = location.header.partition(":")[0]
        start, length = (int(x) for x in place.split("+"))
        content = np.empty(length, np.uint8)
        _fill(file, content.data, start, location)
        if fingerprint(start, content.tobytes()) != location.header:
            raise LinkBrokenError(
                f"linked file {location.path!r} was written anew with another layout (recorded size {location.size} "
                f"bytes, found {found.st_size}); add it again with models.add(..., replace=True)"
            )
    return False


def read_rows(location: Location, shape: Sequence[int], dtype: str, start: int, stop: int) -> NDArray[Any]:
    """Return rows [start, stop) of dimension 0 as a raw array; of a scalar, ``(0, 1)``, an array of shape ``()``.

    Raises
    ------
    LinkBrokenError
        The file is missing or too short.
    """
    carrier = dtypes.carrier(dtype)
    row = math.prod(shape[1:]) * carrier.itemsize
    stop = min(stop, shape[0] if shape else 1)
    out = np.empty((max(stop - start, 0), *shape[1:]) if shape else (), carrier)
    if out.nbytes:
        with _opened(location) as file:
            _fill(file, _bytes(out), location.offset + start * row, location)
    return out


def read_columns(location: Location, shape: Sequence[int], dtype: str, start: int, stop: int) -> NDArray[Any]:
    """Return columns [start, stop) of the 2-D reading (dimension 0 × the rest) as a raw array (rows, stop - start).

    Raises
    ------
    LinkBrokenError
        The file is missing or too short.
    """
    carrier = dtypes.carrier(dtype)
    rows, cols = shape[0], math.prod(shape[1:])
    stop = min(stop, cols)
    if stop - start == cols:
        return read_rows(location, shape, dtype, 0, rows).reshape(rows, cols)
    out = np.empty((rows, max(stop - start, 0)), carrier)
    if out.nbytes:
        view, width, row = _bytes(out), out.shape[1] * carrier.itemsize, cols * carrier.itemsize
        first = location.offset + start * carrier.itemsize
        with _opened(location) as file:
            for i in range(rows):
                _fill(file, view[i * width : (i + 1) * width], first + i * row, location)
    return out


def _bytes(array: NDArray[Any]) -> memoryview:
    return array.reshape(-1).view(np.uint8).data


@contextmanager
def _opened(location: Location) -> Iterator[int]:
    try:
        file = os.open(location.path, os.O_RDONLY | getattr(os, "O_CLOEXEC", 0))
    except OSError as error:
        raise LinkBrokenError(
            f"linked file {location.path!r} cannot be opened ({error.strerror}); expected {location.size} bytes there. "
            "Put it back, or add the model again with models.add(..., replace=True)"
        ) from error
    try:
        yield file
    finally:
        os.close(file)


def _fill(file: int, view: memoryview, offset: int, location: Location) -> None:
    """Read exactly ``len(view)`` bytes at `offset` into `view`."""
    done = 0
    while done < len(view):
        got = os.preadv(file, [view[done : done + _READ_BYTES]], offset + done)
        if not got:
            raise _shrunk(location, os.fstat(file).st_size)
        done += got


def _shrunk(location: Location, found: int) -> LinkBrokenError:
    return LinkBrokenError(
        f"linked file {location.path!r} has shrunk: expected {location.size} bytes, found {found}. Restore it, or add "
        "the model again with models.add(..., replace=True)"
    )
