"""Statistics of the entries of matrices in one pass: norm, mean, spread, extremes, zeros, kurtosis."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from math import isfinite
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from diffract_dask.errors import MatrixError

__all__ = ["Moments", "MomentsStream", "as_matrices", "is_narrow", "moments", "scale_exponent"]

Floats = NDArray[np.float64]

PIECE = 32768
"""Entries worked on at a time: three float64 buffers of this length stay in a core's second-level cache."""

RUN = 4
"""Pieces whose extremes are taken together: threads that call NumPy too often wait for each other's interpreter."""

ROW = 4096
"""Length of a sum; BLAS takes its path without packing up to about this length."""

_ZERO_EXPONENT = -1100
_SAFE = 200


class Moments(NamedTuple):
    """Statistics of the finite entries of each matrix, all ``(...,)`` float64.

    `frob_norm` is NaN if any entry is not finite. Where no entry is finite, all but `nonfinite_fraction` are NaN.
    `zero_fraction` counts among the finite entries, `nonfinite_fraction` among all. `std` is the population standard
    deviation. `excess_kurtosis` is NaN where all finite entries are equal.
    """

    frob_norm: Floats
    mean: Floats
    std: Floats
    min: Floats
    max: Floats
    absmax: Floats
    zero_fraction: Floats
    nonfinite_fraction: Floats
    excess_kurtosis: Floats


class _State(NamedTuple):
    """What is known of some entries; `m2`, `m3`, `m4` are sums of powers about `mean`, in units of 2**exponent."""

    size: Floats
    finite: Floats
    zeros: Floats
    low: Floats
    high: Floats
    exponent: NDArray[np.int32]
    mean: Floats
    m2: Floats
    m3: Floats
    m4: Floats


def as_matrices(w: ArrayLike) -> NDArray[Any]:
    """Return `w` as an array of real matrices ``(..., m, n)``, uncopied where it is an array.

    Raises
    ------
    MatrixError
        Fewer than two dimensions, or entries that are not real numbers.
    """
    array = np.asarray(w)
    if array.ndim < 2:
        raise MatrixError(f"expected matrices (..., m, n), found shape {array.shape}; reshape to two dimensions")
    if array.dtype.kind not in "fiub" and not np.can_cast(array.dtype, np.float64):
        raise MatrixError(f"expected real numbers, found dtype {array.dtype}; convert first, for example w.real")
    return array


def is_narrow(dtype: DTypeLike) -> bool:
    """Return whether a floating dtype has at most the range and precision of float32.

    Sums of squares of such entries neither overflow nor underflow in float64, so that nothing has to be scaled.
    """
    dtype = np.dtype(dtype)
    return dtype.kind not in "iub" and dtype.itemsize <= 4


def scale_exponent(absmax: ArrayLike, safe: int = _SAFE) -> NDArray[np.int32]:
    """Return the power of two to divide by so that powers of entries up to `absmax` stay in range.

    0 if `absmax` is within 2**±`safe`, and a number below all others if it is 0.
    """
    absmax = np.asarray(absmax, np.float64)
    exponent = np.frexp(absmax)[1]
    needed = np.where(np.abs(exponent) <= safe, 0, exponent)
    return np.where(absmax == 0, _ZERO_EXPONENT, needed).astype(np.int32)


def moments(w: ArrayLike) -> Moments:
    r"""Return statistics of the entries of each matrix in one pass over them.

    Parameters
    ----------
    w : (..., m, n) array
        Any real dtype; computed in float64, piece by piece.

    Returns
    -------
    Moments
        Nine arrays ``(...,)``.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Notes
    -----
    Each piece gives :math:`\sum (x-c)^p`, p = 1 … 4, with c = 0, or c = the piece's mean where that is large
    against the spread; pieces are merged about their common mean (Pébay 2008), so that neither the order of
    magnitude nor an offset costs precision. :math:`\|W\|_F^2 = \sum (x-\mu)^2 + N\mu^2`.

    Examples
    --------
    >>> result = moments([[3.0, 0.0], [0.0, 4.0]])
    >>> float(result.frob_norm), float(result.mean), float(result.zero_fraction)
    (5.0, 1.75, 0.5)
    """
    array = as_matrices(w)
    lead = array.shape[:-2]
    if not array.size:
        return _finish(_empty(lead))
    flat = array.reshape(-1, *array.shape[-2:])
    with np.errstate(all="ignore"):
        return _finish(_reshaped(_state(flat), lead))


