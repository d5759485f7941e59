"""QR factors of tall matrices from their row blocks (TSQR)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.errors import MatrixError
from diffract_dask.linalg import dense
from diffract_dask.linalg.pieces import WIDE_SAFE, float64_pieces
from diffract_dask.linalg.routes import CODE, QR, relative_error, unscaled
from diffract_dask.linalg.streams import SpectrumStream, State, begin
from diffract_dask.moments import as_matrices, scale_exponent

__all__ = ["TriangleStream", "directions", "inverse", "project", "qr_of", "solve", "tsqr_r"]


def tsqr_r(blocks: Iterable[ArrayLike]) -> Array:
    """Return the R factor ``(k, k)`` of the matrix whose row blocks ``(b, k)`` are given, in one reading.

    R is upper triangular, its diagonal of either sign; its singular values are those of the matrix.

    Raises
    ------
    MatrixError
        A block is not a real matrix, or there is none.

    Examples
    --------
    >>> np.abs(tsqr_r([[[3.0, 0.0]], [[4.0, 0.0]], [[0.0, 2.0]]])).tolist()
    [[5.0, 0.0], [0.0, 2.0]]
    """
    triangle: Array | None = None
    for block in blocks:
        rows = as_matrices(block)
        if triangle is None:
            triangle = np.zeros((rows.shape[1],) * 2, order="F")
        for piece in float64_pieces(rows):
            blas.add_rows(triangle, np.array(piece, order="F"))
    if triangle is None:
        raise MatrixError("tsqr_r needs at least one block of rows, found none")
    return triangle


def qr_of(w: ArrayLike, mode: str) -> QR:
    """Return the QR factors of one tall matrix in memory, see :func:`diffract_dask.linalg.tsqr`."""
    matrix = as_matrices(w)
    twin = TriangleStream()
    state = twin.update(twin.start((matrix.shape[0], matrix.shape[1]), matrix.dtype), matrix)
    r, error, route = twin.finish(state, lambda: iter(()), {})
    if mode == "r" or not np.isfinite(error):
        return QR(None if mode == "r" else np.full(matrix.shape, np.nan), r, error, route)
    # Of a matrix without full rank R is not unique: both factors must come from one factorisation.
    exponent = unit(np.abs(r).max(initial=0.0))
    q, upper = scipy.linalg.qr(np.ldexp(matrix.astype(np.float64), -exponent), mode="economic", check_finite=False)
    signs = np.where(np.diagonal(upper) < 0, -1.0, 1.0)
    return QR(q * signs, np.ldexp(upper * signs[:, None], exponent), error, route)


class TriangleStream(SpectrumStream):
    """The R factor of a matrix that is read in spans, with a diagonal that is not negative; R, error, route."""

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> State:
        """Return the state of no rows."""
        return begin(shape, dtype, "tsqr")

    def finish(
        self, state: State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return R, a bound on the backward error, and the route; the state is used up."""
        state.own()
        r, exponent = np.triu(state.matrix), state.exponent or 0
        if not state.finite or not np.isfinite(r).all():
            return np.full(r.shape, np.nan), np.float64(np.nan), np.int8(0)
        r *= np.where(np.diagonal(r) < 0, -1.0, 1.0)[:, None]
        error = len(r) * unscaled(relative_error(*state.shape) * np.linalg.norm(r) / max(len(r), 1), exponent)
        return np.ldexp(r, exponent), np.float64(error), np.int8(CODE["tsqr"])


def directions(r: Array) -> tuple[Array, Array, Array]:
    """Return left singular vectors of R, ascending values, and right singular vectors."""
    k = len(r)
    if not np.isfinite(r).all():
        nan = np.full((k, k), np.nan)
        return nan, np.full(k, np.nan), nan
    exponent = unit(np.abs(r).max(initial=0.0))
    left, s, right, _ = dense.vectors(np.ldexp(r, -exponent))
    return left, np.ldexp(s, exponent), right


def unit(size: float) -> int:
    """Return the power of two by which numbers up to `size` are divided before inverses of them are taken."""
    return max(int(scale_exponent(size, WIDE_SAFE)), -1074) if np.isfinite(size) else 0


def inverse(v: Array, s: Array, shape: tuple[int, int]) -> Array:
    """Return V/σ for ascending values in units of ``2**unit(σ₁)``, in descending order, zero where σ is rounding.

    W·V holds nothing else there.
    """
    s = np.ldexp(s, -unit(s.max(initial=0.0)))
    kept = s > relative_error(*shape) * s.max(initial=0.0)
    scaled: Array = (v * (np.where(kept, 1.0, 0.0) / np.where(kept, s, 1.0)))[:, ::-1]
    return scaled


def project(rows: NDArray[Any], scaled: Array, size: Array) -> Array:
    """Return rows of W times V/σ: of U, up to rounding that is large where σ is small. `size` is σ₁."""
    exponent = unit(float(size.max(initial=0.0)))
    values = rows.astype(np.float64)
    with np.errstate(all="ignore"):
        product: Array = (np.ldexp(values, -exponent) if exponent else values) @ scaled
    return product


def solve(rows: Array, r: Array) -> Array:
    """Return rows of X·R⁻¹, which has orthonormal columns, in ascending order; zero where R's diagonal is."""
    rank = int(np.count_nonzero(np.diagonal(r)))
    out = np.zeros(rows.shape)
    if np.isnan(r).any():
        out[...] = np.nan
    elif rank:
        out[:, :rank] = scipy.linalg.solve_triangular(
            r[:rank, :rank], rows[:, :rank].T, trans="T", check_finite=False
        ).T
    return out[:, ::-1]
