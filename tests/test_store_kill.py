"""SIGKILL at any moment and writers that race: nothing half-written is seen, nothing is lost, and work goes on."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import numpy as np
import pytest
import xarray as xr

from diffract_dask import catalog
from diffract_dask.fields import MISSING
from diffract_dask.store import Store

pytestmark = pytest.mark.skipif(not hasattr(signal, "SIGKILL"), reason="no SIGKILL on this system")

WRITER = """
import sys
import numpy as np
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Commit, Store

path, turn = sys.argv[1], int(sys.argv[2])
store = Store.open(path)
print("ready", flush=True)
number = 0
while True:
    model_id = f"m{turn}-{number}"
    value = float(turn * 1000 + number)
    weights = {f"l{i}.weight": np.full((40, 30), value + i) * np.arange(1.0, 31) for i in range(5)}
    store.add_model(model_id, open_checkpoint(weights), step=turn * 1000 + number)
    for chosen in store.model_ids()[-3:]:
        at = np.arange(5)
        base = np.random.default_rng().integers(1, 10**6)
        store.commit([Commit(
            chosen,
            values={"f": (at, base + at.astype(float), np.zeros(5, np.uint8)),
                    "s": (at, np.full(5, np.nan), np.zeros(5, np.uint8))},
            arrays={"s": (at, [np.full(30, base + i, float) for i in at])},
            keys={"f": (at, np.full(5, base, np.uint64)), "s": (at, np.full(5, base, np.uint64))},
            model_values={"t": (float(base), 0)}, model_keys={"t": int(base)},
            attrs={"f": {"long_name": "F", "params": "{}"}},
        )])
    store.refresh_view()
    if number % 3 == 2:
        store.erase_model(f"m{turn}-{number - 1}")
    if number % 4 == 3:
        store.add_model(model_id, open_checkpoint(weights), step=turn * 1000 + number, replace=True)
    print(number, flush=True)
    number += 1
"""


def run_and_kill(path: Path, turn: int, seconds: float) -> int:
    """Let a writer work for a while and kill it; return how many rounds it said it finished."""
    command = [sys.executable, "-c", WRITER, str(path), str(turn)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        first = process.stdout.readline()
        assert first == "ready\n", process.stderr.read()
        time.sleep(seconds)
        process.send_signal(signal.SIGKILL)
        said, failed = process.stdout.read(), process.stderr.read()
    assert failed == ""
    return len(said.split())


def check(store: Store) -> int:
    """Every model that is seen is whole, and every key belongs to its value; return the number of models."""
    view = store.view()
    assert sorted(view.model_ids) == sorted(store.model_ids())
    for i, model_id in enumerate(view.model_ids):
        turn, number = map(int, model_id[1:].split("-"))
        table = store.parameters(model_id)
        assert table.name.tolist() == [f"l{k}.weight" for k in range(5)]
        assert store.model_attrs(model_id)["step"] == turn * 1000 + number
        slices = store.slices(model_id, np.arange(5))
        for k, w in enumerate(slices.load()):
            assert np.array_equal(w, np.full((40, 30), turn * 1000.0 + number + k) * np.arange(1.0, 31))
            assert catalog.digest(lambda a, b, w=w: w[a:b], w.shape, "float64") == table.digest[k]
        columns = np.argsort(np.where(view.row[i] < 0, 99, view.row[i]))[:5]
        check_results(store, view, i, columns)
    return len(view.model_ids)


def check_results(store: Store, view: object, i: int, columns: np.ndarray) -> None:
    """Where there is a key, the value is the one it was written with."""
    model_id = view.model_ids[i]
    if "f" in view.values:
        value, status, key = (x["f"][i, columns] for x in (view.values, view.status, view.keys))
        for k in range(5):
            assert key[k] == 0 or (value[k] == float(key[k]) + k and status[k] == 0)
            assert (status[k] == MISSING) == np.isnan(value[k])
    if "s" in view.status and (view.keys["s"][i, columns] != 0).any():
        key = view.keys["s"][i, columns]
        for k, array in enumerate(store.arrays(model_id, "s", np.arange(5))):
            assert key[k] == 0 or (array == float(key[k]) + k).all()
    if "t" in view.model_values and view.model_keys["t"][i]:
        assert view.model_values["t"][i] == float(view.model_keys["t"][i])


def check_plain(path: Path) -> None:
    """Plain xarray opens the view and the tree."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plain = xr.open_zarr(str(path), group="view").load()
        tree = xr.open_datatree(str(path), engine="zarr", consolidated=False)
    assert {tree["models"][name].attrs["model_id"] for name in tree["models"].children} == set(
        plain.model_id.values.tolist()
    )


