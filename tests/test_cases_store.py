"""Stores and sessions: what is computed again, what several processes do at once, and what users are told."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from diffract_dask import Session, errors
from diffract_dask.fields import Field
from diffract_dask.terminal import sort_rows
from diffract_dask.testing import write_safetensors

SPECTRAL = ("stable_rank", "hard_rank", "effective_rank", "nuclear_norm", "esd_max", "param_norm", "log_norm")


def model(n: int = 4, seed: int = 0, shape: tuple[int, int] = (12, 8)) -> dict[str, NDArray[Any]]:
    rng = np.random.default_rng(seed)
    return {f"h.{i}.weight": rng.standard_normal(shape).astype(np.float32) for i in range(n)}


@pytest.fixture(params=["memory", "disk"])
def session(request: pytest.FixtureRequest, tmp_path: Path) -> Session:
    return Session() if request.param == "memory" else Session(tmp_path / "s.zarr")


def with_own_kernels(session: Session) -> Session:
    """Declare a kernel on hard_rank, one on that, one over the model, and one that depends on none of them."""

    @session.compute.kernel
    def rank_share(hard_rank: float, lower_dim: float, *, power: float = 1.0) -> float:
        return (hard_rank / lower_dim) ** power

    @session.compute.kernel
    def missing_share(rank_share: float) -> float:
        return 1 - rank_share

    @session.compute.kernel(level="model")
    def mean_share(rank_share: NDArray[Any]) -> float:
        return float(np.mean(rank_share))

    @session.compute.kernel
    def norm_gap(nuclear_norm: float, frob_norm: float) -> float:
        return nuclear_norm - frob_norm

    return session


def test_a_changed_parameter_of_a_kernel(session: Session) -> None:
    """A parameter of ``hard_rank`` changes and the same fields are asked for again.

    Exactly that kernel and what depends on it, directly or not, are computed anew; with the old value, once more.
    """
    session.models.add(model(), "m")
    with_own_kernels(session)
    fields = (*SPECTRAL, "rank_share", "missing_share", "mean_share", "norm_gap")
    session.compute.apply(*fields)
    before = session.results.dataset(*fields)
    assert session.compute.apply(*fields).kernel_slices == {}
    session.compute.configure_kernel("hard_rank", rtol=0.3)
    with pytest.warns(errors.StaleValuesWarning, match="hard_rank"):
        session.results.dataset("hard_rank")
    summary = session.compute.apply(*fields)
    assert summary.kernel_slices == {"hard_rank": 4, "rank_share": 4, "missing_share": 4}
    assert set(summary.computed) == {"hard_rank", "rank_share", "missing_share", "mean_share"}
    after = session.results.dataset(*fields)
    changed = {name for name in fields if not after[name].equals(before[name])}
    assert changed == {"hard_rank", "rank_share", "missing_share", "mean_share"}
    session.compute.configure_kernel("rank_share", power=2.0)
    assert session.compute.apply(*fields).kernel_slices == {"rank_share": 4, "missing_share": 4}
    session.compute.configure_kernel("rank_share", power=1.0)
    session.compute.configure_kernel("hard_rank", rtol=1e-5)
    assert session.compute.apply(*fields).kernel_slices == {"hard_rank": 4, "rank_share": 4, "missing_share": 4}
    again = session.results.dataset(*fields)
    for name in fields:
        np.testing.assert_array_equal(again[name], before[name])


@pytest.mark.parametrize("how", ["another model", "replace"])
@pytest.mark.parametrize("link", [False, True])
def test_one_weight_of_one_layer_changed(session: Session, tmp_path: Path, how: str, link: bool) -> None:
    """A checkpoint that differs from one in the store in a single entry, added beside it or in its place.

    Exactly that slice is computed, with the right values; everything else is copied or kept.
    """
    arrays = model()
    fields = (*SPECTRAL, "weights_kurtosis", "weights_svals")
    session.models.add(write_safetensors(tmp_path / "a.safetensors", arrays), "m", link=link)
    session.compute.apply(*fields)
    arrays["h.2.weight"] = arrays["h.2.weight"].copy()
    arrays["h.2.weight"][3, 4] = np.nextafter(arrays["h.2.weight"][3, 4], np.float32(9))
    other = write_safetensors(tmp_path / "b.safetensors", arrays)
    name = "m" if how == "replace" else "n"
    session.models.add(other, name, replace=how == "replace")
    summary = session.compute.apply(*fields)
    assert set(summary.kernel_slices.values()) == {1}
    assert summary.computed["stable_rank"] == summary.computed["weights_svals"] == 1
    kept = summary.reused if how == "replace" else summary.copied
    assert kept["stable_rank"] == kept["weights_svals"] == 3
    fresh = Session()
    fresh.models.add(arrays, name)
    fresh.compute.apply(*fields)
    found, want = session.results.dataset(*fields).sel(model_id=name), fresh.results.dataset(*fields).sel(model_id=name)
    for field in fields:
        np.testing.assert_allclose(found[field], want[field], rtol=1e-12, err_msg=field)


WRITER = """
import sys
import dask, numpy as np
from diffract_dask import Session
from diffract_dask.errors import StoreLockedError
dask.config.set({"diffract_dask.batch-seconds": 0.001})
path, who, timeout = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])
dask.config.set({"diffract_dask.lock-timeout": timeout})
session = Session(path)
print("ready", flush=True)
sys.stdin.readline()
rng = np.random.default_rng(who)
for step in range(4):
    arrays = {f"h.{i}.weight": rng.standard_normal((30, 20)).astype("f4") for i in range(6)}
    session.models.add(arrays, f"{who}-{step}", step=step)
    session.compute.apply("stable_rank", "weights_svals", "param_norm")
