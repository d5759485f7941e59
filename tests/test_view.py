"""The view: equal to what the models say after any history, read by plain xarray, and kept up to date cheaply."""

from __future__ import annotations

import os
import shutil
import threading
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffract_dask import catalog
from diffract_dask.errors import FieldNotFoundError, ModelNotFoundError
from diffract_dask.fields import MISSING
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Commit, Slices, Store, viewfile, viewwriting
from diffract_dask.testing import write_safetensors
from diffract_dask.view import View, addresses
from diffract_dask.xarray_backend import DiffractBackendEntrypoint

COORDINATES = {
    "model_id",
    "name",
    "step",
    "parent",
    "added",
    "type",
    "rows",
    "cols",
    "layer",
    "block",
    "module",
    "role",
}


def arrays(seed: int, names: tuple[str, ...] = ("a.0.weight", "b.1.weight", "ln.bias")) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {n: rng.standard_normal(4 if n.endswith("bias") else (5, 3)).astype(np.float32) for n in names}


def add(store: Store, model_id: str, seed: int = 0, tensors: Any = None, **options: Any) -> None:
    store.add_model(model_id, open_checkpoint(arrays(seed) if tensors is None else tensors), **options)


def scalar(store: Store, model_id: str, field: str, value: float, **attrs: Any) -> Commit:
    at = np.flatnonzero(store.parameters(model_id).analysed)
    given_attrs = {"long_name": field.upper(), "units": "1", "kernel": field, "kernel_version": "1", "params": "{}"}
    return Commit(
        model_id,
        values={field: (at, value + at, np.zeros(len(at), np.uint8))},
        keys={field: (at, (at + 1 + int(value)).astype(np.uint64))},
        attrs={field: {**given_attrs, "dtype": "float64", **attrs}},
    )


