"""Laws of random matrices: the Marchenko–Pastur law of a noise spectrum and the Tracy–Widom laws of its edge.

Eigenvalues are those of WᵀW / N for an N × M matrix, N ≥ M, with `ratio` = M / N; `scale` is the standard deviation
of the entries.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.errors import ConfigurationError

__all__ = [
    "mp_cdf",
    "mp_density",
    "mp_edges",
    "noise_scale",
    "tracy_widom_cdf",
    "tracy_widom_isf",
    "tracy_widom_ppf",
    "tracy_widom_sf",
]

Array = NDArray[np.float64]

_NODES = 56
_END = 12.0  # Ai falls below 1e-13 there, and the error is of the order of its square
_SHORTEST = 4.0
_BETAS = (1, 2)
_BRACKET = (-8.0, 11.5)  # holds the quantiles of all probabilities in _LIMITS
_LIMITS = (1e-11, 1.0 - 1e-11)


def mp_edges(ratio: ArrayLike, scale: ArrayLike = 1.0) -> tuple[Array, Array]:
    r"""Return the lower and the upper edge of the Marchenko–Pastur law.

    Parameters
    ----------
    ratio : array_like (...,)
        M / N, in (0, 1].
    scale : array_like (...,)
        Standard deviation of the entries.

    Returns
    -------
    lower, upper : float64 arrays (...,)
        In squared units of `scale`. NaN where `ratio` is not in (0, 1].

    Notes
    -----
    .. math:: \lambda_\pm = s^2 (1 \pm \sqrt{r})^2

    References
    ----------
    marchenko1967distribution

    Examples
    --------
    >>> [float(edge) for edge in mp_edges(0.25, 2.0)]
    [1.0, 9.0]
    """
    ratio, scale = np.asarray(ratio, np.float64), np.asarray(scale, np.float64)
    root = np.sqrt(np.where((ratio > 0.0) & (ratio <= 1.0), ratio, np.nan))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        lower, upper = np.square((1.0 - root) * scale), np.square((1.0 + root) * scale)
    return np.asarray(lower), np.asarray(upper)


def mp_density(x: ArrayLike, ratio: ArrayLike, scale: ArrayLike = 1.0) -> Array:
    r"""Return the density of the Marchenko–Pastur law.

    Parameters
    ----------
    x : array_like (...,)
        Eigenvalues.
    ratio, scale : array_like (...,)
        As for :func:`mp_edges`; broadcast against `x`.

    Returns
    -------
    float64 array (...,)
        0 outside the edges, infinite at 0 for a square matrix, NaN where `ratio` or `scale` is out of range.

    Notes
    -----
    .. math:: p(x) = \frac{\sqrt{(x - \lambda_-)(\lambda_+ - x)}}{2 \pi r s^2 x}

    References
    ----------
    marchenko1967distribution

    Examples
    --------
    >>> float(mp_density(1.0, 1.0)).hex() == (3**0.5 / (2 * math.pi)).hex()
    True
    """
    z, ratio, variance = _standardised(x, ratio, scale)
    lower, upper = mp_edges(ratio)
    with np.errstate(divide="ignore", invalid="ignore", over="ignore"):
        inside = np.sqrt(np.maximum(z - lower, 0.0)) * np.sqrt(np.maximum(upper - z, 0.0))
        value = np.where(inside > 0.0, inside / (2.0 * np.pi * ratio * z), 0.0)
        value = np.where((z == 0.0) & (lower == 0.0), np.inf, value)
        return np.asarray(np.where(np.isnan(z + lower), np.nan, value / variance))


def mp_cdf(x: ArrayLike, ratio: ArrayLike, scale: ArrayLike = 1.0) -> Array:
    r"""Return the distribution function of the Marchenko–Pastur law.

    Parameters
    ----------
    x : array_like (...,)
        Eigenvalues.
    ratio, scale : array_like (...,)
        As for :func:`mp_edges`; broadcast against `x`.

    Returns
    -------
    float64 array (...,)
        NaN where `ratio` or `scale` is out of range.

    Notes
    -----
    With :math:`x / s^2 = 1 + r - 2 \sqrt{r} \cos\theta`

    .. math:: F = \frac{1}{\pi r} \left( \sqrt{r} \sin\theta + r \theta
              - (1 - r) \arctan\frac{\sqrt{r} \sin\theta}{1 - \sqrt{r} \cos\theta} \right)

    which is the integral of :func:`mp_density` and, unlike its usual form in arcsines, loses no digits at the edges.

    References
    ----------
    marchenko1967distribution

    Examples
    --------
    >>> [round(float(mp_cdf(x, 0.25)), 12) for x in (0.25, 1.25, 2.25)]
    [0.0, 0.693868919416, 1.0]
    """
    z, ratio, _ = _standardised(x, ratio, scale)
    lower, upper = mp_edges(ratio)
    root = np.sqrt(ratio)
    with np.errstate(invalid="ignore", divide="ignore"):
        left, right = np.sqrt(np.maximum(z - lower, 0.0)), np.sqrt(np.maximum(upper - z, 0.0))
        theta = 2.0 * np.arctan2(left, right)
        sine, versine = root * np.sin(theta), 2.0 * np.square(np.sin(0.5 * theta))
        angle = np.arctan2(sine, (1.0 - root) + root * versine)
        value = (sine + ratio * theta - (1.0 - ratio) * angle) / (np.pi * ratio)
        value = np.where(z >= upper, 1.0, np.clip(value, 0.0, 1.0))
        return np.asarray(np.where(np.isnan(z + lower), np.nan, value))


def _standardised(x: ArrayLike, ratio: ArrayLike, scale: ArrayLike) -> tuple[Array, Array, Array]:
    """Return x / scale², the ratio and scale², with NaN for what is out of range."""
    x, ratio = np.asarray(x, np.float64), np.asarray(ratio, np.float64)
    scale = np.where(np.asarray(scale, np.float64) > 0.0, scale, np.nan)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.asarray(x / scale / scale), np.where((ratio > 0) & (ratio <= 1), ratio, np.nan), np.square(scale)


def noise_scale(esd_rand: ArrayLike, scale: ArrayLike, ratio: ArrayLike) -> Array:
    r"""Return the scale of the noise from the spectrum of the shuffled matrix.

    Parameters
    ----------
    esd_rand : array_like (..., k)
        Eigenvalues of the shuffled matrix.
    scale : array_like (...,)
        Standard deviation of its entries.
    ratio : array_like (...,)
        M / N.

    Returns
    -------
    float64 array (...,)
        `scale` where no eigenvalue lies above the edge that it gives. Else single large entries have bled out of the
        bulk, and the scale is the root of the sum of the other eigenvalues, over k. NaN for a NaN spectrum.

    Notes
    -----
    .. math:: s_b^2 = \frac{1}{k} \sum_{\lambda_i \le \lambda_+} \lambda_i

    References
    ----------
    martin2021implicit

    Examples
    --------
    >>> float(noise_scale([1.0, 2.0], 1.5, 1.0)), float(noise_scale([1.0, 1.0, 34.0], 2.0, 1.0))
    (1.5, 0.816496580927726)
    """
    values, scale = np.asarray(esd_rand, np.float64), np.asarray(scale, np.float64)
    unit = np.where(scale > 0.0, scale, 1.0)[..., None]
    edge = np.where(scale > 0.0, mp_edges(ratio)[1], 0.0)[..., None]
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        standardised = values / unit / unit
        kept = np.sum(standardised, axis=-1, where=standardised <= edge)
        bled = np.any(standardised > edge, axis=-1)
        result = np.where(bled, unit[..., 0] * np.sqrt(kept / values.shape[-1]), scale)
    return np.asarray(np.where(np.isnan(values).any(axis=-1) | np.isnan(edge[..., 0]), np.nan, result))


# Tracy–Widom


def tracy_widom_cdf(x: ArrayLike, beta: int = 1) -> Array:
    r"""Return the distribution function of the Tracy–Widom law.

    Parameters
    ----------
    x : array_like
        Any shape; about a millisecond per number.
    beta : {1, 2}
        1 for real matrices, 2 for complex ones.

    Returns
    -------
    float64 array
        In error by at most about 1e-15.

    Raises
    ------
    ConfigurationError
        Another `beta`.

    Notes
    -----
    With the integral operator :math:`B_s` of the kernel :math:`\mathrm{Ai}(s + u + v)` on the positive half-line

    .. math:: F_1 = \det(1 - B_s), \quad F_2 = \det(1 - B_s) \det(1 + B_s)

    (Ferrari and Spohn 2005), as determinants of the kernel on the nodes of a Gauss–Legendre rule (Bornemann 2010).

    References
    ----------
    tracy1994level, tracy1996orthogonal, ferrari2005determinantal, bornemann2010numerical

    Examples
    --------
    >>> round(float(tracy_widom_cdf(0.0)), 10), round(float(tracy_widom_cdf(0.0, beta=2)), 10)
    (0.8319080662, 0.9693728284)
    """
    _check_beta(beta)
    return _each(x, lambda value: math.exp(_log_cdf(value, beta)))


def tracy_widom_sf(x: ArrayLike, beta: int = 1) -> Array:
    """Return one minus the distribution function, exact to many digits far in the upper tail too.

    Parameters, errors and references are those of :func:`tracy_widom_cdf`.

    Examples
    --------
    >>> f"{tracy_widom_sf(10.0):.6g}"
    '1.70822e-11'
    """
    _check_beta(beta)
    return _each(x, lambda value: -math.expm1(_log_cdf(value, beta)))


def tracy_widom_ppf(p: ArrayLike, beta: int = 1) -> Array:
    """Return the quantiles of the Tracy–Widom law: where the distribution function is `p`.

    Parameters
    ----------
    p : array_like
        Any shape; some milliseconds per number, once per process.
    beta : {1, 2}

    Returns
    -------
    float64 array
        NaN where `p` is not within 1e-11 … 1 - 1e-11. In error by about 1e-11 at most from 0.001 on; far in the lower
        tail by more, up to about 1e-7 at 1e-11.

    Raises
    ------
    ConfigurationError
        Another `beta`.

    References
    ----------
    tracy1994level, bornemann2010numerical

    Examples
    --------
    >>> round(float(tracy_widom_ppf(0.95)), 10)
    0.9793160535
    """
    _check_beta(beta)
    return _each(p, lambda value: _quantile(value, beta, False))


def tracy_widom_isf(q: ArrayLike, beta: int = 1) -> Array:
    """Return where the upper tail holds `q`: the quantile of 1 - q, for small q too.

    Parameters, errors and references are those of :func:`tracy_widom_ppf`.

    Examples
    --------
    >>> round(float(tracy_widom_isf(0.005)), 10)
    2.4223265859
    """
    _check_beta(beta)
    return _each(q, lambda value: _quantile(value, beta, True))


def _check_beta(beta: int) -> None:
    if beta not in _BETAS:
        raise ConfigurationError(f"the Tracy–Widom law of beta={beta!r} is not there; beta is one of {_BETAS}")


def _each(x: ArrayLike, function: Callable[[float], float]) -> Array:
    values = np.asarray(x, np.float64)
    return np.array([function(float(value)) for value in values.ravel()], np.float64).reshape(values.shape)


@lru_cache(maxsize=4096)
def _log_cdf(x: float, beta: int) -> float:
    """Return log F, from the eigenvalues of the kernel, which keep the digits of both tails."""
    from scipy.special import airy

    if not x < 2.0 * _BRACKET[1]:
        return math.nan if math.isnan(x) else 0.0
    if x < 2.0 * _BRACKET[0]:
        return -math.inf
    length = max(_END - x, _SHORTEST)
    nodes, weights = np.polynomial.legendre.leggauss(_NODES)
    nodes, weights = 0.5 * length * (nodes + 1.0), np.sqrt(0.5 * length * weights)
    kernel = airy(x + nodes[:, None] + nodes)[0] * weights[:, None] * weights
    eigenvalues = np.linalg.eigvalsh(kernel)
    with np.errstate(divide="ignore", invalid="ignore"):
        terms = np.log1p(np.maximum(-eigenvalues, -1.0))
        if beta == 2:
            terms += np.log1p(np.maximum(eigenvalues, -1.0))
    return float(np.sum(terms))


@lru_cache(maxsize=4096)
def _quantile(p: float, beta: int, upper: bool) -> float:
    from scipy.optimize import brentq

    if not _LIMITS[0] <= p <= _LIMITS[1]:
        return math.nan
    # The smaller of the two tails, on a logarithmic scale, is nearly straight and exact to many digits.
    if (p < 0.5) == upper:
        target = math.log(p if upper else 1.0 - p)
        return float(brentq(lambda x: math.log(-math.expm1(_log_cdf(x, beta))) - target, *_BRACKET, xtol=1e-12))
    target = math.log1p(-p) if upper else math.log(p)
    return float(brentq(lambda x: max(_log_cdf(x, beta), -200.0) - target, *_BRACKET, xtol=1e-12))
