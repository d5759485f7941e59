"""Singular values and vectors of matrices and of stacks of them, in memory and streamed, with a stated error.

A matrix W is m × n, k = min(m, n), and computing is in float64 whatever the dtype of W. Three ways lead to its
singular values: the eigenvalues of the k × k Gram matrix (fast, reads W once in pieces, and loses small singular
values below sqrt(ε)·σ₁); the same of the R factor of W, made from row blocks (TSQR: as exact as LAPACK, also one
reading); LAPACK's dense routines. The Gram matrix in float64 is exact enough for weights stored in float32 or less.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, cast

import numpy as np
import scipy.linalg
from numpy.typing import ArrayLike, DTypeLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array, blas_threads
from diffract_dask.errors import MatrixError
from diffract_dask.moments import as_matrices, is_narrow, scale_exponent

__all__ = [
    "ROUTES",
    "Decomposition",
    "Spectrum",
    "SpectrumStream",
    "blas_threads",
    "choose_route",
    "gram",
    "relative_error",
    "singular_values",
    "svd",
    "tsqr_r",
    "values_workspace",
    "vectors_workspace",
]

ROUTES = {0: "none", 1: "gram", 2: "tsqr", 3: "gesdd", 4: "gesvd", 5: "scaled_gram"}
"""How singular values were computed: the code that is stored, and its name."""

_CODE = {name: code for code, name in ROUTES.items()}
_GRAM_ROUTES = (1, 5)

PIECE = 4 << 20
"""Bytes of float64 of a large matrix that are converted and worked on at a time."""

GROUP = 1 << 20
"""Bytes of float64 of small matrices that are worked on together: they and their Gram matrices stay in cache."""

_MIN_ROWS = 256
_EPS = float(np.finfo(np.float64).eps)
_WIDE_SAFE = 300

Routes = NDArray[np.int8]


class Spectrum(NamedTuple):
    """Singular values ``(..., k)`` ascending, a bound on the error of each ``(...,)``, and the route ``(...,)``."""

    values: Array
    error: Array
    route: Routes


class Decomposition(NamedTuple):
    """Singular vectors ``u`` ``(..., m, k)`` and ``v`` ``(..., n, k)``, values ``s`` ascending, error and route."""

    u: Array
    s: Array
    v: Array
    error: Array
    route: Routes


def relative_error(rows: int, cols: int) -> float:
    """Return the backward error, relative to σ₁ (or, of a Gram matrix, to σ₁²), to expect in float64.

    Notes
    -----
    ε·(4 + sqrt(k)/4 + sqrt(N)/64) with N the longer side: rounding errors add up like a random walk (Higham and Mary
    2019). At least twice what was seen on matrices of known spectrum, with k up to 2048 and N up to a million.
    """
    return _EPS * (4.0 + math.sqrt(min(rows, cols)) / 4 + math.sqrt(max(rows, cols)) / 64)


def choose_route(shape: tuple[int, int], dtype: DTypeLike, rtol: float | None = None, *, streamed: bool = False) -> str:
    """Return the name of the route that is tried first.

    Parameters
    ----------
    shape : (rows, cols)
    dtype : dtype
        As stored.
    rtol : float, optional
        Relative error allowed in every single singular value; default: ε(dtype)·σ₁, absolute.
    streamed : bool
        The matrix is read in spans, so that only ``gram`` and ``tsqr`` are possible.

    Examples
    --------
    >>> choose_route((60000, 4096), "float32"), choose_route((512, 512), "float64")
    ('gram', 'gesdd')
    """
    rows, cols = shape
    if is_narrow(dtype):
        if rtol is None or rtol > relative_error(rows, cols):
            return "gram"
    elif rtol is not None and rtol >= _EPS**0.5 and not streamed:
        return "gram"
    tall = max(rows, cols) >= 2 * min(rows, cols)
    if streamed or (8 * rows * cols > PIECE and (tall or is_narrow(dtype))):
        return "tsqr"
    return "gesdd"


def gram(w: ArrayLike, out: Array | None = None) -> Array:
    """Return the Gram matrix over the longer side: WᵀW of a tall matrix, W·Wᵀ of a wide one.

    Parameters
    ----------
    w : (..., m, n) array
        Converted to float64 in pieces. Nothing is scaled: squares of float64 entries beyond 1e±150 leave the range.
    out : (..., k, k) float64 array, optional
        Overwritten with the result, which saves making it.

    Returns
    -------
    (..., k, k) float64 array

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Examples
    --------
    >>> gram([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]]).tolist()
    [[25.0, 0.0], [0.0, 4.0]]
    """
    flat, lead = _flat(w)
    k = flat.shape[2]
    result = np.empty((*lead, k, k)) if out is None else out
    stack = result.reshape(-1, k, k) if result.flags.c_contiguous else np.empty((len(flat), k, k))
    with np.errstate(all="ignore"):
        for chunk in _chunks(flat):
            if 8 * flat[chunk][0].size <= PIECE:
                block = flat[chunk].astype(np.float64)
                np.matmul(block.swapaxes(1, 2), block, out=stack[chunk])
            else:
                (target,) = stack[chunk]
                target[...] = 0.0
                for piece in _float64_pieces(flat[chunk][0]):
                    blas.add_gram(target.T, piece)
                _mirror(target)
    if not np.may_share_memory(stack, result):
        result[...] = stack.reshape(result.shape)
    return result


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
    >>> values, error, route = singular_values(np.diag([2.0, 5.0, 3.0]))
    >>> values.tolist(), bool(error < 1e-14), ROUTES[int(route)]
    ([2.0, 3.0, 5.0], True, 'gesdd')
    """
    flat, lead = _flat(w)
    k = flat.shape[2]
    values, error, route = np.full((len(flat), k), np.nan), np.full(len(flat), np.nan), np.zeros(len(flat), np.int8)
    if k == 0:
        error[:] = 0.0
    else:
        with np.errstate(all="ignore"):
            for chunk in _chunks(flat):
                values[chunk], error[chunk], route[chunk] = _spectra(flat[chunk], rtol)
    return Spectrum(values.reshape(*lead, k), error.reshape(lead), route.reshape(lead))


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
    flat, lead = _flat(array)
    size, long, k = flat.shape
    left, right = np.full((size, long, k), np.nan), np.full((size, k, k), np.nan)
    values, error, route = np.full((size, k), np.nan), np.full(size, np.nan), np.zeros(size, np.int8)
    if k == 0:
        error[:] = 0.0
    else:
        with np.errstate(all="ignore"):
            for chunk in _chunks(flat):
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
        for piece in _float64_pieces(rows):
            blas.add_rows(triangle, np.array(piece, order="F"))
    if triangle is None:
        raise MatrixError("tsqr_r needs at least one block of rows, found none")
    return triangle


