"""The built-in kernels against independent definitions, Diffract's values, and what must not change them."""

from __future__ import annotations

import inspect
import json
import math
import pickle
import re
import tracemalloc
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import reference
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import MODEL, MODEL_FITS, NULL, SLICE, svals

from diffract_dask import kernels, linalg, testing
from diffract_dask.blas import blas_threads
from diffract_dask.errors import ConfigurationError
from diffract_dask.fields import Field, Status
from diffract_dask.kernel import ROUNDING, SHAPE, WEIGHTS, Kernel, Registry, kernel
from diffract_dask.kernels import BUILTIN, default_registry

DATA = Path(__file__).parent / "data"
BIBLIOGRAPHY = Path(__file__).parent.parent / "docs" / "references.bib"
EPS = np.finfo(np.float64).eps
REGISTRY = Registry(BUILTIN)
DECLARED = list(REGISTRY.kernels.values())

ONE_PASS = [
    "frob_norm",
    "weights_mean",
    "weights_std",
    "weights_min",
    "weights_max",
    "weights_absmax",
    "zero_fraction",
    "nonfinite_fraction",
    "weights_kurtosis",
]
P_VALUES = ["pl_p_value", "tpl_p_value", "expon_p_value"]  # without a definition: shares of random samples
FITS = [*reference.FITS, *P_VALUES]
FIELDS = [
    *FITS,
    *MODEL_FITS,
    *ONE_PASS,
    "greater_dim",
    "lower_dim",
    "aspect_ratio",
    "weights_svals",
    "weights_svals_error",
    "weights_svals_route",
    "weights_lsvs",
    "weights_rsvs",
    "max_weights_sval",
    "min_weights_sval",
    "esd",
    "esd_max",
    "esd_min",
    "nuclear_norm",
    "l2_norm",
    "effective_rank",
    "stable_rank",
    "hard_rank",
    "schatten_4_norm",
    "participation_ratio",
    "log_norm",
    "log_spectral_norm",
    "log_prod_frob_norm",
    "log_prod_spectral_norm",
    "param_norm",
    *NULL,
    "weights_rand_lsvs",
    "weights_rand_rsvs",
]
SPECTRAL = [name for name in SLICE if name not in ONE_PASS and not name.endswith(("_dim", "_ratio"))]
SCALARS = [name for name in SLICE if not REGISTRY.field(name).dims]


def evaluate(weights: NDArray[Any], names: Iterable[str], **params: Any) -> dict[str, Any]:
    """Return the fields `names` and what they need, for one matrix or a batch, by plain calls of the kernels."""
    weights = np.asarray(weights)
    known: dict[str, Any] = {WEIGHTS: weights, SHAPE: np.broadcast_to(weights.shape[-2:], (*weights.shape[:-2], 2))}
    known[ROUNDING] = np.full(weights.shape[:-2], np.finfo(weights.dtype).eps / 2)
    for one in REGISTRY.closure(names):
        made = one.function(
            *(known[name] for name in one.inputs), **(params if set(params) <= set(one.defaults) else {})
        )
        known.update(zip(one.outputs, made if isinstance(made, tuple) else (made,), strict=True))
    return known


def _cases() -> dict[str, NDArray[np.float64]]:
    rng = np.random.default_rng(7)
    gauss = rng.standard_normal((12, 12))
    tall = rng.standard_normal((20, 7))
    sparse = np.where(rng.random((9, 14)) < 0.6, 0.0, rng.standard_normal((9, 14)))
    return {
        "gauss": gauss,
        "tall": tall,
        "wide": tall.T.copy(),
        "transposed_view": tall.T,
        "one_entry": np.array([[-3.0]]),
        "one_row": rng.standard_normal((1, 9)),
        "one_column": rng.standard_normal((9, 1)),
        "heavy_tailed": rng.standard_t(1.5, (15, 10)),
        "sparse": sparse,
        "shifted": 1e6 + gauss,
        "rank_2": testing.matrix_with_spectrum([5.0, 1.0], 10, 8),
        "power_law": testing.matrix_with_spectrum(testing.power_law_svals(12, 2.0), 30, 12),
        "zero": np.zeros((6, 4)),
        "constant": np.full((8, 5), 0.7),
        "identity": np.eye(7),
        "orthogonal": testing.matrix_with_spectrum(np.ones(9), 9, 9),
        "lauchli": testing.lauchli(3),
        "hilbert": testing.hilbert(8),
        "kahan": testing.kahan(10),
        "1e30": 1e30 * gauss,
        "1e-30": 1e-30 * gauss,
        "1e300": 1e300 * tall,
        "1e-300": 1e-300 * tall,
        "subnormal": 1e-312 * tall,
    }


