"""Singular values of matrices in memory, and of stacks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.linalg import dense, pieces
from diffract_dask.linalg.pieces import chunks, flat_matrices, prepared
from diffract_dask.linalg.routes import (
    CODE,
    GRAM_ROUTES,
    Routes,
    Spectrum,
    choose_route,
    error_bound,
    meets,
    roots,
    unscaled,
)
from diffract_dask.linalg.streams import SpectrumStream, begin
from diffract_dask.moments import is_narrow

__all__ = ["values_of", "values_workspace"]


def values_of(w: ArrayLike, rtol: float | None = None, method: str | None = None) -> Spectrum:
    """Return the singular values of each matrix in memory, see :func:`diffract_dask.linalg.singular_values`."""
    flat, lead = flat_matrices(w)
    k = flat.shape[2]
    values, error, route = np.full((len(flat), k), np.nan), np.full(len(flat), np.nan), np.zeros(len(flat), np.int8)
    if k == 0:
        error[:] = 0.0
    else:
        with np.errstate(all="ignore"):
            for chunk in chunks(flat) if method != "tsqr" else map(_one, range(len(flat))):
                values[chunk], error[chunk], route[chunk] = _spectra(flat[chunk], rtol, method)
    return Spectrum(values.reshape(*lead, k), error.reshape(lead), route.reshape(lead))


def values_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`values_of` needs beyond input and output for `n` slices."""
    entries, k = rows * cols, min(rows, cols)
    if 8 * entries <= pieces.PIECE:
        return 4 * max(pieces.GROUP, 8 * entries) + blas.work_bytes(k)
    square = max(rows, cols) < 2 * k
    if itemsize > 4 and square:
        return 16 * entries + blas.work_bytes(k)
    return sum(SpectrumStream().workspace((rows, cols), np.dtype(np.float64)))


def _one(i: int) -> slice:
    return slice(i, i + 1)


def _spectra(w: NDArray[Any], rtol: float | None, method: str | None) -> tuple[Array, Array, Routes]:
    """Return values, error and route of matrices ``(g, N, k)`` that make up one piece, or of one large matrix."""
    size, shape = len(w), (w.shape[1], w.shape[2])
    first = method or choose_route(shape, w.dtype, rtol)
    if first == "tsqr" or (8 * w[0].size > pieces.PIECE and first != "gesdd"):
        stream = SpectrumStream()
        state = stream.update(begin(shape, w.dtype, first), w[0])
        return stream.finish(state, lambda: iter(w), {"rtol": rtol})
    values, route = np.full((size, shape[1]), np.nan), np.zeros(size, np.int8)
    if first == "gram" and is_narrow(w.dtype):
        block, exponent, finite = w.astype(np.float64), np.zeros(size, np.int32), np.ones(size, bool)
    else:
        block, exponent, finite = prepared(w)
    todo = finite
    if first == "gram":
        flipped = block.swapaxes(1, 2)
        # Either Gram matrix of a square one will do; of rows as they lie in memory it is a quarter faster.
        grams = block @ flipped if shape[0] == shape[1] else flipped @ block
        # Squares of narrow entries cannot overflow, so that a trace is finite exactly where all entries are.
        finite = finite & np.isfinite(np.trace(grams, axis1=1, axis2=2))
        grams[~finite] = 0.0
        try:
            values = roots(np.linalg.eigvalsh(grams))
            done = finite & meets(values, shape, rtol)
        except np.linalg.LinAlgError:
            done = np.zeros(size, bool)
        values[~finite] = np.nan
        route[done] = CODE["gram"]
        todo = finite & ~done
    if todo.any():
        values[todo], route[todo] = dense.values(block if todo.all() else block[todo])
    error = error_bound(values, shape, np.isin(route, GRAM_ROUTES))
    return np.ldexp(values, exponent[:, None]), unscaled(error, exponent), route
