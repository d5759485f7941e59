"""Heavy-tailed fits: all lower ends of a sample, at sizes from a small layer to a million values, and p-values."""

from __future__ import annotations

import numpy as np

from diffract_dask.powerlaw import bootstrap_p_value, fit


class Fits:
    """A sample whose body is log-normal and whose tail is a power law, or all of it a power law."""

    params = (["power_law", "exponential", "truncated_power_law", "lognormal"], ["body", "tail"], [384, 4096])
    tiny = (["power_law", "exponential", "truncated_power_law", "lognormal"], ["body", "tail"], [40])
    param_names = ("family", "sample", "n")

    def setup(self, family: str, sample: str, n: int) -> None:
        rng = np.random.default_rng(0)
        self.values = rng.pareto(1.5, n) + 1
        if sample == "body":
            self.values[n // 4 :] = rng.lognormal(0, 0.5, n - n // 4)

    def time_fit(self, family: str, sample: str, n: int) -> None:
        fit(self.values, family)


class LargeFits:
    """A power law of many values: none may be compared with all others."""

    params = ([20_000, 100_000, 1_000_000],)
    tiny = ([300],)
    param_names = ("n",)

    def setup(self, n: int) -> None:
        self.values = np.random.default_rng(0).pareto(1.5, n) + 1

    def time_fit(self, n: int) -> None:
        fit(self.values)

    def peakmem_fit(self, n: int) -> None:
        fit(self.values)


class PValues:
    """2500 replicas of a tail of a thousand values."""

    params = (["power_law", "exponential", "truncated_power_law", "lognormal"], [1000])
    tiny = (["power_law", "truncated_power_law"], [30])
    param_names = ("family", "n")

    def setup(self, family: str, n: int) -> None:
        self.found = fit(np.random.default_rng(0).lognormal(0, 1, n), family, xmin=1e-3)

    def time_p_value(self, family: str, n: int) -> None:
        bootstrap_p_value(self.found)
