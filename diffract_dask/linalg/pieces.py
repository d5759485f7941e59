"""Matrices cut into pieces of float64 that are worked on at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.blas import Array
from diffract_dask.moments import as_matrices, scale_exponent

__all__ = ["GROUP", "MIN_ROWS", "PIECE", "WIDE_SAFE", "chunks", "flat_matrices", "float64_pieces", "prepared"]

PIECE = 4 << 20
"""Bytes of float64 of a large matrix that are converted and worked on at a time."""

GROUP = 1 << 20
"""Bytes of float64 of small matrices that are worked on together: they and their Gram matrices stay in cache."""

MIN_ROWS = 256
"""Rows of a piece, however wide it is: fewer would leave BLAS slow."""

WIDE_SAFE = 300
"""Entries within 2**±this are not scaled: their squares, and sums of them, stay in range."""


def flat_matrices(w: ArrayLike) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return matrices ``(B, N, k)`` with the longer side first, and the leading shape."""
    array = as_matrices(w)
    lead = array.shape[:-2]
    flat = array.reshape(int(np.prod(lead)), *array.shape[-2:])
    return (flat if flat.shape[1] >= flat.shape[2] else flat.swapaxes(1, 2)), lead


def chunks(flat: NDArray[Any]) -> Iterator[slice]:
    """Yield ranges of matrices that make up one piece together."""
    step = max(1, GROUP // (8 * max(1, flat.shape[1] * flat.shape[2])))
    for start in range(0, len(flat), step):
        yield slice(start, start + step)


def float64_pieces(rows: NDArray[Any]) -> Iterator[Array]:
    """Yield contiguous float64 pieces of `rows`; views where it is that already."""
    step = max(MIN_ROWS, PIECE // (8 * max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].astype(np.float64, copy=False)
        if not (piece.flags.c_contiguous or piece.flags.f_contiguous):
            piece = np.ascontiguousarray(piece)
        yield piece


def prepared(w: NDArray[Any]) -> tuple[Array, NDArray[np.int32], NDArray[np.bool_]]:
    """Return float64 matrices scaled by ``2**-exponent``, zero where an entry is not finite, with exponent and flag."""
    block = w.astype(np.float64, copy=False)
    absmax = np.maximum(block.max(axis=(1, 2)), -block.min(axis=(1, 2)))
    finite = np.isfinite(absmax)
    exponent = np.where(finite, scale_exponent(absmax, WIDE_SAFE), np.int32(0))
    if exponent.any():
        block = np.ldexp(block, -exponent[:, None, None])
    if not finite.all():
        block = np.where(finite[:, None, None], block, 0.0)
    return block, exponent, finite
