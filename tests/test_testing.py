"""The public test data: known spectra, exact encodings, files that other readers accept."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import safetensors
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import diffract_dask.testing as dt

MINI_FLOATS = {
    "bfloat16": ml_dtypes.bfloat16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
    "float8_e5m2": ml_dtypes.float8_e5m2,
}


@pytest.mark.parametrize("shape", [(7, 4), (4, 7), (5, 5), (1, 6)])
def test_matrix_with_spectrum_has_it(shape: tuple[int, int]) -> None:
    k = min(shape)
    svals = np.linspace(3.0, 0.5, k)
    w = dt.matrix_with_spectrum(svals, *shape, seed=3)
    assert w.shape == shape
    np.testing.assert_allclose(np.linalg.svd(w, compute_uv=False), svals, rtol=1e-13)


def test_matrix_with_spectrum_is_seeded_and_padded_with_zeros() -> None:
    w = dt.matrix_with_spectrum([2.0], 6, 5, seed=1)
    assert np.array_equal(w, dt.matrix_with_spectrum([2.0], 6, 5, seed=1))
    assert not np.array_equal(w, dt.matrix_with_spectrum([2.0], 6, 5, seed=2))
    assert np.linalg.matrix_rank(w) == 1
    with pytest.raises(ValueError, match=r"at most min\(2, 3\) = 2"):
        dt.matrix_with_spectrum([1.0, 1.0, 1.0], 2, 3)


def test_lauchli_defeats_its_gram_matrix() -> None:
    w = dt.lauchli(3, 1e-9)
    np.testing.assert_allclose(np.linalg.svd(w, compute_uv=False), [np.sqrt(3.0), 1e-9, 1e-9], rtol=1e-6)
    assert np.linalg.matrix_rank(w.T @ w) == 1


def test_hilbert_and_kahan() -> None:
    from scipy.linalg import hilbert

    np.testing.assert_array_equal(dt.hilbert(6), hilbert(6))
    w = dt.kahan(40, 1.2)
    assert np.array_equal(w, np.triu(w))
    assert np.linalg.svd(w, compute_uv=False)[-1] < 1e-2 * np.diagonal(w).min()


def test_random_model_streams_do_not_depend_on_each_other() -> None:
    small = dt.random_model({"a": (4, 3), "b": (2, 5)}, seed=9)
    large = dt.random_model({"a": (4, 3), "b": (2, 5), "c": (8,)}, seed=9)
    assert all(np.array_equal(small[name], large[name]) for name in small)
    assert {w.dtype.name for w in large.values()} == {"float32"}
    assert not np.array_equal(small["a"], dt.random_model({"a": (4, 3)}, seed=10)["a"])


def test_random_model_spectrum_holds_for_convolutions() -> None:
    model = dt.random_model({"conv": (6, 2, 3, 3), "bias": (6,)}, dtype="float64", spectrum=dt.power_law_svals)
    svals = np.linalg.svd(model["conv"].reshape(6, 18), compute_uv=False)
    np.testing.assert_allclose(svals[::-1], dt.power_law_svals(6), rtol=1e-12)
    assert model["bias"].shape == (6,)


@pytest.mark.parametrize("name", MINI_FLOATS)
def test_encode_agrees_with_ml_dtypes(name: str) -> None:
    own = MINI_FLOATS[name]
    codes = np.arange(2 ** (8 * np.dtype(own).itemsize)).astype(dt.encode([0.0], name).dtype)
    values = codes.view(own).astype(np.float32)
    finite = np.sort(np.unique(values[np.isfinite(values)]))
    middles = ((finite[1:].astype(np.float64) + finite[:-1]) / 2).astype(np.float32)  # the ties, exact in float32
    edge = finite[-1] + (finite[-1] - finite[-2]) * np.float32([0.25, 0.5, 0.75])
    with np.errstate(over="ignore"):
        x = np.concatenate([finite, middles, np.nextafter(middles, np.float32(np.inf)), edge, -edge, [np.inf, -0.0]])
        expected = x.astype(np.float32).astype(own).view(codes.dtype)
    found = dt.encode(x.astype(np.float32), name)
    nan = np.isnan(expected.view(own).astype(np.float32))
    assert np.array_equal(found[~nan], expected[~nan])
    assert np.isnan(found[nan].view(own).astype(np.float32)).all()
    assert np.isnan(dt.encode([np.nan, -np.nan], name).view(own).astype(np.float32)).all()


def test_encode_names_the_nearest_dtype() -> None:
    with pytest.raises(ValueError, match="Did you mean 'bfloat16'"):
        dt.encode([1.0], "bfloat1")


def test_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    arrays = {
        "w": np.arange(6, dtype=np.float32).reshape(2, 3),
        "ü.bias": np.array([True, False]),
        "n": np.int64(7),
        "empty": np.zeros((0, 4)),
        "t": np.arange(6.0).reshape(2, 3).T,
    }
    path = dt.write_safetensors(tmp_path / "m.safetensors", arrays, {"step": "3"})
    back = load_file(path)
    assert set(back) == set(arrays)
    for name, value in arrays.items():
        assert back[name].dtype == np.asarray(value).dtype
        np.testing.assert_array_equal(back[name], value)


@pytest.mark.parametrize(
    ("name", "code"), [("bfloat16", "BF16"), ("float8_e4m3fn", "F8_E4M3"), ("float8_e5m2", "F8_E5M2")]
)
def test_safetensors_dtype_by_name(tmp_path: Path, name: str, code: str) -> None:
    values = np.array([[0.5, -1.25], [3.0, 16.0]])
    path = dt.write_safetensors(tmp_path / "m.safetensors", {"w": values, "b": np.ones(2)}, dtype={"w": name})
    back = dict(safetensors.deserialize(path.read_bytes()))
    assert (back["w"]["dtype"], back["b"]["dtype"]) == (code, "F64")
    stored = np.frombuffer(back["w"]["data"], MINI_FLOATS[name]).reshape(2, 2)
    np.testing.assert_array_equal(stored.astype(np.float64), values)


@settings(max_examples=60, deadline=None)
@given(dt.matrices(max_side=5))
def test_matrices_are_finite_and_small(w: np.ndarray) -> None:
    assert w.ndim == 2
    assert max(w.shape) <= 5
    assert w.dtype.name in ("float32", "float64")
    assert np.isfinite(w).all()


@settings(max_examples=30, deadline=None)
@given(st.data())
def test_models_are_dicts_of_matrices(data: st.DataObject) -> None:
    model = data.draw(dt.models(max_parameters=3))
    weights = [name for name in model if name.endswith(".weight")]
    assert 1 <= len(weights) <= 3
    for name in set(model) - set(weights):
        assert model[name].shape == model[name.removesuffix("bias") + "weight"].shape[:1]


def test_import_loads_neither_hypothesis_nor_dask() -> None:
    code = (
        "import sys, diffract_dask.testing\n"
        "print([m for m in ('hypothesis', 'dask', 'xarray', 'zarr', 'torch', 'ml_dtypes') if m in sys.modules])"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
