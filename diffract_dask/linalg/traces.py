"""The trace of the squared Gram matrix, from products of panels of columns: no k × k matrix is held."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.blas import Array
from diffract_dask.linalg import pieces
from diffract_dask.linalg.pieces import chunks, flat_matrices, float64_pieces, prepared
from diffract_dask.linalg.streams import SpectrumStream, State, scaled_piece
from diffract_dask.moments import is_narrow

__all__ = ["SchattenStream", "schatten_of", "schatten_workspace"]

PANEL = 8 << 20
"""Bytes of a panel of the Gram matrix; more where that would be less than a 32nd of the matrix."""


def schatten_of(w: ArrayLike) -> Array:
    """Return the Schatten 4-norm of each matrix in memory, see :func:`diffract_dask.linalg.schatten_4_norm`."""
    flat, lead = flat_matrices(w)
    result = np.zeros(len(flat))
    with np.errstate(all="ignore"):
        for chunk in chunks(flat) if flat.shape[2] else ():
            part = flat[chunk]
            if 8 * part[0].size <= pieces.GROUP:
                block, exponent, finite = prepared(part)
                squares = _norm(np.matmul(block.swapaxes(1, 2), block))
                result[chunk] = np.where(finite, np.ldexp(np.sqrt(squares), exponent), np.nan)
            else:
                result[chunk] = _of_one(part[0])
    return result.reshape(lead)


def schatten_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`schatten_of` needs beyond input and output for `n` slices."""
    size = 8 * rows * cols
    if size > pieces.GROUP:
        return sum(SchattenStream().workspace((rows, cols), np.dtype("float64"))) + 64 * n + (64 << 10)
    return 5 * size * min(n, max(1, pieces.GROUP // size)) + 64 * n + (64 << 10)


def _of_one(tall: NDArray[Any]) -> Any:
    stream = SchattenStream()
    state = stream.update(stream.start(tall.shape, tall.dtype), tall)
    return stream.finish(state, lambda: iter([tall]), {})[0]


def _norm(matrices: Array) -> Array:
    """Return the Frobenius norm of each matrix, of any scale; the matrices are used up."""
    largest = np.maximum(matrices.max(axis=(-2, -1)), -matrices.min(axis=(-2, -1)))
    unit = np.where(largest > 0, largest, 1.0)
    matrices /= unit[..., None, None]
    norms: Array = unit * np.sqrt(np.einsum("...ij,...ij->...i", matrices, matrices).sum(axis=-1))
    return norms


def _entries(k: int) -> int:
    """Return how many numbers a panel may hold."""
    return max(PANEL // 8, k * k // 32, k)


def _width(k: int, start: int) -> int:
    """Return how many columns make up the panel that begins at `start`: from there on, the matrix is symmetric."""
    return min(k - start, _entries(k) // (k - start))


class SchattenStream(SpectrumStream):
    """The Schatten 4-norm of a matrix that is read in spans: once, and once more for each panel beyond the first.

    The state is one panel of the Gram matrix: the rows of some columns of W, right of the diagonal.
    """

    rereads = True

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> State:
        """Return the state of no rows."""
        k, narrow = min(shape), is_narrow(dtype)
        return State("gram", np.zeros((_width(k, 0), k)), shape, narrow, 0 if narrow else None)

    def update(self, state: State, block: NDArray[Any]) -> State:
        """Return `state`, changed in place, with the rows of `block` in it."""
        state.own()
        return _add(state, block, 0)

    def finish(
        self, state: State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the norm; the state is used up."""
        state.own()
        k = min(state.shape)
        start = 0
        total: Any = np.float64(0.0)
        with np.errstate(all="ignore"):
            while start < k:
                if start:
                    state.matrix = np.empty(0)  # never two panels at once
                    state.matrix = np.zeros((_width(k, start), k - start))
                    for block in reread():
                        _add(state, block, start)
                width = len(state.matrix)
                total = np.hypot(total, _norm(state.matrix[:, :width]))
                if start + width < k:
                    total = np.hypot(total, np.sqrt(2.0) * _norm(state.matrix[:, width:]))
                if not (state.finite and np.isfinite(total)):
                    return (np.float64(np.nan),)
                start += width
            return (np.ldexp(np.sqrt(total), state.exponent or 0),)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        k = min(shape)
        panel = 8 * (k * k if _width(k, 0) == k else _entries(k))
        return 2 * panel + 2 * max(pieces.PIECE, 8 * k * pieces.MIN_ROWS), 0

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return how many times the matrix is read."""
        k, start, count = min(shape), 0, 0
        while start < k:
            start += _width(k, start)
            count += 1
        return f"gram in {count} panel{'s' * (count != 1)}"


def _add(state: State, block: NDArray[Any], start: int) -> State:
    """Add to a panel that begins at column `start` what some rows give."""
    width = len(state.matrix)
    with np.errstate(all="ignore"):
        for part in float64_pieces(block):
            piece = scaled_piece(state, part)
            if piece is None:
                break
            state.matrix += piece[:, start : start + width].T @ piece[:, start:]
    return state