print("done", flush=True)
"""


def test_two_processes_add_and_compute_at_once(tmp_path: Path) -> None:
    """Two processes that add models to one store and compute over all of them, over and over, at the same time.

    Nothing is lost or computed wrongly: the one waits for the other where both write.
    """
    path = tmp_path / "s.zarr"
    session = Session(path)
    command = [sys.executable, "-c", WRITER, str(path)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    writers = [subprocess.Popen([*command, str(who), "60"], text=True, **pipes) for who in range(2)]
    for writer in writers:
        assert writer.stdout is not None
        assert writer.stdout.readline() == "ready\n"
    for writer in writers:
        assert writer.stdin is not None
        writer.stdin.write("go\n")
        writer.stdin.flush()
    said = [writer.communicate(timeout=120) for writer in writers]
    assert [out for out, _ in said] == ["done\n"] * 2, [err[-2000:] for _, err in said]
    fields = ("stable_rank", "weights_svals", "param_norm")
    session.compute.apply(*fields)
    assert session.compute.plan(*fields).nothing_to_do
    found = session.results.dataset(*fields)
    assert sorted(session.models.list()) == sorted(f"{who}-{step}" for who in range(2) for step in range(4))
    for who in range(2):
        rng = np.random.default_rng(who)
        for step in range(4):
            total = 0.0
            for i in range(6):
                w = rng.standard_normal((30, 20)).astype("f4").astype(float)
                total += float((w**2).sum())
                got = found.weights_svals.sel(model_id=f"{who}-{step}", name=f"h.{i}.weight")
                want = np.linalg.svd(w, compute_uv=False)[::-1]
                np.testing.assert_allclose(got, want, rtol=0, atol=1.2e-7 * want[-1])
            np.testing.assert_allclose(found.param_norm.sel(model_id=f"{who}-{step}"), total, rtol=1e-12)


HOLDER = """
import sys
from diffract_dask import Session
session = Session(sys.argv[1])
with session.store.lock():
    print("held", flush=True)
    sys.stdin.readline()
