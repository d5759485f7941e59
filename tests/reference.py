"""Definitions of the fields, written apart from the package: one matrix at a time, slow, in 50 digits where it helps.

``SLICE[field](w)`` is the value for one float64 matrix, ``MODEL[field](matrices)`` that for the slices of a model.
Singular values come from LAPACK's dense routine on the matrix scaled to order one; everything after them, and the
moments, are in mpmath.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import mpmath
import numpy as np
from numpy.typing import NDArray

__all__ = ["MODEL", "SLICE", "svals"]

Matrix = NDArray[np.float64]
mp = mpmath.mp.clone()
mp.dps = 50


def svals(w: Matrix) -> Matrix:
    """Return the singular values, ascending; NaN if an entry is not finite."""
    k = min(w.shape)
    if not np.isfinite(w).all():
        return np.full(k, np.nan)
    exponent = math.frexp(float(np.abs(w).max()))[1]
    return np.ldexp(np.linalg.svd(np.ldexp(w, -exponent), compute_uv=False)[::-1], exponent)


def _finite(w: Matrix) -> list[Any]:
    return [mp.mpf(float(x)) for x in w.ravel() if math.isfinite(x)]


def _moment(w: Matrix, order: int) -> Any:
    x = _finite(w)
    mean = mp.fsum(x) / len(x)
    return mp.fsum((value - mean) ** order for value in x) / len(x)


def _kurtosis(w: Matrix) -> float:
    variance = _moment(w, 2)
    return float(_moment(w, 4) / variance**2 - 3) if variance > 0 else math.nan


def _frob(w: Matrix) -> Any:
    return mp.sqrt(mp.fsum(x**2 for x in _finite(w))) if np.isfinite(w).all() else mp.nan


def _mp_svals(w: Matrix) -> list[Any]:
    return [mp.mpf(float(s)) for s in svals(w)]


def _effective_rank(w: Matrix) -> float:
    s = _mp_svals(w)
    total = mp.fsum(s)
    if not total > 0:
        return math.nan
    return float(mp.exp(-mp.fsum(x / total * mp.log(x / total) for x in s if x > 0)))


def _stable_rank(w: Matrix) -> float:
    greatest = _mp_svals(w)[-1]
    return float((_frob(w) / greatest) ** 2) if greatest > 0 else math.nan


def _hard_rank(w: Matrix) -> float:
    s = _mp_svals(w)
    return math.nan if mp.isnan(s[-1]) else float(sum(x**2 > mp.mpf(1e-5) * s[-1] ** 2 for x in s))


def _esd(w: Matrix) -> Matrix:
    return np.array([float(s**2 / max(w.shape)) for s in _mp_svals(w)])


SLICE: dict[str, Callable[[Matrix], Any]] = {
    "greater_dim": lambda w: max(w.shape),
    "lower_dim": lambda w: min(w.shape),
    "aspect_ratio": lambda w: max(w.shape) / min(w.shape),
    "frob_norm": lambda w: float(_frob(w)),
    "weights_mean": lambda w: float(mp.fsum(_finite(w)) / len(_finite(w))),
    "weights_std": lambda w: float(mp.sqrt(_moment(w, 2))),
    "weights_min": lambda w: min(x for x in w.ravel().tolist() if math.isfinite(x)),
    "weights_max": lambda w: max(x for x in w.ravel().tolist() if math.isfinite(x)),
    "weights_absmax": lambda w: max(abs(x) for x in w.ravel().tolist() if math.isfinite(x)),
    "zero_fraction": lambda w: sum(x == 0 for x in _finite(w)) / len(_finite(w)),
    "nonfinite_fraction": lambda w: 1 - len(_finite(w)) / w.size,
    "weights_kurtosis": _kurtosis,
    "weights_svals": svals,
    "max_weights_sval": lambda w: svals(w)[-1],
    "min_weights_sval": lambda w: svals(w)[0],
    "esd": _esd,
    "esd_max": lambda w: _esd(w)[-1],
    "esd_min": lambda w: _esd(w)[0],
    "nuclear_norm": lambda w: float(mp.fsum(_mp_svals(w))),
    "l2_norm": lambda w: svals(w)[-1],
    "effective_rank": _effective_rank,
    "stable_rank": _stable_rank,
    "hard_rank": _hard_rank,
}


def _logs(norms: Sequence[Any]) -> list[Any]:
    return [mp.log10(x) for x in norms if x > 0]


def _mean(values: Sequence[Any]) -> float:
    return float(mp.fsum(values) / len(values)) if values else math.nan


def _sum(values: Sequence[Any]) -> float:
    return float(mp.fsum(values)) if values else math.nan


MODEL: dict[str, Callable[[Sequence[Matrix]], float]] = {
    "log_norm": lambda model: _mean([2 * x for x in _logs([_frob(w) for w in model])]),
    "log_spectral_norm": lambda model: _mean([2 * x for x in _logs([_mp_svals(w)[-1] for w in model])]),
    "log_prod_frob_norm": lambda model: _sum(_logs([_frob(w) for w in model])),
    "log_prod_spectral_norm": lambda model: _sum(_logs([_mp_svals(w)[-1] for w in model])),
    "param_norm": lambda model: _sum([_frob(w) ** 2 for w in model]),
}
