"""The leading part of a spectrum from a few passes over a matrix, with k × l numbers kept, l a little over the rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.linalg import dense, pieces
from diffract_dask.linalg.pieces import WIDE_SAFE, float64_pieces
from diffract_dask.linalg.routes import CODE, relative_error, unscaled
from diffract_dask.moments import scale_exponent

__all__ = ["LEADING", "OVERSAMPLE", "Leading", "LeadingStream", "PassStream", "Ritz", "leading_of", "start_basis"]

LEADING = 64
"""Singular values that :class:`LeadingStream` finds."""

OVERSAMPLE = 16
"""Directions that are followed beyond those asked for."""

PASSES = 8
"""Readings of the matrix at most."""

_CLOSE = 1e-7


@dataclass(slots=True)
class Leading:
    """What one pass gives for a basis Q ``(k, l)``, in units of 2**exponent.

    `triangle` is the R factor of W·Q, `product` is WᵀW·Q, `square` is ‖W‖²_F.
    """

    basis: Array
    triangle: Array
    product: Array
    square: float
    shape: tuple[int, int]
    exponent: int | None
    finite: bool = True


@dataclass(frozen=True)
class Ritz:
    """Approximate singular values, ascending, with bounds of their errors and right singular vectors ``(k, l)``."""

    values: Array
    errors: Array
    vectors: Array
    exponent: int


def start_basis(k: int, size: int, seed: int) -> Array:
    """Return `size` random orthonormal directions in k dimensions, the same for the same seed."""
    drawn = np.random.default_rng(seed).standard_normal((k, size))
    return np.linalg.qr(drawn)[0]


@dataclass(frozen=True)
class PassStream:
    """One pass over a matrix that is read in spans; its outputs are Ritz values, vectors, errors, and a new basis.

    Parameters
    ----------
    size, seed : int
        Of the random basis, where ``start`` is given none.
    """

    size: int = 0
    seed: int = 0

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any], basis: Array | None = None) -> Leading:
        """Return the state of no rows."""
        basis = start_basis(min(shape), self.size, self.seed) if basis is None else basis
        k, size = basis.shape
        return Leading(basis, np.zeros((size, size), order="F"), np.zeros((k, size)), 0.0, shape, None)

    def update(self, state: Leading, block: NDArray[Any]) -> Leading:
        """Return `state`, changed in place, with the rows of `block` in it."""
        _own(state)
        with np.errstate(all="ignore"):
            for piece in float64_pieces(block):
                if not state.finite:
                    break
                _add(state, piece)
        return state

    def merge(self, first: Leading, second: Leading) -> Leading:
        """Return `first`, changed in place, with the rows of `second`, which is used up."""
        _own(first)
        _own(second)
        first.finite &= second.finite
        if not first.finite or second.exponent is None:
            return first
        _raise_exponent(first, second.exponent)
        assert first.exponent is not None
        _raise_exponent(second, first.exponent)
        first.product += second.product
        first.square += second.square
        blas.add_rows(first.triangle, second.triangle, triangular=True)
        return first

    def finish(
        self, state: Leading, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return all ascending values, vectors and errors that the pass tells, and the basis of the next one."""
        found = ritz(state)
        with np.errstate(all="ignore"):
            values = np.ldexp(found.values, found.exponent)
        return values, found.vectors, unscaled(found.errors, found.exponent), next_basis(state)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        return leading_workspace(shape, self.size)


def _own(state: Leading) -> None:
    if not state.triangle.flags.writeable:
        state.triangle = state.triangle.copy(order="F")
    if not state.product.flags.writeable:
        state.product = state.product.copy()


def _add(state: Leading, piece: Array) -> None:
    absmax = np.maximum(piece.max(initial=0.0), -piece.min(initial=0.0))
    if not np.isfinite(absmax):
        state.finite = False
        return
    _raise_exponent(state, int(scale_exponent(absmax, WIDE_SAFE)))
    if state.exponent:
        piece = np.ldexp(piece, -state.exponent)
    state.square += float(np.vdot(piece, piece))
    image = piece @ state.basis
    state.product += piece.T @ image
    blas.add_rows(state.triangle, np.array(image, order="F"))


def _raise_exponent(state: Leading, exponent: int) -> None:
    if state.exponent is None:
        state.exponent = exponent
    elif exponent > state.exponent:
        shift = state.exponent - exponent
        np.ldexp(state.triangle, shift, out=state.triangle)
        np.ldexp(state.product, 2 * shift, out=state.product)
        state.square = float(np.ldexp(state.square, 2 * shift))
        state.exponent = exponent