"""


def test_the_second_writer_fails_naming_the_first(tmp_path: Path) -> None:
    """A process that holds the store longer than another one waits.

    Adding and computing fail with the first one's number; reading goes on; afterwards both go through.
    """
    path = tmp_path / "s.zarr"
    session = Session(path)
    session.models.add(model(), "m")
    session.compute.apply("frob_norm")
    config = tmp_path / "short.yaml"
    config.write_text("lock-timeout: 0.2\n")
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen([sys.executable, "-c", HOLDER, str(path)], text=True, **pipes) as holder:
        assert holder.stdout is not None
        assert holder.stdout.readline() == "held\n"
        other = Session(path, config_path=config)
        with pytest.raises(errors.StoreLockedError, match=str(holder.pid)):
            other.models.add(model(seed=1), "n")
        with pytest.raises(errors.StoreLockedError, match=str(holder.pid)):
            other.compute.apply("stable_rank")
        assert np.isfinite(other.results.dataset("frob_norm").frob_norm).all()
        assert Session(path, mode="r").models.list() == ["m"]
        holder.communicate("go\n", timeout=30)
    other.models.add(model(seed=1), "n")
    assert other.compute.apply("stable_rank").computed["stable_rank"] == 8


@pytest.mark.parametrize("change", ["replaced", "replaced by fewer", "erased", "renamed"])
def test_a_model_that_changes_while_it_is_computed(tmp_path: Path, change: str) -> None:
    """Another session replaces, erases or renames a model between a plan and its results.

    A warning says so, and the other models are computed; nothing of the old weights is ever shown as fresh; the same
    call again makes everything right, values over the whole model included.
    """
    path = str(tmp_path / "s.zarr")
    session = Session(path)
    session.models.add(model(), "m")
    session.models.add(model(seed=5), "other")
    started, go_on = threading.Event(), threading.Event()

    def total(weights: NDArray[Any]) -> float:
        started.set()
        go_on.wait(30)
        return float(weights.sum(dtype=float))

    session.compute.kernel(version=1)(total)
    told: list[Warning] = []

    def work() -> None:
        try:
            session.compute.apply("total", "param_norm")
        except errors.ModelChangedWarning as warning:
            told.append(warning)

    worker = threading.Thread(target=work)
    worker.start()
    assert started.wait(30)
    now = Session(path)
    arrays = dict(reversed(model(seed=9).items()))
    if change == "replaced by fewer":
        arrays = {"h.3.weight": model(seed=9, shape=(6, 5))["h.3.weight"]}
    if change.startswith("replaced"):
        now.models.add(arrays, "m", replace=True)
    elif change == "erased":
        now.models.erase("m")
    else:
        now.models.rename("m", "k")
    go_on.set()
    worker.join()
    assert len(told) == 1
    assert "'m': changed, renamed or erased while values were computed" in str(told[0])
    again = Session(path)
    again.compute.kernel(version=1)(total)
    state = again.results.status("total", "param_norm").state
    assert (state.sel(model_id="other", name=list(model())) == "fresh").all()
    for model_id in set(again.models.list()) - {"other"}:
        assert not (state.sel(model_id=model_id) == "fresh").any()
    again.compute.apply("total", "param_norm")
    found = again.results.dataset("total", "param_norm")
    models = {"other": model(seed=5)} | {
        "erased": {},
        "renamed": {"k": model()},
    }.get(change, {"m": arrays})
    assert set(found.model_id.values) == set(models)
    for model_id, content in models.items():
        for name, w in content.items():
            np.testing.assert_allclose(found.total.sel(model_id=model_id, name=name), w.sum(dtype=float), rtol=1e-12)
        squares = sum(float((w.astype(float) ** 2).sum()) for w in content.values())
        np.testing.assert_allclose(found.param_norm.sel(model_id=model_id), squares, rtol=1e-12)


def test_run_2_comes_before_run_10(session: Session) -> None:
    """Checkpoints run-10, run-2 and run-1, added in this order with their steps; parameters 10, 2 and 1 in a file.

    The numeric step orders models everywhere; sorting by name in a display is natural; both for parameters, too.
    """
    for number in (10, 2, 1):
        session.models.add(model(2, seed=number), f"run-{number}", step=number)
    expected = ["run-1", "run-2", "run-10"]
    assert session.models.list() == expected
    session.compute.apply("frob_norm")
    found = session.results.dataset("frob_norm")
    assert found.model_id.values.tolist() == expected
    assert found.step.values.tolist() == [1, 2, 10]
    rows = session.results.export_metrics("frob_norm", export_format="list")
    assert list(dict.fromkeys(row["model_id"] for row in rows)) == expected
    shown = [{"model_id": row["model_id"], "n": i} for i, row in enumerate(reversed(rows))]
    assert list(dict.fromkeys(row["model_id"] for row in sort_rows(shown, "model_id"))) == expected
    assert list(dict.fromkeys(row["model_id"] for row in sort_rows(shown, "-model_id"))) == expected[::-1]


def test_natural_order_of_parameters_in_files(tmp_path: Path) -> None:
    """A safetensors file whose layers are stored as 1, 10, 2, as writers that sort by letter leave them."""
    arrays = {f"h.{i}.weight": np.eye(3, 4, k=i % 3, dtype=np.float32) for i in (1, 10, 2)}
    session = Session()
    session.models.add(write_safetensors(tmp_path / "m.safetensors", arrays), "m")
    assert session.models.parameters().name.tolist() == ["h.1.weight", "h.2.weight", "h.10.weight"]
    session.compute.apply("frob_norm")
    found = session.results.dataset("frob_norm")
    assert found["name"].values.tolist() == ["h.1.weight", "h.2.weight", "h.10.weight"]


@pytest.mark.parametrize("batch", [False, True])
def test_a_kernel_that_raises_for_one_slice(session: Session, batch: bool) -> None:
    """A kernel that raises for one of twelve slices, called slice by slice or on batches.

    The rest is stored; the summary names model, kernel, slice and reason; nothing runs again by itself, and all
    of it when asked to.
    """
    for seed in range(3):
        session.models.add(model(seed=seed), f"m{seed}")
    troubled = float(np.linalg.norm(model(seed=1)["h.2.weight"].astype(float)))

    def picky(frob_norm: Any) -> Any:
        if np.any(np.abs(np.asarray(frob_norm) - troubled) < 1e-9):
            raise RuntimeError("no such norm")
        return 2 * frob_norm

    def after(picky: Any) -> Any:
        return picky + 1

    session.compute.kernel(batch=batch, version=1)(picky)
    session.compute.kernel(batch=batch, version=1)(after)
    summary = session.compute.apply("picky", "after", "stable_rank", "param_norm")
    (failure,) = summary.failed
    assert (failure.model_id, failure.name, failure.kernel) == ("m1", "h.2.weight", "picky")
    assert "m1: h.2.weight: kernel 'picky' failed: RuntimeError: no such norm" in str(summary)
    found = session.results.dataset("picky", "after", "stable_rank", "param_norm")
    assert int(found.picky.notnull().sum()) == int(found.after.notnull().sum()) == 11
    assert found.stable_rank.notnull().all()
    assert found.param_norm.notnull().all()
    status = session.results.status("picky", "stable_rank").sel(model_id="m1", name="h.2.weight")
    assert status.state.sel(field="picky") == "failed"
    assert "no such norm" in status.reason.sel(field="picky").item()
    assert status.state.sel(field="stable_rank") == "fresh"
    again = session.compute.apply("picky", "after")
    assert again.kernel_slices == {}
    assert "no such norm" in str(again.failed[0])
    troubled = 0.0
    assert session.compute.apply("picky", "after", retry_failed=True).failed == ()
    found = session.results.dataset("picky", "after")
    assert found.picky.notnull().all()
    np.testing.assert_allclose(found.after, found.picky + 1)


def test_unknown_fields_and_parameters(session: Session) -> None:
    """A field misspelt as ``stable_rnk``, in every call that takes fields; a misspelt kernel parameter.

    An error with the nearest names, and nothing is computed.
    """
    session.models.add(model(), "m")
    for call in (
        session.compute.apply,
        session.compute.plan,
        session.compute.lazy,
        session.results.dataset,
        session.results.status,
        session.results.export_metrics,
        session.results.erase,
    ):
        with pytest.raises(errors.FieldNotFoundError, match=r"'stable_rnk'.*Did you mean 'stable_rank'"):
            call("frob_norm", "stable_rnk")
    with pytest.raises(errors.ConfigurationError, match=r"'rtl'.*Did you mean 'rtol'"):
        session.compute.apply("hard_rank", params={"hard_rank": {"rtl": 1e-3}})
    with pytest.raises(errors.KernelNotFoundError, match=r"'hard_rnk'.*Did you mean 'hard_rank'"):
        session.compute.configure_kernel("hard_rnk", rtol=1e-3)
    assert not session.store.view().values


def test_a_field_over_models_of_one_that_is_not_kept(session: Session) -> None:
    """A model-level kernel over a slice-level field that is declared ``persist=False``: computed, and then fresh."""
    session.models.add(model(), "m")
    session.compute.kernel(version=1, passing=Field(long_name="passing", persist=False))(_passing)
    session.compute.kernel(version=1, level="model")(passing_sum)
    session.compute.apply("passing_sum")
    found = session.results.dataset("passing_sum").passing_sum.sel(model_id="m")
    np.testing.assert_allclose(found, sum(2 * np.linalg.norm(w.astype(float)) for w in model().values()), rtol=1e-12)
    assert session.compute.plan("passing_sum").nothing_to_do
    assert session.compute.lazy("passing_sum").compute().passing_sum.sel(model_id="m") == found


def _passing(frob_norm: float) -> float:
    return 2 * frob_norm


def passing_sum(passing: NDArray[Any]) -> float:
    return float(passing.sum())


def test_a_model_is_not_its_own_parent() -> None:
    session = Session()
    with pytest.raises(errors.SessionError, match="own parent"):
        session.models.add({"w": np.eye(3)}, "m", parent=["base", "m"])
    assert session.models.list() == []
