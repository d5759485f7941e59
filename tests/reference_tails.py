"""Definitions of the heavy-tailed fields, written apart from the package: every tail of a spectrum by itself, in loops.

``TAILS[field](esd, zero)`` is the value for eigenvalues in ascending order, of which those at or below `zero` count as
zero. Power laws and exponentials are in closed form. The other two families are fitted to every tail in float64, one
after another, and the tail that is chosen once more in 30 digits, where the slope of the likelihood is zero.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any, NamedTuple

import mpmath
import numpy as np
from numpy.typing import NDArray
from scipy import optimize, special

__all__ = ["TAILS", "mean_and_skipped"]

Spectrum = NDArray[np.float64]
mp = mpmath.mp.clone()
mp.dps = 30

MIN_VALUES, MIN_SPREAD = 7, 0.03
MOST_TRUNCATED = 200.0  # log-normals that are cut off further above their mean are not told from power laws


class Tail(NamedTuple):
    """Ascending values and where they begin; y = ln(x / xmin) and w = x / xmin − 1 of each."""

    x: list[Any]
    xmin: Any
    y: list[Any]
    w: list[Any]


@dataclass(frozen=True)
class Law:
    """A fitted family: parameters and errors by name, survival and log-density at points (y, w), in units of xmin."""

    parameters: dict[str, Any]
    errors: dict[str, Any]
    survival: Callable[[Any, Any], Any]
    log_density: Callable[[Any, Any], Any]


@dataclass(frozen=True)
class Fit:
    """The best tail of a spectrum, or the reason why there is none as the number of values in it."""

    n_used: float
    n_tail: float
    xmin: float = math.nan
    ks: float = math.nan
    ks_two_sided: float = math.nan
    law: Law | None = None

    def parameter(self, name: str) -> float:
        return math.nan if self.law is None else float(self.law.parameters[name])

    def error(self, name: str) -> float:
        return math.nan if self.law is None else float(self.law.errors[name])


def mean(values: Sequence[Any]) -> Any:
    return mp.fsum(values) / len(values)


def tail_of(values: Sequence[Any], xmin: Any) -> Tail:
    x = sorted(value for value in values if value >= xmin)
    return Tail(x, xmin, [mp.log(value / xmin) for value in x], [value / xmin - 1 for value in x])


# Power law and exponential


def power_law(tail: Tail) -> Law:
    rate = 1 / mean(tail.y)
    return Law(
        {"alpha": 1 + rate},
        {"alpha": rate / mp.sqrt(len(tail.x))},
        lambda y, w: mp.exp(-rate * y),
        lambda y, w: mp.log(rate) - (1 + rate) * y,
    )


def exponential(tail: Tail) -> Law:
    rate = 1 / mean(tail.w)
    return Law(
        {"lambda": rate / tail.xmin},
        {"lambda": rate / tail.xmin / mp.sqrt(len(tail.x))},
        lambda y, w: mp.exp(-rate * w),
        lambda y, w: mp.log(rate) - rate * w,
    )


# Power law with a cut-off: density proportional to exp(−alpha·y − cut·w), alpha ≥ 1, cut ≥ 0


def _points() -> tuple[Spectrum, Spectrum]:
    u = np.arange(-5.0, 6.5, 1 / 40)
    y = np.exp(u - np.exp(-u))
    inside = y < 600
    return y[inside], ((1 + np.exp(-u)) * y / 40)[inside]


_Y, _STEPS = _points()
_W = np.expm1(_Y)


def _means(alpha: float, cut: float) -> tuple[float, float, float]:
    """Return log-normaliser and the means of y and w, by a double-exponential rule over all y."""
    with np.errstate(under="ignore"):
        mass = _STEPS * np.exp(-(alpha - 1) * _Y - cut * _W)
    total = mass.sum()
    return math.log(total), float(mass @ _Y / total), float(mass @ _W / total)


def _cut_off_in_float(y: float, w: float) -> tuple[float, float]:
    """Return exponent and cut-off where the convex negative log-likelihood is smallest; on an edge 1.0 or 0.0."""
    steep = 1 + 1 / y
    if steep > 2 and w >= 1 / (steep - 2):
        return steep, 0.0
    flat = math.exp(optimize.brentq(lambda c: math.log(_means(1.0, math.exp(c))[2] / w), -200, 60, xtol=1e-13))
    if y >= _means(1.0, flat)[1]:
        return 1.0, flat

    def loss(at: NDArray[np.float64]) -> float:
        alpha, cut = 1 + math.exp(at[0]), math.exp(at[1])
        return (alpha - 1) * y + cut * w + _means(alpha, cut)[0]

    start = [math.log(0.5 * (steep - 1)), math.log(0.5 * flat)]
    options = {"xatol": 1e-9, "fatol": 1e-14, "maxiter": 2000, "maxfev": 4000}
    best = optimize.minimize(loss, start, method="Nelder-Mead", options=options).x
    return 1 + math.exp(best[0]), math.exp(best[1])


def _integrals(alpha: Any, cut: Any, powers: Sequence[tuple[int, int]]) -> list[Any]:
    """Return the integrals of y**i·w**j·exp(−(alpha − 1)·y − cut·w)."""
    end = mp.log(1 + 80 / cut)
    if alpha > 1:
        end = min(end, 80 / (alpha - 1))
    pieces = [end * k / 12 for k in range(13)]
    return [
        mp.quad(lambda y: y**i * mp.expm1(y) ** j * mp.exp(-(alpha - 1) * y - cut * mp.expm1(y)), pieces)  # noqa: B023
        for i, j in powers
    ]


def _covariance(alpha: Any, cut: Any) -> tuple[Any, Any, Any, Any, Any]:
    """Return the means of y and w, the variances of both and their covariance."""
    total, y, w, yy, yw, ww = _integrals(alpha, cut, [(0, 0), (1, 0), (0, 1), (2, 0), (1, 1), (0, 2)])
    y, w = y / total, w / total
    return y, w, yy / total - y**2, ww / total - w**2, yw / total - y * w


def truncated_power_law(tail: Tail) -> Law:
    """Fit in float64, then by Newton's steps in 30 digits."""
    y, w, n = mean(tail.y), mean(tail.w), len(tail.x)
    alpha, cut = map(mp.mpf, _cut_off_in_float(float(y), float(w)))
    errors = {"alpha": mp.nan, "lambda": mp.nan}
    if cut == 0:
        plain = power_law(tail)
        return Law(
            {**plain.parameters, "lambda": mp.zero}, {**errors, **plain.errors}, plain.survival, plain.log_density
        )
    for _ in range(8):
        at_y, at_w, var_y, var_w, cov = _covariance(alpha, cut)
        det = var_y * var_w - cov**2
        if alpha == 1:
            step = mp.zero, (at_w - w) / var_w
        else:
            step = ((at_y - y) * var_w - (at_w - w) * cov) / det, ((at_w - w) * var_y - (at_y - y) * cov) / det
        alpha, cut = alpha + step[0], cut + step[1]
        if abs(step[0]) < mp.mpf("1e-20") * alpha and abs(step[1]) < mp.mpf("1e-20") * cut:
            break
    else:
        raise AssertionError("Newton's steps do not end")
    if alpha == 1:
        errors["lambda"] = 1 / mp.sqrt(n * var_w) / tail.xmin
    else:
        errors = {"alpha": mp.sqrt(var_w / det / n), "lambda": mp.sqrt(var_y / det / n) / tail.xmin}
    whole = mp.expint(alpha, cut)
    return Law(
        {"alpha": alpha, "lambda": cut / tail.xmin},
        errors,
        lambda y, w: mp.expint(alpha, cut * (1 + w)) * mp.exp((1 - alpha) * y) / whole,
        lambda y, w: -alpha * y - cut * (1 + w) - mp.log(whole),
    )


