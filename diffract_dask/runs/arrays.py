"""Arrays inside files, whatever the format: an address, a shape, a type, and a way to read a part of them.

A reader of a format gives :class:`ArrayRef` objects; everything that previews and compares arrays works on these,
block by block, so that an array of any size is read in bounded memory.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ArtifactError

__all__ = [
    "BLOCK_ENTRIES",
    "PARTS",
    "ArrayRef",
    "Selection",
    "blocks",
    "fields_of",
    "leading_index",
    "numbers",
    "plane",
    "value_class",
]

Selection = tuple[slice, ...]

BLOCK_ENTRIES = 2**17
"""Entries per block where the format does not ask for more: 1 MiB in float64, which stays in the cache."""

PARTS = ("abs", "real", "imag", "phase")
"""What of complex numbers is shown."""


@dataclass(frozen=True, slots=True)
class ArrayRef:
    """An array in a file.

    Parameters
    ----------
    address : str
        Its name inside the file; empty where the file is the array.
    shape : tuple of int
    dtype : dtype
        Of what `read` returns.
    read : callable
        ``read(selection)`` returns the part that one slice per axis (step 1, within bounds) selects.
    chunks : tuple of int, optional
        Shape of the pieces that the format stores.
    stored : str
        The type in the file, where it is another than `dtype`.
    attrs : mapping
        What the file says of it; JSON values.
    refusal : str
        Why it cannot be read; empty if it can.
    """

    address: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    read: Callable[[Selection], NDArray[Any]]
    chunks: tuple[int, ...] | None = None
    stored: str = ""
    attrs: Mapping[str, Any] = field(default_factory=dict)
    refusal: str = ""

    @property
    def size(self) -> int:
        """Number of entries."""
        return math.prod(self.shape)

    @property
    def type_name(self) -> str:
        """The type as people write it: that of the file, if it has one of its own."""
        return self.stored or (str(self.dtype) if self.dtype.names is None else "structured")

    def whole(self) -> NDArray[Any]:
        """Return all of it; for what is known to be small."""
        return np.asarray(self.read(tuple(slice(0, n) for n in self.shape)))


def value_class(dtype: np.dtype[Any]) -> str:
    """Return how values of a type are treated: ``number``, ``complex``, ``time``, ``text``, ``fields`` or ``bytes``.

    >>> [value_class(np.dtype(x)) for x in ("f4", "?", "c8", "M8[s]", "U3", [("x", "f4")], "V7")]
    ['number', 'number', 'complex', 'time', 'text', 'fields', 'bytes']
    """
    if dtype.names is not None:
        return "fields"
    return {"c": "complex", "M": "time", "m": "time", "V": "bytes"}.get(
        dtype.kind, "number" if dtype.kind in "biuf" else "text"
    )


def numbers(block: NDArray[Any], part: str = "abs") -> NDArray[np.float64]:
    """Return values as float64: NaT as NaN, booleans as 0 and 1, and of complex ones the `part` that is asked for."""
    kind = value_class(block.dtype)
    if kind == "complex":
        parts: dict[str, Any] = {"abs": np.abs, "real": np.real, "imag": np.imag, "phase": np.angle}
        return np.asarray(parts[part](block), np.float64)
    if kind == "time":
        values = block.view(np.int64).astype(np.float64)
        values[np.isnat(block)] = np.nan
        return values
    return np.asarray(block, np.float64)


def blocks(
    shape: Sequence[int], chunks: Sequence[int] | None = None, limit: int = BLOCK_ENTRIES
) -> Iterator[Selection]:
    """Yield selections that cover an array once, in C order, each of whole chunks and of about `limit` entries.

    >>> [tuple((s.start, s.stop) for s in block) for block in blocks((3, 4), limit=8)]
    [((0, 2), (0, 4)), ((2, 3), (0, 4))]
    >>> [tuple((s.start, s.stop) for s in block) for block in blocks((4, 6), chunks=(2, 4), limit=1)]
    [((0, 2), (0, 4)), ((0, 2), (4, 6)), ((2, 4), (0, 4)), ((2, 4), (4, 6))]
    """
    if 0 in shape:
        return
    size = [max(1, min(c, n)) for c, n in zip(chunks or [1] * len(shape), shape, strict=True)]
    for axis in reversed(range(len(shape))):
        room = max(1, limit // math.prod(size))
        if room * size[axis] < shape[axis]:
            size[axis] *= room
            break
        size[axis] = shape[axis]
    counts = [math.ceil(n / s) for n, s in zip(shape, size, strict=True)]
    for index in np.ndindex(*counts):
        yield tuple(slice(i * s, min((i + 1) * s, n)) for i, s, n in zip(index, size, shape, strict=True))


def fields_of(ref: ArrayRef) -> list[ArrayRef]:
    """Return an array per field of a structured one, nested fields too; of any other array, itself alone.

    >>> ref = ArrayRef("t", (2,), np.dtype([("x", "f4"), ("p", "i2", 3)]), lambda selection: None)
    >>> [(one.address, one.shape, str(one.dtype)) for one in fields_of(ref)]
    [('t.x', (2,), 'float32'), ('t.p', (2, 3), 'int16')]
    """
    if ref.dtype.names is None:
        return [ref]
    found = []
    for name in ref.dtype.names:
        dtype = ref.dtype[name]
        inner, tail = (dtype.subdtype[0], dtype.shape) if dtype.subdtype else (dtype, ())

        def read(selection: Selection, name: str = name, ndim: int = len(ref.shape)) -> NDArray[Any]:
            return np.asarray(ref.read(selection[:ndim])[name][(slice(None),) * ndim + selection[ndim:]])

        address = f"{ref.address}.{name}" if ref.address else name
        chunks = (*ref.chunks, *tail) if ref.chunks else None
        one = replace(ref, address=address, shape=(*ref.shape, *tail), dtype=inner, read=read, chunks=chunks, stored="")
        found += fields_of(one)
    return found


def leading_index(shape: Sequence[int], index: Sequence[int] | None) -> tuple[int, ...]:
    """Return the index of a plane: one number per axis but the last two, from the end where negative.

    Raises
    ------
    ArtifactError
        There are too many numbers, or one is out of bounds.
    """
    axes = max(0, len(shape) - 2)
    given = tuple(index or ())
    if len(given) > axes:
        raise ArtifactError(
            f"an array of shape {tuple(shape)} has {axes} axes before its last two; the index {list(given)} has "
            f"{len(given)} numbers"
        )
    given += (0,) * (axes - len(given))
    for axis, (i, n) in enumerate(zip(given, shape, strict=False)):
        if not -n <= i < n:
            raise ArtifactError(f"index {i} is out of bounds on axis {axis}, which has {n} entries")
    return tuple(i % n for i, n in zip(given, shape, strict=False))


def plane(ref: ArrayRef, index: Sequence[int] = ()) -> ArrayRef:
    """Return an array as a matrix: a number or a vector as one row, of more axes the last two at `index`."""
    ndim = len(ref.shape)
    if ndim == 2:
        return ref
    if ndim < 2:
        shape = (1, *ref.shape) if ndim else (1, 1)

        def row(selection: Selection) -> NDArray[Any]:
            return np.asarray(ref.read(selection[2 - ndim :])).reshape(tuple(s.stop - s.start for s in selection))

        return replace(ref, shape=shape, read=row, chunks=(1, *ref.chunks) if ref.chunks and ndim else None)
    at = tuple(slice(i, i + 1) for i in leading_index(ref.shape, index))

    def matrix(selection: Selection) -> NDArray[Any]:
        found = np.asarray(ref.read((*at, *selection)))
        return found.reshape(found.shape[-2:])

    return replace(ref, shape=ref.shape[-2:], read=matrix, chunks=ref.chunks[-2:] if ref.chunks else None)
