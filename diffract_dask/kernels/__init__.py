"""Built-in kernels, one file per family, and those that other packages contribute.

A kernel is a plain function on arrays, so each can be called as it is:

>>> from diffract_dask.kernels import stable_rank
>>> float(stable_rank(2.0, 1.0))
4.0
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable
from importlib.metadata import entry_points
from typing import Any

from diffract_dask.errors import KernelError
from diffract_dask.kernel import Kernel, Registry
from diffract_dask.kernels.entries import entry_statistics
from diffract_dask.kernels.heavy_tailed import (
    exponential_fit,
    lognormal_fit,
    power_law_fit,
    truncated_power_law_fit,
)
from diffract_dask.kernels.norms import (
    l2_norm,
    log_norm,
    log_prod_frob_norm,
    log_prod_spectral_norm,
    log_spectral_norm,
    nuclear_norm,
    param_norm,
    schatten_4_norm,
)
from diffract_dask.kernels.null import (
    esd_rand,
    esd_rand_max,
    esd_rand_min,
    max_weights_rand_sval,
    min_weights_rand_sval,
    rand_replicas,
    rand_seed,
    rand_singular_values,
    rand_singular_vectors,
    weights_rand,
)
from diffract_dask.kernels.quality import (
    model_pl_alpha,
    model_pl_alpha_norm,
    model_pl_alpha_weighted,
    model_tpl_alpha_norm,
    pl_alpha_norm,
    pl_alpha_weighted,
    tpl_alpha_norm,
)
from diffract_dask.kernels.random_matrix import (
    marchenko_pastur_fit,
    mp_concentration,
    mp_ks,
    mp_num_spikes,
    mp_presence,
    mp_soft_rank,
    mp_sval_max,
    tw_esd_bound,
    tw_num_spikes,
    w1_rand_distance,
)
from diffract_dask.kernels.ranks import effective_rank, hard_rank, numerical_rank, participation_ratio, stable_rank
from diffract_dask.kernels.shape import aspect_ratio, greater_dim, lower_dim
from diffract_dask.kernels.spectral import (
    esd,
    esd_max,
    esd_min,
    max_weights_sval,
    min_weights_sval,
    singular_values,
    singular_vectors,
)
from diffract_dask.kernels.tail_summaries import (
    detx,
    expon_concentration,
    expon_presence,
    expon_scale,
    pl_concentration,
    pl_presence,
    tpl_concentration,
    tpl_presence,
    tpl_scale,
)
from diffract_dask.kernels.tail_tests import (
    expon_p_value,
    pl_p_value,
    power_law_comparison,
    tpl_p_value,
)

__all__ = [
    "BUILTIN",
    "ENTRY_POINTS",
    "aspect_ratio",
    "default_registry",
    "detx",
    "effective_rank",
    "entry_statistics",
    "esd",
    "esd_max",
    "esd_min",
    "esd_rand",
    "esd_rand_max",
    "esd_rand_min",
    "expon_concentration",
    "expon_p_value",
    "expon_presence",
    "expon_scale",
    "exponential_fit",
    "greater_dim",
    "hard_rank",
    "installed",
    "l2_norm",
    "log_norm",
    "log_prod_frob_norm",
    "log_prod_spectral_norm",
    "log_spectral_norm",
    "lognormal_fit",
    "lower_dim",
    "marchenko_pastur_fit",
    "max_weights_rand_sval",
    "max_weights_sval",
    "min_weights_rand_sval",
    "min_weights_sval",
    "model_pl_alpha",
    "model_pl_alpha_norm",
    "model_pl_alpha_weighted",
    "model_tpl_alpha_norm",
    "mp_concentration",
    "mp_ks",
    "mp_num_spikes",
    "mp_presence",
    "mp_soft_rank",
    "mp_sval_max",
    "nuclear_norm",
    "numerical_rank",
    "param_norm",
    "participation_ratio",
    "pl_alpha_norm",
    "pl_alpha_weighted",
    "pl_concentration",
    "pl_p_value",
    "pl_presence",
    "power_law_comparison",
    "power_law_fit",
    "rand_replicas",
    "rand_seed",
    "rand_singular_values",
    "rand_singular_vectors",
    "schatten_4_norm",
    "singular_values",
    "singular_vectors",
    "stable_rank",
    "tpl_alpha_norm",
    "tpl_concentration",
    "tpl_p_value",
    "tpl_presence",
    "tpl_scale",
    "truncated_power_law_fit",
    "tw_esd_bound",
    "tw_num_spikes",
    "w1_rand_distance",
    "weights_rand",
]

BUILTIN: tuple[Callable[..., Any], ...] = (
    greater_dim,
    lower_dim,
    aspect_ratio,
    entry_statistics,
    singular_values,
    singular_vectors,
    max_weights_sval,
    min_weights_sval,
    esd,
    esd_max,
    esd_min,
    nuclear_norm,
    l2_norm,
    effective_rank,
    stable_rank,
    schatten_4_norm,
    participation_ratio,
    hard_rank,
    rand_seed,
    weights_rand,
    rand_singular_values,
    rand_singular_vectors,
    max_weights_rand_sval,
    min_weights_rand_sval,
    esd_rand,
    esd_rand_max,
    esd_rand_min,
    rand_replicas,
    marchenko_pastur_fit,
    mp_sval_max,
    mp_ks,
    mp_concentration,
    mp_presence,
    mp_num_spikes,
    mp_soft_rank,
    tw_esd_bound,
    tw_num_spikes,
    w1_rand_distance,
    log_norm,
    log_spectral_norm,
    log_prod_frob_norm,
    log_prod_spectral_norm,
    param_norm,
    numerical_rank,
    power_law_fit,
    truncated_power_law_fit,
    exponential_fit,
    lognormal_fit,
    pl_concentration,
    pl_presence,
    tpl_concentration,
    tpl_presence,
    tpl_scale,
    expon_concentration,
    expon_presence,
    expon_scale,
    detx,
    pl_p_value,
    tpl_p_value,
    expon_p_value,
    power_law_comparison,
    pl_alpha_norm,
    tpl_alpha_norm,
    pl_alpha_weighted,
    model_pl_alpha,
    model_pl_alpha_norm,
    model_pl_alpha_weighted,
    model_tpl_alpha_norm,
)
"""The package's own kernels, each after those it depends on."""

ENTRY_POINTS = "diffract_dask.kernels"
"""Entry-point group of other packages' kernels: a decorated function, or an iterable of them."""


def installed() -> Iterable[tuple[str, Kernel | Callable[..., Any]]]:
    """Yield (entry-point name, kernel) of the kernels that installed packages contribute.

    An entry point that cannot be imported is left out with a warning.
    """
    for point in sorted(entry_points(group=ENTRY_POINTS), key=lambda point: point.name):
        try:
            loaded = point.load()
        except Exception as error:  # whatever another package does on import must not stop this one
            warnings.warn(
                f"kernels of the entry point {point.name!r} ({point.value}) are not available: "
                f"{type(error).__name__}: {error}",
                stacklevel=2,
            )
            continue
        for item in (loaded,) if callable(loaded) or isinstance(loaded, Kernel) else loaded:
            yield point.name, item


def default_registry() -> Registry:
    """Return a registry of the built-in and the installed kernels.

    A contributed kernel that cannot be registered (its name is taken, its inputs do not exist) is left out with
    a warning.
    """
    registry = Registry(BUILTIN)
    for name, item in installed():
        try:
            registry.add(item)
        except KernelError as error:
            warnings.warn(f"a kernel of the entry point {name!r} is left out: {error}", stacklevel=2)
    return registry
