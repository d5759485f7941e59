"""Heavy-tailed kernels: Diffract's values, statuses, numerical zero, and what must not change them."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import mpmath
import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray
from reference import MODEL_FITS
from test_kernels import FITS, REGISTRY, evaluate, fixture

from diffract_dask import Session, kernels, powerlaw, testing
from diffract_dask.blas import blas_threads
from diffract_dask.errors import ConfigurationError, StaleValuesWarning
from diffract_dask.fields import STATUS_MEANING, Status
from diffract_dask.sources import dtypes

DATA = Path(__file__).parent / "data"
GOLDEN = json.loads((DATA / "diffract_fits.json").read_text())["slices"]
Array = NDArray[np.float64]
CHEAP = [name for name in FITS if not name.endswith(("_p_value", "_ratio"))]
PL = [name for name in CHEAP if name.startswith("pl_")]
examples = settings(max_examples=10, deadline=None)


def golden(case: str, model: str) -> Array:
    with np.load(DATA / f"diffract_{model}.npz") as archive:
        return np.asarray(archive[case], np.float64)


@cache
def golden_values(case: str, model: str) -> dict[str, Any]:
    with blas_threads(1):
        return evaluate(golden(case, model), CHEAP)


def gaussian(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape)


def computed(model: Any, *fields: str, **options: Any) -> tuple[Any, Any]:
    """Return values and reasons of `fields` of `model`, by way of a store."""
    session = Session()
    session.models.add(model, "m", **options)
    summary = session.compute.apply(*fields)
    assert summary.failed == ()
    found = session.results.dataset(*fields).sel(model_id="m")
    return found, session.results.status(*fields).sel(model_id="m")


# Diffract's values

NOISE_ONLY = {("constant_32x16", "a"): "rank 1: all other eigenvalues, down to 1e-287, are rounding errors"}
EXPONENTIAL_STOPS = {
    ("huge_scale", "a"): "its optimiser stops within 1e-4, absolute, of a rate of 1e-8",
    ("huge_scale", "b"): "its optimiser stops within 1e-4, absolute, of a rate of 1e-8",
    ("lowrank4_exact", "b"): "its optimiser stops 6e-4 from the closed form",
    ("identity_32", "b"): "its distribution is the difference of numbers that agree in 12 digits",
}
EACH = [(case, model) for case, models in GOLDEN.items() for model in models if len(models[model]) > 0]


@pytest.mark.parametrize(("case", "model"), EACH)
def test_power_laws_are_those_of_diffract(case: str, model: str) -> None:
    want = {name: value for name, value in GOLDEN[case][model].items() if name in PL}
    got = golden_values(case, model)
    for name, value in want.items():
        if (case, model) in NOISE_ONLY:
            assert math.isnan(got[name]), name
        else:
            np.testing.assert_allclose(got[name], value, rtol=1e-8, err_msg=name)


@pytest.mark.parametrize(("case", "model"), [key for key in EACH if key not in NOISE_ONLY])
def test_exponentials_are_those_of_diffract(case: str, model: str) -> None:
    want = {name: value for name, value in GOLDEN[case][model].items() if name.startswith("expon_")}
    got = golden_values(case, model)
    for name, value in want.items():
        exact = name in ("expon_esd_xmin", "expon_concentration", "expon_presence")
        known = (case, model) in EXPONENTIAL_STOPS
        tolerance = 1e-8 if exact else 2e-2 if known and name == "expon_ks" else 3e-3 if known else 5e-4
        np.testing.assert_allclose(got[name], value, rtol=tolerance, err_msg=name)
    if want:
        esd = got["esd"]
        tail = esd[esd >= got["expon_esd_xmin"]] - got["expon_esd_xmin"]
        ours, theirs = got["expon_lambda"], want["expon_lambda"]
        most = np.sum(np.log(ours) - ours * tail)
        assert most >= np.sum(np.log(theirs) - theirs * tail) - 1e-12 * abs(most)


def truncated_likelihood(tail: Array, alpha: float, rate: float, xmin: float) -> float:
    """Return the log-likelihood of a truncated power law, its normaliser from mpmath."""
    if rate == 0:
        return float(np.sum(np.log((alpha - 1) / xmin) - alpha * np.log(tail / xmin)))
    with mpmath.workdps(30):
        a, cut = mpmath.mpf(1) - mpmath.mpf(alpha), mpmath.mpf(rate)
        log_norm = float(mpmath.log(cut ** (-a) * mpmath.gammainc(a, cut * mpmath.mpf(xmin))))
    return float(np.sum(-alpha * np.log(tail) - rate * tail)) - len(tail) * log_norm


@pytest.mark.parametrize(("case", "model"), [key for key in EACH if key not in NOISE_ONLY])
def test_truncated_power_laws_are_those_of_diffract_or_more_likely(case: str, model: str) -> None:
    want = {name: value for name, value in GOLDEN[case][model].items() if name.startswith("tpl_")}
    if not want:
        assert (case, model) == ("identity_32", "a")
        return
    got = golden_values(case, model)
    for name in ("tpl_esd_xmin", "tpl_concentration", "tpl_presence"):
        np.testing.assert_allclose(got[name], want[name], rtol=1e-8, err_msg=name)
    esd = got["esd"]
    xmin = float(got["tpl_esd_xmin"])
    tail = esd[esd >= xmin]
    ours = truncated_likelihood(tail, float(got["tpl_alpha"]), float(got["tpl_lambda"]), xmin)
    theirs = truncated_likelihood(tail, want["tpl_alpha"], want["tpl_lambda"], xmin)
    assert ours >= theirs - 1e-9
    if ours < theirs + 1e-7:  # theirs is the maximum too
        for name in ("tpl_alpha", "tpl_ks", "tpl_alpha_norm"):
            np.testing.assert_allclose(got[name], want[name], rtol=1e-3, err_msg=name)
        np.testing.assert_allclose(got["tpl_lambda"], want["tpl_lambda"], rtol=2e-3, atol=1e-5)
    np.testing.assert_allclose(got["tpl_scale"], esd[-1] * got["tpl_lambda"], rtol=1e-12)
    np.testing.assert_allclose(got["tpl_alpha_norm"], np.sum(esd ** got["tpl_alpha"]), rtol=1e-12)
    np.testing.assert_allclose(got["tpl_alpha"], want["tpl_alpha"], rtol=1e-3)


def test_golden_values_cover_every_field_that_diffract_has() -> None:
    names = {name for models in GOLDEN.values() for values in models.values() for name in values}
    ours = {*FITS} - {name for name in FITS if "p_value" in name}
    assert names <= ours
    assert len(names) == 21


FIXTURE = {
    "pl_alpha": 3.23078599544896,
    "pl_esd_xmin": 0.598377249862421,
    "pl_ks": 0.149310991270599,
    "pl_concentration": 0.5,
    "pl_presence": 0.882215689347558,
    "pl_alpha_norm": 168.100972671282,
    "pl_alpha_weighted": 2.21730048737131,
    "expon_lambda": 1.39888192671572,
    "expon_esd_xmin": 0.0299061107179825,
    "expon_ks": 0.15338735310241,
    "expon_concentration": 1,
    "expon_presence": 1,
    "expon_scale": 6.7933625326273,
    "tpl_alpha": 3.23079327733388,
    "tpl_esd_xmin": 0.598377249862421,
    "tpl_ks": 0.149309886038774,
    "tpl_concentration": 0.5,
    "tpl_presence": 0.882215689347558,
    "tpl_alpha_norm": 168.102864583994,
}


@pytest.mark.parametrize("name", FIXTURE)
def test_closed_form_fixture(name: str) -> None:
    tolerance = 5e-4 if name.startswith("expon") else 1e-4 if name.startswith("tpl") else 1e-9
    assert evaluate(fixture(), [name])[name] == pytest.approx(FIXTURE[name], rel=tolerance)


def test_closed_form_fixture_has_no_cut_off_and_its_model() -> None:
    values = evaluate(fixture(), ["tpl_lambda", "pl_alpha_norm", "tpl_alpha_norm"])
    assert values["tpl_lambda"] == 0.0  # Diffract's optimiser stops at 9e-10
    assert kernels.model_pl_alpha_norm([values["pl_alpha_norm"]])[0] == pytest.approx(2.22557022637551, rel=1e-10)
    assert kernels.model_tpl_alpha_norm([values["tpl_alpha_norm"]])[0] == pytest.approx(2.22557511416774, rel=1e-5)


# Parameters, by which Diffract's way is had where ours is another


def test_what_a_fit_leaves_out_can_be_kept() -> None:
    w = golden("constant_32x16", "a")
    rank, zero = kernels.numerical_rank(*(evaluate(w, ["greater_dim", "weights_svals"])[x] for x in SVALS), 0.0)
    assert zero >= 0
    assert rank == 1
    spectrum = np.array([1.0, 1.01, 1.02])
    assert np.isnan(kernels.power_law_fit(spectrum, 0.0)[0])
    assert np.isfinite(kernels.power_law_fit(spectrum, 0.0, min_values=2, min_spread=0.0)[0])
    noisy = np.array([1e-30, 2e-30, 4e-30, 1.0, 2.0, 3.0, 5.0, 7.0])
    assert kernels.power_law_fit(noisy, 1e-20, min_values=2)[-2] == 5
    assert kernels.power_law_fit(noisy, 0.0)[-2] == 8


SVALS = ("weights_svals", "weights_svals_error", "greater_dim")


@pytest.mark.parametrize("kernel", ["power_law_fit", "truncated_power_law_fit", "exponential_fit", "lognormal_fit"])
def test_parameters_of_the_fits(kernel: str) -> None:
    function = getattr(kernels, kernel)
    esd = np.sort(np.random.default_rng(0).pareto(1.5, 200) + 1)
    outputs = dict(zip(function.__kernel__.outputs, function(esd, 0.0, xmin=1.7), strict=True))
    by_name = {name.split("_", 1)[1]: float(value) for name, value in outputs.items()}
    assert (by_name["esd_xmin"], by_name["n_tail"], by_name["n_used"]) == (1.7, (esd >= 1.7).sum(), 200)
    long = dict(zip(function.__kernel__.outputs, function(esd, 0.0, min_tail=150), strict=True))
    assert min(value for name, value in long.items() if name.endswith("n_tail")) >= 150
    if "xmax" in function.__kernel__.defaults:
        bounded = dict(zip(function.__kernel__.outputs, function(esd, 0.0, xmax=5.0), strict=True))
        assert next(value for name, value in bounded.items() if name.endswith("n_used")) == (esd <= 5).sum()
        with pytest.raises(ConfigurationError, match="xmax is -1"):
            function(esd, 0.0, xmax=-1.0)


# Statuses


def rank_one(dtype: Any) -> NDArray[Any]:
    return np.outer(gaussian(30), gaussian(20, seed=1)).astype(dtype)


DEGENERATE: dict[str, NDArray[Any]] = {
    "constant": np.full((32, 16), 0.7, np.float32),
    "zero": np.zeros((20, 12), np.float32),
    "identity": np.eye(24, dtype=np.float32),
    "orthogonal": testing.matrix_with_spectrum(np.ones(20), 40, 20).astype(np.float32),
    "rank_1_float32": rank_one(np.float32),
    "rank_1_float64": rank_one(np.float64),
    "rank_1_float16": rank_one(np.float16),
    "within_3_percent": testing.matrix_with_spectrum(np.linspace(1.0, 1.014, 20), 40, 20),
}
DERIVED = [name for name in FITS if name.split("_")[0] in ("pl", "tpl", "expon", "lognormal") and "n_" not in name]


@pytest.mark.parametrize("case", DEGENERATE)
def test_degenerate_spectra_have_that_status_and_no_number(case: str, capfd: pytest.CaptureFixture[str]) -> None:
    """Eigenvalues within 3 %, all equal, fewer than two above zero: a status and no warning (powerlaw 28)."""
    values, status = computed({"w": DEGENERATE[case]}, *DERIVED, "pl_n_tail")
    for name in DERIVED:
        assert np.isnan(values[name].item()), name
        assert status.reason.sel(field=name).item() == STATUS_MEANING[Status.DEGENERATE], name
    assert values["pl_n_tail"].item() == 0
    assert "Warning" not in capfd.readouterr().err


@pytest.mark.parametrize("shape", [(1, 50), (50, 1), (1, 1)])
def test_one_value_is_degenerate(shape: tuple[int, int]) -> None:
    values = evaluate(gaussian(*shape), ["pl_alpha", "tpl_alpha", "expon_lambda", "lognormal_mu"])
    for name in ("power_law_fit", "truncated_power_law_fit", "exponential_fit", "lognormal_fit"):
        declared = REGISTRY.kernel(name)
        outputs = [values[output] for output in declared.outputs]
        assert np.isnan(outputs[0])
        assert declared.status(*outputs) == Status.DEGENERATE


def test_a_spectrum_of_few_values_has_that_status() -> None:
    rank_4 = (gaussian(40, 4) @ gaussian(4, 30, seed=1)).astype(np.float32)
    for w in (gaussian(50, 6), rank_4):
        values, status = computed({"w": w}, *DERIVED, "pl_n_used", "numerical_rank")
        for name in DERIVED:
            assert np.isnan(values[name].item()), name
            assert status.reason.sel(field=name).item() == STATUS_MEANING[Status.FEW_VALUES], name
        assert values["pl_n_used"].item() == values["numerical_rank"].item() in (4, 6)
    assert computed({"w": gaussian(50, 7)}, "pl_alpha")[0]["pl_alpha"].notnull().all()


def test_one_bad_slice_among_good_ones() -> None:
    model = {f"h.{i}.weight": gaussian(30, 20, seed=i) for i in range(4)}
    good, _ = computed(model, *DERIVED)
    model["h.2.weight"][3, 3] = np.nan
    model["h.1.weight"][:] = 0.5
    mixed, status = computed(model, *DERIVED)
    for name in DERIVED:
        for layer in ("h.0.weight", "h.3.weight"):
            assert mixed[name].sel(name=layer).item() == pytest.approx(good[name].sel(name=layer).item(), nan_ok=True)
        reasons = [status.reason.sel(field=name, name=f"h.{i}.weight").item() for i in (1, 2)]
        assert reasons == [STATUS_MEANING[x] for x in (Status.DEGENERATE, Status.NON_FINITE)], name


@pytest.mark.parametrize("kernel", ["power_law_fit", "lognormal_fit"])
def test_statuses_follow_from_the_outputs(kernel: str) -> None:
    function = getattr(kernels, kernel)
    esd = np.array([np.linspace(1, 9, 9), np.ones(9), np.zeros(9), np.full(9, np.nan), [0, 0, 0, 0, 0, 0, 1, 2, 3]])
    status = function.__kernel__.status(*function(esd, np.zeros(5)))
    want = [Status.OK, Status.DEGENERATE, Status.DEGENERATE, Status.OK, Status.FEW_VALUES]
    assert status.tolist() == want  # a spectrum of NaN has the reason of what it is made of


def test_a_tail_without_a_log_normal_is_undefined() -> None:
    esd = np.concatenate([np.ones(30), [1e30]])
    outputs = kernels.lognormal_fit(esd, 0.0)
    assert np.isnan(outputs[0])
    assert kernels.lognormal_fit.__kernel__.status(*outputs) == Status.UNDEFINED


def test_a_failed_fit_in_one_layer_and_then_a_summary() -> None:
    """The mean over the layers leaves it out, and says so (WeightWatcher 231)."""
    model = {f"h.{i}.weight": gaussian(40, 20, seed=i) for i in range(3)} | {"h.3.weight": np.eye(20)}
    values, _ = computed(model, *MODEL_FITS, "pl_alpha", "pl_alpha_norm", "pl_alpha_weighted")
    alpha = values["pl_alpha"].values
    assert np.isnan(alpha).sum() == 1
    assert values["model_pl_alpha"].item() == pytest.approx(np.nanmean(alpha), rel=1e-14)
    weighted = np.nanmean(values["pl_alpha_weighted"])
    assert values["model_pl_alpha_weighted"].item() == pytest.approx(weighted, rel=1e-14)
    norms = np.log10(values["pl_alpha_norm"].values)
    assert values["model_pl_alpha_norm"].item() == pytest.approx(np.nanmean(norms), rel=1e-13)
    for name in MODEL_FITS:
        if name.endswith("_skipped"):
            assert values[name].item() == 1, name


def test_model_level_means_of_nothing_and_in_any_order() -> None:
    for name in ("model_pl_alpha", "model_pl_alpha_norm", "model_pl_alpha_weighted", "model_tpl_alpha_norm"):
        function = getattr(kernels, name)
        mean, skipped = function(np.array([np.nan, np.nan]))
        assert np.isnan(mean)
        assert skipped == 2
        assert np.isnan(function(np.array([]))[0])
        values = np.exp(np.random.default_rng(0).standard_normal(50))
        assert {function(np.random.default_rng(i).permutation(values)) for i in range(5)} == {function(values)}


# Numerical zero


@pytest.mark.parametrize("name", [name for name, one in dtypes.DTYPES.items() if one.kind == "float"])
def test_rounding_is_that_of_the_stored_type(name: str) -> None:
    stored = getattr(ml_dtypes, name, None) or np.dtype(name)
    if name == "float8_e8m0fnu":
        assert dtypes.rounding(name) == 0.5  # powers of two only
    else:
        assert dtypes.rounding(name) == float(ml_dtypes.finfo(stored).eps) / 2


def test_whole_numbers_are_not_rounded() -> None:
    assert {dtypes.rounding(name) for name in ("int8", "uint64", "bool")} == {0.0}


@pytest.mark.parametrize("dtype", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("rank", [1, 9, 20])
def test_numerical_rank_follows_the_stored_dtype(tmp_path: Path, dtype: str, rank: int) -> None:
    exact = gaussian(60, rank) @ gaussian(rank, 40, seed=1)
    stored = exact.astype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    path = testing.write_safetensors(tmp_path / "m.safetensors", {"w": stored})
    for link in (False, True):
        values, _ = computed(path, "numerical_rank", "pl_n_used", "esd_zero", "pl_alpha", link=link)
        assert values["numerical_rank"].item() == values["pl_n_used"].item() == rank
    if rank == 20:
        want = evaluate(exact, ["pl_alpha"])["pl_alpha"]
        assert values["pl_alpha"].item() == pytest.approx(want, rel=0.1 if "16" in dtype else 1e-5)


@examples
@given(st.integers(0, 2**32 - 1), st.sampled_from(["float32", "float16"]))
def test_rounding_moves_no_eigenvalue_across_numerical_zero(seed: int, dtype: str) -> None:
    rng = np.random.default_rng(seed)
    exact = rng.standard_normal((30, 5)) @ rng.standard_normal((5, 25)) * np.exp(rng.standard_normal((30, 1)))
    values = evaluate(exact.astype(dtype), ["numerical_rank", "esd_zero", "esd"])
    assert values["numerical_rank"] <= 5
    assert (values["esd"] > values["esd_zero"]).sum() == values["numerical_rank"]


def test_numerical_zero_has_a_factor_and_it_is_checked() -> None:
    svals = np.array([1e-9, 0.5, 1.0])
    assert kernels.numerical_rank(svals, 1e-17, 4, 2.0**-24, factor=0.0)[0] == 3
    assert kernels.numerical_rank(svals, 1e-17, 4, 2.0**-24, factor=1e9)[0] == 0
    for bad in (-1.0, math.nan):
        with pytest.raises(ConfigurationError, match="at least 0"):
            kernels.numerical_rank(svals, 0.0, 4, 0.0, factor=bad)
    assert np.isnan(kernels.numerical_rank([np.nan, np.nan], np.nan, 4, 0.0)).all()
    assert kernels.numerical_rank([1e-310, 1e-308], 0.0, 4, 2.0**-53)[0] == 2


# Invariants


def assert_close(one: dict[str, Any], other: dict[str, Any], names: list[str], powers: dict[str, float]) -> None:
    for name in names:
        want = np.asarray(one[name]) * powers.get(name, 1.0)
        np.testing.assert_allclose(other[name], want, rtol=1e-6, atol=1e-9 * abs(powers.get(name, 1.0)), err_msg=name)


def units(scale: float) -> dict[str, float]:
    """Return by what each field that has a unit is multiplied when the weights are multiplied by `scale`."""
    powers = dict.fromkeys([name for name in FITS if name.endswith("esd_xmin")] + ["esd_zero"], scale**2)
    return powers | dict.fromkeys(["tpl_lambda", "tpl_lambda_error", "expon_lambda", "expon_lambda_error"], scale**-2)


SCALE_FREE = [name for name in CHEAP if "norm" not in name and name != "pl_alpha_weighted"]
SCALE_FREE += ["lognormal_sigma", "lognormal_ks", "lognormal_esd_xmin", "lognormal_n_tail"]


@examples
@example(0, 3e-4)
@given(st.integers(0, 2**32 - 1), st.sampled_from([3e-4, 1e-30, 8.0, 1e20]))
def test_the_same_weights_at_another_scale(seed: int, scale: float) -> None:
    """The same weights × 3e-4, and other factors: α and D stay, xmin scales."""
    w = np.random.default_rng(seed).standard_t(3.0, (40, 25))
    assert_close(evaluate(w, SCALE_FREE), evaluate(scale * w, SCALE_FREE), SCALE_FREE, units(scale))


@examples
@given(st.integers(0, 2**32 - 1))
def test_permutation_transposition_and_rotation(seed: int) -> None:
    rng = np.random.default_rng(seed)
    w = rng.standard_t(3.0, (30, 20))
    q = testing.matrix_with_spectrum(np.ones(30), 30, 30, seed % 1000)
    one = evaluate(w, CHEAP)
    names = [name for name in CHEAP if name != "esd_zero"]
    for moved in (w[rng.permutation(30)][:, rng.permutation(20)], w.T, q @ w):
        assert_close(one, evaluate(moved, CHEAP), names, {})


@examples
@given(st.integers(0, 2**32 - 1))
def test_a_batch_is_its_slices_whatever_is_beside_them(seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = rng.standard_t(3.0, (4, 12, 9))
    batch[1] = 1.0
    batch[2, 0, 0] = np.nan
    together = evaluate(batch, CHEAP)
    folded = evaluate(batch.reshape(2, 2, 12, 9), CHEAP)
    for i, w in enumerate(batch):
        alone = evaluate(w, CHEAP)
        for name in CHEAP:
            np.testing.assert_allclose(together[name][i], alone[name], rtol=1e-7, err_msg=name)
            np.testing.assert_array_equal(folded[name].reshape(4)[i], together[name][i], err_msg=name)


def test_float32_against_float64() -> None:
    w = gaussian(80, 50).astype(np.float32)
    one, other = evaluate(w.astype(np.float64), PL), evaluate(w, PL)
    for name in PL:
        np.testing.assert_allclose(other[name], one[name], rtol=1e-5, err_msg=name)


# p-values, comparisons, and the tail of determinant one


def test_p_values_are_those_of_the_fits() -> None:
    w = np.random.default_rng(4).standard_t(2.5, (60, 40))
    values = evaluate(w, ["pl_p_value", "expon_p_value", "tpl_p_value"])
    families = {"pl": "power_law", "expon": "exponential", "tpl": "truncated_power_law"}
    for short, family in families.items():
        want = powerlaw.bootstrap_p_value(powerlaw.fit(values["esd"], family))
        assert values[f"{short}_p_value"] == pytest.approx(want, abs=2e-3), family
    fitted = [values[name] for name in ("pl_ks", "pl_n_used", "pl_n_tail", "pl_bounded")]
    assert kernels.pl_p_value(*fitted, seed=1) != values["pl_p_value"]
    assert kernels.pl_p_value(*fitted, seed=1) == pytest.approx(values["pl_p_value"], abs=0.05)
    assert np.isnan(kernels.pl_p_value([np.nan], [9.0], [0.0], [0.0]))


def test_comparisons_are_on_the_tail_of_the_power_law() -> None:
    w = np.random.default_rng(4).standard_t(2.5, (60, 40))
    values = evaluate(w, ["pl_expon_ratio"])
    esd, xmin = values["esd"], float(values["pl_esd_xmin"])
    power_law = powerlaw.fit(esd, xmin=xmin)
    for short, family in {"expon": "exponential", "lognormal": "lognormal", "tpl": "truncated_power_law"}.items():
        other = powerlaw.fit(esd, family, xmin=xmin)
        found = powerlaw.compare(esd, power_law, other, nested=short == "tpl")
        np.testing.assert_equal(float(values[f"pl_{short}_ratio"]), found.log_ratio)
        np.testing.assert_equal(float(values[f"pl_{short}_p_value"]), found.p_value)
    assert values["pl_tpl_ratio"] <= 0


@pytest.mark.parametrize(
    ("case", "num", "lower"),
    [
        ("gauss_rect_100x50", 41, 0.2892827257135015),
        ("gauss_sq_64", 47, 0.19486686955279806),
    ],
)
def test_determinant_of_the_tail_as_in_weightwatcher(case: str, num: int, lower: float) -> None:
    """Values of weightwatcher 0.7.7, whose eigenvalues are squares of singular values."""
    w = golden(case, "a")
    values = evaluate(w, ["detx_num"])
    assert values["detx_num"] == num
    assert values["detx_esd_xmin"] * max(w.shape) == pytest.approx(lower, rel=1e-6)


def test_determinant_of_thousands_of_eigenvalues_in_the_log_domain() -> None:
    """Product of 4096 normalised eigenvalues (detX): quantiles of the Marchenko–Pastur law of a square matrix.

    The product leaves the range of float64: a program that forms it gives 2951 for a Gaussian matrix, not 2994.
    """
    angle = np.linspace(0.0, math.pi / 2, 200_001)
    share = (2 * angle - np.sin(2 * angle)) / math.pi  # of the eigenvalues, those above 4 cos²(angle)
    esd = 4 * np.cos(np.interp((np.arange(4096) + 0.5) / 4096, share, angle)) ** 2
    num, lower = kernels.detx(np.sort(esd), 0.0)
    assert num == pytest.approx(2994, abs=2)
    assert lower == np.sort(esd)[4096 - int(num)]


@pytest.mark.parametrize("values", [np.ones(5), np.linspace(1.0, 1.02, 5), np.zeros(5), np.full(5, np.nan)])
def test_determinant_of_a_spectrum_without_a_tail(values: Array) -> None:
    assert np.isnan(kernels.detx(values, 0.0)).all()


def test_determinant_does_not_count_rounding_errors() -> None:
    noisy, clean = [1e-33, 3e-32, 1.0, 3.0], [0.0, 0.0, 1.0, 3.0]
    assert kernels.detx(noisy, 1e-30) == kernels.detx(clean, 0.0) == (3.0, 0.0)
    assert np.isfinite(kernels.detx(np.linspace(1.0, 1.02, 5), 0.0, min_spread=0.0)).all()


@pytest.mark.parametrize(
    ("case", "rank"), [("orthogonal", None), ("zero", None), ("constant", 1), ("rank_1_float16", 1)]
)
def test_determinant_of_degenerate_weights(case: str, rank: int | None) -> None:
    """Of weights of low rank the first eigenvalue that counts as zero makes the product zero."""
    values, status = computed({"w": DEGENERATE[case]}, "detx_num", "detx_esd_xmin")
    if rank is None:
        assert status.reason.sel(field="detx_num").item() == STATUS_MEANING[Status.DEGENERATE]
        assert np.isnan(values["detx_num"].item())
    else:
        assert (values["detx_num"].item(), values["detx_esd_xmin"].item()) == (rank + 1, 0.0)


def test_determinant_of_weights_with_nan() -> None:
    status = computed({"w": np.full((9, 8), np.nan)}, "detx_num")[1]
    assert status.reason.sel(field="detx_num").item() == STATUS_MEANING[Status.NON_FINITE]


@pytest.mark.slow
def test_determinant_of_a_large_gaussian_matrix() -> None:
    """The same of a Gaussian matrix of 4096²."""
    w = np.random.default_rng(0).standard_normal((4096, 4096))
    num, _ = kernels.detx(np.linalg.eigvalsh(w @ w.T) / 4096, 0.0)
    assert num == pytest.approx(2994, abs=8)


def test_range_of_alpha_norms() -> None:
    assert np.isnan(kernels.pl_alpha_norm([1e200, 1e300], 3.0))
    assert np.isnan(kernels.pl_alpha_norm([1e-200, 1e-300], 3.0))
    assert np.isnan(kernels.pl_alpha_norm([0.0, 0.0], np.nan))
    assert kernels.pl_alpha_norm([0.0, 2.0], 2.0) == 4.0
    assert np.isnan(kernels.pl_alpha_weighted(0.0, 2.0))


def test_fits_need_the_weights_for_nothing_but_singular_values() -> None:
    names = [one.name for one in REGISTRY.closure(["pl_alpha", "tpl_p_value"])]
    assert names[0] == "singular_values"
    assert [one.name for one in REGISTRY.closure(["pl_alpha"]) if "weights" in one.inputs] == ["singular_values"]


def test_minilm_as_in_weightwatcher(real_weights: Callable[[str], Path]) -> None:
    """Values of weightwatcher 0.7.7, whose eigenvalues are squares of singular values; it leaves out 2 × 384."""
    session = Session()
    session.models.add(real_weights("minilm/model.safetensors"), "m", link=True)
    session.compute.apply("model_pl_alpha", "pl_esd_xmin", "pl_ks")
    found = session.results.dataset("model_pl_alpha", "model_pl_alpha_skipped", "pl_alpha", "pl_esd_xmin", "pl_ks")
    assert found["model_pl_alpha"].item() == pytest.approx(4.1171, abs=5e-5)
    assert found["model_pl_alpha_skipped"].item() == 1
    embedding = found.sel(name="embeddings.word_embeddings.weight", model_id="m")
    assert embedding["pl_alpha"].item() == pytest.approx(4.534994, abs=1e-6)
    assert embedding["pl_esd_xmin"].item() * 30522 == pytest.approx(252.7047, abs=1e-4)
    assert embedding["pl_ks"].item() == pytest.approx(0.0534, abs=5e-5)


# Zero, and the ends of the range of numbers


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("shape", [(300, 200), (200, 300), (600, 600), (10000, 40)])
def test_rounding_of_equal_entries_is_no_spectrum(shape: tuple[int, int], dtype: Any) -> None:
    """Rounding errors of sums of equal numbers go one way, and are larger than those of any others."""
    for entry in (0.1, 1 / 3, 0.7):
        values = evaluate(np.full(shape, entry, dtype), ["numerical_rank", "pl_alpha"])
        assert values["numerical_rank"] == 1
        assert np.isnan(values["pl_alpha"])


def test_what_counts_as_zero_at_the_end_of_the_range() -> None:
    """Squares of small singular values lose their digits; a fit of them would be of another spectrum."""
    w = gaussian(30, 20)
    names = ["numerical_rank", "pl_alpha", "pl_n_used"]
    whole = evaluate(w, names)
    for scale in (1e-100, 1e-140):
        small = evaluate(scale * w, names)
        for name in names:
            assert float(small[name]) == pytest.approx(float(whole[name]), rel=1e-10)
    for scale in (1e-160, 1e-200):
        small = evaluate(scale * w, names)
        assert small["numerical_rank"] == 20
        assert np.isnan(small["pl_alpha"])


def test_comparisons_leave_out_what_counts_as_zero() -> None:
    """A lower end that is given may lie below rounding errors, which are in no tail."""
    w = (gaussian(60, 12) @ gaussian(12, 40, seed=1)).astype(np.float32)
    ratios = [name for name in FITS if name.endswith("_ratio")]
    session = Session()
    session.models.add({"w": w}, "m")
    assert not session.compute.apply("pl_n_tail", "pl_ks", *ratios, params={"power_law_fit": {"xmin": 1e-30}}).failed
    with pytest.warns(StaleValuesWarning):
        values = session.results.dataset("pl_n_tail", *ratios)
    assert values["pl_n_tail"].item() == 12
    esd = evaluate(w, ["esd"])["esd"][-12:]
    mine, other = (powerlaw.fit(esd, family, xmin=1e-30) for family in ("power_law", "exponential"))
    want = powerlaw.compare(esd, mine, other).log_ratio
    assert values["pl_expon_ratio"].item() == pytest.approx(want, rel=1e-5)


def test_a_fit_with_an_upper_end_has_no_p_value_of_one_without() -> None:
    w = np.random.default_rng(5).standard_t(3, (60, 50))
    names = ["pl_p_value", "expon_p_value", "pl_expon_ratio", "pl_lognormal_ratio", "pl_tpl_ratio"]
    params = {"power_law_fit": {"xmax": 1e3}, "exponential_fit": {"xmax": 1e3}}
    with Session(profile="ram") as session:
        session.models.add({"w": w}, "m")
        assert not session.compute.apply("pl_alpha", "pl_bounded", *names).failed
        before = session.results.dataset("pl_bounded", *names)
        assert before.pl_bounded.item() == 0
        assert all(np.isfinite(before[name].item()) for name in names[:3])
        for kernel, own in params.items():
            session.compute.configure_kernel(kernel, **own)
        session.compute.apply("pl_alpha", "pl_bounded", "expon_bounded", *names)
        after = session.results.dataset("pl_alpha", "pl_bounded", "expon_bounded", *names)
    assert np.isfinite(after.pl_alpha.item())
    assert after.pl_bounded.item() == after.expon_bounded.item() == 1
    assert all(np.isnan(after[name].item()) for name in names)
