"""Singular vectors of matrices in memory, and of stacks of them."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.linalg import dense, pieces
from diffract_dask.linalg.pieces import chunks, flat_matrices, prepared
from diffract_dask.linalg.routes import CODE, GRAM_ROUTES, Decomposition, Routes, error_bound, unscaled
from diffract_dask.moments import as_matrices

__all__ = ["fix_signs", "vectors_of", "vectors_workspace"]


def vectors_of(w: ArrayLike) -> Decomposition:
    """Return singular values and vectors of each matrix in memory, see :func:`diffract_dask.linalg.svd`."""
    array = as_matrices(w)
    m, n = array.shape[-2:]
    flat, lead = flat_matrices(array)
    size, long, k = flat.shape
    left, right = np.full((size, long, k), np.nan), np.full((size, k, k), np.nan)
    values, error, route = np.full((size, k), np.nan), np.full(size, np.nan), np.zeros(size, np.int8)
    if k == 0:
        error[:] = 0.0
    else:
        with np.errstate(all="ignore"):
            for chunk in chunks(flat):
                left[chunk], values[chunk], right[chunk], error[chunk], route[chunk] = _vectors(flat[chunk])
    u, v = (left, right) if m >= n else (right, left)
    fix_signs(u, v)
    return Decomposition(
        u.reshape(*lead, m, k),
        values.reshape(*lead, k),
        v.reshape(*lead, n, k),
        error.reshape(lead),
        route.reshape(lead),
    )


def vectors_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`diffract_dask.linalg.svd` needs beyond input and output for `n` slices."""
    return max(8 * pieces.PIECE, 8 * (6 * rows * cols + 6 * min(rows, cols) ** 2)) + blas.work_bytes(min(rows, cols))


def _vectors(w: NDArray[Any]) -> tuple[Array, Array, Array, Array, Routes]:
    """Return left vectors, values, right vectors, error and route of matrices ``(g, N, k)``."""
    block, exponent, finite = prepared(w)
    size, long, k = block.shape
    left, right, values = np.full((size, long, k), np.nan), np.full((size, k, k), np.nan), np.full((size, k), np.nan)
    route = np.zeros(size, np.int8)
    for i in np.flatnonzero(finite):
        left[i], values[i], right[i], name = dense.vectors(block[i])
        route[i] = CODE[name]
    error = unscaled(error_bound(values, (long, k), np.isin(route, GRAM_ROUTES)), exponent)
    return left, np.ldexp(values, exponent[:, None]), right, error, route


def fix_signs(u: Array, v: Array) -> None:
    """Make the entry of largest magnitude in each column of `v` positive, in place."""
    if not v.size:
        return
    largest = np.take_along_axis(v, np.abs(v).argmax(axis=-2, keepdims=True), axis=-2)
    signs = np.where(largest < 0, -1.0, 1.0)
    u *= signs
    v *= signs