def ritz(state: Leading) -> Ritz:
    r"""Return what a pass tells of the singular values.

    Notes
    -----
    With :math:`W Q = Q' R`, :math:`R = A \Theta B^T`, :math:`V = Q B` and :math:`U = Q' A`, each θ is at most the
    singular value of the same rank, and :math:`R_i = W^T U_i - V_i \Theta_i` over the leading i columns is the
    residual: i singular values of W lie within :math:`\|R_i\|_2` of θ₁ … θᵢ (Kahan; Parlett 1998, section 11.5). Also
    :math:`\sigma_i^2 \le \theta_i^2 + \|W\|_F^2 - \|\Theta\|_F^2`. `errors` is the smaller of both, plus rounding.
    """
    size = state.triangle.shape[0]
    if not state.finite or not np.isfinite(state.square):
        nan = np.full(size, np.nan)
        return Ritz(nan, nan, np.full(state.basis.shape, np.nan), 0)
    c = relative_error(*state.shape)
    _, values, right, _ = dense.vectors(np.triu(state.triangle))
    vectors = state.basis @ right
    safe = np.where(values > 0, values, 1.0)
    residual = (state.product @ right) / safe - vectors * values
    norms = np.where(values > 0, np.linalg.norm(residual, axis=0), 0.0)
    by_residual = np.sqrt(np.cumsum(norms[::-1] ** 2))[::-1]
    rest = max(state.square - float(np.sum(values**2)), 0.0) + c * state.square
    sums = np.sqrt(values**2 + rest) + values
    by_norm = np.where(sums > 0, rest / np.where(sums > 0, sums, 1.0), 0.0)
    errors = np.minimum(by_residual, by_norm) + 2 * c * values[-1]
    return Ritz(values, errors, vectors, state.exponent or 0)


def next_basis(state: Leading) -> Array:
    """Return orthonormal directions of WᵀW·Q: those of one more power iteration."""
    return np.linalg.qr(state.product)[0] if state.finite else state.basis


def leading_of(
    blocks: Callable[[], Iterator[NDArray[Any]]],
    shape: tuple[int, int],
    dtype: np.dtype[Any],
    rank: int,
    oversample: int = OVERSAMPLE,
    passes: int = PASSES,
    seed: int = 0,
    *,
    rtol: float = _CLOSE,
    first: Leading | None = None,
) -> Ritz:
    """Return the leading `rank` values from passes over `blocks`, until errors are within `rtol` of the greatest.

    `first` is the state of the first pass, if it was made already.
    """
    twin, k = PassStream(), min(shape)
    found: Ritz | None = None

    def one_pass(basis: Array) -> Leading:
        state = twin.start(shape, dtype, basis)
        for block in blocks():
            state = twin.update(state, block)
        return state

    state = first or one_pass(start_basis(k, min(k, rank + oversample), seed))
    for left in reversed(range(passes)):
        found = ritz(state)
        last = found.errors[-rank:]
        if not left or not last.max(initial=0.0) > rtol * found.values[-1]:
            break
        state = one_pass(next_basis(state))
    assert found is not None
    return Ritz(found.values[-rank:], found.errors[-rank:], found.vectors[:, -rank:], found.exponent)


class LeadingStream:
    """What is known of a spectrum that does not fit: its leading values, the others NaN; values, error and route.

    The twin of :func:`singular_values` where a k × k matrix is over the budget: k × l is kept, and the matrix is read
    up to `PASSES` times.
    """

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> Leading:
        """Return the state of no rows."""
        k = min(shape)
        return PassStream().start(shape, dtype, start_basis(k, min(k, LEADING + OVERSAMPLE), 0))

    def update(self, state: Leading, block: NDArray[Any]) -> Leading:
        """Return `state`, changed in place, with the rows of `block` in it."""
        return PassStream().update(state, block)

    def merge(self, first: Leading, second: Leading) -> Leading:
        """Return `first`, changed in place, with the rows of `second`, which is used up."""
        return PassStream().merge(first, second)

    def finish(
        self, state: Leading, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
    ) -> tuple[Any, ...]:
        """Return ``(k,)`` ascending values, of which the leading ones are numbers, their largest error, the route."""
        k = len(state.basis)
        values = np.full(k, np.nan)
        rank = min(k, LEADING)
        if not state.finite:
            return values, np.float64(np.nan), np.int8(0)
        found = leading_of(reread, state.shape, np.dtype(np.float64), rank, first=state)
        values[-rank:] = np.ldexp(found.values, found.exponent)
        error = unscaled(found.errors.max(initial=0.0), found.exponent)
        return values, np.float64(error), np.int8(CODE["leading"] if np.isfinite(error) else 0)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        return leading_workspace(shape, LEADING + OVERSAMPLE)

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return the name of the route, with how many values it gives."""
        return f"leading {min(*shape, LEADING)} by at most {PASSES} passes"


def leading_workspace(shape: tuple[int, int], size: int) -> tuple[int, int]:
    """Return the bytes of one pass over a matrix of this shape with `size` directions, and of what follows it."""
    k = min(shape)
    size = min(k, size)
    piece = max(pieces.PIECE, 8 * k * pieces.MIN_ROWS)
    return 8 * size * (3 * k + 4 * size) + 2 * piece, 8 * size * (5 * k + 8 * size) + 2 * piece
