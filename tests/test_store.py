"""The store: adding, reading back, committing, erasing, locking, and what a writer leaves that stops at any point."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
import uuid
from collections.abc import Callable, Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import xarray as xr
import zarr

from diffract_dask import catalog
from diffract_dask.errors import (
    FieldNotFoundError,
    IncompatibleStoreError,
    InvalidIdentifierError,
    KernelRegistrationError,
    LinkBrokenError,
    ModelAlreadyExistsError,
    ModelNotFoundError,
    ParameterNotFoundError,
    ReadOnlyStoreError,
    SessionError,
    StoreError,
    StoreLockedError,
    UnsupportedSourceError,
)
from diffract_dask.fields import MISSING, Status
from diffract_dask.sources import dtypes, open_checkpoint
from diffract_dask.store import Commit, Store, opening, upgrade, values, weights
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import folder_of
from diffract_dask.testing import write_safetensors

KINDS: dict[str, Callable[[Path], Any]] = {
    "directory": lambda tmp: tmp / "s.zarr",
    "memory": lambda tmp: None,
    "zarr memory": lambda tmp: zarr.storage.MemoryStore(),
    "url": lambda tmp: f"memory://{uuid.uuid4().hex}/s.zarr",
}

DTYPES = [
    "float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2",
    "int64", "int32", "int16", "int8", "uint64", "uint32", "uint16", "uint8", "bool", "complex64", "complex128",
]  # fmt: skip


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(KINDS[request.param](tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s.zarr")


def arrays(seed: int = 0, n: int = 3, shape: tuple[int, ...] = (6, 4)) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    made = {f"h.{i}.weight": rng.standard_normal(shape).astype(np.float32) for i in range(n)}
    return {**made, "ln.bias": rng.standard_normal(5).astype(np.float32)}


def add(store: Store, model_id: str = "m", tensors: Any = None, **options: Any) -> catalog.Parameters:
    return store.add_model(model_id, open_checkpoint(arrays() if tensors is None else tensors), **options).parameters


def scalar(store: Store, model_id: str, field: str = "f", value: float = 1.0, key: int = 7) -> Commit:
    """A commit of one field for all analysed parameters, made by the kernel of the same name."""
    at = np.flatnonzero(store.parameters(model_id).analysed)
    return Commit(
        model_id,
        values={field: (at, value + np.arange(len(at)), np.zeros(len(at), np.uint8))},
        keys={field: (at, np.full(len(at), key, np.uint64))},
        attrs={field: {"long_name": field.upper(), "units": "1", "kernel": field}},
    )


def cells(store: Store, model_id: str, field: str = "f") -> tuple[list[float], list[int], list[int]]:
    """Values, statuses and keys of a field in the view, in the order of the model's parameters."""
    view = store.view()
    model = view.model_ids.index(model_id)
    at = np.argsort(np.where(view.row[model] < 0, 10**6, view.row[model]))[: int(view.present[model].sum())]
    if field not in view.values:
        return [], [], []
    key = view.keys[field][model, at] if field in view.keys else np.zeros(len(at), np.uint64)
    return view.values[field][model, at].tolist(), view.status[field][model, at].tolist(), key.tolist()


# ------------------------------------------------------------------------------------------------------- opening


def test_open_makes_a_store_that_opens_again(tmp_path: Path) -> None:
    assert Store.open(tmp_path / "s.zarr").model_ids() == []
    assert Store.open(str(tmp_path / "s.zarr"), "r").model_ids() == []
    assert Store.open(tmp_path / "s.zarr", "r+").location == str(tmp_path / "s.zarr")
    assert not Store.open(tmp_path / "s.zarr").in_memory


def test_home_is_expanded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert Store.open("~/s.zarr").location == str(tmp_path / "s.zarr")


def test_a_relative_path_stays_when_the_directory_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    store = Store.open("s.zarr")
    (tmp_path / "below").mkdir()
    monkeypatch.chdir(tmp_path / "below")
    add(store)
    assert Store.open(tmp_path / "s.zarr").model_ids() == ["m"]


@pytest.mark.parametrize("mode", ["r", "r+"])
def test_what_is_not_there_is_not_made_for_reading(tmp_path: Path, mode: str) -> None:
    with pytest.raises(StoreError, match="no store at"):
        Store.open(tmp_path / "s.zarr", mode)
    assert not (tmp_path / "s.zarr").exists()


