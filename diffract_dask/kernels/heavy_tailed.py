"""Heavy-tailed fits of the ESD: power law, power law with cut-off, exponential and log-normal, and how good they are.

A spectrum that cannot be fitted gives NaN and a status: ``degenerate`` if its non-zero eigenvalues are all equal or
nearly so, or fewer than two; ``few_values`` if there are fewer than `min_values`. Eigenvalues that are zero to the
precision of the stored weights (``esd_zero``) are left out everywhere.
"""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import powerlaw
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import kernel
from diffract_dask.kernels.tail_summaries import MIN_SPREAD
from diffract_dask.kernels.workspace import Workspace

__all__ = [
    "exponential_fit",
    "lognormal_fit",
    "power_law_fit",
    "truncated_power_law_fit",
]

Array = NDArray[np.float64]

MIN_VALUES = 7
"""Fewest eigenvalues that are fitted by default: the smallest matrix for which values of Diffract are tested has so
many. Fewer leave the exponent's relative error, one over the square root of their number, above 38 %."""

_NO_FIT = "the spectrum is degenerate or has too few values, or the weights hold NaN or infinity"
_NO_ERROR = f"{_NO_FIT}; or the estimate lies on the edge of what is allowed"
_NO_SPECTRUM = "the weights hold NaN or infinity"


def _workspace(per_value: int) -> Workspace:
    """Return the workspace of a fit that works on one spectrum after another, with so many bytes for each value."""

    def workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
        return per_value * min(rows, cols) + (24 << 20) + 256 * n

    return workspace


def tail_status(*outputs: Array) -> NDArray[np.uint8]:
    """Return why there is no fit; told from the number of values in the tail, the last output.

    0 stands for a degenerate spectrum, NaN (of a finite spectrum) for too few values.
    """
    first, n_used, n_tail = (np.asarray(one, np.float64) for one in (outputs[0], outputs[-2], outputs[-1]))
    status = np.where(n_tail == 0.0, Status.DEGENERATE, Status.UNDEFINED)
    status = np.where(np.isnan(n_tail), Status.FEW_VALUES, status)
    return np.where(np.isnan(first) & ~np.isnan(n_used), status, Status.OK).astype(np.uint8)


_N_TAIL = {Status.DEGENERATE: 0.0, Status.FEW_VALUES: math.nan, Status.NON_FINITE: math.nan}


def _fits(
    family: str, esd: ArrayLike, esd_zero: ArrayLike, names: tuple[str, ...], options: dict[str, Any]
) -> tuple[Array, ...]:
    """Return the parameters `names`, xmin, both distances, errors of the parameters, n used, n in the tail.

    Of families that may have an upper end, whether they have one comes before the numbers of values.
    """
    spectra = np.asarray(esd, np.float64)
    lead = spectra.shape[:-1]
    zeros = np.broadcast_to(np.asarray(esd_zero, np.float64), lead).ravel()
    bounded = [float(options["xmax"] is not None)] if "xmax" in options else []
    no_bound = [math.nan] * len(bounded)
    rows = []
    for spectrum, zero in zip(spectra.reshape(-1, spectra.shape[-1]), zeros, strict=True):
        found = powerlaw.fit(spectrum, family, zero=float(zero), **options)
        n_tail = float(found.n_tail) if found.status == Status.OK else _N_TAIL.get(found.status, float(found.n_used))
        rows.append(
            [
                *(found.parameters.get(name, math.nan) for name in names),
                found.xmin,
                found.ks,
                found.ks_two_sided,
                *(found.errors.get(name, math.nan) for name in names),
                *(bounded if found.status == Status.OK else no_bound),
                math.nan if found.status == Status.NON_FINITE else float(found.n_used),
                n_tail,
            ]
        )
    table = np.array(rows, np.float64).reshape(*lead, 2 * len(names) + len(bounded) + 5)
    return tuple(np.array(table[..., i]) for i in range(table.shape[-1]))


def _lower_end(of: str) -> Field:
    return Field(
        long_name=f"Lower end of the {of} tail",
        formula=r"\lambda_{\min} = \mathrm{argmin}_{\lambda_i} D(\lambda_i)",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    )


def _distance(of: str) -> Field:
    return Field(
        long_name=f"Distance of the {of} fit",
        formula=r"D = \max_i |F(\lambda_i) - (i - 1) / n|",
        reference="clauset2009power",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    )