CASES = _cases()


def tolerance(name: str, w: NDArray[np.float64], want: Any, unit: float) -> Any:
    """Return what a field may differ by when each singular value may by 16 `unit` times the greatest one."""
    tiny = 4 * 5e-324  # a unit in the last place of a subnormal number
    greatest, k = svals(w)[-1], min(w.shape)
    unit += tiny / greatest if greatest else 0.0
    spread = float(np.abs(w).max()) / SLICE["weights_std"](w) if name.startswith("weights_k") and w.std() else 1.0
    step = 16 * unit * greatest
    return tiny + {
        "weights_svals": step,
        "min_weights_sval": step,
        "max_weights_sval": step,
        "l2_norm": step,
        "nuclear_norm": k * step,
        "esd": 2 * step * (greatest / max(w.shape)),
        "esd_min": 2 * step * (greatest / max(w.shape)),
        "esd_max": 2 * step * (greatest / max(w.shape)),
        "effective_rank": 16 * unit * 60 * k,
        "weights_mean": 4 * EPS * np.abs(w).max(),
        "weights_std": 4 * EPS * np.abs(w).max(),
        "weights_kurtosis": 16 * EPS * (1 + spread) * (3 + abs(want)),
        "hard_rank": 0.0,
    }.get(name, 64 * unit * abs(want))


# Definitions


@pytest.mark.parametrize("name", SLICE)
@pytest.mark.parametrize("case", CASES)
def test_each_field_is_what_its_definition_says(case: str, name: str) -> None:
    w = CASES[case]
    with np.errstate(over="ignore"):
        want = SLICE[name](w)
        allowed = tolerance(name, w, want, EPS)
    got = evaluate(w, [name])[name]
    assert np.shape(got) == np.shape(want)
    np.testing.assert_array_equal(np.isnan(got), np.isnan(want))
    np.testing.assert_array_equal(np.isinf(got), np.isinf(want))
    finite = np.isfinite(want)
    with np.errstate(invalid="ignore", over="ignore"):
        assert np.all(np.abs(np.subtract(got, want)) <= allowed, where=finite), (got, want)


@pytest.mark.parametrize("name", MODEL)
@pytest.mark.parametrize(
    "chosen",
    [("gauss", "tall", "wide"), ("gauss", "zero"), ("zero",), ("1e-300", "1e300"), ("subnormal", "lauchli", "1e30")],
)
def test_each_model_level_field_is_what_its_definition_says(chosen: Sequence[str], name: str) -> None:
    model = [CASES[case] for case in chosen]
    (needs,) = REGISTRY.producer(name).inputs
    got = REGISTRY.producer(name).function(np.array([evaluate(w, [needs])[needs] for w in model]))
    want = MODEL[name](model)
    assert np.ndim(got) == 0
    np.testing.assert_allclose(got, want, rtol=1e-12, atol=1e-12)


FIXTURE = {
    "greater_dim": 24,
    "lower_dim": 16,
    "aspect_ratio": 1.5,
    "weights_std": 0.764545651147541,
    "frob_norm": 16.9112918696977,
    "nuclear_norm": 57.8590193348679,
    "l2_norm": 10.7958660419285,
    "max_weights_sval": 10.7958660419285,
    "min_weights_sval": 0.847199301954139,
    "effective_rank": 13.6786963403715,
    "hard_rank": 16,
    "stable_rank": 2.45379680091254,
    "esd_max": 4.85628014980271,
    "esd_min": 0.0299061107179825,
}
FIXTURE_MODEL = {
    "log_norm": 2.45635357006844,
    "log_spectral_norm": 2.06651497414536,
    "log_prod_frob_norm": 1.22817678503422,
    "log_prod_spectral_norm": 1.03325748707268,
    "param_norm": 285.991792702104,
}