@dataclass(slots=True)
class _State:
    """A span of rows as a Gram matrix (lower triangle) or R factor, in units of 2**exponent (twice that for Gram)."""

    route: str
    matrix: Array
    shape: tuple[int, int]
    narrow: bool
    exponent: int | None
    finite: bool = True

    def own(self) -> None:
        """Copy the matrix if it may not be written to, as after a way through another process."""
        if not self.matrix.flags.writeable:
            self.matrix = self.matrix.copy(order="F")


class SpectrumStream:
    """The twin of :func:`singular_values` for a slice read in spans (see :class:`diffract_dask.kernel.Streamed`).

    The state is one k × k float64 matrix, worked on in place from the first block to the eigenvalues.
    """

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> _State:
        """Return the state of no rows."""
        return _begin(shape, dtype, choose_route(shape, dtype, streamed=True))

    def update(self, state: _State, block: NDArray[Any]) -> _State:
        """Return `state`, changed in place, with the rows of `block` in it."""
        state.own()
        with np.errstate(all="ignore"):
            for piece in _float64_pieces(block):
                if not state.finite:
                    break
                _add(state, piece)
        return state

    def merge(self, first: _State, second: _State) -> _State:
        """Return `first`, changed in place, with the rows of `second`, which is used up."""
        first.own()
        second.own()
        first.finite &= second.finite
        if not first.finite or second.exponent is None:
            return first
        if first.exponent is None:
            return second
        _raise_exponent(first, second.exponent)
        _raise_exponent(second, first.exponent)
        if first.route == "gram":
            first.matrix += second.matrix
        else:
            blas.add_rows(first.matrix, second.matrix, triangular=True)
        return first

    def finish(
        self, state: _State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return singular values, error and route; the state is used up.

        `reread` is called only if a route fails or does not reach ``params["rtol"]``.
        """
        state.own()
        rtol = params.get("rtol")
        k = len(state.matrix)
        with np.errstate(all="ignore"):
            if not state.finite or not np.isfinite(np.trace(state.matrix)):
                return np.full(k, np.nan), np.float64(np.nan), np.int8(0)
            attempts = ["gram", "tsqr", "gesvd", "scaled_gram"]
            attempts = attempts[attempts.index(state.route) :]
            for attempt in attempts:
                if attempt != attempts[0]:
                    self._read_again(state, "gram" if attempt == "scaled_gram" else "tsqr", reread)
                try:
                    values = _from_state(state, attempt)
                except np.linalg.LinAlgError:
                    continue
                if attempt == "gram" and not _meets(values, state.shape, rtol):
                    continue
                error, exponent = _error(values, state.shape, attempt in ("gram", "scaled_gram")), state.exponent or 0
                error = _unscaled(error, exponent)
                return np.ldexp(values, exponent), np.float64(error), np.int8(_CODE[attempt])
        return np.full(k, np.nan), np.float64(np.nan), np.int8(0)

    def _read_again(self, state: _State, route: str, reread: Callable[[], Iterator[NDArray[Any]]]) -> None:
        state.route, state.exponent = route, 0 if state.narrow else None
        state.matrix[...] = 0.0
        for block in reread():
            self.update(state, block)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        k = min(shape)
        pieces = 2 * max(PIECE, 8 * k * _MIN_ROWS)
        return 8 * k * k + pieces + blas.work_bytes(k), blas.work_bytes(k) + pieces

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return the name of the route that is tried first."""
        return choose_route(shape, dtype, params.get("rtol"), streamed=True)


def values_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`singular_values` needs beyond input and output for `n` slices."""
    entries, k = rows * cols, min(rows, cols)
    if 8 * entries <= PIECE:
        return 4 * max(GROUP, 8 * entries) + blas.work_bytes(k)
    square = max(rows, cols) < 2 * k
    if itemsize > 4 and square:
        return 16 * entries + blas.work_bytes(k)
    return sum(SpectrumStream().workspace((rows, cols), np.dtype(np.float64)))


def vectors_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    """Return the bytes that :func:`svd` needs beyond input and output for `n` slices."""
    return max(8 * PIECE, 8 * (6 * rows * cols + 6 * min(rows, cols) ** 2)) + blas.work_bytes(min(rows, cols))


def _flat(w: ArrayLike) -> tuple[NDArray[Any], tuple[int, ...]]:
    """Return matrices ``(B, N, k)`` with the longer side first, and the leading shape."""
    array = as_matrices(w)
    lead = array.shape[:-2]
    flat = array.reshape(int(np.prod(lead)), *array.shape[-2:])
    return (flat if flat.shape[1] >= flat.shape[2] else flat.swapaxes(1, 2)), lead


def _chunks(flat: NDArray[Any]) -> Iterator[slice]:
    """Yield ranges of matrices that make up one piece together."""
    step = max(1, GROUP // (8 * max(1, flat.shape[1] * flat.shape[2])))
    for start in range(0, len(flat), step):
        yield slice(start, start + step)


def _float64_pieces(rows: NDArray[Any]) -> Iterator[Array]:
    """Yield contiguous float64 pieces of `rows`; views where it is that already."""
    step = max(_MIN_ROWS, PIECE // (8 * max(1, rows.shape[1])))
    for start in range(0, len(rows), step):
        piece = rows[start : start + step].astype(np.float64, copy=False)
        if not (piece.flags.c_contiguous or piece.flags.f_contiguous):
            piece = np.ascontiguousarray(piece)
        yield piece


def _begin(shape: tuple[int, int], dtype: DTypeLike, route: str) -> _State:
    k, narrow = min(shape), is_narrow(dtype)
    return _State(route, np.zeros((k, k), order="F"), shape, narrow, 0 if narrow else None)


def _from_state(state: _State, attempt: str) -> Array:
    """Return ascending values in the state's unit; its matrix is destroyed."""
    if attempt == "tsqr":
        return blas.svdvals(state.matrix)[::-1]
    if attempt == "gesvd":
        return _gesvd(state.matrix)[::-1]
    return _roots(blas.eigenvalues(state.matrix))


def _add(state: _State, piece: Array) -> None:
    if not state.narrow:
        absmax = np.maximum(piece.max(), -piece.min())
        if not np.isfinite(absmax):
            state.finite = False
            return
        _raise_exponent(state, int(scale_exponent(absmax, _WIDE_SAFE)))
        if state.exponent:
            piece = np.ldexp(piece, -state.exponent)
    if state.route == "gram":
        blas.add_gram(state.matrix, piece)
    else:
        blas.add_rows(state.matrix, np.array(piece, order="F"))


def _raise_exponent(state: _State, exponent: int) -> None:
    """Bring `state` to the unit 2**exponent if its own is smaller."""
    if state.exponent is None:
        state.exponent = exponent
    elif exponent > state.exponent:
        shift = state.exponent - exponent
        np.ldexp(state.matrix, 2 * shift if state.route == "gram" else shift, out=state.matrix)
        state.exponent = exponent


def _mirror(matrix: Array) -> None:
    """Copy the upper triangle of a C-ordered matrix to the lower one."""
    for i in range(0, len(matrix), _MIN_ROWS):
        j = i + _MIN_ROWS
        matrix[i:j, :i] = matrix[:i, i:j].T
        diagonal = matrix[i:j, i:j]
        diagonal[...] = np.triu(diagonal) + np.triu(diagonal, 1).T


def _roots(eigenvalues: NDArray[Any]) -> Array:
    roots: Array = np.sqrt(np.maximum(eigenvalues, 0.0))
    return roots


def _meets(values: Array, shape: tuple[int, int], rtol: float | None) -> Any:
    """Return whether values from the Gram matrix are within `rtol`, if one is given."""
    if rtol is None:
        return np.ones(values.shape[:-1], bool)
    return relative_error(*shape) * values[..., -1] ** 2 <= rtol * values[..., 0] ** 2


def _error(values: Array, shape: tuple[int, int], from_gram: ArrayLike) -> Any:
    """Return the bound on the error of each of `values` ``(..., k)``."""
    c, top = relative_error(*shape), values[..., -1]
    smallest = np.where(top > 0, values[..., 0] / np.where(top > 0, top, 1.0), 1.0)
    return np.where(from_gram, top * (c / np.maximum(smallest, math.sqrt(c))), c * top)


def _unscaled(error: Any, exponent: Any) -> Any:
    """Return `error` in the units of the matrix, with the rounding that subnormal values add."""
    return np.where(error > 0, np.ldexp(error, exponent) + np.finfo(np.float64).smallest_subnormal, error)


def _prepared(w: NDArray[Any]) -> tuple[Array, NDArray[np.int32], NDArray[np.bool_]]:
    """Return float64 matrices scaled by ``2**-exponent``, zero where an entry is not finite, with exponent and flag."""
    block = w.astype(np.float64, copy=False)
    absmax = np.maximum(block.max(axis=(1, 2)), -block.min(axis=(1, 2)))
    finite = np.isfinite(absmax)
    exponent = np.where(finite, scale_exponent(absmax, _WIDE_SAFE), np.int32(0))
    if exponent.any():
        block = np.ldexp(block, -exponent[:, None, None])
    if not finite.all():
        block = np.where(finite[:, None, None], block, 0.0)
    return block, exponent, finite


def _spectra(w: NDArray[Any], rtol: float | None) -> tuple[Array, Array, Routes]:
    """Return values, error and route of matrices ``(g, N, k)`` that make up one piece, or of one large matrix."""
    size, shape = len(w), (w.shape[1], w.shape[2])
    first = choose_route(shape, w.dtype, rtol)
    if 8 * w[0].size > PIECE and first != "gesdd":
        stream = SpectrumStream()
        state = stream.update(_begin(shape, w.dtype, first), w[0])
        return stream.finish(state, lambda: iter(w), {"rtol": rtol})
    values, route = np.full((size, shape[1]), np.nan), np.zeros(size, np.int8)
    if first == "gram" and is_narrow(w.dtype):
        block, exponent, finite = w.astype(np.float64), np.zeros(size, np.int32), np.ones(size, bool)
    else:
        block, exponent, finite = _prepared(w)
    todo = finite
    if first == "gram":
        flipped = block.swapaxes(1, 2)
        # Either Gram matrix of a square one will do; of rows as they lie in memory it is a quarter faster.
        grams = block @ flipped if shape[0] == shape[1] else flipped @ block
        # Squares of narrow entries cannot overflow, so that a trace is finite exactly where all entries are.
        finite = finite & np.isfinite(np.trace(grams, axis1=1, axis2=2))
        grams[~finite] = 0.0
        try:
            values = _roots(np.linalg.eigvalsh(grams))
            done = finite & _meets(values, shape, rtol)
        except np.linalg.LinAlgError:
            done = np.zeros(size, bool)
        values[~finite] = np.nan
        route[done] = _CODE["gram"]
        todo = finite & ~done
    if todo.any():
        values[todo], route[todo] = _dense(block if todo.all() else block[todo])
    error = _error(values, shape, np.isin(route, _GRAM_ROUTES))
    return np.ldexp(values, exponent[:, None]), _unscaled(error, exponent), route


def _gesdd(block: Array) -> Array:
    values: Any = np.linalg.svd(block, compute_uv=False)
    return cast(Array, values)


def _gesvd(matrix: Array) -> Array:
    values: Array = scipy.linalg.svd(
        matrix, compute_uv=False, overwrite_a=True, check_finite=False, lapack_driver="gesvd"
    )
    return values


def _dense(block: Array) -> tuple[Array, Routes]:
    """Return values and route of finite matrices ``(g, N, k)`` by LAPACK, one by one where it fails."""
    try:
        return _gesdd(block)[:, ::-1], np.full(len(block), _CODE["gesdd"], np.int8)
    except np.linalg.LinAlgError:
        results = [_dense_one(matrix) for matrix in block]
    return np.array([values for values, _ in results]), np.array([_CODE[name] for _, name in results], np.int8)


def _dense_one(matrix: Array) -> tuple[Array, str]:
    attempts: dict[str, Callable[[], Array]] = {
        "gesdd": lambda: _gesdd(matrix)[::-1],
        "gesvd": lambda: _gesvd(matrix.copy())[::-1],
        "scaled_gram": lambda: _roots(np.linalg.eigvalsh(matrix.T @ matrix)),
    }
    for name, attempt in attempts.items():
        try:
            return attempt(), name
        except np.linalg.LinAlgError:
            continue
    return np.full(matrix.shape[1], np.nan), "none"


def _vectors(w: NDArray[Any]) -> tuple[Array, Array, Array, Array, Routes]:
    """Return left vectors, values, right vectors, error and route of matrices ``(g, N, k)``."""
    block, exponent, finite = _prepared(w)
    size, long, k = block.shape
    left, right, values = np.full((size, long, k), np.nan), np.full((size, k, k), np.nan), np.full((size, k), np.nan)
    route = np.zeros(size, np.int8)
    for i in np.flatnonzero(finite):
        left[i], values[i], right[i], name = _dense_vectors(block[i])
        route[i] = _CODE[name]
    error = _unscaled(_error(values, (long, k), np.isin(route, _GRAM_ROUTES)), exponent)
    return left, np.ldexp(values, exponent[:, None]), right, error, route


def _gram_vectors(block: Array) -> tuple[Array, Array, Array]:
    """Return left vectors, ascending values and right vectors from the Gram matrix."""
    eigenvalues, right = np.linalg.eigh(np.matmul(block.swapaxes(-1, -2), block))
    left, triangle = np.linalg.qr(np.matmul(block, right[..., ::-1]))
    left *= np.where(np.diagonal(triangle, axis1=-2, axis2=-1) < 0, -1.0, 1.0)[..., None, :]
    return left[..., ::-1], _roots(eigenvalues), right


def _dense_vectors(matrix: Array) -> tuple[Array, Array, Array, str]:
    attempts: dict[str, Callable[[], tuple[Array, Array, Array]]] = {
        "gesdd": lambda: _gesdd_vectors(matrix),
        "gesvd": lambda: _gesvd_vectors(matrix),
        "scaled_gram": lambda: _gram_vectors(matrix),
    }
    for name, attempt in attempts.items():
        try:
            return *attempt(), name
        except np.linalg.LinAlgError:
            continue
    long, k = matrix.shape
    return np.full((long, k), np.nan), np.full(k, np.nan), np.full((k, k), np.nan), "none"


def _gesdd_vectors(matrix: Array) -> tuple[Array, Array, Array]:
    u, s, vt = np.linalg.svd(matrix, full_matrices=False)
    return u[:, ::-1], s[::-1], vt[::-1].T


def _gesvd_vectors(matrix: Array) -> tuple[Array, Array, Array]:
    u, s, vt = scipy.linalg.svd(matrix, full_matrices=False, check_finite=False, lapack_driver="gesvd")
    return u[:, ::-1], s[::-1], vt[::-1].T


def _fix_signs(u: Array, v: Array) -> None:
    """Make the entry of largest magnitude in each column of `v` positive, in place."""
    if not v.size:
        return
    largest = np.take_along_axis(v, np.abs(v).argmax(axis=-2, keepdims=True), axis=-2)
    signs = np.where(largest < 0, -1.0, 1.0)
    u *= signs
    v *= signs
