"""Power laws over whole numbers: the zeta distribution above a lower end, fitted for every lower end at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["ZetaFit", "fit_tails"]

Array = NDArray[np.float64]

_STEP = 1e-4
_LEAST = 1.0 + 1e-6
_TERMS = 14  # so that the error is below 1e-11 for any exponent
_DIRECT = 1 << 13  # so many points are done at once rather than bounded first
_RANKS = 8  # points of each tail that give its first bound
_BLOCK = 1 << 16
_SLACK = 1.0 + 1e-9


class ZetaFit(NamedTuple):
    """The best tail; `error` is the standard error of `alpha`."""

    alpha: float
    error: float
    xmin: float
    ks: float
    log_likelihood: float
    n_tail: int


def _log_zeta(alpha: Any, q: Any) -> Array:
    """Return log ζ(alpha, q) + alpha·log q: the logarithm of the sum of (1 + k/q)^−alpha, of order one for any q.

    The first terms as they are, the others by Euler and Maclaurin; ζ itself underflows, and its logarithm cancels.
    """
    with np.errstate(under="ignore"):
        total = sum(np.exp(-alpha * np.log1p(k / q)) for k in range(1, _TERMS))
        far = q + _TERMS
        first = alpha / far
        third = first * (alpha + 1.0) * (alpha + 2.0) / far**2
        fifth = third * (alpha + 3.0) * (alpha + 4.0) / far**2
        rest = far / (alpha - 1.0) + 0.5 + first / 12.0 - third / 720.0 + fifth / 30240.0
        return np.asarray(np.log1p(total + np.exp(-alpha * np.log1p(_TERMS / q)) * rest))


def _exponents(mean_log: Array, q: Array, size: NDArray[np.intp]) -> tuple[Array, Array]:
    """Return the maximum-likelihood exponents and the second derivative of log ζ there.

    The likelihood is log-concave: Newton's steps, kept within a bracket, on derivatives by central differences.
    """
    # A tail of n values of which one is not the smallest, but the next, has (1 + 1/q)^alpha = n, nearly.
    low, high = np.full(q.shape, _LEAST), 10.0 + 2.0 * (q + 1.0) * np.log(size + 1.0)
    alpha = np.clip(1.0 + 1.0 / (mean_log + 0.5 / q), 1.01, high)
    curvature = np.ones(q.shape)
    for _ in range(100):
        h = np.minimum(_STEP * np.maximum(1.0, 0.1 * alpha), 0.5 * (alpha - 1.0))
        below, at, above = (_log_zeta(alpha + s * h, q) for s in (-1.0, 0.0, 1.0))
        slope = mean_log + (above - below) / (2.0 * h)
        curvature = np.maximum((above - 2.0 * at + below) / h**2, 1e-12)
        low, high = np.where(slope < 0.0, alpha, low), np.where(slope < 0.0, high, alpha)
        new = alpha - slope / curvature
        new = np.where((new > low) & (new < high), new, 0.5 * (low + high))
        done = np.abs(new - alpha) < 1e-10 * alpha
        alpha = new
        if done.all():
            break
    return alpha, curvature


def fit_tails(points: Array, counts: NDArray[np.intp], xmin: int | None, min_tail: int) -> ZetaFit | None:
    """Fit all tails, or the one from `xmin`; return that with the smallest distance, None if there is none.

    Parameters
    ----------
    points, counts : (u,) arrays
        Distinct values, ascending, and how often each occurs.
    """
    tail = np.cumsum(counts[::-1])[::-1]
    if xmin is None:
        start = np.flatnonzero(tail[:-1] >= min_tail)
        q = points[start]
    else:
        start = np.atleast_1d(np.searchsorted(points, float(xmin)))
        q = np.array([float(xmin)])
        start, q = (start, q) if start[0] < len(points) and tail[start[0]] >= min_tail else (start[:0], q[:0])
    if not len(start):
        return None
    logs = np.cumsum((counts * np.log(points))[::-1])[::-1]
    several = start < len(points) - 1  # of one value alone the likelihood grows with alpha for ever
    several |= points[start] > q
    if not several.any():
        return None
    start, q = start[several], q[several]
    mean_log = logs[start] / tail[start] - np.log(q)
    alpha, curvature = _exponents(mean_log, q, tail[start])
    best, ks = _smallest_distance(_Tails(points, tail, start, q, alpha, _log_zeta(alpha, q)))
    n, a, m = int(tail[start[best]]), float(alpha[best]), float(q[best])
    likelihood = -n * float(a * mean_log[best] + np.log(m) * a + _log_zeta(a, m) - a * np.log(m))
    error = float(1.0 / np.sqrt(n * curvature[best]))
    return ZetaFit(a, error, m, ks, likelihood, n)


class _Tails(NamedTuple):
    """Distinct values and the number of values from each on; of each tail its first, its beginning, and its fit."""

    points: Array
    tail: NDArray[np.intp]
    start: NDArray[np.intp]
    q: Array
    alpha: Array
    log_norm: Array

    def deviations(self, i: Any, p: Any) -> Array:
        """Return |P(X > x) − share beyond x| of the tails `i` at the points number `p`, elementwise."""
        alpha, x = self.alpha[i], self.points[p] + 1.0
        with np.errstate(under="ignore"):
            beyond = np.exp(_log_zeta(alpha, x) - alpha * np.log(x / self.q[i]) - self.log_norm[i])
        after = np.append(self.tail, 0)[p + 1]
        return np.asarray(np.abs(beyond - after / self.tail[self.start[i]]))

    def whole(self, i: int) -> tuple[float, int]:
        """Return the distance of the tail `i` and the point where it is."""
        points = np.arange(self.start[i], len(self.points))
        found = self.deviations(np.full(len(points), i), points)
        return float(found.max()), int(points[found.argmax()])


def _smallest_distance(tails: _Tails) -> tuple[int, float]:
    """Return the tail of the smallest distance (the first of equals), and that.

    As for continuous data, any point bounds a distance from below, and few tails need all points.
    """
    sizes = len(tails.points) - tails.start
    if sizes.sum() <= _DIRECT:
        distances = [tails.whole(i)[0] for i in range(len(sizes))]
        return int(np.argmin(distances)), float(min(distances))
    bounds = np.empty(len(sizes))
    step = _BLOCK // _RANKS
    for begin in range(0, len(sizes), step):
        i = np.arange(begin, min(begin + step, len(sizes)))
        p = tails.start[i][:, None] + sizes[i][:, None] * np.arange(_RANKS) // _RANKS
        bounds[i] = tails.deviations(np.repeat(i, _RANKS), p.ravel()).reshape(-1, _RANKS).max(axis=1)
    best, distance = -1, np.inf
    alive = np.arange(len(sizes))
    while len(alive):
        k = int(alive[bounds[alive].argmin()])
        found, worst = tails.whole(k)
        if (found, k) < (distance, best):
            best, distance = k, found
        alive = alive[(alive != k) & (bounds[alive] <= distance * _SLACK)]
        inside = alive[tails.start[alive] <= worst]
        bounds[inside] = np.maximum(bounds[inside], tails.deviations(inside, np.full(len(inside), worst)))
        alive = alive[bounds[alive] <= distance * _SLACK]
    return best, distance