def fixture() -> NDArray[np.float64]:
    i, j = np.arange(24)[:, None], np.arange(16)[None, :]
    return np.asarray(np.sin(1.0 + 0.37 * i * j + 0.11 * i * i) + 0.05 * (i + 1) * (j + 1) / 16)


@pytest.mark.parametrize("name", FIXTURE)
def test_closed_form_fixture(name: str) -> None:
    assert evaluate(fixture(), [name])[name] == pytest.approx(FIXTURE[name], rel=1e-12)


@pytest.mark.parametrize("name", FIXTURE_MODEL)
def test_closed_form_fixture_as_a_model(name: str) -> None:
    (needs,) = REGISTRY.producer(name).inputs
    got = REGISTRY.producer(name).function(np.array([evaluate(fixture(), [needs])[needs]]))
    assert got == pytest.approx(FIXTURE_MODEL[name], rel=1e-12)


def test_closed_form_fixture_sums_of_the_esd() -> None:
    esd = evaluate(fixture(), ["esd"])["esd"]
    assert esd.sum() == pytest.approx(11.9163246959, rel=1e-10)
    assert (esd**2).sum() == pytest.approx(28.1832355587, rel=1e-10)


# Diffract's values

GOLDEN = json.loads((DATA / "diffract.json").read_text())["slices"]
GOLDEN_FIELDS = sorted({name for models in GOLDEN.values() for values in models.values() for name in values})
# Rounding noise in Diffract's values and in ours. A constant matrix has rank 1: its other singular values are zero and
# what LAPACK returns for them (8e-241) is left over from cancellation. lowrank4_exact is a product of rank 4 rounded to
# float32: its smallest singular value, 3e-8, is 5e-10 of the greatest, so that only about 6 of its digits are certain.
NOISE = {
    ("constant_32x16", "a", "min_weights_sval"),
    ("constant_32x16", "a", "esd_min"),
    ("constant_32x16", "a", "weights_std"),
    ("lowrank4_exact", "a", "min_weights_sval"),
    ("lowrank4_exact", "a", "esd_min"),
}


@pytest.fixture(scope="module")
def golden_inputs() -> dict[str, dict[str, NDArray[Any]]]:
    loaded = {}
    for model in "ab":
        with np.load(DATA / f"diffract_{model}.npz") as archive:
            loaded[model] = {name: archive[name] for name in archive}
    return loaded


@pytest.mark.parametrize("model", ["a", "b"])
@pytest.mark.parametrize("case", GOLDEN)
def test_diffract_parity(case: str, model: str, golden_inputs: dict[str, dict[str, NDArray[Any]]]) -> None:
    w = golden_inputs[model][case].astype(np.float64)
    expected = GOLDEN[case][model]
    got = evaluate(w, expected)
    for name, want in expected.items():
        if (case, model, name) in NOISE:
            noise = 100 * EPS * evaluate(w, ["l2_norm"])["l2_norm"]
            assert abs(got[name] - want) <= noise, name
        else:
            np.testing.assert_allclose(got[name], want, rtol=1e-9, err_msg=name)


@pytest.mark.parametrize("case", GOLDEN)
def test_diffract_parity_from_float32(case: str, golden_inputs: dict[str, dict[str, NDArray[Any]]]) -> None:
    w = golden_inputs["a"][case]
    assert w.dtype == np.float32
    expected = GOLDEN[case]["a"]
    got = evaluate(w, expected)
    unit = float(np.finfo(np.float32).eps) * expected["l2_norm"]
    for name, want in expected.items():
        absolute = {"weights_svals": unit, "min_weights_sval": unit, "nuclear_norm": unit * min(w.shape)}
        absolute |= dict.fromkeys(("esd", "esd_min"), 2 * unit * expected["l2_norm"] / max(w.shape))
        relative = 1e-5 if name == "effective_rank" else 1e-6
        np.testing.assert_allclose(got[name], want, rtol=relative, atol=absolute.get(name, 0.0), err_msg=name)


def test_golden_values_cover_the_fields_that_diffract_has() -> None:
    assert set(GOLDEN_FIELDS) == set(FIXTURE) | {"weights_svals", "esd"}


# What must not change a value

