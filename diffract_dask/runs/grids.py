"""A matrix of any size reduced to a few hundred rows and columns: the mean, least and greatest value of each block.

Unlike every n-th entry, a block hides no outlier and shows no pattern that is not there.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

__all__ = ["Grid", "Moments"]

Floats = NDArray[np.float64]


@dataclass(slots=True)
class Moments:
    """Number, extremes, mean and standard deviation of values that come in blocks; those not finite are counted only.

    The mean and the sum of squared deviations are merged block by block (Chan, Golub and LeVeque 1983).
    """

    total: int = 0
    finite: int = 0
    nan: int = 0
    zeros: int = 0
    low: float = math.inf
    high: float = -math.inf
    mean: float = 0.0
    squares: float = 0.0

    def add(self, values: Floats) -> None:
        """Take in a block."""
        self.total += values.size
        with np.errstate(all="ignore"):
            if not math.isfinite(float(values.sum())):
                self.nan += int(np.count_nonzero(np.isnan(values)))
                values = values[np.isfinite(values)]
            n = values.size
            if not n:
                return
            self.zeros += n - int(np.count_nonzero(values))
            self.low, self.high = min(self.low, float(values.min())), max(self.high, float(values.max()))
            mean = float(values.mean())
            apart = (values - mean).ravel()
            shift, n_before = mean - self.mean, self.finite
            self.finite += n
            self.mean += shift * n / self.finite
            self.squares += float(np.einsum("i,i->", apart, apart)) + shift * shift * n_before * n / self.finite

    def summary(self) -> dict[str, Any]:
        """Return the figures by name; None where no value is finite."""
        known = self.finite > 0
        return {
            "count": self.total,
            "nan": self.nan,
            "infinite": self.total - self.finite - self.nan,
            "zeros": self.zeros,
            "min": self.low if known else None,
            "max": self.high if known else None,
            "mean": self.mean if known else None,
            "std": math.sqrt(self.squares / self.finite) if known else None,
        }


@dataclass(slots=True)
class Grid:
    """Blocks of a matrix of `shape`, at most `target` along each axis; values that are not finite are left out.

    Parameters
    ----------
    shape : (int, int)
    target : int
    """

    shape: tuple[int, int]
    target: int = 256
    step: tuple[int, int] = field(init=False)
    total: Floats = field(init=False)
    count: Floats = field(init=False)
    low: Floats = field(init=False)
    high: Floats = field(init=False)

    def __post_init__(self) -> None:
        rows, cols = (max(1, math.ceil(n / self.target)) for n in self.shape)
        self.step = rows, cols
        bins = math.ceil(self.shape[0] / rows), math.ceil(self.shape[1] / cols)
        self.total, self.count = np.zeros(bins), np.zeros(bins)
        self.low, self.high = np.full(bins, np.inf), np.full(bins, -np.inf)

    def add(self, row: int, col: int, values: Floats) -> None:
        """Take in a part of the matrix whose first entry is (row, col)."""
        height = self.step[0]
        start = 0
        while start < len(values):
            bin_ = (row + start) // height
            stop = min(len(values), (bin_ + 1) * height - row)
            self._add_row(bin_, col, values[start:stop])
            start = stop

    def _add_row(self, bin_: int, col: int, values: Floats) -> None:
        width = self.step[1]
        first, cols = col // width, values.shape[1]
        edges = np.append(0, np.arange((first + 1) * width - col, cols, width))
        into = slice(first, first + len(edges))
        with np.errstate(all="ignore"):
            total = np.add.reduceat(values.sum(0), edges)
            if np.isfinite(total).all():
                count = np.diff(edges, append=cols) * len(values)
                low, high = values.min(0), values.max(0)
            else:
                finite = np.isfinite(values)
                total = np.add.reduceat(np.where(finite, values, 0).sum(0), edges)
                count = np.add.reduceat(finite.sum(0), edges)
                low = np.where(finite, values, np.inf).min(0)
                high = np.where(finite, values, -np.inf).max(0)
            self.total[bin_, into] += total
        self.count[bin_, into] += count
        np.minimum(self.low[bin_, into], np.minimum.reduceat(low, edges), out=self.low[bin_, into])
        np.maximum(self.high[bin_, into], np.maximum.reduceat(high, edges), out=self.high[bin_, into])

    def blocks(self) -> dict[str, Floats]:
        """Return ``mean``, ``min`` and ``max`` by block, NaN where nothing in the block is finite."""
        empty = self.count == 0
        with np.errstate(all="ignore"):
            mean = np.where(empty, np.nan, self.total / np.maximum(self.count, 1))
        return {
            "mean": mean,
            "min": np.where(empty, np.nan, self.low),
            "max": np.where(empty, np.nan, self.high),
        }
