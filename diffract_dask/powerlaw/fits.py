"""Fits of the families of densities to the upper tail of a sample, and their comparison."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import special

from diffract_dask.errors import ConfigurationError
from diffract_dask.fields import Status
from diffract_dask.options import check_number, check_whole
from diffract_dask.powerlaw.families import FAMILIES, Family, Means, family_of
from diffract_dask.powerlaw.tails import Tails, smallest_distance, tails_of
from diffract_dask.powerlaw.zeta import fit_tails

__all__ = ["PARAMETERS", "Comparison", "TailFit", "check_options", "compare", "fit", "fit_discrete", "log_density"]

Array = NDArray[np.float64]


@dataclass(frozen=True)
class TailFit:
    """A family fitted to the upper tail of a sample.

    Attributes
    ----------
    family : str
    parameters, errors : dict of str to float
        Estimates and their standard errors, from the Fisher information; NaN on the edge of what is allowed.
    xmin, xmax : float
        Ends of the tail; `xmax` infinite where none was given.
    ks : float
        Greatest difference between the model and the share of the tail strictly below a point: the distance that
        chooses xmin.
    ks_two_sided : float
        The Kolmogorov–Smirnov statistic proper: the share at or below a point is compared too. At least `ks`.
    log_likelihood : float
        Of the tail, in units of the data.
    n, n_used, n_tail : int
        Values given; those that may enter the fit; those in the tail.
    status : Status
        OK; NON_FINITE, DEGENERATE (no spread), FEW_VALUES or UNDEFINED, and then all results are NaN.
    shapes : tuple of float
        Parameters that do not depend on the scale of the data.
    """

    family: str
    n: int
    n_used: int
    status: Status
    parameters: Mapping[str, float] = field(default_factory=dict)
    errors: Mapping[str, float] = field(default_factory=dict)
    xmin: float = math.nan
    xmax: float = math.inf
    ks: float = math.nan
    ks_two_sided: float = math.nan
    log_likelihood: float = math.nan
    n_tail: int = 0
    shapes: tuple[float, ...] = ()

    def __getattr__(self, name: str) -> float:
        """Return a parameter, NaN where there is no fit; ``lambda_`` for the one that Python does not allow."""
        wanted = name.rstrip("_")
        if wanted in PARAMETERS.get(self.__dict__.get("family", ""), ()):
            return self.parameters.get(wanted, math.nan)
        raise AttributeError(f"{type(self).__name__} has no attribute {name!r}")


PARAMETERS: dict[str, tuple[str, ...]] = {
    "power_law": ("alpha",),
    "truncated_power_law": ("alpha", "lambda"),
    "exponential": ("lambda",),
    "lognormal": ("mu", "sigma"),
    "zeta": ("alpha",),
}
"""Names of the parameters of each family."""


class Comparison(NamedTuple):
    """Log-likelihood ratio of two families on one tail; positive: the first is the more likely one.

    `normalised` is the ratio over its standard deviation, `p_value` the probability of one at least as large if both
    were equally good.
    """

    log_ratio: float
    normalised: float
    p_value: float


def fit(
    values: ArrayLike,
    family: str = "power_law",
    *,
    xmin: float | None = None,
    xmax: float | None = None,
    min_tail: int = 2,
    min_values: int = 2,
    min_spread: float = 0.0,
    zero: float = 0.0,
) -> TailFit:
    r"""Fit a family of densities to the upper tail of a sample.

    Parameters
    ----------
    values : array_like
        Any shape and order. Values at or below `zero` are not used.
    family : {"power_law", "truncated_power_law", "exponential", "lognormal"}
        Densities for x ≥ xmin proportional to :math:`x^{-\alpha}`, :math:`x^{-\alpha} e^{-\lambda x}` (with
        :math:`\alpha \ge 1, \lambda \ge 0`), :math:`e^{-\lambda x}` and :math:`\frac1x
        \exp(-(\ln x - \mu)^2 / 2\sigma^2)`.
    xmin : float, optional
        Lower end of the tail; by default the value with the smallest distance `ks`, the first of equals.
    xmax : float, optional
        Greatest possible value: larger ones are not used, and the density is that of what lies below. For power law
        and exponential only.
    min_tail : int
        Smallest number of values in a tail that may be chosen.
    min_values : int
        With fewer usable values there is no fit, and the status is FEW_VALUES.
    min_spread : float
        The sample is DEGENERATE if its largest usable value is at most 1 + `min_spread` times its smallest.
    zero : float
        What counts as zero.

    Returns
    -------
    TailFit

    Raises
    ------
    ConfigurationError
        An unknown family, an option that makes no sense, or `xmax` with a family that has none.

    Notes
    -----
    The exponent of a power law is :math:`\hat\alpha = 1 + n / \sum_i \ln(x_i / x_{\min})`, its standard error
    :math:`(\hat\alpha - 1) / \sqrt n`, for every xmin from one sum over the gaps between neighbouring values.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> sample = 2.0 * (1 - np.arange(1000) / 1000) ** (-1 / 1.5)
    >>> found = fit(sample)
    >>> round(found.alpha, 2), found.xmin, found.n_tail, found.status.name
    (2.51, 2.0, 1000, 'OK')
    """
    kind = family_of(family)
    check_options(family, xmin=xmin, xmax=xmax, min_tail=min_tail, min_values=min_values, min_spread=min_spread)
    data = np.asarray(values, np.float64).ravel()
    if not np.isfinite(data).all():
        return TailFit(family, len(data), 0, Status.NON_FINITE)
    used = data[(data > max(zero, 0.0)) & (data <= (math.inf if xmax is None else xmax))]
    status = _usable(used, min_values, min_spread)
    none = TailFit(family, len(data), len(used), status)
    if status:
        return none
    if xmin is not None and (used >= xmin).sum() < max(min_tail, 1):
        return TailFit(family, len(data), len(used), Status.FEW_VALUES)
    tails = tails_of(used, xmin)
    tails = tails.take(tails.sizes >= min_tail)
    shapes = _shapes(kind, tails, xmax)
    found = np.isfinite(shapes[0])
    tails, shapes = tails.take(found), shapes[:, found]
    if not len(tails.start):
        return TailFit(family, len(data), len(used), Status.UNDEFINED if min_tail <= len(used) else Status.FEW_VALUES)
    with np.errstate(all="ignore"):
        best = smallest_distance(tails, lambda k, y, w: np.exp(kind.log_survival(shapes[:, k], y, w))).k
        return _fitted(none, kind, tails, best, shapes[:, best], xmax)


def check_options(family: str, *, xmin: Any, min_tail: Any, min_values: Any, min_spread: Any, xmax: Any = None) -> None:
    """Raise ConfigurationError for an option of :func:`fit` that makes no sense."""
    if xmin is not None:
        check_number("xmin", xmin, lambda value: 0.0 < value < math.inf, "positive and finite")
    check_whole("min_tail", min_tail, 1)
    check_whole("min_values", min_values, 0)
    check_number("min_spread", min_spread, lambda value: 0.0 <= value < math.inf, "at least 0 and finite")
    if xmax is None:
        return
    check_number("xmax", xmax, lambda value: (xmin or 0.0) < value < math.inf, "finite and above xmin")
    if not FAMILIES[family].bounded:
        known = ", ".join(name for name, one in FAMILIES.items() if one.bounded)
        raise ConfigurationError(f"the family {family!r} has no fit with an upper end xmax; these have: {known}")


def _usable(used: Array, min_values: int, min_spread: float) -> Status:
    if len(used) < 2 or used.max() <= used.min() * (1.0 + min_spread):
        return Status.DEGENERATE
    return Status.FEW_VALUES if len(used) < min_values else Status.OK


def _shapes(kind: Family, tails: Tails, xmax: float | None) -> Array:
    end_y = end_w = None
    if xmax is not None:
        end = np.ldexp(xmax, -tails.exponent)
        end_w = (end - tails.base) / tails.base
        end_y = np.log1p(end_w)
    with np.errstate(all="ignore"):
        return kind.fit(Means(tails.mean_y, tails.mean_yy, tails.mean_w, end_y, end_w))


def _fitted(none: TailFit, kind: Family, tails: Tails, k: int, shapes: Array, xmax: float | None) -> TailFit:
    """Return the fit of one tail, with its distances and its likelihood."""
    y, w = tails.points(k)
    c, n = int(tails.start[k]), len(y)
    model = 1.0 - np.exp(kind.log_survival(shapes, y, w))
    below, upto = (tails.first[c:] - c) / n, (tails.last[c:] + 1 - c) / n
    ks = float(np.abs(model - below).max())
    xmin = float(np.ldexp(tails.base[k], tails.exponent))
    parameters, errors = kind.parameters(shapes, xmin, n)
    return TailFit(
        none.family,
        none.n,
        none.n_used,
        Status.OK,
        parameters,
        errors,
        xmin,
        math.inf if xmax is None else xmax,
        ks,
        max(ks, float(np.abs(upto - model).max())),
        float(np.sum(kind.log_density(shapes, y, w)) - n * math.log(xmin)),
        n,
        tuple(map(float, shapes)),
    )


def log_density(found: TailFit, values: ArrayLike) -> Array:
    """Return the logarithm of the fitted density at each of `values`; −inf outside the tail."""
    x = np.asarray(values, np.float64)
    inside = (x >= found.xmin) & (x <= found.xmax)
    with np.errstate(all="ignore"):
        w = (np.where(inside, x, found.xmin) - found.xmin) / found.xmin
        got = family_of(found.family).log_density(np.array(found.shapes), np.log1p(w), w) - math.log(found.xmin)
    return np.where(inside, got, -np.inf)


def compare(values: ArrayLike, first: TailFit, second: TailFit, *, nested: bool = False) -> Comparison:
    r"""Compare two fits of one tail by their likelihoods (Vuong's test).

    Parameters
    ----------
    values : array_like
        The sample.
    first, second : TailFit
        Fits with the same xmin and xmax.
    nested : bool
        The first family is a special case of the second: then the p-value is that of Wilks' theorem.

    Raises
    ------
    ConfigurationError
        The fits are of different tails.

    Notes
    -----
    .. math:: R = \sum_i [\ln p_1(x_i) - \ln p_2(x_i)], \quad p = \mathrm{erfc}(|R| / \sqrt{2 n} s)

    with s the standard deviation of the terms; if nested, :math:`p = P(\chi^2_1 > 2 |R|)`.

    References
    ----------
    vuong1989likelihood, clauset2009power

    Examples
    --------
    >>> sample = (1 - np.arange(500) / 500) ** (-1 / 1.5)
    >>> fits = [fit(sample, family, xmin=1.0) for family in ("power_law", "exponential")]
    >>> compare(sample, *fits).log_ratio > 100
    True
    """
    if not (first.status or second.status) and (first.xmin, first.xmax) != (second.xmin, second.xmax):
        raise ConfigurationError(
            f"the fits are of different tails, from {first.xmin!r} and from {second.xmin!r}; fit both with one xmin"
        )
    if first.status or second.status:
        return Comparison(math.nan, math.nan, math.nan)
    x = np.asarray(values, np.float64).ravel()
    x = x[(x >= first.xmin) & (x <= first.xmax)]
    one, other = log_density(first, x), log_density(second, x)
    terms = one - other
    ratio, spread = float(terms.sum()), float(terms.std()) * len(x) ** 0.5
    if nested:
        rounding = float(np.finfo(np.float64).eps * (np.abs(one) + np.abs(other)).sum())
        ratio = ratio if ratio < -rounding else 0.0  # the wider family is never the worse one, but for rounding
        return Comparison(ratio, ratio / spread if spread else 0.0, float(special.gammaincc(0.5, -ratio)))
    if not spread:
        return Comparison(ratio, 0.0 if ratio == 0.0 else math.copysign(math.inf, ratio), float(ratio == 0.0))
    return Comparison(ratio, ratio / spread, math.erfc(abs(ratio) / spread / 2**0.5))


def fit_discrete(values: ArrayLike, *, xmin: int | None = None, min_tail: int = 2, min_values: int = 2) -> TailFit:
    r"""Fit a power law to positive whole numbers (a zeta distribution above xmin).

    Parameters
    ----------
    values : array_like of int
        Values below 1 are not used.
    xmin : int, optional
        By default the value with the smallest distance, among all that occur but the largest.
    min_tail, min_values : int
        As for :func:`fit`.

    Raises
    ------
    ConfigurationError
        A value is not a whole number, or an option makes no sense.

    Notes
    -----
    .. math:: p(x) = x^{-\alpha} / \zeta(\alpha, x_{\min})

    with the Hurwitz zeta function; α maximises the likelihood numerically, and the distance compares P(X ≤ x) at
    every value that occurs. `ks` and `ks_two_sided` are the same.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> counts = np.repeat([1, 2, 3, 4, 5, 8, 13], [600, 110, 40, 20, 11, 3, 1])
    >>> found = fit_discrete(counts, xmin=1)
    >>> round(found.alpha, 2), found.n_tail
    (2.72, 785)
    """
    if xmin is not None:
        check_whole("xmin", xmin, 1)
    check_whole("min_tail", min_tail, 1)
    check_whole("min_values", min_values, 0)
    data = np.asarray(values, np.float64).ravel()
    if not np.isfinite(data).all():
        return TailFit("zeta", len(data), 0, Status.NON_FINITE)
    if np.any(data != np.rint(data)):
        raise ConfigurationError("fit_discrete takes whole numbers; fit() is for continuous data")
    used = data[data >= 1.0]
    status = _usable(used, min_values, 0.0)
    none = TailFit("zeta", len(data), len(used), status)
    if status:
        return none
    points, counts = np.unique(used, return_counts=True)
    found = fit_tails(points, counts, xmin, min_tail)
    if found is None:
        enough = xmin is not None and int((used >= xmin).sum()) >= min_tail
        return TailFit("zeta", len(data), len(used), Status.UNDEFINED if enough else Status.FEW_VALUES)
    return TailFit(
        "zeta",
        len(data),
        len(used),
        Status.OK,
        {"alpha": found.alpha},
        {"alpha": found.error},
        found.xmin,
        math.inf,
        found.ks,
        found.ks,
        found.log_likelihood,
        found.n_tail,
        (found.alpha,),
    )