INVARIANT = [name for name in SCALARS if name not in ("hard_rank", "nonfinite_fraction")]
seeds = st.integers(0, 2**32 - 1)
examples = settings(max_examples=25, deadline=None)


def assert_same(one: dict[str, Any], other: dict[str, Any], names: Iterable[str], w: NDArray[Any]) -> None:
    for name in names:
        want, got = one[name], other[name]
        if np.isnan(want).any():
            np.testing.assert_array_equal(np.isnan(got), np.isnan(want), err_msg=name)
            continue
        unit = float(np.finfo(w.dtype).eps)
        allowed = 2 * np.asarray(tolerance(name, w.astype(np.float64), want, unit))
        assert np.all(np.abs(got - want) <= allowed), (name, got, want)


@examples
@given(testing.matrices())
def test_transpose(w: NDArray[Any]) -> None:
    assert_same(evaluate(w, INVARIANT), evaluate(w.T, INVARIANT), INVARIANT, w)


@examples
@given(testing.matrices(), seeds)
def test_permutation_of_rows_and_columns(w: NDArray[Any], seed: int) -> None:
    rng = np.random.default_rng(seed)
    moved = w[rng.permutation(w.shape[0])][:, rng.permutation(w.shape[1])]
    assert_same(evaluate(w, INVARIANT), evaluate(moved, INVARIANT), INVARIANT, w)


@examples
@given(testing.matrices(dtypes=("float64",)), seeds)
def test_rotation_leaves_the_spectrum(w: NDArray[Any], seed: int) -> None:
    q = testing.matrix_with_spectrum(np.ones(w.shape[0]), w.shape[0], w.shape[0], seed)
    names = [name for name in SPECTRAL if name not in ("hard_rank", "stable_rank")]
    assert_same(evaluate(w, names), evaluate(q @ w, names), names, w)


@examples
@given(testing.matrices(dtypes=("float64",)), st.integers(-300, 300))
def test_power_of_two_scale(w: NDArray[Any], exponent: int) -> None:
    scaled = np.ldexp(w, exponent)
    absmax = np.abs(w).max()
    assume(absmax == 0 or absmax > 1e-20)  # so that the square of the norm is in range before and after
    assume(np.array_equal(np.ldexp(scaled, -exponent), w))
    one, other = evaluate(w, SCALARS), evaluate(scaled, SCALARS)
    powers = dict.fromkeys(("esd_max", "esd_min"), 2)
    powers |= dict.fromkeys(
        ("frob_norm", "nuclear_norm", "l2_norm", "max_weights_sval", "min_weights_sval", "weights_mean", "weights_std",
         "weights_min", "weights_max", "weights_absmax", "schatten_4_norm"), 1)  # fmt: skip
    expected = {name: np.ldexp(one[name], exponent * powers.get(name, 0)) for name in SCALARS}
    names = [name for name in SCALARS if name != "hard_rank"]
    assert_same(expected, other, names, scaled)


@pytest.mark.parametrize("scale", [1e-300, 1e-160, 1e-30, 1e30, 1e150, 1e300])
def test_ranks_do_not_depend_on_the_scale(scale: float) -> None:
    names = ["effective_rank", "stable_rank", "hard_rank", "aspect_ratio", "weights_kurtosis", "zero_fraction"]
    one, other = evaluate(CASES["kahan"], names), evaluate(scale * CASES["kahan"], names)
    for name in names:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-12, err_msg=name)


@examples
@given(st.lists(testing.matrices(min_side=4, max_side=4, dtypes=("float32",)), min_size=1, max_size=6))
def test_a_batch_is_its_slices(slices: list[NDArray[Any]]) -> None:
    batch = evaluate(np.stack(slices), SLICE)
    for i, w in enumerate(slices):
        one = evaluate(w, SLICE)
        assert_same(one, {name: batch[name][i] for name in SLICE}, SLICE, w)


def test_a_batch_may_have_any_leading_axes() -> None:
    stacked = np.random.default_rng(0).standard_normal((2, 3, 5, 4)).astype(np.float32)
    folded, flat = evaluate(stacked, SLICE), evaluate(stacked.reshape(6, 5, 4), SLICE)
    for name in SLICE:
        np.testing.assert_allclose(folded[name].reshape(flat[name].shape), flat[name], rtol=1e-12, err_msg=name)


