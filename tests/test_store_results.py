"""Results in the store: commits, array fields, failures, what is ingested and erased, and how much space it takes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import xarray as xr
import zarr
from stored import KINDS, add, arrays, cells, scalar

from diffract_dask.errors import (
    FieldNotFoundError,
    KernelRegistrationError,
    ModelNotFoundError,
    StoreError,
)
from diffract_dask.fields import MISSING, Status
from diffract_dask.store import Commit, Store, values


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(KINDS[request.param](tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s.zarr")


# ----------------------------------------------------------------------------------------------------- committing


def test_commit_and_view(store: Store) -> None:
    add(store, "a")
    add(store, "b", arrays(1, n=5))
    commit = scalar(store, "b", value=3.0)
    commit.values["g"] = (np.array([1]), np.array([np.nan]), np.array([Status.FAILED], np.uint8))
    commit.model_values["total"], commit.model_keys["total"] = (np.nan, int(Status.UNDEFINED)), 2**64 - 1
    commit.keys["g"] = (np.array([1]), np.array([2**63 + 1], np.uint64))
    commit.failures["h.1.weight", "g"] = "no luck"
    store.commit([commit])
    store.refresh_view()
    value, status, key = cells(store, "b")
    assert value[:5] == [3.0, 4.0, 5.0, 6.0, 7.0]
    assert np.isnan(value[5])
    assert status == [0, 0, 0, 0, 0, MISSING]
    assert key == [7, 7, 7, 7, 7, 0]
    view = store.view()
    assert view.keys["g"][1, 1] == 2**63 + 1
    assert view.status["g"][1].tolist() == [MISSING, Status.FAILED, *[MISSING] * 4]
    assert view.model_keys["total"].tolist() == [0, 2**64 - 1]
    assert view.model_status["total"].tolist() == [MISSING, Status.UNDEFINED]
    assert store.failures("b") == {("h.1.weight", "g"): "no luck"}
    assert store.failures("a") == {}
    store.commit([Commit("b", failures={("h.1.weight", "g"): "", ("", "x"): "y"})])
    assert store.failures("b") == {("", "x"): "y"}
    store.commit([Commit("b", failures={("", "x"): ""})])
    assert store.failures("b") == {}


def test_array_fields(store: Store) -> None:
    rng = np.random.default_rng(0)
    add(
        store,
        tensors={"a": rng.random((6, 4)), "b": rng.random((3, 9)), "c": rng.random((4, 9)), "d": rng.random((6, 4))},
    )
    at, inner = np.array([3, 1, 0]), (4, 3, 4)
    spectra = [rng.random(k) for k in inner]
    left = [rng.random((6, 4)), rng.random((3, 3)), rng.random((6, 4))]
    status = np.zeros(3, np.uint8)
    store.commit(
        [
            Commit(
                "m",
                values={name: (at, np.full(3, np.nan), status) for name in ("svals", "lsvs")},
                arrays={"svals": (at, spectra), "lsvs": (at, left)},
                attrs={"lsvs": {"dims": ("row", "sval"), "long_name": "L"}},
            )
        ]
    )
    store.refresh_view()
    view = store.view()
    assert list(view.values) == []
    assert sorted(view.status) == ["lsvs", "svals"]
    assert view.dims == {"svals": ("sval",), "lsvs": ("row", "sval")}
    assert view.attrs["lsvs"] == {"long_name": "L", "units": "1"}
    for name, given in (("svals", spectra), ("lsvs", left)):
        for found, wanted in zip(store.arrays("m", name, at), given, strict=True):
            assert np.array_equal(found, wanted)
    assert np.isnan(store.arrays("m", "svals", [2])[0]).all()
    assert store.arrays("m", "svals", []) == []
    store.commit([Commit("m", arrays={"svals": (np.array([0]), [np.array([9.0, 8.0])])})])
    assert np.array_equal(store.arrays("m", "svals", [0])[0], [9, 8, np.nan, np.nan], equal_nan=True)
    assert np.array_equal(store.arrays("m", "svals", [3])[0], spectra[0])
    with pytest.raises(FieldNotFoundError, match="Did you mean 'svals'"):
        store.arrays("m", "sval", [0])
    for wrong in (np.zeros(5), np.zeros((2, 2, 2))):
        with pytest.raises(StoreError, match="shape"):
            store.commit([Commit("m", arrays={"svals": (np.array([0]), [wrong])})])
    store.erase_fields("m", ["svals"], [], np.array([3]))
    assert np.isnan(store.arrays("m", "svals", [3])[0]).all()
    assert np.array_equal(store.arrays("m", "svals", [1])[0], spectra[1])
    store.erase_fields("m", ["svals", "lsvs"], [])
    store.refresh_view()
    assert list(store.view().status) == []


def test_a_long_spectrum_has_a_chunk_of_its_own(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_WHOLE_BYTES", 100)
    add(local, tensors={f"w{i}": np.random.default_rng(i).random((9, 8)) for i in range(3)})
    given = [np.arange(8.0) + i for i in range(3)]
    local.commit([Commit("m", arrays={"s": (np.array([2, 0]), [given[2], given[0]])})])
    local.commit([Commit("m", arrays={"s": (np.array([1]), [given[1]])})])
    stored = zarr.open_array(f"{local.location}/models/m/spectra/8/s", mode="r")
    assert stored.chunks == (1, 8)
    assert np.array_equal(stored[:], given)


def test_many_fields_and_many_names(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(values, "_NAME_CHUNK", 7)
    add(local, tensors={f"w{i}": np.random.default_rng(i).random((3, 2)) for i in range(20)})
    at = np.arange(20)
    for start in (0, 100, 200, 300):
        commit = Commit("m")
        for i in range(start, start + 100):
            commit.values[f"f{i}"] = (at, at + 1000.0 * i, np.zeros(20, np.uint8))
            commit.keys[f"f{i}"] = (at, np.full(20, i + 1, np.uint64))
        local.commit([commit])
    local.refresh_view()
    view = local.view()
    assert len(view.values) == 400
    for i in (0, 127, 128, 255, 256, 399):
        assert view.values[f"f{i}"][0].tolist() == (at + 1000.0 * i).tolist()
        assert (view.keys[f"f{i}"] == i + 1).all()
    raw = xr.open_zarr(str(local.location), group="models/m/scalars", consolidated=False)
    assert raw.value.sel(field="f300").values.tolist() == (at + 300000.0).tolist()


def test_unwanted_names_of_fields_are_refused(store: Store) -> None:
    add(store)
    for name in ("status", "type", "a/b", "name", "1x", ""):
        with pytest.raises(KernelRegistrationError, match="identifier"):
            store.commit([scalar(store, "m", name)])
    store.commit([scalar(store, "m")])
    store.refresh_view()
    assert list(store.view().values) == ["f"]


def test_wrong_positions_are_refused(store: Store) -> None:
    add(store)
    for bad in ([4], [-1]):
        with pytest.raises(StoreError, match="positions"):
            store.ingest("m", {"f": (bad, [1.0])})
    with pytest.raises(ModelNotFoundError):
        store.commit([Commit("nope")])


def test_ingested_values_have_no_key(store: Store) -> None:
    add(store)
    store.ingest("m", {"mine": ([1, 0], [2.0, np.nan])})
    store.refresh_view()
    value, status, key = cells(store, "m", "mine")
    assert value[1] == 2.0
    assert status[:2] == [Status.INGESTED, Status.INGESTED]
    assert key == [0, 0, 0, 0]


def test_erasing_fields(store: Store) -> None:
    for model_id in ("a", "b"):
        add(store, model_id)
        commit = scalar(store, model_id)
        commit.model_values["t"], commit.model_keys["t"] = (1.0, 0), 4
        commit.failures["h.0.weight", "f"] = "x"
        commit.failures["h.1.weight", "f"] = "y"
        store.commit([commit])
    store.erase_fields("a", ["f", "unknown"], ["f", "unknown"], np.array([0]))
    store.refresh_view()
    assert cells(store, "a")[1][:3] == [MISSING, 0, 0]
    assert cells(store, "a")[2][:3] == [0, 7, 7]
    assert store.failures("a") == {("h.1.weight", "f"): "y"}
    assert store.view().model_values["t"].tolist() == [1.0, 1.0]
    store.erase_fields("a", ["f", "t"], ["f", "t"])
    store.refresh_view()
    assert cells(store, "a")[1] == [MISSING] * 4
    assert np.array_equal(store.view().model_values["t"], [np.nan, 1.0], equal_nan=True)
    assert store.view().model_keys["t"].tolist() == [0, 4]
    assert cells(store, "b")[0][:3] == [1.0, 2.0, 3.0]
    store.erase_fields("b", ["f", "t"], ["f", "t"])
    store.refresh_view()
    assert list(store.view().values) == list(store.view().model_values) == []
    store.commit([scalar(store, "a", value=8.0)])
    store.refresh_view()
    assert cells(store, "a")[0][:3] == [8.0, 9.0, 10.0]
    assert cells(store, "b")[1] == [MISSING] * 4


def test_commits_of_several_models_at_once(store: Store) -> None:
    for i in range(5):
        add(store, f"m{i}", arrays(i))
    store.commit([scalar(store, f"m{i}", value=i * 10.0) for i in range(5)])
    store.refresh_view()
    assert [cells(store, f"m{i}")[0][0] for i in range(5)] == [0.0, 10.0, 20.0, 30.0, 40.0]


# -------------------------------------------------------------------------------------------------------- sizes


def test_results_are_small_beside_weights(local: Store) -> None:
    rng = np.random.default_rng(0)
    given = {f"h.{i}.weight": rng.standard_normal((128, 96)).astype(np.float32) for i in range(100)}
    for model_id in ("a", "b"):
        add(local, model_id, given if model_id == "a" else {k: v + 1 for k, v in given.items()})
        at = np.arange(100)
        commit = Commit(model_id)
        for i in range(40):
            commit.values[f"f{i}"] = (at, rng.random(100), np.zeros(100, np.uint8))
            commit.keys[f"f{i}"] = (at, rng.integers(1, 2**63, 100).astype(np.uint64))
            commit.attrs[f"f{i}"] = {"long_name": f"Field {i}", "units": "1", "kernel": f"f{i}", "params": "{}"}
        commit.arrays["svals"] = (at, [np.sort(rng.random(96)) for _ in at])
        local.commit([commit])
    local.refresh_view()
    total = sum(p.stat().st_size for p in Path(str(local.location)).rglob("*") if p.is_file())
    kept = 2 * sum(a.nbytes for a in given.values())
    assert total - kept <= 0.05 * kept + 2 * 64_000


def test_an_added_model_leaves_chunks_of_values_alone(local: Store) -> None:
    for i in range(3):
        add(local, f"m{i}", arrays(i))
    local.commit([scalar(local, f"m{i}") for i in range(3)])
    local.refresh_view()
    view = Path(str(local.location), "view")
    before = {p: p.stat().st_ino for name in ("f", "status", "key") for p in (view / name).rglob("*") if p.is_file()}
    assert len(before) == 6
    add(local, "m3", arrays(3))
    assert {p: p.stat().st_ino for p in before} == before
    local.commit([scalar(local, "m1", "g")])
    local.refresh_view()
    assert all(p.stat().st_ino == inode for p, inode in before.items() if p.name != "zarr.json" and "g" not in p.parts)
