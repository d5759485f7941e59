"""The laws of random matrices against definitions in many digits and published values."""

from __future__ import annotations

import math
from functools import cache
from typing import Any

import mpmath
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from reference import mp_law
from scipy import integrate, stats

from diffract_dask import randommatrix
from diffract_dask.errors import ConfigurationError

mp = mpmath.mp.clone()
mp.dps = 30

# Bornemann (2010), table 2 and section 6, and Prähofer's tables.
PUBLISHED = {(1, 0.0): 0.8319080662029521, (2, 0.0): 0.969372828355262, (2, -2.0): 0.4132241425051226}
# Those of Diffract, which integrates Painlevé's equation from 10 down to -5 and interpolates in steps of 0.005. The
# equation is unstable in that direction, and the cubics are not exact: the quantiles are off by what stands beside.
DIFFRACT = {
    0.001: (-4.654198482825987, 3e-7), 0.005: (-4.147876573454183, 1e-7), 0.01: (-3.895432711705861, 5e-8),
    0.025: (-3.515853578691799, 2e-8), 0.05: (-3.1803799872509355, 2e-8), 0.1: (-2.782427911322516, 1e-8),
    0.25: (-2.088148337802093, 2e-9), 0.5: (-1.2685746166783702, 1e-10), 0.75: (-0.3919943329709526, 2e-9),
    0.9: (0.45014328841994306, 1e-9), 0.95: (0.9793160534972889, 1e-10), 0.975: (1.4537713525623233, 1e-9),
    0.99: (2.0234492823867622, 2e-9), 0.995: (2.422326585086723, 1e-9), 0.999: (3.272196057678906, 2e-9),
}  # fmt: skip


@cache
def gauss_legendre(count: int) -> list[tuple[Any, Any]]:
    rule = []
    for start in np.polynomial.legendre.leggauss(count)[0]:
        x = mp.findroot(lambda t: mp.legendre(count, t), mp.mpf(float(start)))
        slope = count * (x * mp.legendre(count, x) - mp.legendre(count - 1, x)) / (x * x - 1)
        rule.append((x, 2 / ((1 - x * x) * slope**2)))
    return rule


def determinant(x: float, beta: int, count: int, end: int = 13) -> Any:
    """Return F_beta(x) in many digits: another operator (Ai((s + t) / 2) / 2 on the half-line from x), not scaled."""
    length = 2 * (end - mp.mpf(x))
    nodes = [(x + length * (1 + z) / 2, length * w / 2) for z, w in gauss_legendre(count)]
    kernel = mp.matrix(count, count)
    for i, (s, _) in enumerate(nodes):
        for j, (t, w) in enumerate(nodes):
            kernel[i, j] = mp.airyai((s + t) / 2) / 2 * w
    one = mp.eye(count)
    first = mp.det(one - kernel)
    return first if beta == 1 else first * mp.det(one + kernel)


def test_a_quantile_is_where_a_determinant_in_many_digits_is_p() -> None:
    assert abs(determinant(float(randommatrix.tracy_widom_ppf(0.995)), 1, 16) - 0.995) < 1e-10


@pytest.mark.slow
@pytest.mark.parametrize(("p", "beta"), [(0.005, 1), (0.5, 1), (0.995, 1), (0.9, 2)])
def test_quantiles_are_where_a_determinant_in_many_digits_is_p(p: float, beta: int) -> None:
    assert abs(determinant(float(randommatrix.tracy_widom_ppf(p, beta)), beta, 36) - p) < 4e-13


@pytest.mark.parametrize(("beta", "x"), PUBLISHED)
def test_published_values(beta: int, x: float) -> None:
    assert randommatrix.tracy_widom_cdf(x, beta) == pytest.approx(PUBLISHED[beta, x], abs=3e-15)


@pytest.mark.parametrize("p", DIFFRACT)
def test_diffracts_quantiles_within_their_error(p: float) -> None:
    value, error = DIFFRACT[p]
    assert abs(randommatrix.tracy_widom_ppf(p) - value) < error


def test_both_tails() -> None:
    p = np.array([1e-11, 1e-6, 0.3, 0.5, 0.7])
    for beta in (1, 2):
        low, high = randommatrix.tracy_widom_ppf(p, beta), randommatrix.tracy_widom_isf(p, beta)
        np.testing.assert_allclose(randommatrix.tracy_widom_cdf(low, beta), p, rtol=1e-8)
        np.testing.assert_allclose(randommatrix.tracy_widom_sf(high, beta), p, rtol=1e-8)
        np.testing.assert_allclose(high[2:], randommatrix.tracy_widom_ppf(1 - p[2:], beta), atol=1e-11)
        assert np.all(np.diff(low) > 0)
    # Asymptotically the upper tail is exp(-2/3 x^(3/2)) / (4 sqrt(pi) x^(3/4)).
    tail = math.exp(-2 / 3 * 10**1.5) / (4 * math.sqrt(math.pi) * 10**0.75)
    assert randommatrix.tracy_widom_sf(10.0) == pytest.approx(tail, rel=0.05)