@pytest.mark.parametrize("kills", [6, pytest.param(50, marks=pytest.mark.slow)])
def test_killed_writers(tmp_path: Path, kills: int) -> None:
    path = tmp_path / "s.zarr"
    Store.open(path)
    chance = random.Random(7)
    rounds = turn = 0
    while turn < kills or not rounds:  # on a busy machine the first ones may be killed before they have done anything
        rounds += run_and_kill(path, turn, chance.uniform(0.02, 0.5) * (1 + turn // kills))
        turn += 1
        check(Store.open(path, "r"))
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            xr.open_zarr(str(path), group="view").load()
    survivor = Store.open(path)
    with survivor.lock():
        pass
    assert check(survivor) > 0
    check_plain(path)
    assert check(Store.open(path, "r")) == len(survivor.model_ids())
    assert os.listdir(path / "generation/.staging") == []
    assert not list(path.rglob("*.partial"))


RACER = """
import sys
import numpy as np
from diffract_dask.errors import ModelAlreadyExistsError
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Commit, Store

path, me, count = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
store = Store.open(path, lock_timeout=120)
print("ready", flush=True)
sys.stdin.readline()
won = []
for number in range(count):
    weights = {"w.weight": np.full((6, 5), 1.0 + number) * np.arange(1.0, 6)}
    try:
        store.add_model(f"shared-{number}", open_checkpoint(weights), attrs={"by": me})
        won.append(number)
    except ModelAlreadyExistsError:
        pass
    store.add_model(f"own-{me}-{number}", open_checkpoint(weights), attrs={"by": me})
    at = np.array([0])
    store.commit([Commit(f"own-{me}-{number}", values={f"f{me}": (at, at + 1.0 * number, np.zeros(1, np.uint8))},
                         keys={f"f{me}": (at, np.array([number + 1], np.uint64))}) ])
    store.commit([Commit("shared-0", values={f"f{me}": (at, at + 1.0 * number, np.zeros(1, np.uint8))})])
    if number % 2:
        store.refresh_view()
store.refresh_view()
print(*won, flush=True)
"""


@pytest.mark.parametrize(("writers", "count"), [(2, 6), pytest.param(4, 25, marks=pytest.mark.slow)])
def test_racing_writers_lose_nothing(tmp_path: Path, writers: int, count: int) -> None:
    path = tmp_path / "s.zarr"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", RACER, str(path), str(me), str(count)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        )
        for me in range(writers)
    ]  # fmt: skip
    try:
        for process in processes:
            assert process.stdout.readline() == "ready\n"
        for process in processes:
            process.stdin.write("go\n")
            process.stdin.flush()
        results = [process.communicate(timeout=200) for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.wait()
    assert [failed for _, failed in results] == [""] * writers
    won = [set(map(int, said.split())) for said, _ in results]
    assert sorted(number for mine in won for number in mine) == list(range(count))
    for store in (Store.open(path, "r"), Store.open(path)):
        own = {f"own-{me}-{number}" for me in range(writers) for number in range(count)}
        assert set(store.model_ids()) == own | {f"shared-{number}" for number in range(count)}
        view = store.view()
        row = {model_id: i for i, model_id in enumerate(view.model_ids)}
        for me, mine in enumerate(won):
            for number in mine:
                assert store.model_attrs(f"shared-{number}")["by"] == me
            for number in range(count):
                assert view.values[f"f{me}"][row[f"own-{me}-{number}"], 0] == number
                assert view.keys[f"f{me}"][row[f"own-{me}-{number}"], 0] == number + 1
            assert view.values[f"f{me}"][row["shared-0"], 0] == count - 1
        check_plain(path)