@examples
@given(testing.matrices(dtypes=("float32",)))
def test_float32_is_read_as_what_it_says(w: NDArray[Any]) -> None:
    assert_same(evaluate(w.astype(np.float64), INVARIANT), evaluate(w, INVARIANT), INVARIANT, w)


@pytest.mark.parametrize("dtype", ["float16", "float32", "float64"])
def test_inside_everything_is_float64(dtype: str) -> None:
    values = evaluate(np.random.default_rng(0).standard_normal((3, 6, 5)).astype(dtype), [*SLICE, "weights_lsvs"])
    for name in [*SLICE, "weights_lsvs", "weights_rsvs", "weights_svals_error"]:
        wanted = np.int64 if name.endswith("_dim") else np.float64
        assert values[name].dtype == wanted, name


def test_model_level_fields_do_not_depend_on_the_order_of_slices() -> None:
    rng = np.random.default_rng(3)
    norms = np.exp(20 * rng.standard_normal(101))
    for name in MODEL:
        function = REGISTRY.producer(name).function
        assert {float(function(rng.permutation(norms))) for _ in range(10)} == {float(function(norms))}, name


# Bad input

ALWAYS_KNOWN = {"greater_dim", "lower_dim", "aspect_ratio", "nonfinite_fraction"}


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_one_bad_slice_in_a_batch(bad: float, dtype: str) -> None:
    batch = np.random.default_rng(5).standard_normal((3, 8, 6)).astype(dtype)
    good = evaluate(batch, [*SLICE, "weights_lsvs"])
    batch[1, 2, 3] = bad
    mixed = evaluate(batch, [*SLICE, "weights_lsvs"])
    for name in [*SLICE, "weights_lsvs", "weights_rsvs", "weights_svals_error"]:
        np.testing.assert_allclose(mixed[name][[0, 2]], good[name][[0, 2]], rtol=1e-9, atol=1e-12, err_msg=name)
        over_finite = name in ALWAYS_KNOWN or (name in ONE_PASS and name != "frob_norm")
        assert np.isnan(mixed[name][1]).all() == (not over_finite), name
    finite = np.delete(batch[1].ravel(), 2 * 6 + 3).astype(np.float64)
    assert mixed["nonfinite_fraction"][1] == pytest.approx(1 / 48)
    assert mixed["weights_mean"][1] == pytest.approx(finite.mean(), rel=1e-12)
    assert mixed["weights_std"][1] == pytest.approx(finite.std(), rel=1e-12)
    assert mixed["weights_max"][1] == finite.max()


def test_a_slice_without_a_finite_entry() -> None:
    values = evaluate(np.full((4, 3), np.nan), SLICE)
    for name in SLICE:
        assert np.isnan(values[name]).all() == (name not in ALWAYS_KNOWN), name
    assert values["nonfinite_fraction"] == 1.0


def test_zero_matrix() -> None:
    values = evaluate(np.zeros((5, 3), np.float32), SLICE)
    undefined = {"effective_rank", "stable_rank", "participation_ratio", "weights_kurtosis"}
    for name in SLICE:
        assert np.isnan(values[name]).all() == (name in undefined), name
    assert values["weights_svals"].tolist() == [0.0, 0.0, 0.0]
    assert values["frob_norm"] == values["nuclear_norm"] == values["l2_norm"] == values["hard_rank"] == 0.0
    assert values["zero_fraction"] == 1.0


def test_the_squares_of_a_tiny_and_a_huge_norm_are_never_formed() -> None:
    assert kernels.log_norm([1e-200, 1e-200]) == pytest.approx(-400, rel=1e-14)
    assert kernels.log_spectral_norm([1e300]) == pytest.approx(600, rel=1e-14)
    assert kernels.stable_rank(3e-300, 1e-300) == pytest.approx(9, rel=1e-14)
    assert kernels.hard_rank([1e-310, 1e-308]) == 2
    assert kernels.effective_rank([1e308, 1e308]) == pytest.approx(2, rel=1e-14)