def truncated_power_law_quickly(tail: Tail) -> Callable[[Any, Any], float]:
    alpha, cut = _cut_off_in_float(float(mean(tail.y)), float(mean(tail.w)))

    def survival(y: Any, w: Any) -> float:
        if cut == 0.0:
            return math.exp((1 - alpha) * y)
        beyond = _means(alpha, cut * (1 + float(w)))[0] - _means(alpha, cut)[0]
        return math.exp(beyond - (alpha - 1) * y - cut * w)

    return survival


# Log-normal: y is normal with standard deviation sigma, cut off h standard deviations above its mean


def _excess(h: Any) -> Any:
    """Return the mean of a standard normal above h, less h."""
    return mp.npdf(h) / (mp.erfc(h / mp.sqrt(2)) / 2) - h


def _excess_in_float(h: float) -> float:
    return math.sqrt(2 / math.pi) / float(special.erfcx(h / math.sqrt(2))) - h


def _cut_of_lognormal(tail: Tail) -> float | None:
    ratio = float(mean([y**2 for y in tail.y]) / mean(tail.y) ** 2)

    def above(h: float) -> float:
        excess = _excess_in_float(h)
        return (1 - h * excess) / excess**2 - ratio

    return float(optimize.brentq(above, -1e3, MOST_TRUNCATED)) if above(MOST_TRUNCATED) > 1e-9 else None


