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

__all__ = ["svd", "vectors_workspace"]


def svd(w: ArrayLike) -> Decomposition:
    """Return singular values and vectors of each matrix, in ascending order of the values.

    Parameters
    ----------
    w : (..., m, n) array
        Any real dtype. Matrices with NaN or infinite entries get NaN and route 0.

    Returns
    -------
    Decomposition
        ``u`` ``(..., m, k)``, ``s`` ``(..., k)``, ``v`` ``(..., n, k)`` (not transposed), ``error`` and ``route``:
        ``w ≈ (u * s[..., None, :]) @ v.mT``. In each column of ``v`` the entry of largest magnitude is positive.
        Vectors of equal or zero values are an arbitrary orthonormal basis.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Notes
    -----
    LAPACK ``gesdd`` on every dtype: for vectors the Gram matrix is no faster. Where that does not converge, ``gesvd``,
    and at last V from the eigenvectors of WᵀW and U from the QR factorisation of W·V in descending order, which keeps
    U orthonormal even where σ is 0. Needs about six times the float64 size of the largest matrix.

    Examples
    --------
    >>> u, s, v, error, route = svd([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    >>> s.tolist(), v.tolist()
    ([1.0, 2.0], [[1.0, 0.0], [0.0, 1.0]])
    """
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
    _fix_signs(u, v)
    return Decomposition(
        u.reshape(*lead, m, k),
        values.reshape(*lead, k),
        v.reshape(*lead, n, k),
        error.reshape(lead),
        route.reshape(lead),
    )


def vectors_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`svd` needs beyond input and output for `n` slices."""
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


def _fix_signs(u: Array, v: Array) -> None:
    """Make the entry of largest magnitude in each column of `v` positive, in place."""
    if not v.size:
        return
    largest = np.take_along_axis(v, np.abs(v).argmax(axis=-2, keepdims=True), axis=-2)
    signs = np.where(largest < 0, -1.0, 1.0)
    u *= signs
    v *= signs
