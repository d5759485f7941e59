"""Digests: what a tensor holds, in 32 hex digits, from pieces that can be hashed as they are read.

A digest covers the bytes, the shape, the stored type and the 2-D reading; it is the root of every provenance key of
a slice.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from diffract_dask.sources import dtypes

__all__ = [
    "PIECE_BYTES",
    "Digester",
    "combine_digests",
    "digest",
    "digest_keys",
    "hash_piece",
    "is_constant",
    "matrix_shape",
    "piece_rows",
]


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """Return (rows, cols) of the 2-D reading, dimension 0 × the rest; (0, 0) for scalars and vectors.

    >>> matrix_shape((64, 32, 5))
    (64, 160)
    """
    return (shape[0], math.prod(shape[1:])) if len(shape) > 1 else (0, 0)


PIECE_BYTES = 16 * 2**20
"""Digests are over pieces of about this many bytes, always whole rows of dimension 0."""

_CONSTANT = 1  # the last bit of a hash says that all entries are equal, which `tie` must know without the data
_PROBE_BYTES = 4096


def piece_rows(shape: Sequence[int], dtype: str) -> int:
    """Return how many rows of dimension 0 make one piece of a digest.

    >>> piece_rows((30522, 384), "float32")
    10922
    """
    row = math.prod(shape[1:]) * dtypes.itemsize(dtype)
    return max(1, PIECE_BYTES // row) if row else max([1, *shape[:1]])


def hash_piece(raw: NDArray[Any]) -> bytes:
    """Return the 16-byte hash of one piece, a raw array: xxh3_128, its last bit set if all entries are equal."""
    raw = np.ascontiguousarray(raw)
    flat = raw.reshape(-1).view(np.uint8)
    return _mark(xxhash.xxh3_128_digest(flat.data), _all_equal(flat, raw.itemsize))


def _mark(hashed: bytes, constant: bool) -> bytes:
    return hashed[:-1] + bytes([hashed[-1] & ~_CONSTANT | constant])


def _all_equal(flat: NDArray[np.uint8], itemsize: int) -> bool:
    """Return whether all entries are the same bytes; looks at little more than the first 4 KiB of real weights."""
    probe = flat[:_PROBE_BYTES]
    if not np.array_equal(probe[itemsize:], probe[:-itemsize]):
        return False
    return len(probe) == len(flat) or np.array_equal(flat[itemsize:], flat[:-itemsize])


def combine_digests(piece_hashes: Sequence[bytes], shape: Sequence[int], dtype: str) -> str:
    """Return the digest of a tensor (32 hex digits) from the hashes of its pieces, in order.

    It covers the pieces, shape, stored type and 2-D reading.
    """
    rows, cols = matrix_shape(shape)
    text = f"{tuple(shape)} {dtype} {rows}x{cols}"
    constant = all(piece[-1] & _CONSTANT for piece in piece_hashes)
    return _mark(xxhash.xxh3_128_digest(b"".join([*piece_hashes, text.encode()])), constant).hex()


def is_constant(hexdigest: str) -> bool:
    """Return whether all entries of the tensor (strictly: of each piece of it) are equal."""
    return bool(int(hexdigest[-2:], 16) & _CONSTANT)


class Digester:
    """The digest of a tensor whose raw rows arrive in order, cut anyhow between entries.

    Parameters
    ----------
    shape : sequence of int
    dtype : str
        Name of the stored type.

    Examples
    --------
    >>> w = np.arange(12, dtype="f4").reshape(4, 3)
    >>> d = Digester(w.shape, "float32")
    >>> d.update(w[:1])
    >>> d.update(w[1:])
    >>> d.hexdigest() == digest(lambda start, stop: w[start:stop], w.shape, "float32")
    True
    """

    def __init__(self, shape: Sequence[int], dtype: str) -> None:
        self.shape, self.dtype = tuple(shape), dtype
        self._itemsize = dtypes.itemsize(dtype)
        self._piece = piece_rows(shape, dtype) * math.prod(shape[1:]) * self._itemsize
        self._hashes: list[bytes] = []
        self._hasher = xxhash.xxh3_128()
        self._filled = 0
        self._first = b""
        self._constant = True

    def update(self, raw: NDArray[Any]) -> None:
        """Add the next entries, a raw array of any shape."""
        flat = np.ascontiguousarray(raw).reshape(-1).view(np.uint8)
        start = 0
        while start < len(flat):
            part = flat[start : start + self._piece - self._filled]
            start += len(part)
            if not self._filled:
                self._first, self._constant = part[: self._itemsize].tobytes(), True
            if self._constant:
                same = part[: self._itemsize].tobytes() == self._first
                self._constant = same and _all_equal(part, self._itemsize)
            self._hasher.update(part.data)
            self._filled += len(part)
            if self._filled == self._piece:
                self._close()

    def _close(self) -> None:
        self._hashes.append(_mark(self._hasher.digest(), self._constant))
        self._hasher.reset()
        self._filled = 0

    def hashes(self) -> list[bytes]:
        """Return the hashes of the pieces; call it once, after the last row."""
        if self._filled:
            self._close()
        return self._hashes

    def hexdigest(self) -> str:
        """Return the digest; call it once, after the last row."""
        return combine_digests(self.hashes(), self.shape, self.dtype)


def digest(read: Callable[[int, int], NDArray[Any]], shape: Sequence[int], dtype: str) -> str:
    """Return the digest of a tensor, 32 hex digits: over the xxh3_128 of pieces of whole rows, shape, type, reading.

    Parameters
    ----------
    read : callable
        As in :class:`Tensor`.
    shape : sequence of int
    dtype : str
        Name of the stored type.
    """
    rows = shape[0] if shape else 1
    step = piece_rows(shape, dtype)
    hashes = [hash_piece(read(i, min(i + step, rows))) for i in range(0, rows, step)] if math.prod(shape) else []
    return combine_digests(hashes, shape, dtype)


def digest_keys(hexdigests: Iterable[str]) -> NDArray[np.uint64]:
    """Return the root of all keys of each slice: the first 64 bits of its digest; 0 for an unknown (empty) one."""
    heads = [digest[:16] for digest in hexdigests]
    keys = np.frombuffer(bytes.fromhex("".join(head or "0" * 16 for head in heads)), ">u8").astype(np.uint64)
    keys[(keys == 0) & np.array([bool(head) for head in heads], bool)] = 1
    return keys
