"""A writer that stops at any point: what it had begun is done or not done, and no key vouches for other values."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import xarray as xr
from stored import add, arrays, cells, scalar

from diffract_dask import catalog
from diffract_dask.store import Commit, Store, values
from diffract_dask.store.objects import Objects


@pytest.fixture
def local(tmp_path: Path) -> Store:
    return Store.open(tmp_path / "s.zarr")


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


EVERY = [25, pytest.param(1, marks=pytest.mark.slow)]


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
    for path in stopping.stores(tmp_path / "model.zarr", change, 2):
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


@pytest.mark.parametrize("at", range(6))
def test_a_reader_between_the_steps_of_a_writer(local: Store, monkeypatch: pytest.MonkeyPatch, at: int) -> None:
    """While a reader collects one model's scalars from several objects, a writer replaces them."""
    add(local)
    local.commit([both(local, 1.0, 7)])
    reader = Store.open(local.location, "r")
    count = [0]
    read = Objects.get_many

    def get_many(self: Objects, keys: Any) -> Any:
        found = read(self, keys)
        if self is reader._objects and any("/scalars/" in key for key in keys):
            count[0] += 1
            if count[0] == at + 1:
                local.commit([both(local, 100.0, 8)])
        return found

    monkeypatch.setattr(Objects, "get_many", get_many)
    packed = values.read_packed(reader._objects, "models/m", 4)
    base = {7: 1.0, 8: 100.0}
    assert sorted(packed.kernels) == ["f", "g", "s", "t"]
    for field in ("f", "g"):
        numbers, keys = packed.value[packed.fields.index(field)], packed.key[packed.kernels.index(field)]
        for i in range(3):
            assert keys[i] == 0 or numbers[i] == base[int(keys[i])] + i
    total, key = packed.model_value[packed.fields.index("t")], int(packed.model_key[packed.kernels.index("t")])
    assert key == 0 or total == base[key]
    assert count[0] > 3


def test_what_a_stopped_commit_wrote_never_shows_under_another_field(tmp_path: Path, stopping: Stopping) -> None:
    model = Store.open(tmp_path / "model.zarr")
    add(model)

    def change(store: Store) -> None:
        store.commit([scalar(store, "m", "lost", 100.0, 8)])

    for path in stopping.stores(tmp_path / "model.zarr", change, 1):
        writer = Store.open(path)
        one = np.array([1])
        writer.commit(
            [
                Commit(
                    "m",
                    values={"new": (one, one + 0.5, np.zeros(1, np.uint8))},
                    keys={"other": (one, one.astype(np.uint64))},
                )
            ]
        )
        for view in (writer.view(), Store.open(path, "r").view()):
            assert np.array_equal(view.values["new"][0], [np.nan, 1.5, np.nan, np.nan], equal_nan=True)
            assert view.keys["other"][0].tolist() == [0, 1, 0, 0]


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