def strict(path: str | Path) -> xr.Dataset:
    """Open and load the view with plain xarray; any warning is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        return xr.open_zarr(str(path), group="view").load()


# ---------------------------------------------------------------------------------- against a second implementation


class Expected:
    """What a store should hold, kept in dicts."""

    def __init__(self) -> None:
        self.models: dict[str, dict[str, Any]] = {}

    def check_view(self, view: View) -> None:
        assert sorted(view.model_ids) == sorted(self.models)
        fields = {f for m in self.models.values() for f, _ in m["values"]}
        assert set(view.values) == fields
        assert set(view.model_values) == {f for m in self.models.values() for f in m["totals"]}
        for i, model_id in enumerate(view.model_ids):
            model = self.models[model_id]
            held = {view.names[j] for j in np.flatnonzero(view.present[i])}
            assert held == set(model["names"])
            assert np.array_equal(view.step[i], model["step"], equal_nan=True)
            for j in np.flatnonzero(view.present[i]):
                name = view.names[j]
                assert model["names"][view.row[i, j]] == name
                assert view.analysed[i, j] == (not name.endswith("bias"))
                assert view.rows[i, j] == (0 if name.endswith("bias") else 5)
                assert view.digest[i, j] == model["digests"][name]
                assert view.canonical[i, j] == j
                assert view.type[i, j] == ("bias" if name.endswith("bias") else "dense")
                for field in fields:
                    wanted = model["values"].get((field, name))
                    assert view.status[field][i, j] == (MISSING if wanted is None else 0)
                    assert np.array_equal(
                        view.values[field][i, j], np.nan if wanted is None else wanted[0], equal_nan=True
                    )
                    assert view.keys[field][i, j] == (0 if wanted is None else wanted[1])
            absent = ~view.present[i]
            assert (view.digest[i, absent] == 0).all()
            assert (view.type[i, absent] == "").all()
            for field in fields:
                assert (view.status[field][i, absent] == MISSING).all()
            for field in view.model_values:
                wanted = model["totals"].get(field, np.nan)
                assert np.array_equal(view.model_values[field][i], wanted, equal_nan=True)

    def check_plain(self, path: str) -> None:
        plain = strict(path)
        assert sorted(plain.model_id.values.tolist()) == sorted(self.models)
        assert set(plain.coords) - {"field", "kernel", "model_field", "model_kernel"} == COORDINATES
        fields = {f for m in self.models.values() for f, _ in m["values"]} | {
            f for m in self.models.values() for f in m["totals"]
        }
        assert set(plain.data_vars) == fields | {"status", "key", "model_status", "model_key"}
        for model_id, model in self.models.items():
            row = plain.sel(model_id=model_id)
            for (field, name), (value, key) in model["values"].items():
                cell = row.sel(name=name)
                assert float(cell[field]) == value
                assert int(cell.status.sel(field=field)) == 0
                assert int(cell.key.sel(kernel=field)) == key
            for field in fields - set(model["totals"]) & set(plain.data_vars):
                if plain[field].dims == ("model_id", "name"):
                    held = [name for f, name in model["values"] if f == field]
                    assert int(row[field].notnull().sum()) == len(held)


IDS = ["a", "B", "c/d"]
NAMES = ["x.0.weight", "x.1.weight", "y.weight", "z.bias"]
STEPS = st.one_of(
    st.tuples(st.just("add"), st.sampled_from(IDS), st.integers(0, 5), st.sets(st.sampled_from(NAMES), min_size=1)),
    st.tuples(st.just("replace"), st.sampled_from(IDS), st.integers(0, 5), st.sets(st.sampled_from(NAMES), min_size=1)),
    st.tuples(st.just("erase"), st.sampled_from(IDS)),
    st.tuples(st.just("rename"), st.sampled_from(IDS), st.sampled_from([*IDS, "e"])),
    st.tuples(st.just("commit"), st.sampled_from(IDS), st.sampled_from(["f", "g"]), st.integers(1, 9)),
    st.tuples(st.just("total"), st.sampled_from(IDS), st.integers(1, 9)),
    st.tuples(st.just("erase fields"), st.sampled_from(IDS), st.sampled_from(["f", "g", "t"])),
    st.tuples(st.just("step"), st.sampled_from(IDS), st.integers(0, 9)),
    st.tuples(st.just("refresh")),
)


def play(store: Store, expected: Expected, step: tuple[Any, ...]) -> None:
    """Do one step to the store and to the expectation."""
    models, (what, *args) = expected.models, step
    if what == "refresh":
        store.refresh_view()
        return
    model_id = args[0]
    if (what == "add" and model_id not in models) or what == "replace":
        tensors = arrays(args[1], tuple(sorted(args[2])))
        keys = {
            n: int(catalog.digest_keys([catalog.digest(lambda i, j, a=a: a[i:j], a.shape, "float32")])[0])
            for n, a in tensors.items()
        }
        add(store, model_id, tensors=tensors, replace=what == "replace")
        old = models.get(model_id, {"values": {}, "totals": {}, "digests": {}})
        by_content = {key: n for n, key in reversed(old["digests"].items()) if not n.endswith("bias")}
        source = {n: n if old["digests"].get(n) == key else by_content.get(key) for n, key in keys.items()}
        kept = {
            (f, n): value
            for n, came_from in source.items()
            for (f, name), value in old["values"].items()
            if name == came_from and not n.endswith("bias")
        }
        matrices = [{n: k for n, k in d.items() if not n.endswith("bias")} for d in (old["digests"], keys)]
        totals = old["totals"] if matrices[0] == matrices[1] and any(matrices) else {}
        models[model_id] = {
            "names": list(tensors), "digests": keys, "values": kept, "totals": totals, "step": np.nan,
        }  # fmt: skip
    elif model_id not in models:
        return
    elif what == "erase":
        store.erase_model(model_id)
        del models[model_id]
    elif what == "rename" and args[1] not in models:
        store.rename(model_id, args[1])
        models[args[1]] = models.pop(model_id)
    elif what == "commit":
        commit = scalar(store, model_id, args[1], 10.0 * args[2])
        store.commit([commit])
        names = store.parameters(model_id).name
        for i, value, key in zip(*commit.values[args[1]][:2], commit.keys[args[1]][1], strict=True):
            models[model_id]["values"][args[1], names[i]] = (float(value), int(key))
    elif what == "total":
        store.commit([Commit(model_id, model_values={"t": (float(args[1]), 0)}, model_keys={"t": args[1]})])
        models[model_id]["totals"]["t"] = float(args[1])
    elif what == "erase fields":
        store.erase_fields(model_id, [args[1]], [args[1]])
        own = models[model_id]
        own["values"] = {(f, n): v for (f, n), v in own["values"].items() if f != args[1]}
        own["totals"] = {f: v for f, v in own["totals"].items() if f != args[1]}
    elif what == "step":
        store.set_model_attrs(model_id, step=args[1])
        models[model_id]["step"] = float(args[1])


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(history=st.lists(STEPS, min_size=4, max_size=14))
def test_any_history(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, history: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(viewfile, "MODEL_CHUNK", 2)
    monkeypatch.setattr(viewwriting, "MODEL_CHUNK", 2)
    monkeypatch.setattr(viewfile, "NAME_CHUNK", 3)
    monkeypatch.setattr(viewwriting, "NAME_CHUNK", 3)
    path = tmp_path / "s.zarr"
    shutil.rmtree(path, ignore_errors=True)
    store, expected = Store.open(path), Expected()
    for step in history:
        play(store, expected, step)
        expected.check_view(Store.open(path, "r").view())
    expected.check_view(store.view())
    store.refresh_view()
    expected.check_view(Store.open(path, "r").view())
    expected.check_plain(str(path))
    shutil.rmtree(path / "view")
    expected.check_view(Store.open(path, "r").view())
    store.refresh_view()
    expected.check_view(Store.open(path).view())
    expected.check_plain(str(path))


def test_many_models_and_names_cross_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (viewfile, viewwriting):
        monkeypatch.setattr(module, "MODEL_CHUNK", 4)
        monkeypatch.setattr(module, "NAME_CHUNK", 8)
    store, expected = Store.open(tmp_path / "s.zarr"), Expected()
    for i in range(11):
        names = {f"l.{j}.weight" for j in range(i, i + 12)}
        play(store, expected, ("add", f"m{i}", i, names))
        play(store, expected, ("commit", f"m{i}", "f", i + 1))
    store.refresh_view()
    expected.check_view(Store.open(tmp_path / "s.zarr", "r").view())
    expected.check_plain(str(tmp_path / "s.zarr"))
    for gone in ("m3", "m10", "m0"):
        play(store, expected, ("erase", gone))
        expected.check_view(Store.open(tmp_path / "s.zarr", "r").view())
        expected.check_plain(str(tmp_path / "s.zarr"))
    assert "l.0.weight" not in store.view().names


# -------------------------------------------------------------------------------------------------- plain readers


@pytest.fixture
def filled(tmp_path: Path) -> Store:
    store = Store.open(tmp_path / "s.zarr")
    for i, step in enumerate((20, None, 10)):
        add(store, f"m{i}", i, step=step, parents=("m0",) if i else ())
    store.commit([scalar(store, f"m{i}", "stable_rank", 10.0 * i) for i in range(3)])
    store.commit(
        [Commit("m1", model_values={"total": (5.0, 0)}, attrs={"total": {"long_name": "Total", "units": "m"}})]
    )
    store.refresh_view()
    return store


def test_plain_xarray_sees_a_labelled_dataset(filled: Store) -> None:
    plain = strict(str(filled.location))
    assert set(plain.data_vars) == {"stable_rank", "total", "status", "key", "model_status", "model_key"}
    assert plain.stable_rank.dims == ("model_id", "name")
    assert plain.stable_rank.attrs == {
        "long_name": "STABLE_RANK", "units": "1", "kernel": "stable_rank", "kernel_version": "1", "params": "{}",
    }  # fmt: skip
    assert plain.total.attrs == {"long_name": "Total", "units": "m"}
    assert plain.key.dtype == np.uint64
    assert plain.status.dtype == np.uint8
    assert plain.status.dims == ("field", "model_id", "name")
    assert plain.step.values.tolist()[::2] == [20, 10]
    assert plain.parent.values.tolist() == ["", "m0", "m0"]
    assert plain.block.values.tolist() == [0, 1, -1]
    assert plain.layer.values.tolist() == ["a.0", "b.1", "ln"]
    assert set(plain.step.coords) == {"model_id", "step", "parent", "added"}
    along = plain.isel(model_id=plain.step.notnull().values).sortby("step").swap_dims(model_id="step")
    assert along.stable_rank.sel(step=10, name="b.1.weight").item() == 21.0


def test_other_plain_readers(filled: Store) -> None:
    path = str(filled.location)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        below = xr.open_zarr(f"{path}/view").load()
        tree = xr.open_datatree(path, engine="zarr").load()
        whole = xr.open_datatree(path, engine="zarr", consolidated=False).load()
        group = zarr.open_group(path, mode="r", use_consolidated=False)
        members = dict(group.members(max_depth=None))
    assert below.equals(strict(path))
    assert tree["view"].to_dataset().equals(strict(path))
    assert whole["view"].to_dataset().equals(strict(path))
    assert set(whole["models"].children) == {"m0", "m1", "m2"}
    raw = whole["models/m2/scalars"]
    assert raw.value.sel(field="stable_rank", name="b.1.weight").item() == 21.0
    assert raw.attrs["fields"]["stable_rank"]["kernel"] == "stable_rank"
    assert whole["models/m1/parameters"].shape.sel(name="a.0.weight").item() == "5x3"
    assert np.array_equal(
        whole["models/m1/weights/5x3-float32"].weights.sel(name="b.1.weight"), arrays(1)["b.1.weight"]
    )
    assert members["view/stable_rank"][2, 1] == 21.0
    assert filled.datatree()["models/m0"].attrs["model_id"] == "m0"


def test_a_tree_of_every_kind_of_object_opens_without_warnings(filled: Store, tmp_path: Path) -> None:
    write_safetensors(tmp_path / "l.safetensors", arrays(3))
    add(filled, "linked", tensors=tmp_path / "l.safetensors", link=True)
    add(
        filled,
        "types",
        tensors={
            "s": np.array(3),
            "b": np.array([True]),
            "c": np.array([1j, 2]),
            "e": np.zeros((0, 3)),
            "h": np.ones((3, 3), "f2"),
            "t": np.array(["x"]),
        },
    )
    filled.commit(
        [
            Commit(
                "m0",
                arrays={"svals": (np.array([0]), [np.arange(3.0)]), "lsvs": (np.array([1]), [np.ones((5, 3))])},
                failures={("a.0.weight", "k"): "x"},
            )
        ]
    )
    filled.refresh_view()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tree = xr.open_datatree(str(filled.location), engine="zarr", consolidated=False).load()
    assert tree["models/m0/spectra/3"].svals.sel(name="a.0.weight").values.tolist() == [0, 1, 2]
    assert tree["models/m0/vectors/5x3"].lsvs.dims == ("name", "row", "sval")
    assert "weights" not in tree["models/linked"].children
    assert tree["models/types/weights/3x3-float16"].weights.dtype == np.float16


def test_an_empty_store_opens(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.zarr")
    plain = strict(tmp_path / "s.zarr")
    assert dict(plain.sizes) == dict.fromkeys(plain.sizes, 0)
    assert store.view().to_dataset().sizes == {"model_id": 0, "name": 0}
    assert repr(store.view()) == "<View of 0 models × 0 names, 0 fields>"


def test_booleans_and_counts_stay_numbers(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.zarr")
    for model_id in ("a", "b"):
        add(store, model_id)
    store.commit([scalar(store, "a", "flag", 0.0, dtype="bool"), scalar(store, "b", "count", 3.0, dtype="int64")])
    store.refresh_view()
    plain = strict(tmp_path / "s.zarr")
    assert plain.flag.dtype == plain["count"].dtype == np.float64
    assert np.isnan(plain.flag.sel(model_id="b").values).all()
    assert (plain.flag.attrs["value_dtype"], plain["count"].attrs["value_dtype"]) == ("bool", "int64")


def test_parameters_of_kernels_that_differ_are_mixed(tmp_path: Path) -> None:
    store = Store.open(tmp_path / "s.zarr")
    for i in range(3):
        add(store, f"m{i}", i)

    def params() -> list[str]:
        store.refresh_view()
        return [strict(tmp_path / "s.zarr").f.attrs["params"], store.view().attrs["f"]["params"]]

    store.commit([scalar(store, f"m{i}", "f", 1.0, params='{"a":1}') for i in range(3)])
    assert params() == ['{"a":1}'] * 2
    store.commit([scalar(store, "m1", "f", 2.0, params='{"a":2}')])
    assert params() == ["mixed"] * 2
    store.commit([scalar(store, "m0", "f", 2.0, params='{"a":2}')])
    assert params() == ["mixed"] * 2
    store.commit([scalar(store, "m2", "f", 2.0, params='{"a":2}')])
    assert params() == ['{"a":2}'] * 2
    store.ingest("m0", {"f": ([0], [1.0])})
    assert params() == ['{"a":2}'] * 2


# --------------------------------------------------------------------------------------------------- up to date


def chunks(path: str, name: str) -> dict[str, int]:
    return {
        str(p): p.stat().st_ino for p in Path(path, "view", name).rglob("*") if p.is_file() and p.name != "zarr.json"
    }


def test_only_what_changed_is_written(filled: Store) -> None:
    path = str(filled.location)
    before = chunks(path, "stable_rank"), chunks(path, "rows"), chunks(path, "status")
    assert all(before)
    filled.commit([scalar(filled, "m1", "other", 4.0)])
    filled.refresh_view()
    assert (chunks(path, "stable_rank"), chunks(path, "rows")) == before[:2]
    assert before[2].items() <= chunks(path, "status").items()
    root = Path(path, "zarr.json").stat().st_ino
    filled.refresh_view()
    filled.view()
    assert Path(path, "zarr.json").stat().st_ino == root


def test_a_view_that_is_behind_is_made_in_memory_for_readers(filled: Store) -> None:
    filled.commit([scalar(filled, "m1", "late", 4.0)])
    add(filled, "m3", 3)
    filled.commit([scalar(filled, "m3", "late", 7.0)])
    reader = Store.open(filled.location, "r")
    root = Path(str(filled.location), "zarr.json").read_bytes()
    view = reader.view()
    assert view.values["late"][view.model_ids.index("m3")].tolist()[:2] == [7.0, 8.0]
    assert view.values["late"][view.model_ids.index("m1")].tolist()[:2] == [4.0, 5.0]
    assert reader.view() is view
    assert Path(str(filled.location), "zarr.json").read_bytes() == root
    assert "late" in filled.view().values
    assert Path(str(filled.location), "zarr.json").read_bytes() != root


def test_a_field_that_was_erased_is_gone_for_readers_at_once(filled: Store) -> None:
    for i in range(3):
        filled.erase_fields(f"m{i}", ["stable_rank", "total"], ["stable_rank", "total"])
    view = Store.open(filled.location, "r").view()
    assert (list(view.values), list(view.model_values)) == ([], [])
    assert "stable_rank" in strict(str(filled.location))
    filled.refresh_view()
    assert set(strict(str(filled.location)).data_vars) == {"status", "key", "model_status", "model_key"}
    assert not Path(str(filled.location), "view/stable_rank").exists()


@pytest.mark.parametrize("part", ["view", "index", "view/zarr.json"])
def test_a_view_that_is_gone_is_made_again(filled: Store, part: str) -> None:
    path = Path(str(filled.location), part)
    before = strict(str(filled.location))
    shutil.rmtree(path) if path.is_dir() else path.unlink()
    assert Store.open(filled.location, "r").view().values["stable_rank"][2, 1] == 21.0
    Store.open(filled.location).view()
    assert strict(str(filled.location)).equals(before)


def test_a_view_is_of_one_moment(filled: Store) -> None:
    """What another process writes after a view was made is missing in it, never mixed with what was there."""
    view = Store.open(filled.location, "r").view()
    shown = view.values["stable_rank"].copy()
    filled.commit([scalar(filled, "m1", "stable_rank", 500.0)])
    filled.commit([scalar(filled, "m1", "fresh", 1.0)])
    filled.refresh_view()
    assert np.array_equal(view.values["stable_rank"], shown, equal_nan=True)
    assert (view.status["stable_rank"][1, :2] == 0).all()
    late = view.keys["stable_rank"]
    assert (late[1] == 0).all()
    assert late[2, :2].tolist() == [21, 22]
    with pytest.raises(KeyError):
        view.values["fresh"]
    with pytest.raises(ValueError, match="read-only"):
        view.values["stable_rank"][0, 0] = 1


def test_a_view_loads_what_it_is_asked_for(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[str] = []
    original = viewfile.Layout.load
    monkeypatch.setattr(
        viewfile.Layout, "load", lambda self, kind, name="": (loaded.append(kind), original(self, kind, name))[1]
    )
    view = Store.open(filled.location, "r").view()
    loaded.clear()
    assert len(view.values) == 1
    assert "stable_rank" in view.status
    assert loaded == []
    view.values["stable_rank"]
    view.status["stable_rank"]
    assert loaded == ["value", "status"]


READS = 25


def test_readers_that_loop_see_no_wrong_value(tmp_path: Path) -> None:
    """Models are added, computed, replaced and erased while another thread opens and loads the view."""
    path = str(tmp_path / "s.zarr")
    store = Store.open(path)
    add(store, "m0")
    store.commit([scalar(store, "m0", "f", 0.0)])
    store.refresh_view()
    done, wrong, seen = threading.Event(), [], [0]

    def read() -> None:
        while not done.is_set():
            plain = xr.open_zarr(path, group="view", chunks=None).load()
            for model_id, f in zip(plain.model_id.values, plain.f.values, strict=True):
                shown = f[~np.isnan(f)] - 1000.0 * int(str(model_id)[1:])
                if not set(shown.tolist()) <= {0.0, 1.0}:
                    wrong.append((model_id, f))
            seen[0] += 1

    thread = threading.Thread(target=read)
    thread.start()
    try:
        number = 1
        while seen[0] < READS and thread.is_alive():
            add(store, f"m{number}", number)
            store.commit([scalar(store, f"m{number}", "f", 1000.0 * number)])
            store.refresh_view()
            if number % 4 == 0:
                store.erase_model(f"m{number - 3}", f"m{number - 1}")
            number += 1
    finally:
        done.set()
        thread.join()
    assert wrong == []
    assert seen[0] >= READS
    assert number > 4


# ----------------------------------------------------------------------------------------------------- datasets


def test_to_dataset_is_sorted_and_labelled(filled: Store) -> None:
    dataset = filled.view().to_dataset()
    assert dataset.model_id.values.tolist() == ["m2", "m0", "m1"]
    assert set(dataset.coords) == COORDINATES
    assert dataset.total.values.tolist()[2] == 5.0
    assert dataset.stable_rank.attrs["kernel"] == "stable_rank"
    chosen = filled.view().to_dataset(
        ["stable_rank", "absent"], attrs={"absent": {"long_name": "A"}}, models=np.array([1]), columns=np.array([1, 0])
    )
    assert chosen.stable_rank.values.tolist() == [[11.0, 10.0]]
    assert np.isnan(chosen.absent.values).all()
    assert chosen.absent.attrs == {"long_name": "A", "units": "1"}
    assert chosen.name.values.tolist() == ["b.1.weight", "a.0.weight"]


def test_a_dataset_survives_netcdf(filled: Store, tmp_path: Path) -> None:
    dataset = filled.view().to_dataset()
    dataset.to_netcdf(tmp_path / "d.nc")
    with xr.open_dataset(tmp_path / "d.nc") as again:
        xr.testing.assert_equal(again.load(), dataset)
        assert again.stable_rank.attrs == dataset.stable_rank.attrs


def test_the_engine_opens_results(filled: Store) -> None:
    svals = [np.array([1.0, 2.0, 3.0]), np.array([4.0, 5.0, 6.0])]
    filled.commit(
        [
            Commit(
                "m2",
                values={"svals": (np.arange(2), np.full(2, np.nan), np.zeros(2, np.uint8))},
                arrays={"svals": (np.arange(2), svals)},
                attrs={"svals": {"long_name": "S"}},
            )
        ]
    )
    filled.refresh_view()
    path = filled.location
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        default = xr.open_dataset(path, engine=DiffractBackendEntrypoint)
        asked = xr.open_dataset(
            path, engine=DiffractBackendEntrypoint, fields=["svals", "stable_rank"], models=["m2", "m0"], weights=True
        )
    assert set(default.data_vars) == {"stable_rank", "total"}
    assert default.stable_rank.sel(model_id="m2", name="b.1.weight").item() == 21.0
    assert asked.model_id.values.tolist() == ["m2", "m0"]
    assert asked.svals.sel(model_id="m2", name="b.1.weight").values.tolist() == [4, 5, 6]
    assert np.isnan(asked.svals.sel(model_id="m0").values).all()
    assert asked.svals_size.sel(name="a.0.weight").values.tolist() == [3, 0]
    assert asked.svals.attrs["long_name"] == "S"
    assert asked["weights_5x3"].dtype == np.float32
    assert np.array_equal(asked["weights_5x3"].sel(model_id="m0", name_5x3="b.1.weight"), arrays(0)["b.1.weight"])
    assert "total" not in xr.open_dataset(path, engine=DiffractBackendEntrypoint, drop_variables="total")
    with pytest.raises(FieldNotFoundError, match="Did you mean 'stable_rank'"):
        xr.open_dataset(path, engine=DiffractBackendEntrypoint, fields=["stable_rnk"])
    with pytest.raises(ModelNotFoundError):
        xr.open_dataset(path, engine=DiffractBackendEntrypoint, models=["m9"])


def test_the_engine_reads_only_what_is_looked_at(filled: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    load = Slices.load
    monkeypatch.setattr(Slices, "load", lambda self: (read.append(self.n), load(self))[1])
    opened = xr.open_dataset(filled.location, engine=DiffractBackendEntrypoint, weights=True)
    chunked = xr.open_dataset(filled.location, engine=DiffractBackendEntrypoint, weights=True, chunks={})
    assert read == []
    wanted = arrays(2)["a.0.weight"]
    for dataset in (opened, chunked):
        found = dataset["weights_5x3"].sel(model_id="m2", name_5x3="a.0.weight")
        assert np.array_equal(found.values, wanted)
    assert read == [1, 1]


def test_the_engine_fills_what_models_do_not_share(tmp_path: Path) -> None:
    store = Store.open()
    add(store, "one", tensors={"a": np.ones((2, 3), "f2"), "b": np.full((2, 3), 2.0)})
    add(store, "two", tensors={"a": np.full((3, 2), 3.0)})
    opened = DiffractBackendEntrypoint().open_dataset(store, weights=True)
    assert opened["weights_2x3"].shape == (2, 2, 2, 3)
    assert np.isnan(opened["weights_2x3"].sel(model_id="two").values).all()
    assert opened["weights_2x3"].sel(model_id="one", name_2x3="a").values.tolist() == [[1.0] * 3] * 2
    assert opened["weights_3x2"].sel(model_id="two", name_3x2="a").values.tolist() == [[3.0] * 2] * 3
    assert DiffractBackendEntrypoint().open_dataset(Store.open(), weights=True).sizes == {"model_id": 0, "name": 0}


def test_the_engine_knows_a_store(filled: Store, tmp_path: Path) -> None:
    guess = DiffractBackendEntrypoint().guess_can_open
    assert guess(filled.location)
    assert guess(Path(str(filled.location)))
    assert not guess(tmp_path)
    assert not guess(os.fspath(tmp_path / "x.nc"))


# -------------------------------------------------------------------------------------------------- what names say

ADDRESSES = {  # name: layer, block, module, role
    "h.0.attn.c_attn.weight": ("h.0.attn.c_attn", 0, "attn.c_attn", "query_key_value"),
    "h.11.attn.c_proj.weight": ("h.11.attn.c_proj", 11, "attn.c_proj", "attention_output"),
    "h.11.mlp.c_proj.bias": ("h.11.mlp.c_proj", 11, "mlp.c_proj", "mlp_down"),
    "h.3.mlp.c_fc.weight": ("h.3.mlp.c_fc", 3, "mlp.c_fc", "mlp_up"),
    "wte.weight": ("wte", -1, "wte", "embedding"),
    "wpe.weight": ("wpe", -1, "wpe", "position_embedding"),
    "lm_head.weight": ("lm_head", -1, "lm_head", "head"),
    "h.0.ln_1.weight": ("h.0.ln_1", 0, "ln_1", "norm"),
    "layer.5.attention.self.query.weight": ("layer.5.attention.self.query", 5, "attention.self.query", "query"),
    "encoder.layer.5.attention.output.dense.weight": (
        "encoder.layer.5.attention.output.dense", 5, "attention.output.dense", "attention_output",
    ),
    "encoder.layer.5.output.dense.weight": ("encoder.layer.5.output.dense", 5, "output.dense", "mlp_down"),
    "layer.5.intermediate.dense.weight": ("layer.5.intermediate.dense", 5, "intermediate.dense", "mlp_up"),
    "embeddings.word_embeddings.weight": ("embeddings.word_embeddings", -1, "embeddings.word_embeddings", "embedding"),
    "embeddings.position_embeddings.weight": (
        "embeddings.position_embeddings", -1, "embeddings.position_embeddings", "position_embedding",
    ),
    "model.layers.31.self_attn.k_proj.weight": ("model.layers.31.self_attn.k_proj", 31, "self_attn.k_proj", "key"),
    "model.layers.31.self_attn.v_proj.weight": ("model.layers.31.self_attn.v_proj", 31, "self_attn.v_proj", "value"),
    "layers.31.self_attn.o_proj.weight": ("layers.31.self_attn.o_proj", 31, "self_attn.o_proj", "attention_output"),
    "model.layers.31.mlp.gate_proj.weight": ("model.layers.31.mlp.gate_proj", 31, "mlp.gate_proj", "mlp_gate"),
    "model.layers.31.mlp.up_proj.weight": ("model.layers.31.mlp.up_proj", 31, "mlp.up_proj", "mlp_up"),
    "model.layers.31.input_layernorm.weight": ("model.layers.31.input_layernorm", 31, "input_layernorm", "norm"),
    "model.embed_tokens.weight": ("model.embed_tokens", -1, "model.embed_tokens", "embedding"),
    "transformer.0.self_attn.in_proj_weight": ("transformer.0.self_attn", 0, "self_attn", "query_key_value"),
    "layer1.0.conv1.weight": ("layer1.0.conv1", 0, "conv1", "convolution"),
    "params/Dense_0/kernel": ("params/Dense_0", -1, "params.Dense_0", ""),
    "weight": ("", -1, "", ""),
    "0.weight": ("0", 0, "", ""),
    "fc1.weight": ("fc1", -1, "fc1", "mlp_up"),
}  # fmt: skip


@pytest.mark.parametrize("name", ADDRESSES)
def test_addresses(name: str) -> None:
    found = addresses([name])
    assert tuple(found[key][0] for key in ("layer", "block", "module", "role")) == ADDRESSES[name]


@given(st.lists(st.text(min_size=1, max_size=20)))
def test_addresses_of_anything(names: list[str]) -> None:
    found = addresses(names)
    assert all(len(column) == len(names) for column in found.values())
    assert found["block"].dtype == np.int64
    assert all(name.startswith(layer) for name, layer in zip(names, found["layer"], strict=True))