def _two_sided(of: str) -> Field:
    return Field(
        long_name=f"Kolmogorov–Smirnov statistic of the {of} fit",
        formula=r"\max_i \max(|F(\lambda_i) - (i - 1) / n|, |i / n - F(\lambda_i)|)",
        reference="clauset2009power",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    )


def _bounded(of: str) -> Field:
    return Field(
        long_name=f"Whether the {of} tail has an upper end",
        formula=r"[\mathrm{xmax}\ \text{is given}]",
        reference="clauset2009power",
        dtype="bool",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    )


def _n_used(of: str) -> Field:
    return Field(
        long_name=f"Eigenvalues that may enter the {of} fit",
        formula=r"\#\{i : \lambda_0 < \lambda_i \le \mathrm{xmax}\}",
        reference="clauset2009power",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan=_NO_SPECTRUM,
    )


def _n_tail(of: str) -> Field:
    return Field(
        long_name=f"Eigenvalues in the {of} tail",
        formula=r"n = \#\{i : \lambda_i \ge \lambda_{\min}\}",
        reference="clauset2009power",
        dtype="int64",
        valid_range=(0.0, math.inf),
        nan="too few values, or the weights hold NaN or infinity; 0 for a degenerate spectrum",
    )


@kernel(
    pl_alpha=Field(
        long_name="Power-law exponent",
        formula=r"\hat\alpha = 1 + n / \sum_i \ln(\lambda_i / \lambda_{\min})",
        reference="clauset2009power",
        nan=_NO_FIT,
    ),
    pl_esd_xmin=_lower_end("power-law"),
    pl_ks=_distance("power-law"),
    pl_ks_two_sided=_two_sided("power-law"),
    pl_alpha_error=Field(
        long_name="Standard error of the power-law exponent",
        formula=r"(\hat\alpha - 1) / \sqrt n",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    pl_bounded=_bounded("power-law"),
    pl_n_used=_n_used("power-law"),
    pl_n_tail=_n_tail("power-law"),
    version=1,
    workspace=_workspace(400),
    status=tail_status,
    check=partial(powerlaw.check_options, "power_law"),
)
def power_law_fit(
    esd: ArrayLike,
    esd_zero: ArrayLike,
    *,
    xmin: float | None = None,
    xmax: float | None = None,
    min_tail: int = 2,
    min_values: int = MIN_VALUES,
    min_spread: float = MIN_SPREAD,
) -> tuple[Array, ...]:
    r"""Fit a power law to the upper tail of the ESD by maximum likelihood.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    esd_zero : array_like (...,)
        At or below it they count as zero and are not used.
    xmin : float, optional
        Lower end of the tail; by default the eigenvalue with the smallest distance ``pl_ks``, the first of equals.
    xmax : float, optional
        Greatest possible eigenvalue: larger ones are not used, and the likelihood is that of a bounded power law.
    min_tail : int
        Smallest number of eigenvalues in a tail that may be chosen. Two, as in Diffract, admits any.
    min_values : int
        With fewer non-zero eigenvalues there is no fit. Seven are few, but Diffract's values for them are met.
    min_spread : float
        The spectrum is degenerate if its largest non-zero eigenvalue is at most 1 + `min_spread` times the smallest.

    Returns
    -------
    pl_alpha, pl_esd_xmin, pl_ks, pl_ks_two_sided, pl_alpha_error, pl_bounded, pl_n_used, pl_n_tail : \
    float64 arrays (...,)
        `pl_esd_xmin` in squared units of the weights.

    Raises
    ------
    ConfigurationError
        A parameter makes no sense.

    Notes
    -----
    .. math:: \hat\alpha = 1 + n / \sum_i \ln(\lambda_i / \lambda_{\min})

    `pl_ks`, by which the lower end is chosen, compares the fit with the share of the tail strictly below each
    eigenvalue; `pl_ks_two_sided` also with the share at or below it.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> esd = (1 - np.arange(200) / 200) ** (-1 / 2.0)
    >>> alpha, xmin, *_ = power_law_fit(esd, 0.0)
    >>> round(float(alpha), 1), float(xmin)
    (3.0, 1.0)
    """
    options = {
        "xmin": xmin, "xmax": xmax, "min_tail": min_tail, "min_values": min_values, "min_spread": min_spread
    }  # fmt: skip
    return _fits("power_law", esd, esd_zero, ("alpha",), options)


@kernel(
    tpl_alpha=Field(
        long_name="Exponent of the truncated power law",
        formula=r"p(\lambda) \propto \lambda^{-\alpha} e^{-\Lambda \lambda},\; \alpha \ge 1, \Lambda \ge 0",
        reference="clauset2009power",
        valid_range=(1.0, math.inf),
        nan=_NO_FIT,
    ),
    tpl_lambda=Field(
        long_name="Cut-off rate of the truncated power law",
        formula=r"\Lambda : p(\lambda) \propto \lambda^{-\alpha} e^{-\Lambda \lambda},\; \alpha \ge 1, \Lambda \ge 0",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    tpl_esd_xmin=_lower_end("truncated power-law"),
    tpl_ks=_distance("truncated power-law"),
    tpl_ks_two_sided=_two_sided("truncated power-law"),
    tpl_alpha_error=Field(
        long_name="Standard error of the exponent of the truncated power law",
        formula=r"\sqrt{(I^{-1})_{\alpha\alpha} / n},\; I = \mathrm{Cov}(\ln \lambda, \lambda)",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_ERROR,
    ),
    tpl_lambda_error=Field(
        long_name="Standard error of the cut-off rate of the truncated power law",
        formula=r"\sqrt{(I^{-1})_{\Lambda\Lambda} / n},\; I = \mathrm{Cov}(\ln \lambda, \lambda)",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_ERROR,
    ),
    tpl_n_used=_n_used("truncated power-law"),
    tpl_n_tail=_n_tail("truncated power-law"),
    version=1,
    workspace=_workspace(1200),
    status=tail_status,
    check=partial(powerlaw.check_options, "truncated_power_law"),
)
def truncated_power_law_fit(
    esd: ArrayLike,
    esd_zero: ArrayLike,
    *,
    xmin: float | None = None,
    min_tail: int = 2,
    min_values: int = MIN_VALUES,
    min_spread: float = MIN_SPREAD,
) -> tuple[Array, ...]:
    r"""Fit a power law with an exponential cut-off to the upper tail of the ESD by maximum likelihood.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    esd_zero : array_like (...,)
        At or below it they count as zero and are not used.
    xmin, min_tail, min_values, min_spread
        As for :func:`power_law_fit`.

    Returns
    -------
    tpl_alpha, tpl_lambda, tpl_esd_xmin, tpl_ks, tpl_ks_two_sided, tpl_alpha_error, tpl_lambda_error, tpl_n_used, \
    tpl_n_tail : float64 arrays (...,)
        `tpl_esd_xmin` in squared units of the weights, `tpl_lambda` in one over these. A `tpl_lambda` of 0 says that
        no cut-off makes the tail more likely, a `tpl_alpha` of 1 that it falls more like an exponential.

    Notes
    -----
    .. math:: p(\lambda) = \frac{\Lambda^{1-\alpha}}{\Gamma(1-\alpha, \Lambda \lambda_{\min})}
        \lambda^{-\alpha} e^{-\Lambda \lambda}

    The negative log-likelihood is convex in (α, Λ), so that there is one maximum on α ≥ 1, Λ ≥ 0; it is found to
    about 1e-10 for every lower end. Diffract stops within 1e-4, at a likelihood that is never greater.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> esd = (1 - np.arange(200) / 200) ** (-1 / 2.0)
    >>> alpha, rate, *_ = truncated_power_law_fit(np.minimum(esd, 4.0), 0.0, xmin=1.0)
    >>> bool(1 < alpha < 3), bool(rate > 0)
    (True, True)
    """
    options = {"xmin": xmin, "min_tail": min_tail, "min_values": min_values, "min_spread": min_spread}
    return _fits("truncated_power_law", esd, esd_zero, ("alpha", "lambda"), options)


@kernel(
    expon_lambda=Field(
        long_name="Rate of the exponential tail",
        formula=r"\Lambda = 1 / (\bar\lambda - \lambda_{\min})",
        reference="clauset2009power",
        nan=_NO_FIT,
    ),
    expon_esd_xmin=_lower_end("exponential"),
    expon_ks=_distance("exponential"),
    expon_ks_two_sided=_two_sided("exponential"),
    expon_lambda_error=Field(
        long_name="Standard error of the rate of the exponential tail",
        formula=r"\Lambda / \sqrt n",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    expon_bounded=_bounded("exponential"),
    expon_n_used=_n_used("exponential"),
    expon_n_tail=_n_tail("exponential"),
    version=1,
    workspace=_workspace(400),
    status=tail_status,
    check=partial(powerlaw.check_options, "exponential"),
)
def exponential_fit(
    esd: ArrayLike,
    esd_zero: ArrayLike,
    *,
    xmin: float | None = None,
    xmax: float | None = None,
    min_tail: int = 2,
    min_values: int = MIN_VALUES,
    min_spread: float = MIN_SPREAD,
) -> tuple[Array, ...]:
    r"""Fit an exponential to the upper tail of the ESD by maximum likelihood, in closed form.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    esd_zero : array_like (...,)
        At or below it they count as zero and are not used.
    xmin, xmax, min_tail, min_values, min_spread
        As for :func:`power_law_fit`.

    Returns
    -------
    expon_lambda, expon_esd_xmin, expon_ks, expon_ks_two_sided, expon_lambda_error, expon_bounded, expon_n_used, \
    expon_n_tail : float64 arrays (...,)
        `expon_esd_xmin` in squared units of the weights, `expon_lambda` in one over these.

    Notes
    -----
    .. math:: p(\lambda) = \Lambda e^{-\Lambda (\lambda - \lambda_{\min})}, \quad
        \Lambda = 1 / (\bar\lambda - \lambda_{\min})

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> rate, *_ = exponential_fit(1 - np.log(1 - np.arange(500) / 500) / 3, 0.0, xmin=1.0)
    >>> round(float(rate), 1)
    3.0
    """
    options = {
        "xmin": xmin, "xmax": xmax, "min_tail": min_tail, "min_values": min_values, "min_spread": min_spread
    }  # fmt: skip
    return _fits("exponential", esd, esd_zero, ("lambda",), options)


@kernel(
    lognormal_mu=Field(
        long_name="Location of the log-normal tail",
        formula=r"\mu : p(\lambda) \propto \lambda^{-1} \exp(-(\ln \lambda - \mu)^2 / 2 s^2)",
        reference="clauset2009power",
        nan=_NO_FIT,
    ),
    lognormal_sigma=Field(
        long_name="Width of the log-normal tail",
        formula=r"s : p(\lambda) \propto \lambda^{-1} \exp(-(\ln \lambda - \mu)^2 / 2 s^2)",
        reference="clauset2009power",
        valid_range=(0.0, math.inf),
        nan=_NO_FIT,
    ),
    lognormal_esd_xmin=_lower_end("log-normal"),
    lognormal_ks=_distance("log-normal"),
    lognormal_ks_two_sided=_two_sided("log-normal"),
    lognormal_n_used=_n_used("log-normal"),
    lognormal_n_tail=_n_tail("log-normal"),
    version=1,
    workspace=_workspace(600),
    status=tail_status,
    check=partial(powerlaw.check_options, "lognormal"),
)
def lognormal_fit(
    esd: ArrayLike,
    esd_zero: ArrayLike,
    *,
    xmin: float | None = None,
    min_tail: int = 2,
    min_values: int = MIN_VALUES,
    min_spread: float = MIN_SPREAD,
) -> tuple[Array, ...]:
    r"""Fit the upper part of a log-normal distribution to the upper tail of the ESD by maximum likelihood.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    esd_zero : array_like (...,)
        At or below it they count as zero and are not used.
    xmin, min_tail, min_values, min_spread
        As for :func:`power_law_fit`.

    Returns
    -------
    lognormal_mu, lognormal_sigma, lognormal_esd_xmin, lognormal_ks, lognormal_ks_two_sided, lognormal_n_used, \
    lognormal_n_tail : float64 arrays (...,)
        `lognormal_mu` in logarithms of squared units of the weights.

    Notes
    -----
    .. math:: p(\lambda) \propto \lambda^{-1} \exp(-(\ln \lambda - \mu)^2 / 2 s^2), \quad \lambda \ge \lambda_{\min}

    A normal distribution of ln λ cut off below: its two moments give one equation for the cut. Tails for which it has
    no solution, because they fall more slowly than any log-normal, cannot be chosen.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> from scipy.special import ndtri
    >>> mu, sigma, *_ = lognormal_fit(np.exp(0.5 * ndtri((np.arange(500) + 0.5) / 500)), 0.0, xmin=1e-3)
    >>> round(abs(float(mu)), 2), round(float(sigma), 2)
    (0.0, 0.5)
    """
    options = {"xmin": xmin, "min_tail": min_tail, "min_values": min_values, "min_spread": min_spread}
    mu, sigma, lower, ks, two_sided, *_, n_used, n_tail = _fits("lognormal", esd, esd_zero, ("mu", "sigma"), options)
    return mu, sigma, lower, ks, two_sided, n_used, n_tail