@pytest.mark.parametrize("name", MODEL)
def test_model_level_fields_skip_what_is_not_measurable(name: str) -> None:
    function = REGISTRY.producer(name).function
    assert np.isnan(function(np.array([])))
    if name == "param_norm":
        assert np.isnan(function(np.array([1.0, np.nan])))
        assert function(np.array([0.0, 0.0])) == 0.0
        assert function(np.array([1e200])) == np.inf
    else:
        assert function(np.array([10.0, np.nan, 0.0, 1000.0])) == function(np.array([10.0, 1000.0]))
        assert np.isnan(function(np.array([0.0, np.nan])))
        assert function(np.array([10.0, np.inf])) == np.inf


@given(st.floats(0, 0.999))
def test_hard_rank_counts_above_the_tolerance(rtol: float) -> None:
    values = np.array([0.0, 1e-6, 1e-3, 0.25, 0.5, 1.0])
    got = kernels.hard_rank(np.stack([values, 2.0**-900 * values]), rtol=rtol)
    want = sum(float(x) ** 2 > rtol for x in values)
    assert got.tolist() == [want, want]


@pytest.mark.parametrize("rtol", [-1e-9, 1.0, math.nan])
def test_hard_rank_refuses_a_tolerance_that_makes_no_sense(rtol: float) -> None:
    with pytest.raises(ConfigurationError, match="at least 0 and less than 1"):
        kernels.hard_rank([1.0, 2.0], rtol=rtol)


def test_stable_rank_is_at_least_one_in_spite_of_rounding() -> None:
    assert kernels.stable_rank(np.nextafter(1.0, 0.0), 1.0) == 1.0


# Singular vectors


@pytest.mark.parametrize("case", ["gauss", "tall", "wide", "rank_2", "zero", "identity", "lauchli", "1e300", "1e-300"])
def test_vectors_rebuild_the_matrix(case: str) -> None:
    w = CASES[case]
    values = evaluate(w, ["weights_lsvs"])
    u, s, v = values["weights_lsvs"], values["weights_svals"], values["weights_rsvs"]
    k = min(w.shape)
    assert u.shape == (w.shape[0], k)
    assert v.shape == (w.shape[1], k)
    np.testing.assert_allclose(u.T @ u, np.eye(k), atol=1e-12)
    np.testing.assert_allclose(v.T @ v, np.eye(k), atol=1e-12)
    scale = float(np.abs(w).max()) or 1.0
    np.testing.assert_allclose((u * (s / scale)) @ v.T, w / scale, atol=1e-13 * w.size)


def test_vectors_without_any_good_slice() -> None:
    w = np.full((2, 4, 3), np.nan)
    u, v = kernels.singular_vectors(w, np.full((2, 3), np.nan))
    assert np.isnan(u).all()
    assert np.isnan(v).all()
    assert (u.shape, v.shape) == ((2, 4, 3), (2, 3, 3))


def test_vectors_follow_the_singular_values_that_are_given() -> None:
    w = np.random.default_rng(2).standard_normal((3, 5, 4))
    values = evaluate(w, ["weights_lsvs"])
    given = values["weights_svals"].copy()
    given[1] = np.nan
    u, v = kernels.singular_vectors(w, given)
    for got, want in ((u, values["weights_lsvs"]), (v, values["weights_rsvs"])):
        assert np.isnan(got[1]).all()
        np.testing.assert_array_equal(got[[0, 2]], want[[0, 2]])


# Statuses


def test_statuses_of_entries_and_spectra() -> None:
    batch = np.random.default_rng(0).standard_normal((3, 5, 4))
    batch[1, 0, 0] = np.inf
    for function in (kernels.entry_statistics, kernels.singular_values):
        declared = function.__kernel__
        status = declared.status(*function(batch))
        assert status.dtype == np.uint8
        assert status.tolist() == [Status.OK, Status.NON_FINITE, Status.OK]
        assert pickle.loads(pickle.dumps(declared.status)) is declared.status


@pytest.mark.parametrize(
    ("route", "status"),
    [
        ("none", Status.OK),
        ("gram", Status.OK),
        ("tsqr", Status.OK),
        ("gesdd", Status.OK),
        ("gesvd", Status.FELL_BACK),
        ("scaled_gram", Status.FELL_BACK),
    ],
)
def test_a_fallback_says_so(route: str, status: Status) -> None:
    (code,) = [code for code, name in linalg.ROUTES.items() if name == route]
    good, broken = np.ones(3), np.full(3, np.nan)
    got = kernels.singular_values.__kernel__.status(np.stack([good, broken]), np.zeros(2), np.array([code, code]))
    assert got.tolist() == [status, Status.NON_FINITE]


