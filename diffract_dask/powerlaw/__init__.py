"""Heavy-tailed fits of a sample: power law, power law with exponential cut-off, exponential and log-normal.

Each family is fitted by maximum likelihood to the part of the sample above a lower end xmin. Unless that is given, it
is the value for which the fit has the smallest Kolmogorov–Smirnov distance (Clauset, Shalizi and Newman 2009). All
values are candidates, and none is left out that could be the best one; see :mod:`diffract_dask.powerlaw.tails`.
"""

from __future__ import annotations

from diffract_dask.powerlaw.bootstrap import bootstrap_p_value, check_replicas, p_value_of_distance
from diffract_dask.powerlaw.fits import (
    PARAMETERS,
    Comparison,
    TailFit,
    check_options,
    compare,
    fit,
    fit_discrete,
    log_density,
)

__all__ = [
    "PARAMETERS",
    "Comparison",
    "TailFit",
    "bootstrap_p_value",
    "check_options",
    "check_replicas",
    "compare",
    "fit",
    "fit_discrete",
    "log_density",
    "p_value_of_distance",
]