def lognormal(tail: Tail) -> Law | None:
    start = _cut_of_lognormal(tail)
    if start is None:
        return None
    ratio = mean([y**2 for y in tail.y]) / mean(tail.y) ** 2
    with mp.workdps(50):
        h = mp.findroot(lambda h: (1 - h * _excess(h)) / _excess(h) ** 2 - ratio, start)
        sigma = mean(tail.y) / _excess(h)
        whole = mp.erfc(h / mp.sqrt(2)) / 2
    return Law(
        {"mu": mp.log(tail.xmin) - h * sigma, "sigma": sigma},
        {},
        lambda y, w: mp.erfc((h + y / sigma) / mp.sqrt(2)) / 2 / whole,
        lambda y, w: mp.log(mp.npdf(h + y / sigma) / sigma / whole) - y,
    )


def lognormal_quickly(tail: Tail) -> Callable[[Any, Any], float] | None:
    h = _cut_of_lognormal(tail)
    if h is None:
        return None
    sigma = float(mean(tail.y)) / _excess_in_float(h)
    return lambda y, w: math.exp(special.log_ndtr(-h - float(y) / sigma) - special.log_ndtr(-h))


# The choice of the lower end: Clauset, Shalizi and Newman (2009)


def distances(tail: Tail, survival: Callable[[Any, Any], Any]) -> tuple[Any, Any]:
    """Return the greatest difference from the share strictly below each value, and from that at or below it too."""
    n, one_sided, two_sided = len(tail.x), mp.zero, mp.zero
    for value, y, w in zip(tail.x, tail.y, tail.w, strict=True):
        model = 1 - survival(y, w)
        below, upto = sum(x < value for x in tail.x), sum(x <= value for x in tail.x)
        one_sided = max(one_sided, abs(model - mp.mpf(below) / n))
        two_sided = max(two_sided, abs(model - mp.mpf(below) / n), abs(mp.mpf(upto) / n - model))
    return one_sided, two_sided


FAMILIES: dict[str, tuple[Callable[[Tail], Law | None], Callable[[Tail], Any]]] = {
    "power_law": (power_law, lambda tail: power_law(tail).survival),
    "exponential": (exponential, lambda tail: exponential(tail).survival),
    "truncated_power_law": (truncated_power_law, truncated_power_law_quickly),
    "lognormal": (lognormal, lognormal_quickly),
}
"""For each family the fit of one tail, and one that is quick and gives only the survival, None where there is none."""


def best_fit(esd: Spectrum, zero: float, family: str) -> Fit:
    return _best_fit(tuple(map(float, esd)), float(zero), family)


@cache
def _best_fit(esd: tuple[float, ...], zero: float, family: str) -> Fit:
    """Return the tail of the smallest distance, the first of equals, of all that begin at a value but the largest."""
    if not all(map(math.isfinite, esd)):
        return Fit(math.nan, math.nan)
    used = [mp.mpf(x) for x in esd if x > zero]
    if len(used) < 2 or max(used) <= (1 + mp.mpf(MIN_SPREAD)) * min(used):
        return Fit(len(used), 0)
    if len(used) < MIN_VALUES:
        return Fit(len(used), math.nan)
    fitted, quickly = FAMILIES[family]
    best: tuple[Any, Tail] | None = None
    for xmin in sorted(set(used))[:-1]:
        tail = tail_of(used, xmin)
        survival = quickly(tail)
        if survival is not None:
            distance = distances(tail, survival)[0]
            if best is None or distance < best[0]:
                best = distance, tail
    if best is None:
        return Fit(len(used), len(used))
    tail = best[1]
    law = fitted(tail)
    assert law is not None
    ks, two_sided = distances(tail, law.survival)
    return Fit(len(used), len(tail.x), float(tail.xmin), float(ks), float(two_sided), law)


# Power law against the others on its own tail: Vuong (1989), Wilks where one family holds the other


def ratio(esd: Spectrum, zero: float, family: str) -> tuple[float, float]:
    return _ratio(tuple(map(float, esd)), float(zero), family)


@cache
def _ratio(esd: tuple[float, ...], zero: float, family: str) -> tuple[float, float]:
    """Return the log-likelihood ratio and its p-value."""
    mine = _best_fit(esd, zero, "power_law")
    if mine.law is None:
        return math.nan, math.nan
    tail = tail_of([mp.mpf(x) for x in esd], mp.mpf(mine.xmin))
    rival = FAMILIES[family][0](tail)
    if rival is None:
        return math.nan, math.nan
    terms = [mine.law.log_density(y, w) - rival.log_density(y, w) for y, w in zip(tail.y, tail.w, strict=True)]
    total, n = mp.fsum(terms), len(terms)
    if family == "truncated_power_law":
        return float(total), float(mp.erfc(mp.sqrt(abs(total))))
    spread = mp.sqrt(mean([term**2 for term in terms]) - mean(terms) ** 2)
    return float(total), float(mp.erfc(abs(total) / mp.sqrt(2 * n) / spread))