# Streamed twins


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("function", [one for one in BUILTIN if one.__kernel__.blocks is not None])
def test_the_streamed_twin_gives_the_same_outputs_in_the_same_order(function: Any, wide: bool) -> None:
    w = np.random.default_rng(1).standard_normal((40, 6)).astype(np.float32)
    w[3] = 0.0
    shape = w.shape[::-1] if wide else w.shape
    stream, params = function.__kernel__.blocks, dict(function.__kernel__.defaults)
    known = evaluate(w.T if wide else w, function.__kernel__.inputs[1:]) if function.__kernel__.inputs[1:] else {}
    others = {name: known[name] for name in function.__kernel__.inputs[1:]}

    def span(rows: NDArray[Any]) -> Any:
        state = stream.start(shape, w.dtype)
        for block in np.array_split(rows, 3):
            state = stream.update(state, block)
        return state

    state = stream.merge(span(w[:25]), span(w[25:]))
    streamed = stream.finish(state, lambda: iter(np.array_split(w, 6)), {**params, **others})
    whole = function(w.T if wide else w, *others.values())
    whole = whole if isinstance(whole, tuple) else (whole,)
    assert len(streamed) == len(whole) == len(function.__kernel__.outputs)
    for name, got, want in zip(function.__kernel__.outputs, streamed, whole, strict=True):
        if name != "weights_svals_error":
            np.testing.assert_allclose(got, want, rtol=1e-6, err_msg=name)
    assert isinstance(stream.route(shape, w.dtype, params), str)


# Declarations


def test_the_catalogue_is_complete() -> None:
    assert sorted(REGISTRY.fields) == sorted(FIELDS)
    by_property = {"weights_lsvs", "weights_rsvs", "weights_svals_error", "weights_svals_route"}
    fitted = {*FITS, *MODEL_FITS}
    assert {*SLICE, *NULL, *MODEL} == set(FIELDS) - fitted - by_property - {"weights_rand_lsvs", "weights_rand_rsvs"}
    assert {name for name in FIELDS if REGISTRY.producer(name).level == "model"} == {*MODEL, *MODEL_FITS}
    assert {name for name in FIELDS if not REGISTRY.field(name).persist} == {
        *("esd", "weights_lsvs", "weights_rsvs"),
        *("esd_rand", "weights_rand", "weights_rand_lsvs", "weights_rand_rsvs"),
        *(name for name in FIELDS if REGISTRY.producer(name).name == "rand_replicas"),
    }


def test_cheap_fields_need_no_decomposition() -> None:
    assert [one.name for one in REGISTRY.closure(ONE_PASS)] == ["entry_statistics"]
    for name in ("greater_dim", "lower_dim", "aspect_ratio"):
        assert all(WEIGHTS not in one.inputs for one in REGISTRY.closure([name]))
    assert "singular_vectors" not in [
        one.name for one in REGISTRY.closure(set(FIELDS) - {"weights_lsvs", "weights_rsvs"})
    ]


@pytest.mark.parametrize("declared", DECLARED, ids=lambda one: one.name)
def test_each_kernel_is_fully_declared(declared: Kernel) -> None:
    assert isinstance(declared.version, int)
    assert declared.batch
    assert declared.workspace is not None
    assert getattr(kernels, declared.name) is declared.function
    assert pickle.loads(pickle.dumps(declared.function)) is declared.function
    bibliography = BIBLIOGRAPHY.read_text()
    for name, field in declared.outputs.items():
        assert field.long_name, name
        assert field.formula, name
        assert field.nan, name
        assert field.units == "1", name
        for key in filter(None, field.reference.split(",")):
            assert f"{{{key.strip()}," in bibliography, key
            assert key.strip() in inspect.getdoc(declared.function), key


@pytest.mark.parametrize("declared", DECLARED, ids=lambda one: one.name)
def test_each_kernel_is_documented(declared: Kernel) -> None:
    text = inspect.getdoc(declared.function) or ""
    for section in ("Parameters", "Returns", "Notes", "Examples"):
        assert f"\n{section}\n---" in text, section
    for name in (*declared.inputs, *declared.defaults):
        assert re.search(rf"\b{name}\b", text), name


