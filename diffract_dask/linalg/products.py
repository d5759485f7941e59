"""Gram matrices, and products of two matrices over their common long axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.errors import MatrixError
from diffract_dask.linalg import pieces
from diffract_dask.linalg.pieces import chunks, flat_matrices, float64_pieces
from diffract_dask.linalg.routes import CODE, Product, relative_error
from diffract_dask.linalg.streams import SpectrumStream, State, begin
from diffract_dask.moments import as_matrices

__all__ = ["GramStream", "PairStream", "gram_of", "pair_of"]


def gram_of(w: ArrayLike, out: Array | None = None) -> Product:
    """Return the Gram matrix of each matrix in memory, see :func:`diffract_dask.linalg.gram`."""
    flat, lead = flat_matrices(w)
    k = flat.shape[2]
    result = np.empty((*lead, k, k)) if out is None else out
    stack = result.reshape(-1, k, k) if result.flags.c_contiguous else np.empty((len(flat), k, k))
    with np.errstate(all="ignore"):
        for chunk in chunks(flat):
            if 8 * flat[chunk][0].size <= pieces.PIECE:
                block = flat[chunk].astype(np.float64)
                np.matmul(block.swapaxes(1, 2), block, out=stack[chunk])
            else:
                (target,) = stack[chunk]
                target[...] = 0.0
                for piece in float64_pieces(flat[chunk][0]):
                    blas.add_gram(target.T, piece)
                mirror(target)
        error = _gram_error(np.trace(stack, axis1=1, axis2=2), flat.shape[1:])
    if not np.may_share_memory(stack, result):
        result[...] = stack.reshape(result.shape)
    return Product(result, error.reshape(lead), np.full(lead, CODE["gram"], np.int8))


def pair_of(a: ArrayLike, b: ArrayLike) -> Product:
    """Return AᵀB of matrices in memory, see :func:`diffract_dask.linalg.pair_product`."""
    first, second = as_matrices(a), as_matrices(b)
    check_pair(first.shape, second.shape)
    lead = np.broadcast_shapes(first.shape[:-2], second.shape[:-2])
    p, q = first.shape[-1], second.shape[-1]
    first = np.broadcast_to(first, (*lead, *first.shape[-2:])).reshape(-1, *first.shape[-2:])
    second = np.broadcast_to(second, (*lead, *second.shape[-2:])).reshape(-1, *second.shape[-2:])
    values, error = np.empty((len(first), p, q)), np.empty(len(first))
    twin = PairStream()
    for i, (x, y) in enumerate(zip(first, second, strict=True)):
        state = twin.update(twin.start((len(x), p, q), x.dtype), (x, y))
        values[i], error[i], _ = twin.finish(state, lambda: iter(()), {})
    return Product(values.reshape(*lead, p, q), error.reshape(lead), np.full(lead, CODE["product"], np.int8))


def check_pair(first: tuple[int, ...], second: tuple[int, ...]) -> None:
    """Raise MatrixError if matrices of these shapes have no common long axis."""
    if first[-2] != second[-2]:
        raise MatrixError(
            f"expected matrices of as many rows, found shapes {first} and {second}; transpose the one whose columns "
            "are meant"
        )


class GramStream(SpectrumStream):
    """The Gram matrix of a matrix that is read in spans; its outputs are those of :class:`Product`."""

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> State:
        """Return the state of no rows."""
        return begin(shape, dtype, "gram")

    def finish(
        self, state: State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the whole matrix, its error and its route; the state is used up."""
        state.own()
        result = state.matrix.T
        with np.errstate(all="ignore"):
            mirror(result)
            if state.exponent:
                np.ldexp(result, 2 * state.exponent, out=result)
            if not state.finite:
                result[...] = np.nan
            return result, _gram_error(np.trace(result), state.shape), np.int8(CODE["gram"])


@dataclass(slots=True)
class _Pair:
    """AᵀB of some rows, and the sums of squares of both."""

    matrix: Array
    first: float
    second: float
    rows: int


@dataclass(frozen=True)
class PairStream:
    """AᵀB of two matrices that are read in spans of their rows; blocks are pairs."""

    def start(self, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> _Pair:
        """Return the state of no rows; `shape` is (rows, columns of A, columns of B)."""
        return _Pair(np.zeros(shape[1:]), 0.0, 0.0, shape[0])

    def update(self, state: _Pair, block: tuple[NDArray[Any], NDArray[Any]]) -> _Pair:
        """Return `state`, changed in place, with the rows of both blocks in it."""
        if not state.matrix.flags.writeable:
            state.matrix = state.matrix.copy()
        a, b = (as_matrices(part) for part in block)
        step = max(pieces.MIN_ROWS, pieces.PIECE // (8 * max(1, a.shape[1] + b.shape[1])))
        with np.errstate(all="ignore"):
            for start in range(0, len(a), step):
                x, y = (part[start : start + step].astype(np.float64) for part in (a, b))
                state.first += float(np.vdot(x, x))
                state.second += float(np.vdot(y, y))
                state.matrix += x.T @ y
        return state

    def merge(self, first: _Pair, second: _Pair) -> _Pair:
        """Return `first`, changed in place, with the rows of `second` in it."""
        if not first.matrix.flags.writeable:
            first.matrix = first.matrix.copy()
        with np.errstate(all="ignore"):
            first.matrix += second.matrix
        first.first += second.first
        first.second += second.second
        return first

    def finish(self, state: _Pair, reread: Callable[[], Iterator[Any]], params: Mapping[str, Any]) -> tuple[Any, ...]:
        """Return the product, its error and its route."""
        c = relative_error(state.rows, max(state.matrix.shape))
        error = np.float64(c) * np.sqrt(state.first) * np.sqrt(state.second)
        return state.matrix, error, np.int8(CODE["product"])

    def workspace(self, shape: tuple[int, int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        _, p, q = shape
        return 16 * p * q + 2 * max(pieces.PIECE, 8 * (p + q) * pieces.MIN_ROWS), 0


def _gram_error(trace: Any, shape: tuple[int, ...]) -> Any:
    return relative_error(shape[0], shape[1]) * np.asarray(trace, np.float64)


def mirror(matrix: Array) -> None:
    """Copy the upper triangle of a C-ordered matrix to the lower one."""
    step = pieces.MIN_ROWS
    for i in range(0, len(matrix), step):
        j = i + step
        matrix[i:j, :i] = matrix[:i, i:j].T
        diagonal = matrix[i:j, i:j]
        diagonal[...] = np.triu(diagonal) + np.triu(diagonal, 1).T
