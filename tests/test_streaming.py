"""Slices read in spans: the same numbers by every route, digests on the way, memory within the plan."""

from __future__ import annotations

import re
import subprocess
import sys

import dask
import ml_dtypes
import numpy as np
import pytest

from diffract_dask import Session, errors
from diffract_dask.testing import write_safetensors

FIELDS = ("weights_svals", "frob_norm", "weights_mean", "weights_kurtosis", "stable_rank", "hard_rank", "esd_min")
SHAPES = {"tall": (3000, 40), "wide": (40, 3000), "square": (200, 200)}
SMALL = {
    "diffract_dask.stream-above": "1 kB",
    "diffract_dask.read-size": "64 kiB",
}


def matrix(kind, dtype, seed=1):
    return np.random.default_rng(seed).standard_normal(SHAPES[kind]).astype(dtype)


@pytest.mark.parametrize("kind", SHAPES)
@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16, np.float32, np.float64])
@pytest.mark.parametrize("link", [True, False])
def test_streamed_agrees_with_whole(kind, dtype, link, tmp_path):
    array = matrix(kind, dtype)
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"a.weight": array, "small.weight": matrix("square", np.float32)[:3, :2].copy()})
    whole = Session()
    whole.models.add(path, "m", link=False)
    whole.compute.apply(*FIELDS)
    streamed = Session(str(tmp_path / "s.zarr"))
    streamed.models.add(path, "m", link=link)
    with dask.config.set(SMALL):
        text = streamed.compute.plan(*FIELDS).explain()
        assert "streamed in" in text
        assert ("tsqr" in text) == (dtype is np.float64)
        streamed.compute.apply(*FIELDS)
        assert streamed.compute.plan(*FIELDS).nothing_to_do
    left, right = whole.results.dataset(*FIELDS), streamed.results.dataset(*FIELDS)
    scale = float(left.weights_svals.max())
    for field in FIELDS:
        if field != "hard_rank":
            np.testing.assert_allclose(right[field], left[field], rtol=1e-7, atol=1e-12 * scale, err_msg=field)
    np.testing.assert_array_equal(right.hard_rank, left.hard_rank)
    svals = np.linalg.svd(array.astype(np.float64), compute_uv=False)[::-1]
    found = right.weights_svals.sel(model_id="m", name="a.weight").values[: len(svals)]
    eps = 1e-13 if dtype is np.float64 else np.finfo(np.float32).eps
    np.testing.assert_allclose(found, svals, atol=eps * scale)
    digests = [s.models.parameters("m").set_index("name").digest["a.weight"] for s in (whole, streamed)]
    assert digests[0] == digests[1]


def test_one_nan_in_a_streamed_slice(tmp_path):
    array = matrix("tall", np.float32)
    array[2500, 3] = np.nan
    session = Session()
    session.models.add({"bad.weight": array, "good.weight": matrix("tall", np.float32, 2)}, "m")
    with dask.config.set(SMALL):
        summary = session.compute.apply(*FIELDS, "nonfinite_fraction")
    assert not summary.failed
    ds = session.results.dataset("stable_rank", "frob_norm", "nonfinite_fraction").sel(model_id="m")
    assert np.isnan(ds.stable_rank.sel(name="bad.weight"))
    assert np.isfinite(ds.stable_rank.sel(name="good.weight"))
    np.testing.assert_allclose(ds.nonfinite_fraction.sel(name="bad.weight"), 1 / array.size)
    reasons = session.results.status("stable_rank", "weights_svals", "frob_norm").reason.sel(name="bad.weight")
    assert all("NaN or infinity" in str(reason) for reason in reasons.values.ravel())


@pytest.mark.parametrize("shape", [(400, 400), (4000, 300), (300, 4000)])
def test_over_budget_is_refused_before_anything_runs(shape, no_compute):
    session = Session()
    session.models.add({"w.weight": np.ones(shape, np.float32)}, "m")
    with (
        dask.config.set({"diffract_dask.memory-budget": "200 kB", "diffract_dask.read-size": "10 kB"}),
        pytest.raises(errors.OverBudgetError, match=r"KiB|MiB") as caught,
    ):
        session.compute.apply("nuclear_norm")
    text = str(caught.value)
    assert "m: " in text
    assert "memory-budget" in text
    assert len(re.findall(r"[KM]iB", text)) >= 2


def test_a_kernel_without_a_streaming_form_runs_whole_or_is_refused():
    session = Session()
    session.models.add({"w.weight": np.ones((500, 100), np.float32)}, "m")

    @session.compute.kernel
    def corner(weights):
        return weights[0, 0]

    with dask.config.set(SMALL):
        assert session.compute.apply("corner").computed == {"corner": 1}
    session.compute.configure_kernel("hard_rank", rtol=1e-3)
    with dask.config.set(SMALL | {"diffract_dask.memory-budget": "300 kB"}), pytest.raises(errors.OverBudgetError):
        session.filter(param_names="w.weight").compute.apply("weights_lsvs")


PEAK = """
import sys, resource
from diffract_dask import Session
session = Session(sys.argv[1], mode="a")
small = session.filter(model_ids="warm")
small.compute.apply("nuclear_norm", "weights_mean")
def rss():
    with open("/proc/self/status") as f:
        return {l.split(":")[0]: int(l.split()[1]) * 1024 for l in f if l.startswith("Vm")}
with open("/proc/self/clear_refs", "w") as f:
    f.write("5")
before = rss()["VmRSS"]
plan = session.compute.plan("nuclear_norm", "weights_mean")
session.compute.apply("nuclear_norm", "weights_mean")
print(plan.peak_bytes, rss()["VmHWM"] - before)
"""


@pytest.mark.parametrize("shape", [(40000, 512), (512, 40000), (1500, 1500)])
def test_measured_peak_is_within_the_projection(shape, tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, {"w.weight": np.random.default_rng(0).standard_normal(shape).astype(np.float32)})
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add({"w.weight": np.eye(20, 30, dtype=np.float32)}, "warm")
    session.models.add(path, "big", link=True)
    out = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path / "s.zarr")], capture_output=True, text=True, check=True
    )
    projected, measured = map(int, out.stdout.split())
    # The allocator and the libraries' own buffers come on top of what the plan can know.
    assert measured <= projected + 24 * 2**20