def test_tracy_widom_beyond_its_range() -> None:
    with pytest.raises(ConfigurationError, match="beta"):
        randommatrix.tracy_widom_ppf(0.5, 4)
    assert np.isnan(randommatrix.tracy_widom_ppf([0.0, 1.0, -1.0, np.nan])).all()
    np.testing.assert_array_equal(randommatrix.tracy_widom_cdf([-99.0, 99.0, np.inf, np.nan]), [0.0, 1.0, 1.0, np.nan])


def test_the_largest_eigenvalue_of_noise_has_the_law() -> None:
    """Of 2000 Gaussian matrices of 60 × 40, a Kolmogorov–Smirnov test against Johnstone's scaling (beta = 1)."""
    n, p = 60, 40
    w = np.random.default_rng(3).standard_normal((2000, n, p))
    top = np.linalg.svd(w, compute_uv=False)[:, 0] ** 2
    both = math.sqrt(n - 1) + math.sqrt(p)
    x = (top - both**2) / (both * (1 / math.sqrt(n - 1) + 1 / math.sqrt(p)) ** (1 / 3))
    grid = np.linspace(-5.0, 4.0, 60)
    law = np.interp(x, grid, randommatrix.tracy_widom_cdf(grid))
    assert stats.kstest(law, "uniform").statistic < 0.05


# Marchenko–Pastur

ratios = st.floats(1e-3, 1.0)


@settings(max_examples=60, deadline=None)
@given(ratios, st.floats(0.0, 1.0), st.floats(-40, 40))
def test_the_distribution_is_that_of_its_usual_form(ratio: float, share: float, exponent: float) -> None:
    scale = 10**exponent
    lower, upper = randommatrix.mp_edges(ratio, scale)
    x = lower + share * (upper - lower)
    assert abs(randommatrix.mp_cdf(x, ratio, scale) - mp_law(float(x), ratio, scale)) < 1e-12 / math.sqrt(ratio)


@pytest.mark.parametrize("ratio", [1.0, 0.9, 0.25, 0.01])
def test_the_distribution_is_the_integral_of_the_density(ratio: float) -> None:
    lower, upper = (float(edge) for edge in randommatrix.mp_edges(ratio, 2.0))
    middle = lower + 0.4 * (upper - lower)

    def substituted(t: float) -> float:  # x = lower + t²: the density of a square matrix is infinite at 0
        return 2 * t * float(randommatrix.mp_density(lower + t * t, ratio, 2.0))

    area = integrate.quad(substituted, 1e-12, math.sqrt(middle - lower), epsabs=1e-12, epsrel=1e-12)[0]
    assert randommatrix.mp_cdf(middle, ratio, 2.0) == pytest.approx(area, abs=1e-10)


def test_marchenko_pastur_at_known_points() -> None:
    # A square matrix: x = 1 is theta = 60 degrees, F = (sin 60 + pi/3) / pi; x = 2 is 90 degrees.
    points = [(1.0, math.sqrt(0.75) / math.pi + 1 / 3), (2.0, 1 / math.pi + 0.5), (0.0, 0.0), (4.0, 1.0), (9.0, 1.0)]
    for x, want in points:
        assert randommatrix.mp_cdf(x, 1.0) == pytest.approx(want, abs=1e-15)
        assert randommatrix.mp_cdf(9e60 * x, 1.0, 3e30) == pytest.approx(want, abs=1e-15)
    assert randommatrix.mp_density(0.0, 1.0) == math.inf
    assert randommatrix.mp_density([0.2, 2.3], 0.25).tolist() == [0.0, 0.0]


@pytest.mark.parametrize(("ratio", "scale"), [(0.0, 1.0), (1.5, 1.0), (math.nan, 1.0), (0.5, 0.0), (0.5, -1.0)])
def test_marchenko_pastur_out_of_range_is_nan(ratio: float, scale: float) -> None:
    assert math.isnan(randommatrix.mp_cdf(1.0, ratio, scale))
    assert math.isnan(randommatrix.mp_density(1.0, ratio, scale))
    assert scale <= 0 or math.isnan(randommatrix.mp_edges(ratio, scale)[1])


@pytest.mark.parametrize("scale", [1e-150, 1e-3, 1.0, 1e3, 1e150])
def test_noise_scale_of_any_magnitude(scale: float) -> None:
    null = np.square(scale * np.array([0.5, 0.9, 1.1, 12.0]))
    assert randommatrix.noise_scale(null, scale, 1.0) == pytest.approx(scale * math.sqrt((0.25 + 0.81 + 1.21) / 4))
    assert randommatrix.noise_scale(null[:3], scale, 1.0) == scale
    assert math.isnan(randommatrix.noise_scale([*null[:3], math.nan], scale, 1.0))
