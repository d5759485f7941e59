"""Bootstrap p-values: how often samples drawn from a fit lie at least as far from their own fits."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask.errors import ConfigurationError
from diffract_dask.options import check_whole
from diffract_dask.powerlaw.families import FAMILIES, Family, Means, family_of
from diffract_dask.powerlaw.fits import TailFit, fit

__all__ = ["bootstrap_p_value", "check_replicas", "p_value_of_distance"]

Array = NDArray[np.float64]

_BLOCK = 1 << 19  # numbers of replicas that are worked on at a time


def check_replicas(*, replicas: Any, seed: Any) -> None:
    """Raise ConfigurationError for a number of replicas or a seed that makes no sense."""
    check_whole("replicas", replicas, 1)
    check_whole("seed", seed, 0)


def bootstrap_p_value(
    found: TailFit, *, values: ArrayLike | None = None, replicas: int = 2500, seed: int = 42, min_tail: int = 2
) -> float:
    """Return the probability of a distance `ks` at least as large, if the fitted family were the true one.

    Parameters
    ----------
    found : TailFit
        Of a continuous family, without `xmax`.
    values : array_like, optional
        The sample. With it xmin is chosen anew in every replica, whose body is drawn from the values below xmin: the
        procedure of Clauset et al., as many whole fits as there are replicas. Without it xmin stays.
    replicas : int
        2500 give two decimals.
    seed : int
        Of a generator that is made for this call.
    min_tail : int
        Of the fits to replicas.

    Raises
    ------
    ConfigurationError
        The fit has an upper end, or is of discrete data; or an option makes no sense.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> found = fit((1 - np.arange(500) / 500) ** (-1 / 1.5))
    >>> bootstrap_p_value(found, replicas=200) > 0.9
    True
    """
    kind = family_of(found.family)
    check_replicas(replicas=replicas, seed=seed)
    check_whole("min_tail", min_tail, 1)
    if not math.isinf(found.xmax):
        raise ConfigurationError("bootstrap p-values are for fits without an upper end xmax")
    if found.status:
        return math.nan
    if values is None:
        return p_value_of_distance(
            found.family, found.shapes, found.ks, found.n_tail, found.n_used, replicas=replicas, seed=seed
        )
    x = np.asarray(values, np.float64).ravel()
    body = x[(x > 0.0) & (x < found.xmin)]
    rng = np.random.default_rng(seed)
    above = 0
    for n in rng.binomial(found.n_used, found.n_tail / found.n_used, replicas):
        with np.errstate(all="ignore"):
            _, w = kind.inverse(np.array(found.shapes), rng.standard_exponential(n))
        drawn = np.append(found.xmin * (1.0 + w), rng.choice(body, found.n_used - n) if len(body) else [])
        above += fit(drawn, found.family, min_tail=min_tail).ks >= found.ks
    return above / replicas


def p_value_of_distance(
    family: str,
    shapes: tuple[float, ...],
    ks: float,
    n_tail: int,
    n_used: int,
    *,
    replicas: int = 2500,
    seed: int = 42,
) -> float:
    """Return the bootstrap p-value of a distance, at a fixed xmin.

    A replica has as many values in its tail as `n_used` draws that fall there with probability `n_tail` / `n_used`;
    they are drawn from the fit and fitted anew. For power law and exponential the distances depend on the numbers of
    values alone, on no parameter.
    """
    kind = family_of(family)
    check_replicas(replicas=replicas, seed=seed)
    if not (np.isfinite(ks) and n_tail >= 2):
        return math.nan
    rng = np.random.default_rng(seed)
    sizes = np.maximum(rng.binomial(n_used, min(1.0, n_tail / n_used), replicas), 2)
    above = 0
    step = max(1, _BLOCK // int(sizes.max()))
    with np.errstate(all="ignore"):
        for begin in range(0, replicas, step):
            above += _exceeding(kind, np.array(shapes), ks, sizes[begin : begin + step], rng)
    return above / replicas


def _exceeding(kind: Family, shapes: Array, ks: float, sizes: NDArray[np.intp], rng: np.random.Generator) -> int:
    """Return how many of the replicas of these sizes have a distance of at least `ks`."""
    n = sizes[:, None]
    rank = np.arange(int(sizes.max()))
    inside = rank < n
    # Sorted standard exponentials from independent ones (Rényi): each gap is one over the number that is left.
    e = np.cumsum(np.where(inside, rng.standard_exponential(inside.shape) / np.maximum(n - rank, 1), 0.0), axis=1)
    y, w = kind.inverse(shapes, e)

    def mean(values: Array) -> Array:
        return np.asarray(np.where(inside, values, 0.0).sum(axis=1) / sizes)

    fitted = kind.fit(Means(mean(y), mean(y * y), mean(w)))
    if kind is FAMILIES["truncated_power_law"]:
        model = _cutoff_distribution(fitted, y, w)
    else:
        model = -np.expm1(kind.log_survival(fitted[:, :, None], y, w))
    deviation = np.where(inside, np.abs(model - rank / n), 0.0)
    return int((deviation.max(axis=1) >= ks).sum())


def _cutoff_distribution(shapes: Array, y: Array, w: Array) -> Array:
    """Return the distribution of truncated power laws at sorted points, by two-point quadrature between neighbours."""
    alpha, cut, log_norm = shapes[:, :, None]
    gaps = np.diff(y, axis=1, prepend=0.0)
    share = np.zeros_like(y)
    for node in (0.5 - 0.5 / 3**0.5, 0.5 + 0.5 / 3**0.5):
        z = y - (1.0 - node) * gaps
        share += np.exp(-(alpha - 1.0) * z - cut * np.expm1(z))
    share *= 0.5 * gaps / np.exp(log_norm)
    return np.asarray(np.cumsum(share, axis=1))