class MomentsStream:
    """The twin of :func:`moments` for a slice that is read in spans (see :class:`diffract_dask.kernel.Streamed`)."""

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> _State:
        """Return the state of no entries."""
        return _empty(())

    def update(self, state: _State, block: NDArray[Any]) -> _State:
        """Return `state` with the entries of `block` in it; a block that is not contiguous is copied."""
        if not block.size:
            return state
        with np.errstate(all="ignore"):
            return _merge(state, _reshaped(_state(as_matrices(block)[None]), ()))

    def merge(self, first: _State, second: _State) -> _State:
        """Return one state for the entries of both."""
        with np.errstate(all="ignore"):
            return _merge(first, second)

    def finish(
        self, state: _State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return the nine scalars of :class:`Moments`."""
        return tuple(_finish(state))

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of the piece buffers, and nothing more for finish."""
        return workspace_bytes(np.dtype(dtype).itemsize), 0

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return the one route there is."""
        return "one pass"


def workspace_bytes(itemsize: int) -> int:
    """Return the most that one pass holds beside its results: three buffers of a piece, copies and flags of a run."""
    return (3 * 8 + RUN * (2 * max(itemsize, 4) + 2)) * PIECE


def _reshaped(state: _State, lead: tuple[int, ...]) -> _State:
    parts: list[Any] = [part.reshape(lead) for part in state]
    return _State(*parts)


def _empty(lead: tuple[int, ...]) -> _State:
    zero = np.zeros(lead)
    inf = np.full(lead, np.inf)
    return _State(zero, zero, zero, inf, -inf, np.full(lead, _ZERO_EXPONENT, np.int32), zero, zero, zero, zero)


def _state(flat: NDArray[Any]) -> _State:
    """Return the states ``(B,)`` of matrices ``(B, m, n)``."""
    size = flat.shape[1] * flat.shape[2]
    total = np.full(len(flat), float(size))
    if size <= PIECE // 2:
        group = RUN * PIECE // size
        parts = [_measure(flat[i : i + group].reshape(-1, size), -1) for i in range(0, len(flat), group)]
        low, high, zeros, exponent, count, shift, sums = (np.concatenate(part) for part in zip(*parts, strict=True))
        return _State(total, count, zeros, low, high, exponent, *_central(count, shift, sums))
    parts = [piece for matrix in flat for piece in _pieces(matrix)]
    low, high, zeros, exponent = (np.reshape([part[i] for part in parts], (len(flat), -1)) for i in range(4))
    count, shift, sums = (np.concatenate([part[i] for part in parts]) for i in range(4, 7))
    exponents = np.repeat(exponent.reshape(-1), [len(part.finite) for part in parts])
    by_row: list[Any] = [x.reshape(len(flat), -1) for x in (exponents, count, *_central(count, shift, sums))]
    exponent, count, *powers = _total(*by_row)
    return _State(total, count, zeros.sum(axis=-1), low.min(axis=-1), high.max(axis=-1), exponent, *powers)


class _Piece(NamedTuple):
    """Sums over the rows ``(g, l)`` of some entries; `low`, `high`, `zeros`, `exponent` over all rows, or per row."""

    low: Any
    high: Any
    zeros: Any
    exponent: Any
    finite: Floats
    shift: Floats
    sums: Floats


def _pieces(matrix: NDArray[Any]) -> Iterator[_Piece]:
    """Yield the sums of one matrix, read in the order in which it lies in memory."""
    entries = matrix.ravel(order="K")
    even = matrix.size // ROW * ROW
    for i in range(0, even, RUN * PIECE):
        yield _measure(entries[i : min(i + RUN * PIECE, even)].reshape(-1, ROW), None)
    if matrix.size > even:
        yield _measure(entries[even:].reshape(1, -1), None)


_scratch = threading.local()


def _buffers(g: int, length: int) -> Floats:
    """Return this thread's room ``(3, g, length)`` for ones, entries and squares, with ones in the first."""
    if not hasattr(_scratch, "buffers"):
        _scratch.buffers = np.ones((3, PIECE))
    buffers: Floats = _scratch.buffers[:, : g * length].reshape(3, g, length)
    return buffers


def _measure(x: NDArray[Any], axis: int | None) -> _Piece:
    """Return the sums of each row of `x` ``(g, l)``."""
    narrow = is_narrow(x.dtype)
    if x.dtype not in (np.float32, np.float64):
        x = x.astype(np.float32 if narrow else np.float64)
    g, length = x.shape
    low, high = _float64(x.min(axis)), _float64(x.max(axis))
    count, finite = np.full(g, float(length)), None
    if not (isfinite(high - low) if axis is None else np.isfinite(high - low).all()):
        finite = np.isfinite(x)
        low = _float64(np.where(finite, x, np.inf).min(axis))
        high = _float64(np.where(finite, x, -np.inf).max(axis))
        x = np.where(finite, x, np.ones((), x.dtype))
        count = finite.sum(axis=-1).astype(np.float64)
    zeros = _zeros(x, axis)
    exponent = np.zeros(np.shape(low), np.int32)
    if not narrow:
        exponent = scale_exponent(np.maximum(np.maximum(-low, high), 0.0) + 0.0)
    shift: Floats | None = None
    sums = _sums(x, exponent, finite, shift)
    if _is_offset(sums, count, axis):
        shift = sums[:, 0, 0] / np.maximum(count, 1.0)
        sums = _sums(x, exponent, finite, shift)
    return _Piece(low, high, zeros, exponent, count, np.zeros(g) if shift is None else shift, sums)


def _sums(
    x: NDArray[Any], exponent: NDArray[np.int32], finite: NDArray[np.bool_] | None, shift: Floats | None
) -> Floats:
    """Return Σy, Σy², Σy³ and Σy⁴ of each row as ``(g, 2, 2)``, y = x / 2**exponent - shift where it is finite.

    The product of the rows [1, y²] and [y, y²] is all four at once: half the time of four dot products.
    """
    g, length = x.shape
    sums = np.empty((g, 2, 2))
    step = max(1, PIECE // length)
    scaled = bool(exponent.any())
    for start in range(0, g, step):
        rows = slice(start, min(start + step, g))
        buffers = _buffers(rows.stop - start, length)
        left, right = buffers[::2].transpose(1, 0, 2), buffers[1:].transpose(1, 2, 0)
        values, squares = buffers[1], buffers[2]
        np.copyto(values, x[rows])
        if scaled:
            np.ldexp(values, -(exponent[rows, None] if exponent.ndim else exponent), out=values)
        if shift is not None:
            values -= shift[rows, None]
        if finite is not None:
            values *= finite[rows]
        np.square(values, out=squares)
        np.matmul(left, right, out=sums[rows])
    return sums


def _float64(x: Any) -> Any:
    """Return `x` as float64 in its own shape; before NumPy 2.4 ``np.float64`` drops an axis of length 1."""
    return np.asarray(x, np.float64)[()]


def _zeros(x: NDArray[Any], axis: int | None) -> Any:
    """Return the number of zeros in all of `x`, or in each row; counting flags per row is slow, and rarely needed."""
    is_zero = x == 0
    zeros = np.count_nonzero(is_zero)
    if axis is None:
        return float(zeros)
    return np.count_nonzero(is_zero, axis=axis).astype(np.float64) if zeros else np.zeros(len(x))


def _is_offset(sums: Floats, count: Floats, axis: int | None) -> bool:
    """Return whether a mean is larger than the spread, so that moving the sums to it would lose digits.

    Rows of one matrix are judged together: the spread between them is part of the result.
    """
    if axis is None:
        s1, s2 = sums[:, 0].sum(axis=0).tolist()
        return bool(2.0 * s1 * s1 > s2 * count.sum())
    s1, s2 = sums[:, 0].T
    return bool((2.0 * s1 * s1 > s2 * count).any())


def _central(count: Floats, shift: Floats, sums: Floats) -> tuple[Floats, Floats, Floats, Floats]:
    """Return mean and central power sums of each row, from power sums about `shift`."""
    n = np.maximum(count, 1.0)
    (s1, s2), (s3, s4) = sums.transpose(1, 2, 0)
    delta = s1 / n
    square = delta * delta
    m2 = np.maximum(s2 - s1 * delta, 0.0)
    m3 = s3 + delta * (2 * n * square - 3 * s2)
    m4 = np.maximum(s4 - 4 * delta * s3 + square * (6 * s2 - 3 * n * square), 0.0)
    return shift + delta, m2, m3, m4


def _total(
    exponents: NDArray[np.int32], counts: Floats, means: Floats, m2: Floats, m3: Floats, m4: Floats
) -> tuple[Any, ...]:
    """Return exponent, count, mean and power sums ``(B,)`` of all rows ``(B, r)`` together."""
    exponent = exponents.max(axis=-1)
    means, m2, m3, m4 = _rescaled(exponents - exponent[:, None], means, m2, m3, m4)
    count = counts.sum(axis=-1)
    mean = np.sum(counts * means, axis=-1) / np.maximum(count, 1.0)
    delta = means - mean[:, None]
    square = delta * delta
    return (
        exponent,
        count,
        mean,
        np.sum(m2 + counts * square, axis=-1),
        np.sum(m3 + delta * (3 * m2 + counts * square), axis=-1),
        np.sum(m4 + 4 * delta * m3 + square * (6 * m2 + counts * square), axis=-1),
    )


def _merge(a: _State, b: _State) -> _State:
    """Return the state of the entries of both."""
    states: Any = (a, b)
    pairs: list[Any] = [np.stack(pair, axis=-1).reshape(-1, 2) for pair in zip(*states, strict=True)]
    sizes, counts, zeros, lows, highs, exponents, *powers = pairs
    exponent, count, *totals = _total(exponents, counts, *powers)
    merged = _State(
        sizes.sum(axis=-1), count, zeros.sum(axis=-1), lows.min(axis=-1), highs.max(axis=-1), exponent, *totals
    )
    return _reshaped(merged, a.finite.shape)


def _rescaled(shift: NDArray[np.int32], mean: Floats, *powers: Floats) -> tuple[Floats, ...]:
    """Return means and power sums of degree 2, 3, … in units larger by ``2**-shift``."""
    if not shift.any():
        return mean, *powers
    return tuple(np.ldexp(x, degree * shift) for degree, x in enumerate((mean, *powers), 1))


def _finish(state: _State) -> Moments:
    with np.errstate(all="ignore"):
        some = state.finite > 0
        constant = state.low == state.high
        mean = np.where(constant, state.low, np.ldexp(state.mean, state.exponent))
        m2 = np.where(constant, 0.0, state.m2)
        n = np.where(some, state.finite, np.nan)
        scaled_mean = np.ldexp(mean, -state.exponent)
        frob_norm = np.ldexp(np.sqrt(m2 + state.finite * scaled_mean**2), state.exponent)
        return Moments(
            np.where(state.finite == state.size, frob_norm, np.nan),
            np.where(some, mean, np.nan),
            np.ldexp(np.sqrt(m2 / n), state.exponent),
            np.where(some, state.low, np.nan),
            np.where(some, state.high, np.nan),
            np.where(some, np.maximum(-state.low, state.high), np.nan),
            state.zeros / n,
            (state.size - state.finite) / np.where(state.size > 0, state.size, np.nan),
            np.where(constant, np.nan, n * state.m4 / m2**2 - 3.0),
        )
