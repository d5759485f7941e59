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

__all__ = ["singular_values", "values_workspace"]


def singular_values(w: ArrayLike, rtol: float | None = None) -> Spectrum:
    r"""Return the singular values of each matrix, ascending, with a bound on their error.

    Parameters
    ----------
    w : (..., m, n) array
        Any real dtype. Matrices with NaN or infinite entries get NaN and route 0; the others are not affected.
    rtol : float, optional
        Largest relative error of every single singular value. Default: an absolute error of at most ε(dtype)·σ₁,
        which is the rounding that the stored entries carry already; in float64, of a small multiple of ε·σ₁.

    Returns
    -------
    Spectrum
        ``values`` ``(..., k)``, ``error`` ``(...,)`` in the same units, ``route`` ``(...,)`` int8, see `ROUTES`.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Notes
    -----
    With the Gram matrix in error by at most :math:`E = c\,\varepsilon\,\sigma_1^2` (`relative_error`), each value is
    in error by :math:`|\delta\sigma_i| \le \min(E/\sigma_i, \sqrt{E})`; `error` is this for the smallest. That is
    within ε(float32)·σ₁ for any matrix. With `rtol` it is refused where :math:`c\,\varepsilon\,(\sigma_1/\sigma_k)^2`
    exceeds it, and for float64 by default; then TSQR or LAPACK ``gesdd`` is taken, of error :math:`c\,\varepsilon\,
    \sigma_1`, and if that does not converge, ``gesvd`` and at last the Gram matrix. Entries near the ends of the
    float64 range are scaled by a power of two, which is exact.

    Examples
    --------
    >>> from diffract_dask.linalg import ROUTES
    >>> values, error, route = singular_values(np.diag([2.0, 5.0, 3.0]))
    >>> values.tolist(), bool(error < 1e-14), ROUTES[int(route)]
    ([2.0, 3.0, 5.0], True, 'gesdd')
    """
    flat, lead = flat_matrices(w)
    k = flat.shape[2]
    values, error, route = np.full((len(flat), k), np.nan), np.full(len(flat), np.nan), np.zeros(len(flat), np.int8)
    if k == 0:
        error[:] = 0.0
    else:
        with np.errstate(all="ignore"):
            for chunk in chunks(flat):
                values[chunk], error[chunk], route[chunk] = _spectra(flat[chunk], rtol)
    return Spectrum(values.reshape(*lead, k), error.reshape(lead), route.reshape(lead))


def values_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`singular_values` needs beyond input and output for `n` slices."""
    entries, k = rows * cols, min(rows, cols)
    if 8 * entries <= pieces.PIECE:
        return 4 * max(pieces.GROUP, 8 * entries) + blas.work_bytes(k)
    square = max(rows, cols) < 2 * k
    if itemsize > 4 and square:
        return 16 * entries + blas.work_bytes(k)
    return sum(SpectrumStream().workspace((rows, cols), np.dtype(np.float64)))


def _spectra(w: NDArray[Any], rtol: float | None) -> tuple[Array, Array, Routes]:
    """Return values, error and route of matrices ``(g, N, k)`` that make up one piece, or of one large matrix."""
    size, shape = len(w), (w.shape[1], w.shape[2])
    first = choose_route(shape, w.dtype, rtol)
    if 8 * w[0].size > pieces.PIECE and first != "gesdd":
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
