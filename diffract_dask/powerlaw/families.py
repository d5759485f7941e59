"""Families of densities for an upper tail: how each is fitted to all tails at once, and its densities.

A tail is taken relative to its beginning m: t = x / m ≥ 1, y = ln t, w = t − 1. Each family has one or more *shapes*,
numbers that do not depend on the scale of the data. The maximum-likelihood estimates need only the means of y, y², w.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy import special

from diffract_dask.errors import ConfigurationError, did_you_mean
from diffract_dask.powerlaw import expint

__all__ = ["FAMILIES", "Family", "Means", "family_of"]

Array = NDArray[np.float64]

_HALF_NORMAL = float(np.sqrt(2.0 / np.pi))
_MOST_TRUNCATED = 200.0  # beyond, a truncated normal in y is an exponential to five digits, and its fit has no end
_SMALLEST_CUT = 1e-40
_WIDEST = 1e300


class Means(NamedTuple):
    """Means of y, y² and w over each tail, and y and w of the upper end where there is one."""

    y: Array
    yy: Array
    w: Array
    end_y: Array | None = None
    end_w: Array | None = None


class Family(NamedTuple):
    """One family of densities.

    Attributes
    ----------
    fit : callable
        Means to shapes ``(p, c)``, NaN where the likelihood has no maximum.
    log_survival : callable
        ``(shapes, y, w)`` to the logarithm of the probability beyond a point, by numbers that broadcast.
    log_density : callable
        ``(shapes, y, w)`` to the logarithm of the density in t.
    inverse : callable
        ``(shapes, e)`` to the (y, w) at which −log survival is `e`, for one set of shapes.
    parameters : callable
        ``(shapes, xmin, n)`` to the parameters as they are reported and their standard errors, by name.
    bounded : bool
        Whether data with a greatest possible value can be fitted.
    """

    fit: Callable[[Means], Array]
    log_survival: Callable[[Any, Any, Any], Any]
    log_density: Callable[[Any, Any, Any], Any]
    inverse: Callable[[Array, Array], tuple[Array, Array]]
    parameters: Callable[[Array, float, int], tuple[dict[str, float], dict[str, float]]]
    bounded: bool = False


# An exponential in y (power law) or in w (exponential), up to an end where there is one. Shapes: rate, end.


def _rate(mean: Array, end: Array | None) -> Array:
    """Return the rates and ends of exponentials on [0, end] with these means."""
    if end is None:
        with np.errstate(over="ignore", divide="ignore"):
            return np.stack([np.where(np.isfinite(mean), 1.0 / mean, np.nan), np.full(mean.shape, np.inf)])
    share = mean / end
    with np.errstate(over="ignore", divide="ignore", invalid="ignore"):
        low, high = -1.0 / (1.0 - share), 1.0 / share
        for _ in range(64):
            middle = 0.5 * (low + high)
            above = _share(middle) > share
            low, high = np.where(above, middle, low), np.where(above, high, middle)
        inside = (share > 0.0) & (share < 1.0)
    return np.stack([np.where(inside, 0.5 * (low + high) / end, np.nan), end])


def _share(s: Array) -> Array:
    """Return the mean of an exponential of rate s on [0, 1]."""
    small = np.abs(s) < 1e-4
    safe = np.where(small, 1.0, s)
    return np.where(small, 0.5 - s / 12.0, 1.0 / safe - 1.0 / np.expm1(safe))


def _spread(rate: float, end: float) -> float:
    """Return the standard deviation of an exponential on [0, end]."""
    s = rate * end
    if not np.isfinite(end):
        return 1.0 / rate
    if abs(s) < 1e-2:
        return float(end * np.sqrt(1.0 / 12.0 - s * s / 240.0))
    return float(np.sqrt(1.0 / rate**2 - (end / (2.0 * np.sinh(s / 2.0))) ** 2))


def _exponential_survival(shapes: Any, z: Any) -> Any:
    rate, end = shapes
    if np.all(np.isinf(end)):
        return -rate * z
    with np.errstate(divide="ignore", invalid="ignore"):
        bent = np.log(special.expm1(-rate * (end - z)) / special.expm1(-rate * end)) - rate * z
        return np.where(rate == 0.0, np.log((end - z) / end), bent)


def _exponential_density(shapes: Any, z: Any) -> Any:
    rate, end = shapes
    if np.all(np.isinf(end)):
        return np.log(rate) - rate * z
    with np.errstate(divide="ignore", invalid="ignore"):
        return np.where(rate == 0.0, -np.log(end), np.log(rate / -special.expm1(-rate * end)) - rate * z)


def _power_law_parameters(shapes: Array, xmin: float, n: int) -> tuple[dict[str, float], dict[str, float]]:
    rate, end = map(float, shapes)
    return {"alpha": 1.0 + rate}, {"alpha": 1.0 / (_spread(rate, end) * n**0.5)}


def _exponential_parameters(shapes: Array, xmin: float, n: int) -> tuple[dict[str, float], dict[str, float]]:
    rate, end = map(float, shapes)
    return {"lambda": rate / xmin}, {"lambda": 1.0 / (_spread(rate, end) * n**0.5) / xmin}


# A power law with an exponential cut-off. Shapes: alpha ≥ 1, lambda·xmin ≥ 0, log of the normaliser.


def _cutoff_fit(means: Means) -> Array:
    alpha, cut = _cutoff_maximum(means.y, means.w)
    return np.stack([alpha, cut, expint.log_scaled_expint(alpha, cut)])


def _cutoff_maximum(y: Array, w: Array) -> tuple[Array, Array]:
    """Return alpha ≥ 1 and the cut-off ≥ 0 of the greatest likelihood: on an edge where that falls towards it.

    The likelihood is that of an exponential family in (y, w), so that it has one maximum. Without a cut-off it is the
    power law's, and stays there if the mean of w is no smaller than the power law's own.
    """
    with np.errstate(divide="ignore", over="ignore", invalid="ignore"):
        alpha, cut = 1.0 + 1.0 / y, np.zeros(y.shape)
        rest = np.flatnonzero((w * (alpha - 2.0) < 1.0) & np.isfinite(w) & (w > 0.0))
    if not len(rest):
        return alpha, cut
    flat = _cut_of_flat(w[rest])
    pulled = y[rest] < expint.moments(np.ones(len(rest)), flat).mean_y
    alpha[rest[~pulled]], cut[rest[~pulled]] = 1.0, flat[~pulled]
    inner = rest[pulled]
    alpha[inner], cut[inner] = _cutoff_inside(y[inner], w[inner], alpha[inner], flat[pulled])
    return alpha, cut


def _cut_of_flat(w: Array) -> Array:
    """Return the cut-offs at alpha = 1 whose mean of w is given: Newton's steps in log-log, almost a line."""
    log_cut = -np.log(w)
    for _ in range(50):
        cut = np.exp(log_cut)
        now = expint.moments(np.ones(len(w)), cut)
        step = (np.log(now.mean_w) - np.log(w)) * now.mean_w / (cut * now.var_w)
        log_cut = np.maximum(log_cut + np.clip(step, -3.0, 3.0), np.log(_SMALLEST_CUT))
        if np.all(np.abs(step) < 1e-13 * (1.0 + np.abs(log_cut))):
            break
    return np.exp(log_cut)


