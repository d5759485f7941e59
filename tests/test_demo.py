"""The demo: a network that learns, checkpoints with a lineage, and everything that is printed and written."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import xarray as xr
from safetensors.numpy import load_file

from diffract_dask import demo
from diffract_dask.blas import blas_threads
from diffract_dask.session import Session


@dataclass(frozen=True)
class Finished:
    result: demo.Demo
    text: str


@pytest.fixture(autouse=True, scope="module")
def one_thread() -> Iterator[None]:
    """Keep BLAS threads from waiting for each other: the matrices are small."""
    with blas_threads(1):
        yield


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Finished]:
    folder = tmp_path_factory.mktemp("demo")
    said: list[str] = []
    yield Finished(demo.run(folder, echo=said.append), "\n".join(said))
    shutil.rmtree(folder)


def test_digits_are_the_whole_set() -> None:
    (images, labels), (test_images, test_labels) = demo.digits()
    assert images.shape == (1437, 64)
    assert test_images.shape == (360, 64)
    assert images.dtype == np.float32
    assert (float(images.min()), float(images.max())) == (0.0, 1.0)
    # class sizes as the archive states them for this test set
    counts = np.bincount(np.concatenate([labels, test_labels]))
    assert counts.tolist() == [178, 182, 177, 183, 181, 182, 181, 179, 174, 180]


def test_the_data_file_is_small_and_says_where_it_is_from() -> None:
    data = Path(demo.__file__).parent / "data"
    assert (data / "digits.npz").stat().st_size < 70_000
    notice = (data / "NOTICE.txt").read_text(encoding="utf8")
    assert "UCI" in notice
    assert "CC BY 4.0" in notice


def test_gradient_agrees_with_differences() -> None:
    rng = np.random.default_rng(1)
    weights = {name: w.astype(np.float64) for name, w in demo.initial_weights(3).items()}
    images, labels = rng.random((5, 64)), rng.integers(0, 10, 5)

    def loss() -> float:
        scores = demo.predict(weights, images)[1]  # type: ignore[arg-type]
        return float((np.log(np.exp(scores).sum(1)) - scores[np.arange(5), labels]).mean())

    found = demo.gradient(weights, images, labels)  # type: ignore[arg-type]
    for name, w in weights.items():
        for _ in range(3):
            at = tuple(rng.integers(0, n) for n in w.shape)
            middle, step = w[at], 1e-5
            w[at] = middle + step
            above = loss()
            w[at] = middle - step
            below = loss()
            w[at] = middle
            np.testing.assert_allclose(found[name][at], (above - below) / (2 * step), rtol=1e-4, atol=1e-9)


def test_training_goes_on_where_it_stopped() -> None:
    data, _ = demo.digits()

    def fresh() -> demo.State:
        weights = demo.initial_weights(0)
        return demo.State(0, weights, {name: np.zeros_like(w) for name, w in weights.items()})

    whole, parts = fresh(), fresh()
    list(demo.train(whole, data, [12]))
    list(demo.train(parts, data, [5]))
    list(demo.train(parts.copy(), data, [9], weight_decay=0.1))  # a fork leaves what it came from alone
    list(demo.train(parts, data, [12]))
    for name, w in whole.weights.items():
        assert np.array_equal(w, parts.weights[name])


def test_both_runs_learn(finished: Finished) -> None:
    accuracy = {c.model_id: c.accuracy for c in finished.result.checkpoints}
    assert accuracy["base-0"] < 0.3
    assert accuracy["base-3000"] > 0.95
    assert accuracy["decay-3000"] > 0.95


def test_checkpoints_are_plain_safetensors(finished: Finished) -> None:
    last = finished.result.checkpoints[-1]
    weights = load_file(last.path)
    assert {name: w.shape for name, w in weights.items() if name.endswith("weight")} == {
        "input.weight": (256, 64),
        "hidden.weight": (128, 256),
        "output.weight": (10, 128),
    }


def test_lineage_is_stored(finished: Finished) -> None:
    with Session(finished.result.store, mode="r") as session:
        dataset = session.results.dataset("stable_rank")
    parents = dict(zip(dataset.model_id.values.tolist(), dataset.parent.values.tolist(), strict=True))
    assert parents["base-1000"] == parents["decay-600"] == "base-300"
    assert parents["base-0"] == ""
    steps = dict(zip(dataset.model_id.values.tolist(), dataset.step.values.tolist(), strict=True))
    assert steps["decay-600"] == 600
    assert dataset.step.values.tolist() == sorted(dataset.step.values)


def test_values_are_those_of_numpy(finished: Finished) -> None:
    view = xr.open_zarr(finished.result.store, group="view").load()
    for point in finished.result.checkpoints:
        for name, w in load_file(point.path).items():
            if w.ndim < 2:
                continue
            s = np.linalg.svd(w.astype(np.float64), compute_uv=False)
            p = s / s.sum()
            found = view.sel(model_id=point.model_id, name=name)
            np.testing.assert_allclose(float(found.frob_norm), np.sqrt((s**2).sum()), rtol=1e-6)
            np.testing.assert_allclose(float(found.stable_rank), (s**2).sum() / s[0] ** 2, rtol=1e-5)
            np.testing.assert_allclose(float(found.effective_rank), np.exp(-(p * np.log(p)).sum()), rtol=1e-4)


def test_weight_decay_lowers_the_rank(finished: Finished) -> None:
    view = xr.open_zarr(finished.result.store, group="view").stable_rank.sel(name="hidden.weight")
    assert float(view.sel(model_id="decay-3000")) < 0.5 * float(view.sel(model_id="base-3000"))


def test_what_is_printed(finished: Finished) -> None:
    for point in finished.result.checkpoints:
        assert point.model_id in finished.text
    assert str(finished.result.report) in finished.text
    again = next(line for line in finished.text.splitlines() if line.startswith("Asked once more"))
    assert " 0 values computed" in again
    assert max(map(len, finished.text.splitlines())) <= 140


def test_run_again_computes_nothing(finished: Finished, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = finished.result.store.parent
    saved = finished.result.checkpoints
    monkeypatch.setattr(demo, "checkpoints", lambda *_: iter(saved))
    said: list[str] = []
    demo.run(folder, echo=said.append)
    first = next(line for line in said if "Added and analysed" in line)
    assert " 0 values computed" in first


def test_linked(finished: Finished, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved = finished.result.checkpoints
    monkeypatch.setattr(demo, "checkpoints", lambda *_: iter(saved))
    linked = demo.run(tmp_path, link=True, echo=lambda _: None)
    copied, other = (xr.open_zarr(r.store, group="view") for r in (finished.result, linked))
    np.testing.assert_array_equal(copied.stable_rank.values, other.stable_rank.values)
    size = sum(f.stat().st_size for f in linked.store.rglob("*") if f.is_file())
    assert size < sum(c.path.stat().st_size for c in saved)