def test_the_bibliography_holds_what_is_cited_and_nothing_else() -> None:
    cited = {key.strip() for field in REGISTRY.fields.values() for key in field.reference.split(",") if key}
    assert set(re.findall(r"^@\w+\{(\w+),", BIBLIOGRAPHY.read_text(), re.MULTILINE)) >= cited


@pytest.mark.parametrize("case", CASES)
def test_values_lie_in_the_range_that_is_declared(case: str) -> None:
    names = set(FIELDS) - {*MODEL, *MODEL_FITS}
    values = evaluate(CASES[case], names)
    for name in names:
        low, high = REGISTRY.field(name).valid_range or (-math.inf, math.inf)
        got = np.asarray(values[name])[~np.isnan(values[name])]
        assert np.all((got >= low) & (got <= high)), name


# Memory


@pytest.mark.parametrize(("n", "rows", "cols"), [(1, 300, 200), (1, 60, 900), (2000, 8, 8), (8, 40, 2000)])
@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_workspace_is_an_upper_bound(n: int, rows: int, cols: int, dtype: str) -> None:
    w = np.random.default_rng(0).standard_normal((n, rows, cols)).astype(dtype)
    known = {WEIGHTS: w, SHAPE: np.broadcast_to((rows, cols), (n, 2)), ROUNDING: np.full(n, np.finfo(dtype).eps / 2)}
    fast = [one for one in DECLARED if n <= 100 or not {*one.outputs} & {*FITS, *MODEL_FITS}]
    with blas_threads(1):
        known |= evaluate(w, [name for one in fast if one.level != "model" for name in one.outputs])
        for one in fast:
            if one.level == "model":
                known |= dict(zip(one.outputs, np.atleast_1d(one.function(known[one.inputs[0]])), strict=True))
    for declared in fast:
        inputs = [known[name] for name in declared.inputs]
        tracemalloc.start()
        with blas_threads(1):
            outputs = declared.function(*inputs)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        made = sum(np.asarray(x).nbytes for x in (outputs if isinstance(outputs, tuple) else (outputs,)))
        allowed = declared.workspace(n, rows, cols, w.itemsize)
        assert peak - made <= allowed, (declared.name, peak - made, allowed)


# Kernels of other packages


@kernel(extra=Field("Extra"), version=1)
def extra(l2_norm):
    return l2_norm


@kernel(more=Field("More"), version=1)
def more(extra):
    return extra


@kernel(l2_norm=Field("Taken"), version=1)
def clash(frob_norm):
    return frob_norm


GROUP = (extra, more)


def points(monkeypatch: pytest.MonkeyPatch, **values: str) -> None:
    found = [EntryPoint(name, f"{__name__}:{value}", kernels.ENTRY_POINTS) for name, value in values.items()]
    monkeypatch.setattr(kernels, "entry_points", lambda group: found if group == kernels.ENTRY_POINTS else [])


@pytest.mark.parametrize(
    "values", [{"both": "GROUP"}, {"a": "extra", "b": "more"}, {"b": "more.__kernel__", "a": "extra"}]
)
def test_entry_points_add_kernels(monkeypatch: pytest.MonkeyPatch, values: dict[str, str]) -> None:
    points(monkeypatch, **values)
    registry = default_registry()
    assert list(registry.kernels)[-2:] == ["extra", "more"]
    assert [one.__kernel__.name for one in BUILTIN] == list(registry.kernels)[:-2]


def test_a_broken_entry_point_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, broken="no_such_thing", fine="extra")
    with pytest.warns(UserWarning, match="entry point 'broken'.*AttributeError"):
        registry = default_registry()
    assert "extra" in registry.kernels


def test_a_clashing_entry_point_is_left_out_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    points(monkeypatch, clash="clash", lonely="more")
    with (
        pytest.warns(UserWarning, match="'clash' is left out: kernel 'clash': the field 'l2_norm' is produced by"),
        pytest.warns(UserWarning, match="'lonely' is left out: kernel 'more' needs the field 'extra'"),
    ):
        registry = default_registry()
    assert list(registry.kernels) == [one.__kernel__.name for one in BUILTIN]
