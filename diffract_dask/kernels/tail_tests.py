"""How good the fits are: bootstrap p-values of their distances, and comparisons of families by likelihood."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import ArrayLike, NDArray

from diffract_dask import powerlaw
from diffract_dask.fields import Field
from diffract_dask.kernel import kernel
from diffract_dask.powerlaw import expint

__all__ = ["expon_p_value", "pl_p_value", "power_law_comparison", "tpl_p_value"]

Array = NDArray[np.float64]

_NO_FIT = "there is no fit, or the weights hold NaN or infinity"
_BOUNDED = f"{_NO_FIT}; or the fit has an upper end"
_NO_RIVAL = f"{_BOUNDED}; or the likelihood of the rival has no maximum"


def _each(function: Callable[..., float], *inputs: ArrayLike) -> Array:
    """Return `function` of the numbers of one slice after another."""
    arrays = np.broadcast_arrays(*(np.asarray(one, np.float64) for one in inputs))
    values = [function(*numbers) for numbers in zip(*(one.ravel().tolist() for one in arrays), strict=True)]
    return np.array(values, np.float64).reshape(arrays[0].shape)


def _replicas(n: int, rows: int, cols: int, itemsize: int) -> int:
    return (96 << 20) + 64 * n


def _scale_free_p_value(
    family: str, ks: ArrayLike, n_used: ArrayLike, n_tail: ArrayLike, bounded: ArrayLike, replicas: int, seed: int
) -> Array:
    def p_value(distance: float, used: float, tail: float, has_end: float) -> float:
        if math.isnan(distance) or has_end:
            return math.nan
        return powerlaw.p_value_of_distance(
            family, (1.0, math.inf), distance, int(tail), int(used), replicas=replicas, seed=seed
        )

    return _each(p_value, ks, n_used, n_tail, bounded)


@kernel(
    pl_p_value=Field(
        long_name="Bootstrap p-value of the power-law fit",
        formula=r"P(D^* \ge D)",
        reference="clauset2009power",
        valid_range=(0.0, 1.0),
        nan=_BOUNDED,
    ),
    version=2,
    workspace=_replicas,
    check=powerlaw.check_replicas,
)
def pl_p_value(
    pl_ks: ArrayLike,
    pl_n_used: ArrayLike,
    pl_n_tail: ArrayLike,
    pl_bounded: ArrayLike,
    *,
    replicas: int = 2500,
    seed: int = 42,
) -> Array:
    r"""Probability of a distance at least as large as that of the power-law fit, if the fit were the truth.

    Parameters
    ----------
    pl_ks : array_like (...,)
        Distance of the fit.
    pl_n_used, pl_n_tail : array_like (...,)
        Numbers of eigenvalues that are used and that lie in the tail.
    pl_bounded : array_like (...,)
        Whether the fit has an upper end `xmax`: there is no p-value then, for replicas are drawn without one.
    replicas : int
        Samples drawn from the fit and fitted anew above the same lower end; 2500 give two decimals.
    seed : int
        Of the random numbers, which are the same for every slice.

    Returns
    -------
    float64 array (...,)
        Small values speak against the fit.

    Notes
    -----
    .. math:: P(D^* \ge D)

    The lower end stays where it is in every replica, as in Diffract; ``powerlaw.bootstrap_p_value`` can also choose it
    anew each time, as Clauset et al. do, which gives smaller values.

    The distances of replicas depend on their numbers of values alone, not on the fitted parameters.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> bool(0.5 < pl_p_value(0.03, 100, 80, False, replicas=200) <= 1.0)
    True
    """
    return _scale_free_p_value("power_law", pl_ks, pl_n_used, pl_n_tail, pl_bounded, replicas, seed)


@kernel(
    expon_p_value=Field(
        long_name="Bootstrap p-value of the exponential fit",
        formula=r"P(D^* \ge D)",
        reference="clauset2009power",
        valid_range=(0.0, 1.0),
        nan=_BOUNDED,
    ),
    version=2,
    workspace=_replicas,
    check=powerlaw.check_replicas,
)
def expon_p_value(
    expon_ks: ArrayLike,
    expon_n_used: ArrayLike,
    expon_n_tail: ArrayLike,
    expon_bounded: ArrayLike,
    *,
    replicas: int = 2500,
    seed: int = 42,
) -> Array:
    r"""Probability of a distance at least as large as that of the exponential fit, if the fit were the truth.

    Parameters
    ----------
    expon_ks : array_like (...,)
        Distance of the fit.
    expon_n_used, expon_n_tail : array_like (...,)
        Numbers of eigenvalues that are used and that lie in the tail.
    expon_bounded : array_like (...,)
        Whether the fit has an upper end `xmax`: there is no p-value then, for replicas are drawn without one.
    replicas : int
        Samples drawn from the fit and fitted anew above the same lower end; 2500 give two decimals.
    seed : int
        Of the random numbers, which are the same for every slice.

    Returns
    -------
    float64 array (...,)
        Small values speak against the fit.

    Notes
    -----
    .. math:: P(D^* \ge D)

    The lower end stays where it is in every replica, as in Diffract; ``powerlaw.bootstrap_p_value`` can also choose it
    anew each time, as Clauset et al. do, which gives smaller values.

    The distances of replicas depend on their numbers of values alone, not on the fitted parameters.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> bool(0.5 < expon_p_value(0.03, 100, 80, False, replicas=200) <= 1.0)
    True
    """
    return _scale_free_p_value("exponential", expon_ks, expon_n_used, expon_n_tail, expon_bounded, replicas, seed)


@kernel(
    tpl_p_value=Field(
        long_name="Bootstrap p-value of the truncated power-law fit",
        formula=r"P(D^* \ge D)",
        reference="clauset2009power",
        valid_range=(0.0, 1.0),
        nan=_NO_FIT,
    ),
    version=1,
    workspace=_replicas,
    check=powerlaw.check_replicas,
)
def tpl_p_value(
    tpl_ks: ArrayLike,
    tpl_alpha: ArrayLike,
    tpl_lambda: ArrayLike,
    tpl_esd_xmin: ArrayLike,
    tpl_n_used: ArrayLike,
    tpl_n_tail: ArrayLike,
    *,
    replicas: int = 2500,
    seed: int = 42,
) -> Array:
    r"""Probability of a distance at least as large as that of the truncated power-law fit, if the fit were the truth.

    Parameters
    ----------
    tpl_ks : array_like (...,)
        Distance of the fit.
    tpl_alpha, tpl_lambda, tpl_esd_xmin : array_like (...,)
        The fit.
    tpl_n_used, tpl_n_tail : array_like (...,)
        Numbers of eigenvalues that are used and that lie in the tail.
    replicas : int
        Samples drawn from the fit and fitted anew above the same lower end; 2500 give two decimals.
    seed : int
        Of the random numbers, which are the same for every slice.

    Returns
    -------
    float64 array (...,)
        Small values speak against the fit.

    Notes
    -----
    .. math:: P(D^* \ge D)

    The lower end stays where it is in every replica, as in Diffract; ``powerlaw.bootstrap_p_value`` can also choose it
    anew each time, as Clauset et al. do, which gives smaller values.

    References
    ----------
    clauset2009power

    Examples
    --------
    >>> bool(0.5 < tpl_p_value(0.03, 2.5, 0.0, 1.0, 100, 80, replicas=200) <= 1.0)
    True
    """

    def p_value(ks: float, alpha: float, rate: float, xmin: float, n_used: float, n_tail: float) -> float:
        if math.isnan(ks):
            return math.nan
        shapes = (alpha, rate * xmin, float(expint.log_scaled_expint(alpha, rate * xmin)))
        return powerlaw.p_value_of_distance(
            "truncated_power_law", shapes, ks, int(n_tail), int(n_used), replicas=replicas, seed=seed
        )

    return _each(p_value, tpl_ks, tpl_alpha, tpl_lambda, tpl_esd_xmin, tpl_n_used, tpl_n_tail)


_RIVALS = ("exponential", "lognormal", "truncated_power_law")


def _ratio(rival: str) -> Field:
    return Field(
        long_name=f"Log-likelihood ratio of power law and {rival}",
        formula=r"R = \sum_i [\ln p_1(\lambda_i) - \ln p_2(\lambda_i)]",
        reference="vuong1989likelihood",
        nan=_NO_RIVAL,
    )


def _ratio_p_value(rival: str, formula: str = r"\mathrm{erfc}(|R| / \sqrt{2 n} s)") -> Field:
    return Field(
        long_name=f"p-value of the comparison of power law and {rival}",
        formula=formula,
        reference="vuong1989likelihood",
        valid_range=(0.0, 1.0),
        nan=_NO_RIVAL,
    )


def _comparison_workspace(n: int, rows: int, cols: int, itemsize: int) -> int:
    return (24 << 20) + 1200 * min(rows, cols) + 64 * n


@kernel(
    pl_expon_ratio=_ratio("exponential"),
    pl_expon_p_value=_ratio_p_value("exponential"),
    pl_lognormal_ratio=_ratio("log-normal"),
    pl_lognormal_p_value=_ratio_p_value("log-normal"),
    pl_tpl_ratio=_ratio("truncated power law"),
    pl_tpl_p_value=_ratio_p_value("truncated power law", r"P(\chi^2_1 > 2 |R|)"),
    version=3,
    workspace=_comparison_workspace,
)
def power_law_comparison(
    esd: ArrayLike, esd_zero: ArrayLike, pl_esd_xmin: ArrayLike, pl_bounded: ArrayLike
) -> tuple[Array, ...]:
    r"""Compare the power law with other families on its own tail, by their likelihoods.

    Parameters
    ----------
    esd : array_like (..., k)
        Eigenvalues.
    esd_zero : array_like (...,)
        At or below it they count as zero and are not used.
    pl_esd_xmin : array_like (...,)
        Lower end of the power-law tail.
    pl_bounded : array_like (...,)
        Whether the power law has an upper end `xmax`: the rivals have none, so there is no comparison then.

    Returns
    -------
    pl_expon_ratio, pl_expon_p_value, pl_lognormal_ratio, pl_lognormal_p_value, pl_tpl_ratio, pl_tpl_p_value : \
    float64 arrays (...,)
        A positive ratio says that the power law is the more likely one, a small p-value that the sign of the ratio
        is not due to chance. The truncated power law holds the power law as a special case: its ratio is never
        positive, and the p-value is that of Wilks' theorem.

    Notes
    -----
    .. math:: R = \sum_i [\ln p_1(\lambda_i) - \ln p_2(\lambda_i)], \quad p = \mathrm{erfc}(|R| / \sqrt{2 n} s)

    with s the standard deviation of the terms. A log-normal tail that falls as slowly as the power law has no maximum
    of its likelihood: then its ratio is NaN.

    References
    ----------
    vuong1989likelihood, clauset2009power

    Examples
    --------
    >>> ratio, p_value, *_ = power_law_comparison((1 - np.arange(200) / 200) ** (-1 / 2.0), 0.0, 1.0, False)
    >>> bool(ratio > 0), bool(p_value < 0.05)
    (True, True)
    """
    spectra_ = np.asarray(esd, np.float64)
    lead = spectra_.shape[:-1]
    of_slices = (pl_esd_xmin, esd_zero, pl_bounded)
    lower, zeros, ends = (np.broadcast_to(np.asarray(one, np.float64), lead).ravel() for one in of_slices)
    table = np.full((len(lower), 2 * len(_RIVALS)), np.nan)
    whole_spectra = spectra_.reshape(-1, spectra_.shape[-1])
    for row, whole, xmin, zero, has_end in zip(table, whole_spectra, lower, zeros, ends, strict=True):
        if math.isnan(xmin) or has_end:
            continue
        spectrum = whole[whole > zero]
        mine = powerlaw.fit(spectrum, xmin=float(xmin))
        for i, family in enumerate(_RIVALS):
            rival = powerlaw.fit(spectrum, family, xmin=float(xmin))
            found = powerlaw.compare(spectrum, mine, rival, nested=family == "truncated_power_law")
            row[2 * i : 2 * i + 2] = found.log_ratio, found.p_value
    return tuple(np.array(table[:, i]).reshape(lead) for i in range(table.shape[1]))
