"""The functions for users: on NumPy arrays at once, on Dask arrays lazily and within a budget of memory."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from diffract_dask.blas import Array
from diffract_dask.errors import MatrixError, did_you_mean
from diffract_dask.linalg.folding import pick
from diffract_dask.linalg.lazily import (
    Budget,
    check_whole,
    checked,
    error_and_route,
    folded,
    in_one_chunk,
    is_lazy,
    leading_lazily,
    leading_now,
    long_vectors,
    several,
    stacked,
    tall_shape,
    whole_matrices,
)
from diffract_dask.linalg.products import GramStream, PairStream, check_pair, gram_of, pair_of
from diffract_dask.linalg.randomised import OVERSAMPLE
from diffract_dask.linalg.routes import QR, Decomposition, Product, Spectrum, choose_route
from diffract_dask.linalg.shuffling import shuffled
from diffract_dask.linalg.spectrum import values_of, values_workspace
from diffract_dask.linalg.streams import SpectrumStream
from diffract_dask.linalg.traces import SchattenStream, schatten_of
from diffract_dask.linalg.triangles import TriangleStream, qr_of
from diffract_dask.linalg.vectors import vectors_of, vectors_workspace
from diffract_dask.moments import Moments, MomentsStream, as_matrices
from diffract_dask.moments import moments as moments_of
from diffract_dask.shuffle import permuted

__all__ = [
    "gram",
    "leading_svd",
    "moments",
    "pair_product",
    "schatten_4_norm",
    "shuffle",
    "singular_values",
    "svd",
    "tsqr",
]

METHODS = ("auto", "gram", "tsqr", "gesdd")

WHOLE = 16 << 20
"""Bytes of float64 of a Dask array up to which it is worked on whole, in one task."""


def gram(w: ArrayLike, out: Array | None = None, *, budget: Budget = None) -> Product:
    r"""Return the Gram matrix over the longer side: WᵀW of a tall matrix, W·Wᵀ of a wide one.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks. Converted to float64 in pieces. Nothing is scaled: squares of float64 entries
        beyond 1e±150 leave the range.
    out : (..., k, k) float64 array, optional
        NumPy only: overwritten with the result, which saves making it.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once; default: the setting ``memory-budget``, or 60 % of what is free.

    Returns
    -------
    Product
        ``values`` ``(..., k, k)`` float64, ``error`` ``(...,)``, a bound on the 2-norm of their error, and ``route``.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.
    OverBudgetError
        k × k does not fit.

    Notes
    -----
    .. math:: \|\delta G\|_2 \le c\,\varepsilon\,\mathrm{tr}\,G

    with the constant of :func:`relative_error`.

    Examples
    --------
    >>> gram([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]]).values.tolist()
    [[25.0, 0.0], [0.0, 4.0]]
    """
    if not is_lazy(w):
        return gram_of(w, out)
    if w.ndim > 2:
        return Product(*stacked(gram_of, w, "(k,k),(),()", (min(w.shape[-2:]),)))
    shape = tall_shape(w)
    name, graph = folded([w], GramStream(), shape, budget, "gram")
    k = shape[1]
    return Product(pick(name, graph, 0, (k, k), np.float64), *error_and_route(name, graph))


def pair_product(a: ArrayLike, b: ArrayLike, *, budget: Budget = None) -> Product:
    r"""Return AᵀB: of the singular vectors of two models, their overlaps.

    Parameters
    ----------
    a, b : (..., m, p) and (..., m, q) arrays
        NumPy, or Dask in any chunks; if one of them is Dask, so is the result.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    Product
        ``values`` ``(..., p, q)`` float64, ``error`` ``(...,)``, a bound on the 2-norm of their error, and ``route``.

    Raises
    ------
    MatrixError
        Not matrices of as many rows.
    OverBudgetError
        p × q does not fit.

    Notes
    -----
    .. math:: \|\delta\|_2 \le c\,\varepsilon\,\|A\|_F \|B\|_F

    Examples
    --------
    >>> pair_product([[1.0], [2.0]], [[3.0, 0.0], [0.0, 1.0]]).values.tolist()
    [[3.0, 2.0]]
    """
    if not (is_lazy(a) or is_lazy(b)):
        return pair_of(a, b)
    first, second = (checked(x if is_lazy(x) else in_one_chunk(as_matrices(x))) for x in (a, b))
    check_pair(first.shape, second.shape)
    second = second.rechunk({0: first.chunks[0]})
    p, q = first.shape[1], second.shape[1]
    name, graph = folded([first, second], PairStream(), (first.shape[0], p, q), budget, "pair_product")
    return Product(pick(name, graph, 0, (p, q), np.float64), *error_and_route(name, graph))


def singular_values(
    w: ArrayLike, rtol: float | None = None, *, method: str = "auto", budget: Budget = None
) -> Spectrum:
    r"""Return the singular values of each matrix, ascending, with a bound on their error.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks; any real dtype. Matrices with NaN or infinite entries get NaN and route 0; the
        others are not affected.
    rtol : float, optional
        Largest relative error of every single singular value. Default: an absolute error of at most ε(dtype)·σ₁,
        which is the rounding that the stored entries carry already; in float64, of a small multiple of ε·σ₁.
    method : {"auto", "gram", "tsqr", "gesdd"}
        What is tried first; see :func:`choose_route`. ``"gram"`` on float64 may be in error by up to 1e-7·σ₁, and says
        so in ``error``.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once; default: the setting ``memory-budget``, or 60 % of what is free.

    Returns
    -------
    Spectrum
        ``values`` ``(..., k)``, ``error`` ``(...,)`` in the same units, ``route`` ``(...,)`` int8, see `ROUTES`. Of a
        Dask array lazy ones: nothing is read before they are computed.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.
    OverBudgetError
        Nothing fits; raised before anything is read.

    Notes
    -----
    With small eigenvalues of the Gram matrix in error by at most :math:`E = c_0\,\varepsilon\,\sigma_1^2`, the values
    are in error by :math:`|\delta\sigma_i| \le \min(E/\sigma_i, \sqrt{E}) + c\,\varepsilon\,\sigma_1`
    (:func:`relative_error`); `error` is this for the smallest. That is within ε(float32)·σ₁ for k up to 14000. With
    `rtol` it is refused where :math:`c_0\,\varepsilon\,(\sigma_1/\sigma_k)^2 + c\,\varepsilon` exceeds it, and for
    float64 by default; then TSQR or LAPACK ``gesdd`` is taken, of error :math:`c\,\varepsilon\,\sigma_1`, and if that
    does not converge, ``gesvd`` and at last the Gram matrix. Entries near the ends of the float64 range are scaled by a
    power of two, which is exact.

    A Dask array is read once, by as many tasks as there are workers, each with one k × k matrix.

    Examples
    --------
    >>> from diffract_dask.linalg import ROUTES
    >>> values, error, route = singular_values(np.diag([2.0, 5.0, 3.0]))
    >>> values.tolist(), bool(error < 1e-13), ROUTES[int(route)]
    ([2.0, 3.0, 5.0], True, 'gesdd')
    >>> import dask.array as da
    >>> lazy = singular_values(da.ones((4000, 3), chunks=(1000, 2)))
    >>> lazy.values.compute().round(9).tolist()
    [0.0, 0.0, 109.544511501]
    """
    if method not in METHODS:
        raise ValueError(f"method {method!r}; known are {', '.join(METHODS)}.{did_you_mean(method, METHODS)}")
    asked = None if method == "auto" else method
    if not is_lazy(w):
        return values_of(w, rtol, asked)
    m, n = w.shape[-2:]
    k = min(m, n)
    if w.ndim > 2:
        return Spectrum(*stacked(values_of, w, "(k),(),()", (k,), rtol=rtol, method=asked))
    shape = tall_shape(w)
    if method == "gesdd" or (method == "auto" and 8 * w.size <= WHOLE) or not w.size:
        check_whole("singular_values", w, values_workspace(1, m, n, w.dtype.itemsize), budget)
        return Spectrum(*several(values_of, ((k,), (), ()), w, route=True, rtol=rtol, method=asked))
    first = asked or choose_route(shape, w.dtype, rtol, streamed=True)
    name, graph = folded([w], SpectrumStream(first), shape, budget, "singular_values", {"rtol": rtol})
    return Spectrum(pick(name, graph, 0, (k,), np.float64), *error_and_route(name, graph))


def svd(w: ArrayLike, *, method: str = "auto", budget: Budget = None) -> Decomposition:
    """Return singular values and vectors of each matrix, in ascending order of the values.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks; any real dtype. Matrices with NaN or infinite entries get NaN and route 0.
    method : {"auto", "tsqr", "gesdd"}
        Dask only: the matrix in blocks of rows, or whole in one task.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    Decomposition
        ``u`` ``(..., m, k)``, ``s`` ``(..., k)``, ``v`` ``(..., n, k)`` (not transposed), ``error`` and ``route``:
        ``w ≈ (u * s[..., None, :]) @ v.mT``. In each column of ``v`` the entry of largest magnitude is positive.
        Vectors of equal or zero values are an arbitrary orthonormal basis; of a Dask array in blocks, those on its
        longer side that belong to values within the error of zero are zero.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.
    OverBudgetError
        Nothing fits; raised before anything is read.

    Notes
    -----
    LAPACK ``gesdd`` on every dtype: for vectors the Gram matrix is no faster. Where that does not converge, ``gesvd``,
    and at last V from the eigenvectors of WᵀW and U from the QR factorisation of W·V in descending order, which keeps
    U orthonormal even where σ is 0. Needs about six times the float64 size of the largest matrix.

    Of a Dask array in blocks: R by TSQR in one reading, its SVD for s and V; U is X·R₂⁻¹ with X = W·V/σ and R₂ its own
    R factor, made block by block. Three readings in all, and k × k matrices.

    Examples
    --------
    >>> u, s, v, error, route = svd([[0.0, 2.0], [1.0, 0.0], [0.0, 0.0]])
    >>> s.tolist(), v.tolist()
    ([1.0, 2.0], [[1.0, 0.0], [0.0, 1.0]])
    """
    if method not in ("auto", "tsqr", "gesdd"):
        raise ValueError(f"method {method!r}; known are auto, tsqr, gesdd.{did_you_mean(method, METHODS)}")
    if not is_lazy(w):
        return vectors_of(w)
    m, n = w.shape[-2:]
    k = min(m, n)
    if w.ndim > 2:
        made = stacked(vectors_of, w, "(p,k),(k),(q,k),(),()", (k, m, n))
        return Decomposition(*made)
    shape = tall_shape(w)
    if method == "gesdd" or (method == "auto" and 8 * w.size <= WHOLE) or not w.size:
        check_whole("svd", w, vectors_workspace(1, m, n, w.dtype.itemsize), budget)
        return Decomposition(*several(vectors_of, ((m, k), (k,), (n, k), (), ()), w, route=True))
    long, (_, values, short, signs, _), _, error, route = long_vectors(w, shape, budget)
    long = long * signs
    return Decomposition(long if m >= n else short, values, short if m >= n else long, error, route)


def tsqr(w: ArrayLike, mode: str = "reduced", *, budget: Budget = None) -> QR:
    """Return the QR factors of a tall matrix, from its row blocks in one reading.

    Parameters
    ----------
    w : (m, n) array, m ≥ n
        NumPy, or Dask in any chunks; any real dtype.
    mode : {"reduced", "r"}
        ``"r"``: without Q.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    QR
        ``q`` ``(m, n)``, ``r`` ``(n, n)`` upper triangular with a diagonal that is not negative, ``error``, a bound on
        ‖W - QR‖₂, and ``route``. The Q of a Dask array is lazy; if W has not full rank its columns span no more than W
        does, so that QᵀQ is a projection.

    Raises
    ------
    MatrixError
        `w` is not one real matrix, or wide.
    OverBudgetError
        n × n does not fit; raised before anything is read.

    Examples
    --------
    >>> q, r, error, route = tsqr([[3.0, 0.0], [4.0, 0.0], [0.0, 2.0]])
    >>> np.abs(r).round(12).tolist()
    [[5.0, 0.0], [0.0, 2.0]]
    """
    if mode not in ("reduced", "r"):
        raise ValueError(f"mode {mode!r}; known are 'reduced' and 'r'")
    matrix = checked(w) if is_lazy(w) else as_matrices(w)
    if matrix.ndim != 2 or matrix.shape[0] < matrix.shape[1]:
        raise MatrixError(f"expected one matrix with at least as many rows as columns, found shape {matrix.shape}")
    if not is_lazy(w):
        return qr_of(matrix, mode)
    if mode == "r":
        name, graph = folded([matrix], TriangleStream(), matrix.shape, budget, "tsqr")
        r = pick(name, graph, 0, (matrix.shape[1],) * 2, np.float64)
        return QR(None, r, *error_and_route(name, graph))
    long, (left, *_), triangle, error, route = long_vectors(matrix, matrix.shape, budget)
    return QR(long @ left.T, triangle, error, route)


def leading_svd(
    w: ArrayLike, rank: int, *, oversample: int = OVERSAMPLE, passes: int = 4, seed: int = 0, budget: Budget = None
) -> Decomposition:
    r"""Return the leading singular values and vectors from a few readings, however large min(m, n) is.

    Parameters
    ----------
    w : (m, n) array
        NumPy, or Dask in any chunks; any real dtype.
    rank : int
        How many; at most min(m, n).
    oversample : int
        Directions that are followed beyond these: more of them converge faster.
    passes : int
        Readings of the matrix; each but the first is a power iteration with WᵀW.
    seed : int
        Of the random start; the result depends on nothing else.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    Decomposition
        ``u`` ``(m, rank)``, ``s`` ``(rank,)`` ascending, ``v`` ``(n, rank)``, ``error`` ``(rank,)``, one bound for each
        value, and ``route``. Vectors on the longer side that belong to values within the error of zero are zero.

    Raises
    ------
    MatrixError
        `w` is not one real matrix, or `rank` is not between 1 and min(m, n).
    OverBudgetError
        Even a span with this rank does not fit; raised before anything is read.

    Notes
    -----
    Subspace iteration (Halko, Martinsson and Tropp 2011) in which each reading gives both WᵀW·Q, the next basis, and
    the R factor of W·Q, so that values are not squared. Each value is at most the true one of its rank. `error` is the
    smaller of two bounds: of the residual Wᵀu - σv, by which so many singular values lie within it (that they are the
    leading ones is as certain as the random start), and of the part of ‖W‖²_F that the values do not explain.

    References
    ----------
    halko2011finding, parlett1998symmetric

    Examples
    --------
    >>> u, s, v, error, route = leading_svd(np.diag([5.0, 3.0, 1.0, 0.5]), 2)
    >>> s.round(9).tolist(), bool(error.max() < 1e-9)
    ([3.0, 5.0], True)
    """
    matrix = checked(w) if is_lazy(w) else as_matrices(w)
    if matrix.ndim != 2 or not 1 <= rank <= min(matrix.shape):
        raise MatrixError(
            f"expected one matrix and a rank between 1 and its smaller side, found shape {matrix.shape} and rank {rank}"
        )
    m, n = matrix.shape
    if is_lazy(w):
        found = leading_lazily(matrix, tall_shape(matrix), rank, oversample, passes, seed, budget)
    else:
        found = leading_now(matrix if m >= n else matrix.T, rank, oversample, passes, seed)
    long, values, short, errors, route = found
    return Decomposition(long if m >= n else short, values, short if m >= n else long, errors, route)


def moments(w: ArrayLike, *, budget: Budget = None) -> Moments:
    """Return norm, mean, spread, extremes, zeros and kurtosis of the entries of each matrix, in one reading.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks (one matrix); any real dtype.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    Moments
        Nine arrays ``(...,)``; see :func:`diffract_dask.moments.moments`.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Notes
    -----
    The norm is in error by at most :func:`relative_error` times itself.

    Examples
    --------
    >>> import dask.array as da
    >>> float(moments(da.ones((30, 20), chunks=7)).frob_norm.compute() ** 2)
    600.0
    """
    if not is_lazy(w):
        return moments_of(w)
    if w.ndim > 2:
        return Moments(*stacked(moments_of, w, ",".join(["()"] * len(Moments._fields)), ()))
    name, graph = folded([w], MomentsStream(), tall_shape(w), budget, "moments")
    return Moments(*(pick(name, graph, i, (), np.float64) for i in range(len(Moments._fields))))


def schatten_4_norm(w: ArrayLike, *, budget: Budget = None) -> Array:
    r"""Return the Schatten 4-norm of each matrix: the fourth root of the trace of its squared Gram matrix.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks; any real dtype and scale.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    (...,) float64 array
        In units of `w`; NaN for a matrix with an entry that is not finite.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.

    Notes
    -----
    .. math:: \|W\|_{S_4} = \left(\sum_i \sigma_i^4\right)^{1/4} = \|W^T W\|_F^{1/2}

    The Gram matrix is made in panels of 8 MiB, or of a 32nd of it where that is more, and never held as a whole: what
    is larger than a panel is read once for each, at most 18 times in all. In error by at most :func:`relative_error`
    times itself.

    Examples
    --------
    >>> round(float(schatten_4_norm([[2.0, 0.0], [0.0, 2.0]]) ** 4), 9)
    32.0
    """
    if not is_lazy(w):
        return schatten_of(w)
    if w.ndim > 2:
        return whole_matrices(schatten_of, w, (), np.float64)  # type: ignore[no-any-return]
    name, graph = folded([w], SchattenStream(), tall_shape(w), budget, "schatten_4_norm")
    return pick(name, graph, 0, (), np.float64)  # type: ignore[no-any-return]


def shuffle(w: ArrayLike, seed: int = 42, *, budget: Budget = None) -> Any:
    r"""Return each matrix with its entries in random places, every permutation being equally likely.

    Parameters
    ----------
    w : (..., m, n) array
        NumPy, or Dask in any chunks (one matrix); any real dtype.
    seed : int
        Of the permutation, from 0 on; the result depends on it and on the shape alone, not on chunks or workers.
    budget : int or str, optional
        Dask only: bytes that tasks may use at once.

    Returns
    -------
    (..., m, n) array
        In the dtype of `w`; of a Dask array a lazy one, in blocks of rows of a tall matrix, of columns of a wide one.

    Raises
    ------
    MatrixError
        `w` is not an array of real matrices.
    ConfigurationError
        The seed is negative.
    OverBudgetError
        The matrix has at most 2**24 entries, which are shuffled in memory, and they do not fit.

    Notes
    -----
    The permutation of :func:`diffract_dask.shuffle.permuted`. A Dask array of more than 2**24 entries is scattered into
    a temporary file in one pass over it, and the file's parts are shuffled in a second one.

    References
    ----------
    sandelius1962simple

    Examples
    --------
    >>> shuffle(np.arange(6).reshape(2, 3)).tolist()
    [[3, 2, 5], [4, 1, 0]]
    """
    return shuffled(w, seed, budget) if is_lazy(w) else permuted(w, seed)