# What follows from the fits


def alpha_norm(esd: Spectrum, alpha: float) -> float:
    if math.isnan(alpha):
        return math.nan
    total = float(mp.fsum(mp.mpf(float(x)) ** mp.mpf(alpha) for x in esd))
    return total if 0 < total < math.inf else math.nan


def concentration(esd: Spectrum, xmin: float) -> float:
    return math.nan if math.isnan(xmin) else sum(x >= xmin for x in esd.tolist()) / len(esd)


def presence(esd: Spectrum, xmin: float) -> float:
    low, high = float(esd[0]), float(esd[-1])
    return (high - xmin) / (high - low) if high > low else math.nan


def determinant(esd: Spectrum, zero: float) -> tuple[float, float]:
    """Return the number of the largest eigenvalues whose product in units of the mean is below one, and the least."""
    kept = [x if x > zero else 0.0 for x in esd.tolist()]
    if not np.isfinite(esd).all() or not kept[-1] > (1 + MIN_SPREAD) * kept[0]:
        return math.nan, math.nan
    average, total = mean([mp.mpf(x) for x in kept]), mp.zero
    for k, value in enumerate(reversed(kept), 1):
        total = total + mp.log(mp.mpf(value) / average) if value > 0 else mp.ninf
        if total < 0:
            return float(k), value
    raise AssertionError("the geometric mean is above the arithmetic one")


def _numbers(short: str, family: str, parameters: Sequence[str]) -> dict[str, Callable[[Spectrum, float], float]]:
    def of(get: Callable[[Fit], float]) -> Callable[[Spectrum, float], float]:
        return lambda esd, zero: get(best_fit(esd, zero, family))

    found = {
        f"{short}_esd_xmin": of(lambda fit: fit.xmin),
        f"{short}_ks": of(lambda fit: fit.ks),
        f"{short}_ks_two_sided": of(lambda fit: fit.ks_two_sided),
        f"{short}_n_used": of(lambda fit: fit.n_used),
        f"{short}_n_tail": of(lambda fit: fit.n_tail),
    }
    for name in parameters:
        found[f"{short}_{name}"] = of(lambda fit, name=name: fit.parameter(name))  # type: ignore[misc]
        if family != "lognormal":
            found[f"{short}_{name}_error"] = of(lambda fit, name=name: fit.error(name))  # type: ignore[misc]
    if family != "lognormal":
        found[f"{short}_concentration"] = lambda esd, zero: concentration(esd, best_fit(esd, zero, family).xmin)
        found[f"{short}_presence"] = lambda esd, zero: presence(esd, best_fit(esd, zero, family).xmin)
    if "lambda" in parameters:
        found[f"{short}_scale"] = lambda esd, zero: float(esd[-1]) * best_fit(esd, zero, family).parameter("lambda")
    if "alpha" in parameters:
        found[f"{short}_alpha_norm"] = lambda esd, zero: alpha_norm(esd, best_fit(esd, zero, family).parameter("alpha"))
    return found


def _alpha_weighted(esd: Spectrum, zero: float) -> float:
    alpha = best_fit(esd, zero, "power_law").parameter("alpha")
    return math.nan if math.isnan(alpha) else float(alpha * mp.log10(float(esd[-1])))


TAILS: dict[str, Callable[[Spectrum, float], float]] = {
    **_numbers("pl", "power_law", ["alpha"]),
    **_numbers("tpl", "truncated_power_law", ["alpha", "lambda"]),
    **_numbers("expon", "exponential", ["lambda"]),
    **_numbers("lognormal", "lognormal", ["mu", "sigma"]),
    "pl_alpha_weighted": _alpha_weighted,
    "detx_num": lambda esd, zero: determinant(esd, zero)[0],
    "detx_esd_xmin": lambda esd, zero: determinant(esd, zero)[1],
    "pl_expon_ratio": lambda esd, zero: ratio(esd, zero, "exponential")[0],
    "pl_expon_p_value": lambda esd, zero: ratio(esd, zero, "exponential")[1],
    "pl_lognormal_ratio": lambda esd, zero: ratio(esd, zero, "lognormal")[0],
    "pl_lognormal_p_value": lambda esd, zero: ratio(esd, zero, "lognormal")[1],
    "pl_tpl_ratio": lambda esd, zero: ratio(esd, zero, "truncated_power_law")[0],
    "pl_tpl_p_value": lambda esd, zero: ratio(esd, zero, "truncated_power_law")[1],
}


def mean_and_skipped(values: Sequence[float]) -> tuple[float, int]:
    """Return the mean of what is not NaN, NaN of nothing, and how many are."""
    known = [value for value in values if not math.isnan(value)]
    return float(mean([mp.mpf(value) for value in known])) if known else math.nan, len(values) - len(known)
