"""Power laws over whole numbers: the zeta distribution above a lower end, fitted for every lower end at once."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

__all__ = ["ZetaFit", "fit_tails"]

Array = NDArray[np.float64]

_STEP = 1e-4
_LEAST, _MOST = 1.0 + 1e-6, 200.0


class ZetaFit(NamedTuple):
    """The best tail; `error` is the standard error of `alpha`."""

    alpha: float
    error: float
    xmin: float
    ks: float
    log_likelihood: float
    n_tail: int


def _log_zeta(alpha: Any, q: Any) -> Any:
    """Return log ζ(alpha, q) + alpha·log q: of order one for any q, since the leading term is taken out."""
    with np.errstate(under="ignore", divide="ignore", invalid="ignore"):
        direct = np.log(special.zeta(alpha, q)) + alpha * np.log(q)
        # Euler–Maclaurin, for arguments so large that ζ itself underflows.
        far = np.log(q / (alpha - 1.0) + 0.5 + alpha / (12.0 * q))
    return np.where(np.isfinite(direct), direct, far)


def _exponents(mean_log: Array, q: Array) -> tuple[Array, Array]:
    """Return the maximum-likelihood exponents and the second derivative of log ζ there.

    The likelihood is log-concave: Newton's steps, kept within a bracket, on derivatives by central differences.
    """
    low, high = np.full(q.shape, _LEAST), np.full(q.shape, _MOST)
    alpha = np.clip(1.0 + 1.0 / (mean_log + 0.5 / q), 1.01, _MOST)
    curvature = np.ones(q.shape)
    for _ in range(100):
        h = np.minimum(_STEP, 0.5 * (alpha - 1.0))
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
    mean_log = logs[start] / tail[start] - np.log(q)
    alpha, curvature = _exponents(mean_log, q)
    ks = _distances(points, tail, start, q, alpha)
    best = int(ks.argmin())
    n, a, m = int(tail[start[best]]), float(alpha[best]), float(q[best])
    likelihood = -n * float(a * mean_log[best] + np.log(m) * a + _log_zeta(a, m) - a * np.log(m))
    error = float(1.0 / np.sqrt(n * curvature[best]))
    return ZetaFit(a, error, m, float(ks[best]), likelihood, n)


def _distances(points: Array, tail: NDArray[np.intp], start: NDArray[np.intp], q: Array, alpha: Array) -> Array:
    """Return the greatest difference of P(X ≤ x) from the share at or below x, over the values x of each tail."""
    out = np.empty(len(start))
    after = np.append(tail[1:], 0)
    for i, c in enumerate(start):
        with np.errstate(under="ignore"):
            log_beyond = _log_zeta(alpha[i], points[c:] + 1.0) - alpha[i] * np.log(points[c:] + 1.0)
            beyond = np.exp(log_beyond - _log_zeta(alpha[i], q[i]) + alpha[i] * np.log(q[i]))
        out[i] = np.abs(beyond - after[c:] / tail[c]).max()
    return out