def _objective(y: Array, w: Array, alpha: Array, cut: Array) -> Array:
    """Return the negative mean log-likelihood in y, a convex function of alpha and cut-off."""
    return np.asarray((alpha - 1.0) * y + cut * w + expint.log_scaled_expint(alpha, cut))


def _inner_start(y: Array, w: Array, steep: Array, flat: Array) -> tuple[Array, Array]:
    """Return points with a smaller objective than both edges: from there it cannot fall towards an edge.

    The minimum on one edge is at alpha = 1 and the cut-off `flat`, that on the other is the power law `steep`.
    """
    ones = np.ones(len(y))
    edge = np.minimum(_objective(y, w, ones, flat), _objective(y, w, steep, 0.0 * ones))
    alpha, cut = steep.copy(), flat.copy()
    left = np.arange(len(y))
    between = [(s, 1.0 - s) for s in (0.5, 0.75, 0.25, 0.9, 0.1)]
    along = [pair for k in range(2, 16, 2) for pair in ((1.0, 10.0**-k), (2.0**-k, 1.0))]
    for share, part in between + along:
        alpha[left], cut[left] = 1.0 + share * (steep[left] - 1.0), part * flat[left]
        left = left[~(_objective(y[left], w[left], alpha[left], cut[left]) < edge[left])]
        if not len(left):
            break
    on_flat = edge[left] == _objective(y[left], w[left], ones[left], flat[left])
    alpha[left], cut[left] = np.where(on_flat, 1.0, steep[left]), np.where(on_flat, flat[left], 0.0)
    return alpha, cut


