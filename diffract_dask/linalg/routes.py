"""Routes to singular values, which one is tried first, and the error that each of them has."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from diffract_dask.blas import Array
from diffract_dask.linalg import pieces
from diffract_dask.moments import is_narrow

__all__ = [
    "CODE",
    "GRAM_ROUTES",
    "QR",
    "ROUTES",
    "Decomposition",
    "Product",
    "Routes",
    "Spectrum",
    "choose_route",
    "error_bound",
    "gram_floor",
    "meets",
    "relative_error",
    "roots",
    "unscaled",
]

ROUTES = {0: "none", 1: "gram", 2: "tsqr", 3: "gesdd", 4: "gesvd", 5: "scaled_gram", 6: "leading", 7: "product"}
"""How a result was computed: the code that is stored, and its name."""

CODE = {name: code for code, name in ROUTES.items()}
GRAM_ROUTES = (CODE["gram"], CODE["scaled_gram"])

EPS = float(np.finfo(np.float64).eps)

Routes = NDArray[np.int8]


class Spectrum(NamedTuple):
    """Singular values ``(..., k)`` ascending, a bound on the error of each ``(...,)``, and the route ``(...,)``."""

    values: Array
    error: Array
    route: Routes


class Product(NamedTuple):
    """A product of matrices ``(..., p, q)``, a bound on the 2-norm of its error ``(...,)``, and route ``(...,)``."""

    values: Any
    error: Any
    route: Any


class QR(NamedTuple):
    """Factors ``q`` ``(m, k)`` (None if not asked for) and ``r`` ``(k, n)``, backward error ‖W - QR‖₂, and route."""

    q: Any
    r: Any
    error: Any
    route: Any


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
    ε·(20 + 2·sqrt(k) + sqrt(N)/16) with N the longer side: rounding errors add up like a random walk (Higham and Mary
    2019). About twice the worst that was seen, of LAPACK, TSQR and the Gram matrix alike, on random matrices and known
    spectra with k up to 500, against references in extended precision.

    Examples
    --------
    >>> relative_error(120000, 4096) < 1e-13
    True
    """
    return EPS * (20.0 + 2.0 * math.sqrt(min(rows, cols)) + math.sqrt(max(rows, cols)) / 16)


def gram_floor(rows: int, cols: int) -> float:
    """Return the error, relative to σ₁², of small eigenvalues of the Gram matrix in float64: ε·(4 + sqrt(k)/2 + …).

    It is less than that of the large ones, and what decides how much of the small singular values is left.
    """
    return EPS * (4.0 + math.sqrt(min(rows, cols)) / 2 + math.sqrt(max(rows, cols)) / 64)


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
    elif rtol is not None and rtol >= EPS**0.5 and not streamed:
        return "gram"
    tall = max(rows, cols) >= 2 * min(rows, cols)
    if streamed or (8 * rows * cols > pieces.PIECE and (tall or is_narrow(dtype))):
        return "tsqr"
    return "gesdd"


def roots(eigenvalues: NDArray[Any]) -> Array:
    roots: Array = np.sqrt(np.maximum(eigenvalues, 0.0))
    return roots


def meets(values: Array, shape: tuple[int, int], rtol: float | None) -> Any:
    """Return whether values from the Gram matrix are within `rtol`, if one is given."""
    if rtol is None:
        return np.ones(values.shape[:-1], bool)
    limit = rtol - relative_error(*shape)
    return gram_floor(*shape) * values[..., -1] ** 2 <= limit * values[..., 0] ** 2


def error_bound(values: Array, shape: tuple[int, int], from_gram: ArrayLike) -> Any:
    """Return the bound on the error of each of `values` ``(..., k)``.

    Dense routines may err by k·ε/4 more: where all entries are equal, so are rounding errors, and they add up to up to
    0.3 k·ε (seen with k up to 1500).
    """
    c, floor, top = relative_error(*shape), gram_floor(*shape), values[..., -1]
    smallest = np.where(top > 0, values[..., 0] / np.where(top > 0, top, 1.0), 1.0)
    dense = c + EPS * min(shape) / 4
    return np.where(from_gram, top * (floor / np.maximum(smallest, math.sqrt(floor)) + c), dense * top)


def unscaled(error: Any, exponent: Any) -> Any:
    """Return `error` in the units of the matrix, with the rounding that subnormal values add."""
    return np.where(error > 0, np.ldexp(error, exponent) + np.finfo(np.float64).smallest_subnormal, error)
