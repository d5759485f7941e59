"""Singular values of a matrix that is read in spans of its long axis."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from diffract_dask import blas
from diffract_dask.blas import Array
from diffract_dask.linalg import dense, pieces
from diffract_dask.linalg.pieces import WIDE_SAFE, float64_pieces
from diffract_dask.linalg.routes import CODE, choose_route, error_bound, meets, roots, unscaled
from diffract_dask.moments import is_narrow, scale_exponent

__all__ = ["SpectrumStream", "State", "begin"]


@dataclass(slots=True)
class State:
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


@dataclass(frozen=True)
class SpectrumStream:
    """The twin of :func:`singular_values` for a slice read in spans (see :class:`diffract_dask.kernel.Streamed`).

    The state is one k × k float64 matrix, worked on in place from the first block to the eigenvalues.

    Parameters
    ----------
    first : {"gram", "tsqr"}, optional
        The route that is tried first; default: as :func:`choose_route` says.
    """

    first: str | None = None

    def start(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> State:
        """Return the state of no rows."""
        return begin(shape, dtype, self.first or choose_route(shape, dtype, streamed=True))

    def update(self, state: State, block: NDArray[Any]) -> State:
        """Return `state`, changed in place, with the rows of `block` in it."""
        state.own()
        with np.errstate(all="ignore"):
            for piece in float64_pieces(block):
                if not state.finite:
                    break
                add_piece(state, piece)
        return state

    def merge(self, first: State, second: State) -> State:
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
        self, state: State, reread: Callable[[], Iterator[NDArray[Any]]], params: Mapping[str, Any]
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
                except dense.FAILURES:
                    continue
                if attempt == "gram" and not meets(values, state.shape, rtol):
                    continue
                error, exponent = (
                    error_bound(values, state.shape, attempt in ("gram", "scaled_gram")),
                    state.exponent or 0,
                )
                error = unscaled(error, exponent)
                return np.ldexp(values, exponent), np.float64(error), np.int8(CODE[attempt])
        return np.full(k, np.nan), np.float64(np.nan), np.int8(0)

    def _read_again(self, state: State, route: str, reread: Callable[[], Iterator[NDArray[Any]]]) -> None:
        state.route, state.exponent = route, 0 if state.narrow else None
        state.matrix[...] = 0.0
        for block in reread():
            self.update(state, block)

    def workspace(self, shape: tuple[int, int], dtype: np.dtype[Any]) -> tuple[int, int]:
        """Return the bytes of one state while it is updated, and of finish beyond the state."""
        k = min(shape)
        in_work = 2 * max(pieces.PIECE, 8 * k * pieces.MIN_ROWS)
        return 8 * k * k + in_work + blas.work_bytes(k), blas.work_bytes(k) + in_work

    def route(self, shape: tuple[int, int], dtype: np.dtype[Any], params: Mapping[str, Any]) -> str:
        """Return the name of the route that is tried first."""
        return choose_route(shape, dtype, params.get("rtol"), streamed=True)


def begin(shape: tuple[int, int], dtype: DTypeLike, route: str) -> State:
    k, narrow = min(shape), is_narrow(dtype)
    return State(route, np.zeros((k, k), order="F"), shape, narrow, 0 if narrow else None)


def _from_state(state: State, attempt: str) -> Array:
    """Return ascending values in the state's unit; its matrix is destroyed."""
    if attempt == "tsqr":
        return blas.svdvals(state.matrix)[::-1]
    if attempt == "gesvd":
        return dense.gesvd(state.matrix)[::-1]
    return roots(blas.eigenvalues(state.matrix))


def add_piece(state: State, part: Array) -> None:
    piece = scaled_piece(state, part)
    if piece is None:
        return
    if state.route == "gram":
        blas.add_gram(state.matrix, piece)
    else:
        blas.add_rows(state.matrix, np.array(piece, order="F"))


def scaled_piece(state: State, piece: Array) -> Array | None:
    """Return a piece in the unit of `state`, which is raised if need be; None if an entry is not finite."""
    if not state.finite:
        return None
    if not state.narrow:
        absmax = np.maximum(piece.max(), -piece.min())
        if not np.isfinite(absmax):
            state.finite = False
            return None
        _raise_exponent(state, int(scale_exponent(absmax, WIDE_SAFE)))
        if state.exponent:
            piece = np.ldexp(piece, -state.exponent)
    return piece


def _raise_exponent(state: State, exponent: int) -> None:
    """Bring `state` to the unit 2**exponent if its own is smaller."""
    if state.exponent is None:
        state.exponent = exponent
    elif exponent > state.exponent:
        shift = state.exponent - exponent
        np.ldexp(state.matrix, 2 * shift if state.route == "gram" else shift, out=state.matrix)
        state.exponent = exponent