def test_other_things_are_left_alone(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    with pytest.raises(StoreError, match="is a file"):
        Store.open(tmp_path / "file")
    with pytest.raises(StoreError, match=r"not empty \(it holds 'file'\)"):
        Store.open(tmp_path)
    zarr.open_group(tmp_path / "g.zarr", mode="w")
    with pytest.raises(StoreError, match="did not write"):
        Store.open(tmp_path / "g.zarr")
    with pytest.raises(StoreError, match="mode is 'w'"):
        Store.open(tmp_path / "s.zarr", "w")
    with pytest.raises(StoreError, match="cannot be opened"):
        Store.open("nosuchprotocol://x/y")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["file", "g.zarr"]


def set_version(store: Store, version: int) -> None:
    opening.set_version(store._objects, version)


def test_a_newer_store_is_refused(local: Store) -> None:
    set_version(local, 99)
    with pytest.raises(IncompatibleStoreError, match=r"has version 99 .* reads version 1"):
        Store.open(local.location)
    with pytest.raises(IncompatibleStoreError, match="has version 99"):
        upgrade(local.location)


def test_an_older_store_needs_an_explicit_upgrade(local: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    add(local)
    set_version(local, 0)
    with pytest.raises(IncompatibleStoreError, match=r"diffract_dask.upgrade\("):
        Store.open(local.location)
    with pytest.raises(IncompatibleStoreError, match="no way to"):
        upgrade(local.location)
    monkeypatch.setitem(opening.UPGRADES, 0, lambda objects: opening.set_version(objects, 1))
    assert upgrade(local.location) == 1
    assert upgrade(local.location) == 0
    assert Store.open(local.location).model_ids() == ["m"]


def test_an_upgrade_of_nothing_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match="no store"):
        upgrade(tmp_path / "none.zarr")


@pytest.mark.parametrize(
    "call",
    [
        lambda s: add(s, "n"),
        lambda s: s.rename("m", "n"),
        lambda s: s.erase_model("m"),
        lambda s: s.set_model_attrs("m", a=1),
        lambda s: s.commit([scalar(s, "m")]),
        lambda s: s.ingest("m", {"f": ([0], [1.0])}),
        lambda s: s.erase_fields("m", ["f"], []),
        lambda s: s.refresh_view(),
        lambda s: s.lock().__enter__(),
    ],
)
def test_a_store_open_for_reading_is_not_written(local: Store, call: Callable[[Store], Any]) -> None:
    add(local)
    before = {p: p.stat().st_mtime_ns for p in Path(str(local.location)).rglob("*")}
    with pytest.raises(ReadOnlyStoreError, match="open for reading"):
        call(Store.open(local.location, "r"))
    assert {p: p.stat().st_mtime_ns for p in Path(str(local.location)).rglob("*")} == before


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_says_so(local: Store) -> None:
    Path(str(local.location), "generation").chmod(0o500)
    with pytest.raises(ReadOnlyStoreError, match="cannot be written"):
        add(local)


# -------------------------------------------------------------------------------------------------------- adding


def test_what_was_added_comes_back(store: Store) -> None:
    given = arrays()
    added = store.add_model("m", open_checkpoint(given), step=3, parents=("p",), attrs={"lr": 0.1})
    again = store.parameters("m")
    assert added.same_as == []
    for column in ("name", "uid", "type", "dtype", "digest", "tied_to", "skip_reason", "module", "stack"):
        assert getattr(again, column).tolist() == getattr(added.parameters, column).tolist()
    assert again.shape.tolist() == [a.shape for a in given.values()]
    assert again.name.tolist() == list(given)
    expected = [catalog.digest(lambda i, j, a=a: a[i:j], a.shape, "float32") for a in given.values()]
    assert again.digest.tolist() == expected
    shown = store.model_attrs("m")
    assert shown["step"] == 3
    assert shown["parent"] == ["p"]
    assert shown["lr"] == 0.1
    assert shown["model_id"] == "m"
    loaded = store.slices("m", [2, 0]).load()
    assert np.array_equal(loaded, [given["h.2.weight"], given["h.0.weight"]])


def test_a_table_read_from_disk_equals_the_one_given(local: Store) -> None:
    given = add(local, overrides={"h.1.weight": {"type": "conv", "note": {"a": [1]}}, "h.2.weight": {"skip": True}})
    again = Store.open(local.location).parameters("m")
    for column in catalog.Parameters.__dataclass_fields__:
        assert getattr(again, column).tolist() == getattr(given, column).tolist(), column
    assert again.sharing_known == given.sharing_known


@pytest.mark.parametrize("shape", [(), (1,), (7,), (3, 5), (4, 3, 2, 2), (0, 5)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_dtype_is_kept_exactly_and_read_by_plain_zarr(local: Store, dtype: str, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(5)
    numpy_type = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    with np.errstate(all="ignore"):
        one, two = (
            (rng.standard_normal(shape) * 3).astype(numpy_type),
            (rng.standard_normal(shape) * 3).astype(numpy_type),
        )
    table = add(local, tensors={"a": one, "b": two})
    if 0 in shape:
        assert table.stack.tolist() == ["", ""]
        return
    kept = zarr.open_array(f"{local.location}/models/m/weights/{table.stack[0]}/weights", mode="r")
    for name, given in (("a", one), ("b", two)):
        found = kept[int(table.index[table.row(name)])]
        wanted = given.astype(np.float32) if dtype.startswith(("bf", "float8")) else given
        assert found.dtype == wanted.dtype
        assert np.array_equal(found, wanted, equal_nan=wanted.dtype.kind in "fc")
    names = zarr.open_array(f"{local.location}/models/m/weights/{table.stack[0]}/name", mode="r")
    assert names[:].tolist() == ["a", "b"][: kept.shape[0]]


def test_text_and_objects_get_a_row_and_no_data(store: Store) -> None:
    table = add(store, tensors={"w": np.eye(3), "note": np.array(["x", "y"]), "s": np.float32(2)})
    assert dict(zip(table.name, table.skip_reason, strict=True)) == {"w": "", "note": "not_numeric", "s": "scalar"}
    assert table.stack[table.row("note")] == ""
    with pytest.raises(StoreError, match="no data of 'note'"):
        store.slices("m", [table.row("note")])


def test_an_object_may_change_after_it_was_added(store: Store) -> None:
    given = {"w": np.ones((64, 64))}
    add(store, tensors=given)
    given["w"][:] = 5
    assert (store.slices("m", [0]).load() == 1).all()


def test_an_empty_checkpoint_is_an_empty_table(store: Store) -> None:
    table = store.add_model("m", catalog.Checkpoint([], "nothing")).parameters
    assert len(table) == 0
    assert len(store.parameters("m")) == 0
    assert store.view().model_ids == ["m"]
    store.commit([Commit("m", model_values={"n": (0.0, 0)})])
    store.refresh_view()
    assert store.view().model_values["n"].tolist() == [0.0]


ODD = [
    "Run",
    "run",
    "RUN",
    "run-2",
    "a/b",
    "..",
    ".",
    "con",
    "aux.txt",
    "zarr.json",
    "c",
    "日本 語",
    "é",
    "x" * 300,
    " ",
    "a\\b",
    "%2e",
    "__x",
    "-",
    "'\"",
    "🙂",
]


def test_ids_and_names_are_any_printable_text(local: Store) -> None:
    for i, model_id in enumerate(ODD):
        add(local, model_id, {name: np.full((2, 3), i + 1.0) * [[1, 2, 3], [1, 1, 1]] for name in ODD})
    again = Store.open(local.location)
    assert again.model_ids() == ODD
    assert sorted(os.listdir(f"{local.location}/models")) == sorted(
        n.lower() for n in os.listdir(f"{local.location}/models")
    )
    for i, model_id in enumerate(ODD):
        assert again.parameters(model_id).name.tolist() == ODD
        assert again.slices(model_id, [3]).load()[0, 1, 0] == i + 1
    assert sorted(xr.open_zarr(str(local.location), group="view").model_id.values.tolist()) == sorted(ODD)


@pytest.mark.parametrize("bad", ["", "a\nb", "\x00", "\ud800", 3, None])
def test_other_ids_are_refused(store: Store, bad: Any) -> None:
    with pytest.raises(InvalidIdentifierError, match="printable"):
        add(store, bad)
    add(store)
    with pytest.raises(InvalidIdentifierError, match="printable"):
        store.rename("m", bad)


def test_folders_keep_plain_ids_and_never_collide() -> None:
    assert folder_of("run-2.b_c") == "run-2.b_c"
    assert folder_of("Run-2").startswith("run-2-")
    taken: list[str] = []
    for model_id in [*ODD, folder_of("Run")]:
        folder = folder_of(model_id, taken)
        assert folder.lower() not in {t.lower() for t in taken}
        assert folder not in ("con", "zarr.json", "..", ".")
        taken.append(folder)
    assert folder_of("a", ["a"]) != folder_of("a", ["a", folder_of("a", ["a"])])


def test_an_id_can_be_used_once(store: Store) -> None:
    add(store)
    with pytest.raises(ModelAlreadyExistsError, match="replace=True"):
        add(store)
    assert store.model_ids() == ["m"]


def test_a_failing_checkpoint_leaves_nothing(store: Store) -> None:
    def fail(start: int, stop: int) -> Any:
        raise OSError("disk on fire")

    good = open_checkpoint(arrays()).tensors
    bad = catalog.Tensor("x.weight", (3, 4), "float32", fail)
    for _ in range(2):
        with pytest.raises(OSError, match="fire"):
            store.add_model("m", catalog.Checkpoint([*good, bad], "here"))
        assert store.model_ids() == []
    add(store)
    assert store.model_ids() == ["m"]
    if store.location and store.location.startswith("/"):
        assert os.listdir(f"{store.location}/generation/.staging") == []
        assert sorted(os.listdir(f"{store.location}/models")) == ["m", "zarr.json"]


def test_unknown_names_in_overrides(store: Store) -> None:
    with pytest.raises(ParameterNotFoundError):
        add(store, overrides={"nope": {}})
    assert store.model_ids() == []


def test_equal_content_is_told(store: Store) -> None:
    add(store, "a")
    add(store, "b", arrays(1))
    shuffled = dict(reversed(arrays().items()))
    assert store.add_model("c", open_checkpoint(shuffled)).same_as == ["a"]
    assert store.add_model("d", open_checkpoint(arrays())).same_as == ["a", "c"]
    assert store.add_model("d", open_checkpoint(arrays()), replace=True).same_as == ["a", "c"]
    changed = arrays()
    changed["ln.bias"] = changed["ln.bias"] + 1
    assert store.add_model("e", open_checkpoint(changed)).same_as == []


def test_equal_tensors_are_kept_once(local: Store) -> None:
    w = np.random.default_rng(0).standard_normal((50, 8)).astype(np.float32)
    shared = add(local, "shared", {"emb.weight": w, "x.weight": w + 1, "head.weight": w})
    copied = add(local, "copied", {"emb.weight": w, "x.weight": w + 1, "head.weight": w.copy()})
    for model_id, table in (("shared", shared), ("copied", copied)):
        kept = zarr.open_array(f"{local.location}/models/{model_id}/weights/50x8-float32/weights", mode="r")
        assert kept.shape == (2, 50, 8)
        assert np.array_equal(local.slices(model_id, [0, 1, 2]).load(), [w, w + 1, w])
        assert table.digest[0] == table.digest[2]
    assert shared.tied_to.tolist() == ["", "", "emb.weight"]
    assert local.view().canonical[0].tolist() == [0, 1, 0]


def test_steps_order_models(store: Store) -> None:
    for model_id, step in (("run-10", None), ("run-2", None), ("late", 20), ("early", -1.5), ("late2", 20)):
        add(store, model_id, step=step)
    assert store.model_ids() == ["early", "late", "late2", "run-10", "run-2"]
    with pytest.raises(SessionError, match="finite number"):
        add(store, "x", step=float("nan"))


def test_attributes(store: Store) -> None:
    add(store, attrs={"lr": np.float32(0.5), "tags": ["a"]})
    store.set_model_attrs("m", lr=None, note="x", step=4, parent=["a", "b"])
    shown = store.model_attrs("m")
    assert "lr" not in shown
    assert (shown["note"], shown["tags"], shown["step"], shown["parent"]) == ("x", ["a"], 4, ["a", "b"])
    assert store.view().step.tolist() == [4]
    assert store.view().parent == ['["a", "b"]']
    with pytest.raises(SessionError, match="kept by the store"):
        store.set_model_attrs("m", digest=1, model_id="x")
    with pytest.raises(SessionError, match="JSON"):
        store.set_model_attrs("m", x=object())
    with pytest.raises(SessionError, match="JSON"):
        add(store, "n", attrs={"x": float("inf")})
    with pytest.raises(ModelNotFoundError, match="no model 'mm'"):
        store.set_model_attrs("mm", a=1)


def test_renaming_keeps_everything_but_the_id(store: Store) -> None:
    add(store, "a")
    add(store, "b", arrays(1))
    store.commit([scalar(store, "a", value=5.0)])
    before = store.parameters("a")
    store.rename("a", "z")
    assert store.model_ids() == ["z", "b"]
    assert cells(store, "z")[0][:3] == [5.0, 6.0, 7.0]
    assert cells(store, "z")[2][:3] == [7, 7, 7]
    after = store.parameters("z")
    assert after.uid.tolist() == [catalog.uid("z", name) for name in before.name]
    with pytest.raises(ModelAlreadyExistsError):
        store.rename("z", "b")
    with pytest.raises(ModelNotFoundError):
        store.rename("a", "c")
    add(store, "a", arrays(2))
    assert store.slices("z", [0]).load()[0, 0, 0] == arrays()["h.0.weight"][0, 0]
    assert store.slices("a", [0]).load()[0, 0, 0] == arrays(2)["h.0.weight"][0, 0]


def test_erasing_models_leaves_nothing_of_them(store: Store) -> None:
    for i in range(4):
        add(store, f"m{i}", arrays(i))
        store.commit([scalar(store, f"m{i}", value=10.0 * i)])
    with pytest.raises(ModelNotFoundError):
        store.erase_model("m1", "nope")
    assert len(store.model_ids()) == 4
    store.erase_model("m0", "m2")
    assert store.model_ids() == ["m1", "m3"]
    assert store.view().model_ids == ["m1", "m3"]
    assert cells(store, "m3")[0][0] == 30.0
    if store.location and store.location.startswith("/"):
        assert sorted(os.listdir(f"{store.location}/models")) == ["m1", "m3", "zarr.json"]
    store.erase_model("m1", "m3")
    view = store.view()
    assert (view.model_ids, view.names, list(view.values)) == ([], [], [])


def test_replacing_keeps_results_of_equal_weights(store: Store) -> None:
    add(store, "other")
    add(store)
    commit = scalar(store, "m", value=1.0)
    at = commit.values["f"][0]
    spectrum = [np.arange(4.0) + i for i in at]
    commit.values["s"] = (at, np.full(3, np.nan), np.zeros(3, np.uint8))
    commit.arrays["s"] = (at, spectrum)
    commit.model_values["total"], commit.model_keys["total"] = (9.0, 0), 5
    commit.failures = {("h.0.weight", "g"): "boom", ("h.1.weight", "g"): "bang"}
    store.commit([commit])
    new = arrays()
    new["h.1.weight"] = new["h.1.weight"] * 2
    new["renamed.weight"] = new.pop("h.2.weight")
    add(store, "m", new, replace=True)
    assert store.parameters("m").name.tolist() == list(new)
    value, status, key = cells(store, "m")
    assert value[0] == 1.0
    assert np.isnan(value[1])
    assert value[3] == 3.0
    assert status == [0, MISSING, MISSING, 0]
    assert key == [7, 0, 0, 7]
    found = store.arrays("m", "s", [0, 1, 3])
    assert found[0].tolist() == spectrum[0].tolist()
    assert np.isnan(found[1]).all()
    assert found[2].tolist() == spectrum[2].tolist()
    assert store.failures("m") == {("h.0.weight", "g"): "boom"}
    assert "total" not in store.view().model_values
    assert store.view().model_ids == ["other", "m"]
    add(store, "m", new, replace=True)
    assert cells(store, "m")[2] == [7, 0, 0, 7]


def test_replacing_by_the_same_keeps_model_level_results(store: Store) -> None:
    add(store)
    store.commit([Commit("m", model_values={"total": (9.0, 0)}, model_keys={"total": 5})])
    add(store, replace=True)
    assert store.view().model_values["total"].tolist() == [9.0]
    assert store.view().model_keys["total"].tolist() == [5]


def test_replace_of_nothing_adds(store: Store) -> None:
    add(store, replace=True)
    assert store.model_ids() == ["m"]


# ------------------------------------------------------------------------------------------------- large weights

LIMITS = {"_CHUNK_BYTES": 300, "_WHOLE_BYTES": 600, "_PART_BYTES": 200, "_PANEL_BYTES": 500}


@pytest.fixture
def small_limits(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, limit in LIMITS.items():
        monkeypatch.setattr(weights, name, limit)


SHAPES = [
    (2, 2),
    (6, 4),
    (10, 15),
    (33, 7),
    (7, 33),
    (5, 3, 7),
    (31, 2, 3, 2),
    (8, 9, 3),
    (160, 2),
    (2, 160),
    (300,),
    (2, 2, 50),
]


@pytest.mark.usefixtures("small_limits")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float64"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_chunking_gives_the_same_slices(tmp_path: Path, shape: tuple[int, ...], dtype: str) -> None:
    rng = np.random.default_rng(1)
    kind = np.dtype(getattr(ml_dtypes, dtype, None) or dtype)
    given = {f"w{i}": rng.standard_normal(shape).astype(kind) for i in range(5)}
    given["same"] = given["w1"].copy()
    for location in (tmp_path / "s.zarr", None):
        store = Store.open(location)
        table = add(store, tensors=given)
        assert (table.digest != "").all()
        wanted = catalog.digest(lambda i, j: given["w3"][i:j].view(dtypes.carrier(dtype)), shape, dtype)
        assert table.digest[3] == wanted
        if location is not None:
            kept = zarr.open_array(f"{location}/models/m/weights/{table.stack[0]}/weights", mode="r")
            assert kept.shape[0] == 5
            assert np.array_equal(kept[3], given["w3"].astype(store.slice_dtype(dtype)))
        if len(shape) < 2:
            continue
        expected = np.stack([a.reshape(shape[0], -1).astype(store.slice_dtype(dtype)) for a in given.values()])
        slices = store.slices("m", np.array([4, 0, 1, 2, 5]))
        assert np.array_equal(slices.load(), expected[[4, 0, 1, 2, 5]])
        one = store.slices("m", [2])
        long, tall = max(expected.shape[1:]), expected.shape[1] >= expected.shape[2]
        across = expected[2] if tall else expected[2].T
        for start, stop, nbytes in (
            (0, long, 64),
            (0, long, 10**6),
            (1, long - 1, 48),
            (long // 2, long, 1),
            (1, 1, 9),
        ):
            blocks = list(one.blocks(start, stop, nbytes))
            step = max(1, nbytes // (across.shape[1] * one.dtype.itemsize))
            assert [len(b) for b in blocks] == [min(step, stop - i) for i in range(start, stop, step)]
            assert np.array_equal(np.concatenate([across[:0], *blocks]), across[start:stop])
        edges = one.span_edges(3)
        assert edges[0] == 0
        assert edges[-1] == long
        assert sorted(set(edges)) == edges


def test_small_parameters_share_a_chunk(local: Store) -> None:
    add(local, tensors={f"w{i}": np.random.default_rng(i).standard_normal((16, 16)) for i in range(300)})
    folder = Path(str(local.location), "models/m/weights/16x16-float64/weights")
    assert len([p for p in folder.rglob("*") if p.is_file()]) == 2


def test_chunks_waste_little() -> None:
    for n in (1, 2, 7, 11, 25, 100, 333):
        for rows in (10, 384, 1000, 1500, 3000):
            spec = weights.stack_spec((rows, rows), "float32", n)
            stored = np.prod(spec.grid) * np.prod(spec.chunks)
            assert stored * 4 <= np.prod(spec.shape) * 4 + spec.grid[0] * rows * rows * 4
            assert np.prod(spec.chunks) * 4 <= 64 * 2**20
    tall = weights.stack_spec((60000, 4096), "float32", 1)
    wide = weights.stack_spec((4096, 60000), "bfloat16", 1)
    assert tall.chunks[2] == 4096
    assert wide.chunks[1] == 4096
    for spec in (tall, wide):
        assert 8 * 2**20 < np.prod(spec.chunks) * 4 <= 17 * 2**20
        assert np.prod(spec.grid) * np.prod(spec.chunks) <= 1.02 * np.prod(spec.shape)


# ------------------------------------------------------------------------------------------------------- slices


def test_slices_of_different_shapes_are_refused(local: Store) -> None:
    add(local, tensors={"a": np.eye(3), "b": np.eye(4), "c": np.eye(3, dtype=np.float32)})
    for pair in ([0, 1], [0, 2]):
        with pytest.raises(StoreError, match="of one shape and type"):
            local.slices("m", pair)


def test_one_reading_of_several_stacks(local: Store) -> None:
    rng = np.random.default_rng(0)
    given = {"a": rng.random((4, 6)), "b": rng.random((4, 3, 2)), "c": rng.random((4, 6)), "d": rng.random((4, 2, 3))}
    add(local, tensors=given)
    found = local.slices("m", [1, 0, 3, 2]).load()
    assert np.array_equal(found, [given[k].reshape(4, 6) for k in "badc"])


def test_slices_travel_unless_in_memory(local: Store) -> None:
    add(local)
    assert np.array_equal(
        pickle.loads(pickle.dumps(local.slices("m", [0, 1]))).load(), local.slices("m", [0, 1]).load()
    )
    again = pickle.loads(pickle.dumps(local))
    assert again.read_only
    assert again.model_ids() == ["m"]
    memory = Store.open()
    add(memory)
    slices = memory.slices("m", [0, 1])
    with pytest.raises(StoreError, match="inline"):
        pickle.dumps(slices)
    with pytest.raises(StoreError, match="cannot be sent"):
        pickle.dumps(memory)
    sent = pickle.loads(pickle.dumps(slices.inline()))
    assert np.array_equal(sent.load(), slices.load())
    assert sent.load_with_digests()[1] == list(slices.digests)
    one = pickle.loads(pickle.dumps(memory.slices("m", [1]).inline()))
    assert np.array_equal(np.concatenate(list(one.blocks(1, 5, 20))), slices.load()[1][1:5])


def test_a_lost_chunk_is_an_error_and_no_number(local: Store) -> None:
    add(local)
    slices = local.slices("m", [0])
    next(Path(str(local.location), "models/m/weights/6x4-float32/weights").rglob("c/0/0/0")).unlink()
    with pytest.raises(StoreError, match="damaged or was removed"):
        slices.load()


# ----------------------------------------------------------------------------------------------------- linked


@pytest.fixture
def linked(local: Store, tmp_path: Path) -> tuple[Store, Path]:
    path = tmp_path / "m.safetensors"
    write_safetensors(path, arrays())
    table = add(local, "m", path, link=True)
    assert (table.stack == "").all()
    assert (table.digest == "").all()
    return local, path


def test_linked_and_copied_agree(linked: tuple[Store, Path]) -> None:
    store, path = linked
    add(store, "copied", path)
    assert not Path(str(store.location), "models/m/weights").exists()
    ours, theirs = store.slices("m", [0, 1, 2]), store.slices("copied", [0, 1, 2])
    assert ours.linked
    assert not theirs.linked
    values, digests = ours.load_with_digests()
    assert np.array_equal(values, theirs.load())
    assert digests == list(theirs.digests)
    assert pickle.loads(pickle.dumps(ours)).load_with_digests()[1] == digests
    for i in range(3):
        one = store.slices("m", [i])
        assert one.digest() == digests[i]
        pieces = one.digest_pieces(0, 6)
        blocks = list(one.blocks(0, 6, 20, pieces))
        assert np.array_equal(np.concatenate(blocks), values[i])
        assert one.combine(pieces.hashes()) == digests[i]
    assert store.view().digest[0, :3].tolist() == [0, 0, 0]
    store.commit([Commit("m", digests=(np.array([2, 0]), [digests[2], digests[0]]))])
    store.refresh_view()
    known = [int(catalog.digest_key(d)) for d in digests]
    assert store.view().digest[0, :3].tolist() == [known[0], 0, known[2]]


def test_spans_of_a_linked_slice_give_its_digest(local: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("diffract_dask.digests.PIECE_BYTES", 100)
    w = np.random.default_rng(0).standard_normal((101, 5)).astype(np.float32)
    write_safetensors(tmp_path / "w.safetensors", {"w": w, "wide": np.ascontiguousarray(w.T)})
    add(local, "m", tmp_path / "w.safetensors", link=True)
    wanted = catalog.digest(lambda i, j: w[i:j], w.shape, "float32")
    tall = local.slices("m", [0])
    for spans in (1, 2, 7, 1000):
        edges = tall.span_edges(spans)
        hashes: list[bytes] = []
        for start, stop in pairwise(edges):
            pieces = tall.digest_pieces(start, stop)
            assert np.array_equal(np.concatenate(list(tall.blocks(start, stop, 60, pieces))), w[start:stop])
            hashes += pieces.hashes()
        assert tall.combine(hashes) == wanted
    wide = local.slices("m", [1])
    assert np.array_equal(np.concatenate(list(wide.blocks(0, 101, 60))), w)
    assert wide.digest() == catalog.digest(lambda i, j: w.T[i:j], (5, 101), "float32")


def test_the_same_file_linked_twice_is_told(linked: tuple[Store, Path]) -> None:
    store, path = linked
    assert store.add_model("again", open_checkpoint(path), link=True).same_as == ["m"]


def test_ties_show_when_digests_come(local: Store, tmp_path: Path) -> None:
    w = np.random.default_rng(0).standard_normal((6, 4)).astype(np.float32)
    write_safetensors(tmp_path / "t.safetensors", {"emb.weight": w, "head.weight": w})
    add(local, "m", tmp_path / "t.safetensors", link=True)
    assert local.parameters("m").tied_to.tolist() == ["", ""]
    _, digests = local.slices("m", [0, 1]).load_with_digests()
    local.commit([Commit("m", digests=(np.array([0, 1]), digests))])
    assert local.parameters("m").tied_to.tolist() == ["", "emb.weight"]
    assert local.view().canonical.tolist() == [[0, 0]]


def test_a_changed_file_is_hashed_again(linked: tuple[Store, Path]) -> None:
    store, path = linked
    digests = store.slices("m", [0, 1, 2]).load_with_digests()[1]
    store.commit([Commit("m", digests=(np.arange(3), digests))])
    assert (store.view().digest[0, :3] != 0).all()
    planned = store.slices("m", [0])
    write_safetensors(path, arrays(9))
    os.utime(path, ns=(1, 10**18))
    with pytest.raises(LinkBrokenError, match="changed after"):
        planned.load()
    with pytest.raises(LinkBrokenError, match="changed after"):
        list(planned.blocks(0, 6, 10))
    assert (store.view().digest[0, :3] == 0).all()
    assert (store.parameters("m").digest == "").all()
    values, new = store.slices("m", [0, 1, 2]).load_with_digests()
    assert np.array_equal(values[0], arrays(9)["h.0.weight"])
    assert not set(new) & set(digests)


def test_a_touched_file_with_the_old_content_gets_the_old_digests(linked: tuple[Store, Path]) -> None:
    store, path = linked
    digests = store.slices("m", [0, 1]).load_with_digests()[1]
    os.utime(path, ns=(1, 10**18))
    store.view()
    assert store.slices("m", [0, 1]).load_with_digests()[1] == digests


@pytest.mark.parametrize("damage", ["gone", "shrunk", "other layout"])
def test_a_broken_link_is_an_error_at_reading_only(linked: tuple[Store, Path], damage: str) -> None:
    store, path = linked
    store.commit([scalar(store, "m")])
    store.refresh_view()
    if damage == "gone":
        path.unlink()
    elif damage == "shrunk":
        path.write_bytes(path.read_bytes()[:-120])
    else:
        write_safetensors(path, {"x": np.eye(9), **arrays(9)})
    assert cells(store, "m")[0][:3] == [1.0, 2.0, 3.0]
    slices = store.slices("m", [0])
    for read in (slices.load, slices.load_with_digests, slices.digest, lambda: list(slices.blocks(0, 6, 8))):
        with pytest.raises(LinkBrokenError, match=r"m\.safetensors"):
            read()


def test_what_lies_in_no_file_cannot_be_linked(store: Store) -> None:
    with pytest.raises(UnsupportedSourceError, match="link"):
        add(store, link=True)
    assert store.model_ids() == []


def test_npz_is_linked(local: Store, tmp_path: Path) -> None:
    np.savez(tmp_path / "w.npz", **{k: v for k, v in arrays().items() if v.ndim == 2})
    add(local, "m", tmp_path / "w.npz", link=True)
    assert np.array_equal(local.slices("m", [1]).load()[0], arrays()["h.1.weight"])


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


# ------------------------------------------------------------------------------- a writer that stops at any point


class Stop(BaseException):
    """Stands for SIGKILL."""


class Stopping:
    """Lets a number of changes of the store pass and then stops the writer before the next."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.left: int | None = None
        self.count = 0
        for name in ("set", "overwrite", "delete", "move", "delete_dir"):
            monkeypatch.setattr(Objects, name, self._counting(getattr(Objects, name)))

    def _counting(self, change: Callable[..., None]) -> Callable[..., None]:
        def counted(*args: Any, **kwargs: Any) -> None:
            self.count += 1
            if self.left is not None:
                if self.left == 0:
                    raise Stop
                self.left -= 1
            change(*args, **kwargs)

        return counted

    def stores(self, model: Path, call: Callable[[Store], None], every: int) -> Iterator[Path]:
        """Yield copies of a store in which `call` was stopped after 0, 1, 2, … changes; each `every`-th of them."""
        whole = shutil.copytree(model, model.with_name("whole.zarr"))
        self.count = 0
        call(Store.open(whole))
        total = self.count
        assert total > 5
        for point in sorted({*range(0, total, every), *range(total - 3, total)}):
            path = Path(shutil.copytree(model, model.with_name(f"{point}.zarr")))
            store = Store.open(path)
            self.left = point
            with pytest.raises(Stop):
                call(store)
            self.left = None
            yield path
            shutil.rmtree(path)


@pytest.fixture
def stopping(monkeypatch: pytest.MonkeyPatch) -> Stopping:
    return Stopping(monkeypatch)


EVERY = [7, pytest.param(1, marks=pytest.mark.slow)]


def both(store: Store, value: float, key: int) -> Commit:
    """A commit of every kind of result, all of one key."""
    commit = scalar(store, "m", "f", value, key)
    commit.keys["g"], commit.values["g"] = commit.keys["f"], commit.values["f"]
    at = commit.values["f"][0]
    commit.arrays["s"] = (at, [np.full(4, value) for _ in at])
    commit.values["s"] = (at, np.full(len(at), np.nan), np.zeros(len(at), np.uint8))
    commit.keys["s"] = (at, np.full(len(at), key, np.uint64))
    commit.model_values["t"], commit.model_keys["t"] = (value, 0), key
    return commit


def test_a_key_never_vouches_for_other_values(tmp_path: Path, stopping: Stopping) -> None:
    model = Store.open(tmp_path / "model.zarr")
    add(model)
    model.commit([both(model, 1.0, 7)])
    model.refresh_view()

    def change(store: Store) -> None:
        store.commit([both(store, 100.0, 8)])
        store.refresh_view()

    seen = set()
    base = {7: 1.0, 8: 100.0}
    for path in stopping.stores(tmp_path / "model.zarr", change, 1):
        reader, writer = Store.open(path, "r"), Store.open(path)
        with writer.lock():
            pass
        for store in (reader, writer, Store.open(path, "r")):
            view = store.view()
            for field in ("f", "g"):
                value, key = view.values[field][0, :3], view.keys[field][0, :3]
                for i in range(3):
                    assert key[i] == 0 or value[i] == base[int(key[i])] + i
                seen.add(int(key[0]))
            stored = store.arrays("m", "s", np.arange(3))
            for i in range(3):
                key_of_s = int(view.keys["s"][0, i])
                assert key_of_s == 0 or (stored[i] == base[key_of_s]).all()
            model_key = int(view.model_keys["t"][0])
            assert model_key == 0 or view.model_values["t"][0] == base[model_key]
        change(writer)
        assert cells(writer, "m")[0][:3] == [100.0, 101.0, 102.0]
        assert cells(Store.open(path, "r"), "m")[2][:3] == [8, 8, 8]
    assert seen == {0, 7, 8}


CHANGES: dict[str, tuple[Callable[[Store], Any], list[set[str]]]] = {
    "add": (lambda s: add(s, "new", arrays(5)), [{"a", "b"}, {"a", "b", "new"}]),
    "replace": (lambda s: add(s, "a", arrays(5), replace=True), [{"a", "b"}]),
    "erase": (lambda s: s.erase_model("a"), [{"a", "b"}, {"b"}]),
    "rename": (lambda s: s.rename("a", "z"), [{"a", "b"}, {"z", "b"}]),
    "attrs": (lambda s: s.set_model_attrs("a", step=9, note="n"), [{"a", "b"}]),
    "erase fields": (lambda s: (s.erase_fields("a", ["f"], ["f"]), s.refresh_view()), [{"a", "b"}]),
}


@pytest.mark.parametrize("every", EVERY)
@pytest.mark.parametrize("name", CHANGES)
def test_a_stopped_change_is_done_or_not_done(tmp_path: Path, stopping: Stopping, name: str, every: int) -> None:
    change, states = CHANGES[name]
    model = Store.open(tmp_path / "model.zarr")
    for model_id, seed in (("a", 0), ("b", 1)):
        add(model, model_id, arrays(seed))
    model.commit([scalar(model, "a", value=1.0), scalar(model, "b", value=50.0)])
    model.refresh_view()
    found = []
    for path in stopping.stores(tmp_path / "model.zarr", change, every):
        reader = Store.open(path, "r")
        found.append(set(reader.model_ids()))
        check_whole(reader)
        check_plain(path)
        writer = Store.open(path)
        add(writer, "later", arrays(8))
        check_whole(writer)
        check_plain(path)
        assert set(writer.model_ids()) - {"later"} == found[-1]
        assert all(f"-{os.getpid()}-" in left for left in os.listdir(path / "generation/.staging"))
        assert not list(path.rglob("*.partial"))
        if found[-1] == states[0] and name != "add":
            change(writer)
            check_whole(Store.open(path, "r"))
    tree = xr.open_datatree(tmp_path / "whole.zarr", engine="zarr", consolidated=False)
    assert set(tree["models"].children) == {p.name for p in (tmp_path / "whole.zarr/models").iterdir()} - {"zarr.json"}
    assert all(ids in states for ids in found)
    assert found[-1] == states[-1]


def check_whole(store: Store) -> None:
    """Every model has all of its weights, and the values that its keys vouch for."""
    view = store.view()
    assert set(view.model_ids) == set(store.model_ids())
    for i, model_id in enumerate(view.model_ids):
        table = store.parameters(model_id)
        values, digests = store.slices(model_id, [0, 1, 2]).load_with_digests()
        for w, recorded, name in zip(values, digests, table.name, strict=False):
            assert catalog.digest(lambda a, b, w=w: w[a:b], w.shape, "float32") == recorded
            assert any(np.array_equal(w, arrays(seed)[name]) for seed in (0, 1, 5, 8))
        assert sorted(view.row[i][view.row[i] >= 0].tolist()) == list(range(len(table)))
        for field in view.values:
            held = view.keys[field][i] != 0
            shown = view.values[field][i, held].tolist()
            assert shown in ([], [1.0, 2.0, 3.0], [50.0, 51.0, 52.0])


def check_plain(path: Path) -> None:
    """Plain xarray opens the view and sees no value that was never stored."""
    plain = xr.open_zarr(str(path), group="view").load()
    known = {"a": [1.0, 2.0, 3.0], "z": [1.0, 2.0, 3.0], "b": [50.0, 51.0, 52.0], "new": [], "later": []}
    if "f" in plain:
        for model_id, shown in zip(plain.model_id.values, plain.f.values, strict=True):
            assert shown[~np.isnan(shown)].tolist() in ([], known[str(model_id)])


def test_leftovers_of_dead_writers_are_swept(local: Store, tmp_path: Path) -> None:
    add(local)
    dead = subprocess.run(
        [sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, text=True, check=True
    )
    host = os.uname().nodename
    staging = Path(str(local.location), "generation/.staging")
    (staging / f"aa-{dead.stdout.strip()}-{host}").mkdir(parents=True)
    (staging / f"bb-{os.getpid()}-{host}").mkdir()
    (staging / f"cc-{os.getpid()}-elsewhere").mkdir()
    add(Store.open(local.location), "n")
    assert sorted(p.name[:2] for p in staging.iterdir()) == ["bb", "cc"]


# ----------------------------------------------------------------------------------------------------- locking

HOLD = """
import sys, time
from diffract_dask.store import Store
with Store.open(sys.argv[1]).lock():
    print("held", flush=True)
    sys.stdin.read()
"""


def holder(path: str) -> subprocess.Popen[str]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, path], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "held\n"
    return process


def test_the_second_writer_waits_then_fails_naming_the_first(local: Store) -> None:
    add(local)
    process = holder(str(local.location))
    try:
        with pytest.raises(StoreLockedError, match=rf"process {process.pid} on {os.uname().nodename} since 20"):
            add(Store.open(local.location, lock_timeout=0.2), "n")
        assert Store.open(local.location).view().model_ids == ["m"]
        assert Store.open(local.location, "r").model_ids() == ["m"]
        threading.Timer(0.3, lambda: process.stdin.close()).start()  # type: ignore[union-attr]
        add(Store.open(local.location, lock_timeout=30), "n")
    finally:
        process.kill()
        process.wait()
        process.stdout.close()  # type: ignore[union-attr]
    assert local.model_ids() == ["m", "n"]


def test_a_killed_holder_holds_nothing(local: Store) -> None:
    process = holder(str(local.location))
    process.kill()
    process.wait()
    process.stdin.close()  # type: ignore[union-attr]
    process.stdout.close()  # type: ignore[union-attr]
    with local.lock(timeout=5):
        add(local)


def test_the_lock_is_reentrant_and_shared_by_threads(store: Store) -> None:
    with store.lock(), store.lock():
        add(store, "a")
    failed: list[BaseException] = []

    def work(i: int) -> None:
        try:
            add(store, f"t{i}", arrays(i))
            store.commit([scalar(store, f"t{i}", value=float(i))])
        except BaseException as error:  # a thread's failure must fail the test
            failed.append(error)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failed
    store.refresh_view()
    assert sorted(store.model_ids()) == ["a", *(f"t{i}" for i in range(6))]
    assert [cells(store, f"t{i}")[0][0] for i in range(6)] == [0, 1, 2, 3, 4, 5]


def test_another_thread_waits_and_is_told(store: Store) -> None:
    entered, leave = threading.Event(), threading.Event()

    def hold() -> None:
        with store.lock():
            entered.set()
            leave.wait(10)

    thread = threading.Thread(target=hold)
    thread.start()
    entered.wait(10)
    with pytest.raises(StoreLockedError, match="is being written by"), store.lock(timeout=0.05):
        pass
    leave.set()
    thread.join()


def test_an_error_within_a_lock_that_the_caller_swallows(store: Store) -> None:
    add(store)
    with store.lock():
        with pytest.raises(ModelAlreadyExistsError):
            add(store)
        store.commit([scalar(store, "m")])
    assert cells(Store.open(store._objects.store), "m")[0][:3] == [1.0, 2.0, 3.0]


def test_two_stores_of_one_directory_see_each_other(tmp_path: Path) -> None:
    one, two = Store.open(tmp_path / "s.zarr"), Store.open(tmp_path / "s.zarr")
    add(one, "a")
    assert two.model_ids() == ["a"]
    two.commit([scalar(two, "a", value=2.0)])
    assert cells(one, "a")[0][:3] == [2.0, 3.0, 4.0]
    two.erase_model("a")
    assert one.model_ids() == []
    with pytest.raises(ModelNotFoundError):
        one.parameters("a")
    add(two, "a", arrays(4))
    assert np.array_equal(one.slices("a", [0]).load()[0], arrays(4)["h.0.weight"])


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
