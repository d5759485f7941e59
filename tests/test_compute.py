"""The engine end to end: what is computed, copied, reused and failed, on threads."""

from __future__ import annotations

import numpy as np
import pytest

from diffract_dask import Session, errors
from diffract_dask.fields import Status
from diffract_dask.testing import write_safetensors

SPECTRAL = ("frob_norm", "stable_rank", "effective_rank", "nuclear_norm", "hard_rank", "esd_max", "esd_min")


def weights(seed=0, n=3, shape=(12, 8), dtype=np.float32):
    rng = np.random.default_rng(seed)
    return {f"h.{i}.w.weight": rng.standard_normal(shape).astype(dtype) for i in range(n)}


@pytest.fixture
def session():
    return Session()


def test_values_agree_with_lapack(session):
    arrays = weights(n=4) | {"wide.weight": np.random.default_rng(9).standard_normal((5, 30))}
    session.models.add(arrays, "m")
    session.compute.apply(*SPECTRAL)
    ds = session.results.dataset(*SPECTRAL)
    for name, array in arrays.items():
        svals = np.linalg.svd(array.astype(float), compute_uv=False)
        row = ds.sel(model_id="m", name=name)
        np.testing.assert_allclose(row.frob_norm, np.linalg.norm(array.astype(float)), rtol=1e-12)
        np.testing.assert_allclose(row.nuclear_norm, svals.sum(), rtol=1e-6)
        np.testing.assert_allclose(row.stable_rank, (svals**2).sum() / svals[0] ** 2, rtol=1e-6)
        np.testing.assert_allclose(row.esd_max, svals[0] ** 2 / max(array.shape), rtol=1e-6)


def test_second_apply_computes_nothing(session):
    session.models.add(weights(), "m")
    first = session.compute.apply(*SPECTRAL)
    assert first.kernel_slices["singular_values"] == 3
    again = session.compute.apply(*SPECTRAL)
    assert again.kernel_slices == {}
    assert again.computed == {}
    assert again.reused == dict.fromkeys(SPECTRAL, 3)


def test_changed_parameter_recomputes_exactly_what_depends_on_it(session):
    session.models.add(weights(), "m")
    session.compute.apply(*SPECTRAL)
    session.compute.configure_kernel("hard_rank", rtol=0.5)
    summary = session.compute.apply(*SPECTRAL)
    # esd is not stored; it is made anew from the stored singular values, which are not.
    assert set(summary.kernel_slices) <= {"hard_rank", "esd", "greater_dim"}
    assert summary.kernel_slices["hard_rank"] == 3
    assert list(summary.computed) == ["hard_rank"]


def test_params_of_one_call(session):
    session.models.add(weights(), "m")
    session.compute.apply("hard_rank")
    loose = session.compute.apply("hard_rank", params={"hard_rank": {"rtol": 0.5}})
    assert loose.computed == {"hard_rank": 3}
    assert session.compute.apply("hard_rank").computed == {"hard_rank": 3}


def test_changed_weight_recomputes_exactly_that_slice(session):
    arrays = weights()
    session.models.add(arrays, "m")
    session.compute.apply(*SPECTRAL)
    arrays["h.1.w.weight"] = arrays["h.1.w.weight"].copy()
    arrays["h.1.w.weight"][3, 2] += 1
    session.models.add(arrays, "m", replace=True)
    summary = session.compute.apply(*SPECTRAL)
    assert summary.kernel_slices["singular_values"] == 1
    assert summary.kernel_slices["entry_statistics"] == 1
    assert summary.computed["stable_rank"] == 1
    assert summary.reused["stable_rank"] == 2


def test_equal_content_is_copied(session):
    session.models.add(weights(), "m")
    session.compute.apply(*SPECTRAL, "weights_svals", "param_norm")
    with pytest.warns(errors.DuplicateContentWarning):
        session.models.add(weights(), "copy")
    summary = session.compute.apply(*SPECTRAL, "weights_svals", "param_norm")
    assert summary.kernel_slices == {}
    assert summary.copied["stable_rank"] == 3
    ds = session.results.dataset("stable_rank", "weights_svals", "param_norm")
    assert ds.sel(model_id="m").equals(ds.sel(model_id="copy").assign_coords(ds.sel(model_id="m").coords))


def test_shared_layers_are_computed_once(session):
    first, second = weights(0), weights(1)
    second["h.0.w.weight"] = first["h.0.w.weight"]
    session.models.add(first, "a")
    session.models.add(second, "b")
    summary = session.compute.apply("nuclear_norm")
    assert summary.kernel_slices["singular_values"] == 5
    assert summary.computed["nuclear_norm"] == 6


def test_one_bad_slice_does_not_stop_the_others(session):
    arrays = weights()
    arrays["h.1.w.weight"][0, 0] = np.nan
    session.models.add(arrays, "m")
    summary = session.compute.apply(*SPECTRAL)
    assert not summary.failed
    ds = session.results.dataset(*SPECTRAL)
    assert np.isnan(ds.stable_rank.sel(model_id="m", name="h.1.w.weight"))
    assert np.isfinite(ds.stable_rank.sel(name=["h.0.w.weight", "h.2.w.weight"])).all()
    view = session.store.view()
    for field in SPECTRAL:
        assert view.status[field][0, view.names.index("h.1.w.weight")] == Status.NON_FINITE, field


