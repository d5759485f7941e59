"""All upper tails of a sample at once: their sufficient statistics, and the one that a family of densities fits best.

The tail at m = x[c] of a sorted sample x holds x[c:]. Its points are taken as y = ln(x / m) and w = x / m − 1. Sums
over a tail are built up from the gaps between neighbours, all of one sign, so that nothing cancels: neither for values
that differ in the last digits nor for samples that span a hundred decades.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Best", "Tails", "distances", "smallest_distance", "tails_of"]

Array = NDArray[np.float64]
Index = NDArray[np.intp]
Survival = Callable[[Index, Array, Array], Array]
"""``(k, y, w)`` to the probability beyond a point, for the points of the tails ``start[k]``; all of one length."""

_SLACK = 1.0 + 1e-12  # bounds and distances of the same tail may differ by rounding
_RANKS = 8  # points of each tail that give its first bound
_BLOCK = 1 << 16  # points that are worked on at a time
_LARGEST = 960  # binary exponent of the largest values whose sums cannot overflow
_DIRECT = 1 << 13  # so many points are done at once rather than bounded first


@dataclass(frozen=True)
class Tails:
    """A sorted sample and, for each of its tails, what the fits need.

    Attributes
    ----------
    x : (n,) array
        Positive and ascending, divided by ``2**exponent``, which is 1 unless the values are huge.
    exponent : int
    depth : (n,) array
        ln(x[-1] / x).
    first, last : (n,) int arrays
        First and last position of each point's value.
    start : (c,) int array
        First position of each tail.
    base, base_depth : (c,) arrays
        Where each tail begins, as `x` and as `depth`.
    mean_y, mean_yy, mean_w : (c,) arrays
        Means of y, y² and w over each tail.
    """

    x: Array
    exponent: int
    depth: Array
    first: Index
    last: Index
    start: Index
    base: Array
    base_depth: Array
    mean_y: Array
    mean_yy: Array
    mean_w: Array

    @property
    def sizes(self) -> Index:
        """Number of points of each tail."""
        return len(self.x) - self.start

    def take(self, chosen: NDArray[np.bool_] | Index) -> Tails:
        """Return the same sample with some of the tails only."""
        names = ("start", "base", "base_depth", "mean_y", "mean_yy", "mean_w")
        return replace(self, **{name: getattr(self, name)[chosen] for name in names})

    def points(self, k: int) -> tuple[Array, Array]:
        """Return y and w of the points of the tail number `k`."""
        c = self.start[k]
        return self.base_depth[k] - self.depth[c:], (self.x[c:] - self.base[k]) / self.base[k]


class Best(NamedTuple):
    """The tail with the smallest distance (the first of equals), and that distance."""

    k: int
    distance: float


def tails_of(values: Array, xmin: float | None = None) -> Tails:
    """Return the tails of a sample of positive finite numbers, in any order.

    There is one at every distinct value but the largest; with `xmin` there is one, of what is not below it.
    """
    exponent = max(0, int(np.frexp(values.max())[1]) - _LARGEST)
    x = np.ldexp(np.sort(values if xmin is None else values[values >= xmin]), -exponent)
    x = np.maximum(x, np.finfo(np.float64).smallest_subnormal)
    n = len(x)
    steps = np.diff(x)
    new = np.flatnonzero(np.concatenate([[True], steps > 0.0]))
    counts = np.diff(np.append(new, n))
    with np.errstate(over="ignore", divide="ignore"):
        ratio = steps / x[:-1]
        gaps = np.where(np.isfinite(ratio), np.log1p(ratio), np.log(x[1:]) - np.log(x[:-1]))
    above = np.arange(n - 1.0, 0.0, -1.0)  # points beyond each gap

    def from_top(terms: Array) -> Array:
        return np.append(np.cumsum(terms[::-1])[::-1], 0.0)

    depth = from_top(gaps)
    sample = (x, exponent, depth, np.repeat(new, counts), np.repeat(new + counts - 1, counts))
    if xmin is not None:
        base = np.ldexp(np.array([xmin]), -exponent)
        with np.errstate(over="ignore"):
            from_base = np.log1p((x[0] - base) / base)
            y = from_base + (depth[0] - depth)
            means = [np.array([one.mean()]) for one in (y, y * y, (x - base) / base)]
        return Tails(*sample, np.zeros(1, np.intp), base, depth[:1] + from_base, *means)
    start = new[:-1]
    sum_y = from_top(above * gaps)
    sum_yy = from_top(2.0 * gaps * sum_y[1:] + above * gaps**2)
    sizes = n - start
    with np.errstate(over="ignore"):
        mean_w = from_top(above * steps)[start] / x[start] / sizes
    return Tails(*sample, start, x[start], depth[start], sum_y[start] / sizes, sum_yy[start] / sizes, mean_w)


def _deviations(tails: Tails, survival: Survival, k: Index, p: Index) -> Array:
    """Return F(x[p]) minus the empirical distribution just below x[p], in the tail number `k`, elementwise."""
    c, base = tails.start[k], tails.base[k]
    values = survival(k, tails.base_depth[k] - tails.depth[p], (tails.x[p] - base) / base)
    return np.asarray((1.0 - values) - (tails.first[p] - c) / (len(tails.x) - c))


def _whole(tails: Tails, survival: Survival, k: int) -> tuple[float, list[int]]:
    """Return the distance of one tail and the points of greatest deviation to either side."""
    c = int(tails.start[k])
    y, w = tails.points(k)
    deviation = (1.0 - survival(np.array(k), y, w)) - (tails.first[c:] - c) / (len(tails.x) - c)
    low, high = int(deviation.argmin()), int(deviation.argmax())
    return max(-float(deviation[low]), float(deviation[high])), [c + low, c + high]


def distances(tails: Tails, survival: Survival, chosen: Index) -> Array:
    """Return the distances of the tails number `chosen`."""
    out = np.empty(len(chosen))
    ends = np.cumsum(tails.sizes[chosen])
    begin = 0
    while begin < len(chosen):
        done = ends[begin - 1] if begin else 0
        stop = max(begin + 1, int(np.searchsorted(ends, done + _BLOCK, "right")))
        part = chosen[begin:stop]
        if len(part) == 1:
            out[begin] = _whole(tails, survival, int(part[0]))[0]
        else:
            sizes = tails.sizes[part]
            offsets = np.append(0, np.cumsum(sizes)[:-1])
            p = np.arange(sizes.sum()) + np.repeat(tails.start[part] - offsets, sizes)
            deviation = np.abs(_deviations(tails, survival, np.repeat(part, sizes), p))
            out[begin:stop] = np.maximum.reduceat(deviation, offsets)
        begin = stop
    return np.where(np.isnan(out), np.inf, out)  # a model that leaves the range of float64 fits nothing


def _by_ranks(tails: Tails, survival: Survival) -> Array:
    """Return lower bounds of all distances from a few evenly spaced points of each tail."""
    out = np.empty(len(tails.start))
    step = _BLOCK // _RANKS
    for begin in range(0, len(out), step):
        part = np.arange(begin, min(begin + step, len(out)))
        p = tails.start[part][:, None] + tails.sizes[part][:, None] * (2 * np.arange(_RANKS) + 1) // (2 * _RANKS)
        deviation = _deviations(tails, survival, np.repeat(part, _RANKS), p.ravel())
        out[part] = np.abs(deviation).reshape(-1, _RANKS).max(axis=1)
    return out


def smallest_distance(tails: Tails, survival: Survival) -> Best:
    """Return the tail whose Kolmogorov–Smirnov distance is the smallest.

    The distance is the greatest difference between the model and the empirical distribution just below each point.
    Any single point bounds it from below. So most tails are ruled out by a few points each, and those that remain by
    the points where the best tails so far deviate most: the result is that of computing all n² / 2 differences.

    Parameters
    ----------
    tails : Tails
        At least one tail.
    survival : callable
    """
    everything = np.arange(len(tails.start))
    if tails.sizes.sum() <= _DIRECT:
        found = distances(tails, survival, everything)
        k = int(found.argmin())
        return Best(k, float(found[k]))
    bounds = _by_ranks(tails, survival)
    best, _ = _try(tails, survival, int(bounds.argmin()), Best(-1, np.inf))
    alive = everything[bounds <= best.distance * _SLACK]
    return _cut(tails, survival, bounds, alive, best)


def _try(tails: Tails, survival: Survival, k: int, best: Best) -> tuple[Best, list[int]]:
    distance, witnesses = _whole(tails, survival, k)
    distance = np.inf if np.isnan(distance) else distance
    return min(best, Best(k, distance), key=lambda one: (one.distance, one.k)), witnesses


def _cut(tails: Tails, survival: Survival, bounds: Array, alive: Index, best: Best) -> Best:
    """Try tails in the order of their bounds, and raise the bounds of the others where the tail tried deviates most."""
    seen: set[int] = set()
    alive = alive[alive != best.k]
    while len(alive):
        if tails.sizes[alive].sum() <= _DIRECT:
            found = distances(tails, survival, alive)
            k = int(np.lexsort((alive, found))[0])
            return min(best, Best(int(alive[k]), float(found[k])), key=lambda one: (one.distance, one.k))
        k = int(alive[bounds[alive].argmin()])
        best, witnesses = _try(tails, survival, k, best)
        alive = alive[alive != k]
        for p in set(witnesses) - seen:
            inside = alive[tails.start[alive] <= p]
            deviation = _deviations(tails, survival, inside, np.full(len(inside), p))
            bounds[inside] = np.maximum(bounds[inside], np.abs(deviation))
        seen.update(witnesses)
        alive = alive[bounds[alive] <= best.distance * _SLACK]
    return best