def _cutoff_inside(y: Array, w: Array, steep: Array, flat: Array) -> tuple[Array, Array]:
    """Return the minima inside alpha > 1, cut-off > 0 by damped scoring in alpha and the logarithm of the cut-off."""
    alpha, cut = _inner_start(y, w, steep, flat)
    going = np.flatnonzero((alpha > 1.0) & (cut > 0.0))
    with np.errstate(divide="ignore"):
        here = np.stack([alpha, np.log(cut)])
    there, step = here.copy(), np.zeros_like(here)
    value, slope, length = np.full(len(y), np.inf), np.zeros(len(y)), np.ones(len(y))
    for _ in range(200):
        if not len(going):
            break
        g = going
        now_cut = np.exp(there[1, g])
        at = expint.moments(there[0, g], now_cut)
        new = (there[0, g] - 1.0) * y[g] + now_cut * w[g] + at.log_norm
        good = new <= value[g] + 1e-4 * slope[g] * length[g] + 1e-14 * (1.0 + np.abs(new))
        took = g[good]
        length[g[~good]] *= 0.5
        here[:, took], value[took] = there[:, took], new[good]
        gradient = np.stack([y[took] - at.mean_y[good], now_cut[good] * (w[took] - at.mean_w[good])])
        step[:, took] = _scoring_step(gradient, at.var_y[good], (now_cut * at.cov)[good], (now_cut**2 * at.var_w)[good])
        slope[took] = (gradient * step[:, took]).sum(axis=0)
        with np.errstate(divide="ignore"):
            room = np.where(step[0, took] < 0.0, 0.9 * (here[0, took] - 1.0) / -step[0, took], np.inf)
            length[took] = np.minimum(np.minimum(1.0, room), 2.0 / np.abs(step[1, took]))
        small = (np.abs(step[0, g]) < 1e-11 * here[0, g]) & (np.abs(step[1, g]) < 1e-9)
        going = g[~(small | (length[g] < 1e-9))]
        there[:, going] = here[:, going] + length[going] * step[:, going]
    return here[0], np.exp(here[1])


def _scoring_step(gradient: Array, a: Array, b: Array, c: Array) -> Array:
    """Return −H⁻¹·gradient for H = [[a, b], [b, c]], kept away from singular."""
    det = np.maximum(a * c - b * b, 1e-14 * a * c)
    return np.stack([b * gradient[1] - c * gradient[0], b * gradient[0] - a * gradient[1]]) / det


def _cutoff_survival(shapes: Any, y: Any, w: Any) -> Any:
    alpha, cut, log_norm = shapes
    decay = cut * np.minimum(w, _WIDEST)
    return expint.log_scaled_expint(alpha, cut + decay) - log_norm - (alpha - 1.0) * y - decay


def _cutoff_density(shapes: Any, y: Any, w: Any) -> Any:
    alpha, cut, log_norm = shapes
    return -alpha * y - cut * np.minimum(w, _WIDEST) - log_norm


def _cutoff_inverse(shapes: Array, e: Array) -> tuple[Array, Array]:
    """Return where −log survival is `e`: by a table of 4096 points of it, linear between them."""
    alpha, cut, _ = shapes
    if cut == 0.0:
        return e / (alpha - 1.0), np.expm1(e / (alpha - 1.0))
    high = np.log1p((float(e.max()) + 1.0) / cut)
    if alpha > 1.0:
        high = min(high, (float(e.max()) + 1.0) / (alpha - 1.0))
    grid = np.linspace(0.0, high, 4096)
    y = np.interp(e, -_cutoff_survival(shapes, grid, np.expm1(grid)), grid)
    return y, np.expm1(y)