def test_kernel_that_raises_on_one_slice(session):
    arrays = weights()
    arrays["h.2.w.weight"] *= 100
    session.models.add(arrays, "m")

    @session.compute.kernel
    def picky(frob_norm, *, limit=50.0):
        if frob_norm > limit:
            raise RuntimeError("too large")
        return frob_norm

    @session.compute.kernel
    def after(picky):
        return picky + 1

    summary = session.compute.apply("picky", "after", "param_norm")
    (failure,) = summary.failed
    assert (failure.model_id, failure.name, failure.kernel) == ("m", "h.2.w.weight", "picky")
    assert "too large" in failure.reason
    assert np.isfinite(session.results.dataset("after").after.sel(name="h.0.w.weight")).all()
    assert session.results.status("picky").state.sel(name="h.2.w.weight").item() == "failed"
    assert session.compute.apply("picky", "after").kernel_slices == {}
    retried = session.compute.apply("picky", "after", retry_failed=True)
    assert retried.kernel_slices["picky"] == 1
    session.compute.configure_kernel("picky", limit=1e9)
    assert session.compute.apply("picky", "after").failed == ()
    assert session.results.status("picky", "after").state.isin(["fresh"]).all()


def test_model_level_fields(session):
    arrays = weights()
    session.models.add(arrays, "m")
    session.compute.apply("param_norm", "log_norm")
    ds = session.results.dataset("param_norm")
    expected = sum((a.astype(float) ** 2).sum() for a in arrays.values())
    np.testing.assert_allclose(ds.param_norm.sel(model_id="m"), expected, rtol=1e-12)
    part = session.filter(param_names="h.0.*")
    np.testing.assert_allclose(
        part.results.dataset("param_norm").param_norm.sel(model_id="m"),
        (arrays["h.0.w.weight"].astype(float) ** 2).sum(),
        rtol=1e-12,
    )
    np.testing.assert_allclose(session.results.dataset("param_norm").param_norm.sel(model_id="m"), expected)


def test_planning_and_lazy_compute_nothing(session, no_compute):
    session.models.add(weights(), "a")
    lazy = session.compute.lazy(*SPECTRAL, "weights_svals", "param_norm").sel(model_id="a")
    session.compute.plan("stable_rank").explain()
    assert lazy.stable_rank.chunks is not None
    assert no_compute == []


def test_lazy_agrees_with_apply(session):
    session.models.add(weights(), "a", step=2)
    session.models.add(weights(1, n=2, shape=(9, 20)), "b", step=1)
    fields = (*SPECTRAL, "weights_svals", "param_norm")
    lazy = session.compute.lazy(*fields).compute()
    assert session.compute.plan("stable_rank").explain().count("missing 5")
    session.compute.apply(*fields)
    eager = session.results.dataset(*fields)
    assert list(eager.model_id.values) == ["b", "a"]
    for field in fields:
        np.testing.assert_array_equal(*(x[field].sel(model_id=["a", "b"]) for x in (lazy, eager)))
    from_store = session.compute.lazy(*fields).compute()
    for field in fields:
        np.testing.assert_array_equal(from_store[field], lazy[field])


def test_plan_explains(session):
    session.models.add(weights(), "m")
    text = session.compute.plan("stable_rank").explain()
    assert "singular_values" in text
    assert "missing 3" in text
    assert "gram" in text
    session.compute.apply("stable_rank", "hard_rank")
    assert "nothing to do" in session.compute.plan("stable_rank").explain()
    session.compute.configure_kernel("hard_rank", rtol=0.1)
    assert "parameter or version changed 3" in session.compute.plan("hard_rank").explain()


def test_unknown_field_names_the_nearest(session):
    session.models.add(weights(), "m")
    with pytest.raises(errors.FieldNotFoundError, match="stable_rank"):
        session.compute.apply("stable_rnk")
    with pytest.raises(errors.ConfigurationError, match="rtol"):
        session.compute.configure_kernel("hard_rank", rtl=1)


@pytest.mark.parametrize("how", ["missing", "another"])
def test_a_linked_file_that_is_lost_is_told(how, tmp_path):
    path = tmp_path / "m.safetensors"
    write_safetensors(path, weights())
    session = Session(str(tmp_path / "s.zarr"))
    session.models.add(path, "m", link=True)
    session.compute.apply("stable_rank")
    path.unlink()
    if how == "another":
        write_safetensors(path, {"h.0.w.weight": np.ones((30, 4), np.float32)})
    with pytest.warns(errors.LinkBrokenWarning, match="m.safetensors"):
        assert session.compute.apply("stable_rank").reused == {"stable_rank": 3}
    with pytest.warns(errors.LinkBrokenWarning):
        session.results.dataset("stable_rank")
    states = session.results.status("stable_rank")
    assert set(states.state.values.ravel()) == {"stale"}
    assert all("m.safetensors" in text for text in states.reason.values.ravel())
    with pytest.warns(errors.LinkBrokenWarning), pytest.raises(errors.LinkBrokenError):
        session.compute.apply("weights_lsvs")
