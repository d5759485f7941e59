"""Opening a store, adding, renaming, replacing and erasing models, and who may write when."""

from __future__ import annotations

import os
import pickle
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
import zarr
from stored import KINDS, add, arrays, cells, scalar

from diffract_dask import catalog
from diffract_dask.errors import (
    IncompatibleStoreError,
    InvalidIdentifierError,
    ModelAlreadyExistsError,
    ModelNotFoundError,
    ParameterNotFoundError,
    ReadOnlyStoreError,
    SessionError,
    StoreError,
    StoreLockedError,
)
from diffract_dask.fields import MISSING
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Commit, Store, opening, upgrade
from diffract_dask.store.tables import folder_of


@pytest.fixture(params=KINDS)
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Store:
    return Store.open(KINDS[request.param](tmp_path))


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s.zarr")


# ------------------------------------------------------------------------------------------------------- opening


def test_open_makes_a_store_that_opens_again(tmp_path: Path) -> None:
    assert Store.open(tmp_path / "s.zarr").model_ids() == []
    assert Store.open(str(tmp_path / "s.zarr"), "r").model_ids() == []
    assert Store.open(tmp_path / "s.zarr", "r+").location == str(tmp_path / "s.zarr")
    assert Store.open(f"file://{tmp_path}/s.zarr").location == str(tmp_path / "s.zarr")
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


def test_a_lock_object_where_there_are_no_locks(tmp_path: Path) -> None:
    place = KINDS["object store"](tmp_path)
    one, two = Store.open(place), Store.open(place, lock_timeout=0.1)
    holder = tmp_path / "s.zarr/generation/.holder.json"
    with one.lock():
        with pytest.raises(StoreLockedError, match=rf"process {os.getpid()} .* remove 'generation/.holder.json'"):
            add(two)
        add(one)
    assert not holder.exists()
    dead = subprocess.run([sys.executable, "-c", "import os; print(os.getpid())"], capture_output=True, check=True)
    holder.write_text(f'{{"host": "{os.uname().nodename}", "pid": {int(dead.stdout)}, "time": "then", "token": "x"}}')
    add(two, "n")
    holder.write_text('{"host": "elsewhere", "pid": 1, "time": "then", "token": "x"}')
    with pytest.raises(StoreLockedError, match="process 1 on elsewhere since then"):
        add(two, "o")
    assert two.model_ids() == ["m", "n"]
    sent = pickle.loads(pickle.dumps(two.slices("m", [0, 1])))
    assert np.array_equal(sent.load(), one.slices("m", [0, 1]).load())


def test_an_error_within_a_lock_that_the_caller_swallows(store: Store) -> None:
    add(store)
    with store.lock():
        with pytest.raises(ModelAlreadyExistsError):
            add(store)
        store.commit([scalar(store, "m")])
    assert cells(Store.open(store._objects.store), "m")[0][:3] == [1.0, 2.0, 3.0]


def test_another_model_of_the_same_id_is_another_model(tmp_path: Path) -> None:
    one, two = Store.open(tmp_path / "s.zarr"), Store.open(tmp_path / "s.zarr")
    add(one, "a", arrays(0, n=2))
    one.commit([scalar(one, "a")])
    before = one.view()
    assert one.slices("a", [0, 1]).load().shape == (2, 6, 4)
    two.erase_model("a")
    add(two, "a", arrays(7, n=9))
    assert len(one.parameters("a")) == 10
    assert np.array_equal(one.slices("a", [8]).load()[0], arrays(7, n=9)["h.8.weight"])
    assert (before.status["f"] == MISSING).all()
    assert "f" not in one.view().values


def test_a_store_made_anew_in_the_same_place_is_another_store(tmp_path: Path) -> None:
    one = Store.open(tmp_path / "s.zarr")
    add(one, "a")
    one.commit([scalar(one, "a")])
    assert list(one.view().values) == ["f"]
    shutil.rmtree(tmp_path / "s.zarr")
    add(Store.open(tmp_path / "s.zarr"), "a", arrays(3))
    assert list(one.view().values) == []
    assert np.array_equal(one.slices("a", [0]).load()[0], arrays(3)["h.0.weight"])


def test_stores_may_be_made_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        stores = list(pool.map(lambda _: Store.open(tmp_path / "s.zarr"), range(16)))
    add(stores[0])
    assert {tuple(store.model_ids()) for store in stores} == {("m",)}


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