def _cutoff_parameters(shapes: Array, xmin: float, n: int) -> tuple[dict[str, float], dict[str, float]]:
    alpha, cut, _ = map(float, shapes)
    errors = {"alpha": np.nan, "lambda": np.nan}
    if cut == 0.0:
        errors["alpha"] = (alpha - 1.0) / n**0.5
    else:
        at = expint.moments(np.array([alpha]), np.array([cut]))
        var_y, cov, var_w = float(at.var_y[0]), float(at.cov[0]), float(at.var_w[0])
        det = var_y * var_w - cov**2
        if alpha == 1.0:
            errors["lambda"] = 1.0 / (n * var_w) ** 0.5 / xmin
        elif det > 0.0:
            errors = {"alpha": (var_w / det / n) ** 0.5, "lambda": (var_y / det / n) ** 0.5 / xmin}
    return {"alpha": alpha, "lambda": cut / xmin}, errors


# A normal in ln x, cut off below xmin. Shapes: h = (ln xmin − mu) / sigma, sigma.


def _mills(h: Any) -> Any:
    """Return the mean of a standard normal above h."""
    with np.errstate(over="ignore"):
        return _HALF_NORMAL / special.erfcx(h / np.sqrt(2.0))


def _lognormal_fit(means: Means) -> Array:
    """Return h and sigma by bisection on mean(y²) / mean(y)², which grows with h from 1 to 2."""
    ratio = means.yy / means.y**2
    low, high = np.full(ratio.shape, -1e8), np.full(ratio.shape, _MOST_TRUNCATED)
    for _ in range(90):
        h = 0.5 * (low + high)
        excess = _mills(h) - h
        above = (1.0 - h * excess) / excess**2 > ratio
        low, high = np.where(above, low, h), np.where(above, h, high)
    h = 0.5 * (low + high)
    sigma = means.y / (_mills(h) - h)
    inside = (h > -1e7) & (h < _MOST_TRUNCATED * (1.0 - 1e-6))
    return np.stack([np.where(inside, h, np.nan), np.where(inside, sigma, np.nan)])


def _lognormal_survival(shapes: Any, y: Any, w: Any) -> Any:
    h, sigma = shapes
    return special.log_ndtr(-(h + y / sigma)) - special.log_ndtr(-h)


def _lognormal_density(shapes: Any, y: Any, w: Any) -> Any:
    h, sigma = shapes
    z = h + y / sigma
    return -0.5 * z * z - 0.5 * np.log(2.0 * np.pi) - np.log(sigma) - special.log_ndtr(-h) - y


def _lognormal_inverse(shapes: Array, e: Array) -> tuple[Array, Array]:
    h, sigma = shapes
    y = np.maximum(sigma * (-special.ndtri_exp(special.log_ndtr(-h) - e) - h), 0.0)
    return y, np.expm1(y)


def _lognormal_parameters(shapes: Array, xmin: float, n: int) -> tuple[dict[str, float], dict[str, float]]:
    h, sigma = map(float, shapes)
    return {"mu": float(np.log(xmin)) - h * sigma, "sigma": sigma}, {"mu": np.nan, "sigma": np.nan}


FAMILIES: dict[str, Family] = {
    "power_law": Family(
        lambda means: _rate(means.y, means.end_y),
        lambda shapes, y, w: _exponential_survival(shapes, y),
        lambda shapes, y, w: _exponential_density(shapes, y) - y,
        lambda shapes, e: (e / shapes[0], np.expm1(e / shapes[0])),
        _power_law_parameters,
        bounded=True,
    ),
    "exponential": Family(
        lambda means: _rate(means.w, means.end_w),
        lambda shapes, y, w: _exponential_survival(shapes, w),
        lambda shapes, y, w: _exponential_density(shapes, w),
        lambda shapes, e: (np.log1p(e / shapes[0]), e / shapes[0]),
        _exponential_parameters,
        bounded=True,
    ),
    "truncated_power_law": Family(_cutoff_fit, _cutoff_survival, _cutoff_density, _cutoff_inverse, _cutoff_parameters),
    "lognormal": Family(
        _lognormal_fit, _lognormal_survival, _lognormal_density, _lognormal_inverse, _lognormal_parameters
    ),
}
"""Families by name."""


def family_of(name: str) -> Family:
    """Return the family `name`; ConfigurationError with the nearest names."""
    if name not in FAMILIES:
        raise ConfigurationError(f"no family of densities {name!r}.{did_you_mean(name, FAMILIES)}")
    return FAMILIES[name]
