"""Where runs meet weights: registering checkpoints, the weight diff, lineage, artifacts of runs."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import diffract_dask.runs as dm
from diffract_dask import Session
from diffract_dask.errors import ArtifactError, ArtifactNotFoundError
from diffract_dask.runs.artifact_diffs import diff_artifacts
from diffract_dask.runs.artifacts import diff_run_artifacts, find_artifact, list_artifacts, preview_run_artifact
from diffract_dask.runs.config import frozen_overrides
from diffract_dask.runs.previews import preview
from diffract_dask.runs.weights import lineage
from diffract_dask.testing import write_safetensors


def arrays(scale: float = 1.0) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    return {"fc.weight": (scale * rng.normal(size=(6, 4))).astype(np.float32), "fc.bias": np.zeros(6, np.float32)}


@pytest.fixture
def registry(tmp_path: Path) -> dm.RunRegistry:
    return dm.RunRegistry(tmp_path / "runs")


@pytest.fixture
def make(registry: dm.RunRegistry, tmp_path: Path) -> Any:
    """Return ``make(variant, scale=…, **options)``: a run that saves a checkpoint and registers it."""
    module = f"weights_of_{tmp_path.name.replace('-', '_')}"
    variants: dict[str, dm.Variant] = {}
    counter = iter(range(1000))

    def run(name: str, **config: Any) -> dm.RunRecord:
        options = config.pop("options", {})
        config = {"scale": 1.0, **config}
        module_now = f"{module}_{next(counter)}"
        sys.modules[module_now] = sys.modules[__name__]

        def save(ctx: dm.RunContext) -> None:
            path = write_safetensors(ctx.artifact("save", "final.safetensors"), arrays(ctx.config["scale"]))
            ctx.checkpoint(tmp_path / "store.zarr", path, **options)

        variant = dm.Variant(name, module_now, overrides=frozen_overrides(config))
        variants[name] = variant
        pipeline = dm.Pipeline("train", [dm.Stage("save", save, version=str(options))], module=module_now)
        return pipeline.run(variant, registry)

    return run


# ------------------------------------------------------------------------------------------- registering


def test_model_and_record_point_at_each_other(make: Any, tmp_path: Path) -> None:
    record = make("base", scale=2.0, options={"model_id": "m", "parent": "start", "step": 7, "attrs": {"note": "x"}})
    session = Session(tmp_path / "store.zarr", mode="r")
    attrs = session.models.attrs("m")
    assert (attrs["step"], attrs["parent"], attrs["config"], attrs["note"]) == (7, ["start"], {"scale": 2.0}, "x")
    assert attrs["run"]["fingerprint"] == record.fingerprint
    assert (tmp_path / attrs["run"]["root"] / attrs["run"]["path"] / "run.json").is_file()
    (entry,) = record.checkpoints
    assert (entry["model_id"], entry["status"], entry["step"], entry["parent"]) == ("m", "added", 7, ["start"])
    assert (tmp_path / "runs" / entry["store"]).resolve() == tmp_path / "store.zarr"
    assert entry["source"] == "stages/save/outputs/final.safetensors"
    assert json.loads((Path(record.fdir) / "run.json").read_text())["checkpoints"] == record.checkpoints


def test_a_model_id_of_its_own(make: Any, tmp_path: Path) -> None:
    record = make("base", options={"step": 100})
    assert Session(tmp_path / "store.zarr").models.list() == [f"train/base/{record.short_fp}@100"]


def test_several_parents(make: Any, tmp_path: Path) -> None:
    make("base", options={"model_id": "merged", "parent": ["a", "b"]})
    assert Session(tmp_path / "store.zarr").models.attrs("merged")["parent"] == ["a", "b"]


def test_the_same_content_again_is_no_write(make: Any, tmp_path: Path) -> None:
    make("base", options={"model_id": "m"})
    session = Session(tmp_path / "store.zarr")
    session.compute.apply("frob_norm")
    before = session.models.attrs("m")
    files = {path: path.stat().st_mtime_ns for path in (tmp_path / "store.zarr" / "models").rglob("weights/**/c/*")}
    assert files
    again = make("base", options={"model_id": "m", "step": 3})  # other code, and so another run
    assert again.checkpoints[0]["status"] == "same"
    assert {path: path.stat().st_mtime_ns for path in files} == files
    after = Session(tmp_path / "store.zarr").models.attrs("m")
    assert after["added"] == before["added"]
    assert (after["step"], after["run"]["fingerprint"]) == (3, again.fingerprint)


def test_registering_twice_in_one_run_changes_nothing(make: Any, tmp_path: Path, registry: dm.RunRegistry) -> None:
    record = make("base", options={"model_id": "m"})
    counts = [path.read_bytes() for path in (tmp_path / "store.zarr").rglob("commits/c")]
    (Path(record.fdir) / "stages" / "save" / "_key").unlink()
    make("base", options={"model_id": "m"})
    assert [path.read_bytes() for path in (tmp_path / "store.zarr").rglob("commits/c")] == counts


def test_changed_content_replaces_and_is_noted(make: Any, tmp_path: Path) -> None:
    first = make("base", options={"model_id": "m"})
    second = make("loud", scale=3.0, options={"model_id": "m"})
    (entry,) = second.checkpoints
    assert entry["status"] == "replaced"
    assert entry["replaced"]["run"]["fingerprint"] == first.fingerprint
    attrs = Session(tmp_path / "store.zarr").models.attrs("m")
    assert [one["content"] for one in attrs["replaced"]] == [first.checkpoints[0]["content"]]
    assert attrs["run"]["variant"] == "loud"
    weights = preview(tmp_path / "store.zarr", "m/fc.weight").data["heatmap"]["mean"]
    assert np.array_equal(weights, arrays(3.0)["fc.weight"])


@pytest.mark.parametrize("link", [False, True])
def test_a_model_that_was_added_by_hand(link: bool, make: Any, tmp_path: Path) -> None:
    path = write_safetensors(tmp_path / "by_hand.safetensors", arrays())
    Session(tmp_path / "store.zarr").models.add(path, "m", link=link)
    record = make("base", options={"model_id": "m"})
    assert record.checkpoints[0]["status"] == ("replaced" if link else "same")  # of a link the content is not known
    assert Session(tmp_path / "store.zarr").models.attrs("m")["run"]["variant"] == "base"


def test_a_stage_that_is_cached_keeps_its_checkpoints(make: Any, registry: dm.RunRegistry) -> None:
    first = make("base", options={"model_id": "m"})
    again = make("base", options={"model_id": "m"})
    assert again.checkpoints == first.checkpoints
    assert again.fingerprint == first.fingerprint


def test_a_session_is_a_store_too(tmp_path: Path, registry: dm.RunRegistry) -> None:
    session = Session()

    def save(ctx: dm.RunContext) -> None:
        ctx.checkpoint(session, {"w": np.eye(3)}, "m")  # type: ignore[arg-type]

    pipeline = dm.Pipeline("memory", [dm.Stage("save", save, version="1")], module=f"m_{tmp_path.name}")
    record = pipeline.run(dm.Variant("v", f"m_{tmp_path.name}"), registry)
    assert record.checkpoints[0]["store"] is None
    assert session.models.attrs("m")["run"]["pipeline"] == "memory"


# ------------------------------------------------------------------------------------------- the weight diff


def test_parameters_shapes_and_relative_differences(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    a = {
        "same": np.eye(3, dtype=np.float32),
        "moved": rng.normal(size=(8, 5)),
        "grown": np.ones((2, 2)),
        "gone": np.ones(2),
        "zero": np.zeros(4),
        "scalar": np.array(2.0),
    }
    b = {**a, "moved": a["moved"] * 1.1, "grown": np.ones((3, 2)), "new": np.ones(1), "zero": np.ones(4)}
    del b["gone"]
    paths = [write_safetensors(tmp_path / f"{name}.safetensors", part) for name, part in (("a", a), ("b", b))]
    (pair,) = diff_artifacts(*paths).data["models"]
    assert (pair["only_in_a"], pair["only_in_b"]) == (["gone"], ["new"])
    assert pair["shapes"] == [{"name": "grown", "a": [2, 2], "b": [3, 2]}]
    found = {one["name"]: one for one in pair["parameters"]}
    assert found["same"]["equal"]
    assert found["scalar"]["equal"]
    assert found["moved"]["rel_norm"] == pytest.approx(0.1)
    assert found["zero"]["rel_norm"] == np.inf
    json.dumps(diff_artifacts(*paths).as_dict(), allow_nan=False)


def test_types_are_told_and_compared_by_value(tmp_path: Path) -> None:
    ml_dtypes = pytest.importorskip("ml_dtypes")
    values = np.array([[1.0, 2.0], [3.0, 4.5]])
    a = write_safetensors(tmp_path / "a.safetensors", {"w": values.astype(ml_dtypes.bfloat16)})
    b = write_safetensors(tmp_path / "b.safetensors", {"w": values.astype(np.float32)})
    (one,) = diff_artifacts(a, b).data["models"][0]["parameters"]
    assert (one["dtype_a"], one["dtype_b"], one["equal"], one["differing"]) == ("bfloat16", "float32", False, 0)
    assert preview(a, "w").data["heatmap"]["mean"].tolist() == values.tolist()


@pytest.fixture
def stores(tmp_path: Path) -> list[Path]:
    paths = []
    for name, scale in (("a", 1.0), ("b", 2.0)):
        with Session(tmp_path / f"{name}.zarr") as session:
            session.models.add(arrays(), "start")
            session.models.add({**arrays(scale), "end": np.ones(1)}, "end", parent="start")
            session.compute.apply("frob_norm", "stable_rank", "param_norm")
        paths.append(tmp_path / f"{name}.zarr")
    return paths


def test_stores_are_compared_model_by_model_with_their_metrics(stores: list[Path]) -> None:
    found = diff_artifacts(*stores)
    pairs = {one["model_a"]: one for one in found.data["models"]}
    assert pairs["start"]["equal"]
    assert pairs["start"]["metrics"] == []
    metrics = {(one["field"], one["parameter"]): one for one in pairs["end"]["metrics"]}
    assert metrics["frob_norm", "fc.weight"]["relative"] == pytest.approx(1.0)
    assert metrics["param_norm", ""]["relative"] == pytest.approx(3.0)  # a sum of squares
    assert ("stable_rank", "fc.weight") not in metrics or abs(metrics["stable_rank", "fc.weight"]["relative"]) < 1e-6
    assert found.equal is False


def test_two_models_of_one_store_and_a_checkpoint(stores: list[Path], tmp_path: Path) -> None:
    found = diff_artifacts(stores[1], stores[1], "start", dataset_b="end")
    (pair,) = found.data["models"]
    by_name = {one["name"]: one for one in pair["parameters"]}
    assert (by_name["fc.bias"]["equal"], by_name["fc.weight"]["rel_norm"]) == (True, 1.0)
    path = write_safetensors(tmp_path / "end.safetensors", {**arrays(2.0), "end": np.ones(1)})
    with pytest.raises(ArtifactError, match="name one of start, end"):
        diff_artifacts(stores[1], path)
    assert diff_artifacts(stores[1], path, "end").equal is True
    with pytest.raises(ArtifactNotFoundError, match="Did you mean"):
        diff_artifacts(stores[0], stores[1], "strat")


@pytest.mark.parametrize("shape", [(), (7,), (0, 3), (3, 4, 2), (5000, 4000), (4000, 5000), (20_000_000,)])
@pytest.mark.parametrize("dtype", ["float32"])
def test_parameters_of_every_shape_are_read_from_a_store(shape: tuple[int, ...], dtype: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    values = rng.integers(-9, 9, shape).astype(dtype)
    with Session(tmp_path / "a.zarr") as session:
        session.models.add({"w": values, "other": np.eye(2)}, "m")
    path = tmp_path / "a.safetensors"
    pytest.importorskip("safetensors.numpy").save_file({"w": values, "other": np.eye(2)}, path)
    found = diff_artifacts(tmp_path / "a.zarr", path, "m")
    assert found.equal is True
    shown = preview(tmp_path / "a.zarr", "m/w").data
    if shape and values.size:
        assert shown["stats"]["mean"] == pytest.approx(
            values[(0,) * (values.ndim - 2)].mean(dtype=np.float64), rel=1e-6
        )


# ------------------------------------------------------------------------------------------- artifacts of runs


def test_checkpoints_of_runs_are_compared_with_the_metrics_of_their_models(
    make: Any, registry: dm.RunRegistry, tmp_path: Path
) -> None:
    a = make("base", options={"model_id": "a"})
    b = make("loud", scale=3.0, options={"model_id": "b"})
    Session(tmp_path / "store.zarr").compute.apply("frob_norm")
    found = diff_run_artifacts(registry, a, b, "final.safetensors")
    (pair,) = found.data["models"]
    (norm,) = [one for one in pair["metrics"] if one["field"] == "frob_norm"]
    assert (norm["parameter"], norm["relative"]) == ("fc.weight", pytest.approx(2.0))
    shutil.rmtree(tmp_path / "store.zarr")
    assert diff_run_artifacts(registry, a, b, "final.safetensors").data["models"][0]["metrics"] == []


def test_artifacts_are_listed_and_found(tmp_path: Path, registry: dm.RunRegistry) -> None:
    def save(ctx: dm.RunContext) -> None:
        np.save(ctx.artifact("save", "deep/x.npy"), np.eye(2))
        np.save(ctx.artifact("save", "other/x.npy"), np.eye(3))
        with Session(ctx.artifact("save", "store.zarr")) as session:
            session.models.add({"w": np.eye(3)}, "m")
        outside = tmp_path / "outside.txt"
        outside.write_text("hello")
        ctx.artifact("save", "linked.txt", outside, how="link")

    pipeline = dm.Pipeline("kinds", [dm.Stage("save", save, version="1")], module=f"k_{tmp_path.name}")
    record = pipeline.run(dm.Variant("v", f"k_{tmp_path.name}"), registry)
    found = {one.relpath: one for one in list_artifacts(registry, record)}
    assert {name: one.kind for name, one in found.items()} == {
        "deep/x.npy": "npy",
        "other/x.npy": "npy",
        "store.zarr": "weight store",
        "linked.txt": "text",
    }
    assert found["store.zarr"].files > 5
    assert found["linked.txt"].link
    assert find_artifact(registry, record, "save/deep/x.npy") == found["deep/x.npy"]
    assert find_artifact(registry, record, "stages/save/outputs/deep/x.npy") == found["deep/x.npy"]
    assert find_artifact(registry, record, "store.zarr").view == "weights"
    with pytest.raises(ArtifactError, match=r"save/deep/x\.npy, save/other/x\.npy"):
        find_artifact(registry, record, "x.npy")
    for outside in ("../../run.json", "/etc/passwd", "run.json", "deep/y.npy"):
        with pytest.raises(ArtifactNotFoundError):
            find_artifact(registry, record, outside)
    with pytest.raises(ArtifactError, match="Did you mean 'save'"):
        list_artifacts(registry, record, "sav")
    assert preview_run_artifact(registry, record, "deep/x.npy").data["stats"]["mean"] == 0.5
    (tmp_path / "outside.txt").unlink()
    assert {one.relpath for one in list_artifacts(registry, record) if one.missing} == {"linked.txt"}
    with pytest.raises(ArtifactNotFoundError, match="gone"):
        preview_run_artifact(registry, record, "linked.txt")


# ------------------------------------------------------------------------------------------- lineage


def forest(*models: tuple[str, Any]) -> Any:
    session = Session()
    for step, (name, parent) in enumerate(models):
        session.models.add({"w": np.eye(3) * (step + 1)}, name, step=step, parent=parent)
    return lineage(session)


def walked(found: Any) -> list[tuple[int, str]]:
    return [(depth, model.model_id) for depth, model in found.walk()]


def test_a_fork_and_a_merge() -> None:
    found = forest(("a", None), ("b", "a"), ("c", "a"), ("d", ["b", "c"]))
    assert walked(found) == [(0, "a"), (1, "b"), (2, "d"), (1, "c")]
    assert (found.roots, found.orphans, found.cycles) == (["a"], [], [])
    assert next(m for m in found.models if m.model_id == "c").children == ["d"]


def test_orphans_are_roots() -> None:
    found = forest(("a", "gone"), ("b", ["a", "lost"]))
    assert walked(found) == [(0, "a"), (1, "b")]
    assert found.orphans == ["a", "b"]
    assert found.models[1].missing_parents == ["lost"]


def test_cycles_are_reported_and_every_model_is_shown_once() -> None:
    found = forest(("a", "c"), ("b", "a"), ("c", "b"), ("d", "c"), ("e", None))
    assert found.cycles == [["a", "b", "c"]]
    assert sorted(name for _, name in walked(found)) == ["a", "b", "c", "d", "e"]
    json.dumps(found.as_dict(), allow_nan=False)


def test_a_long_chain_needs_no_recursion() -> None:
    from diffract_dask.runs.weights import LineageModel, _cycles

    n = 5000
    models = {
        str(i): LineageModel(str(i), i, [str(i - 1)] if i else [], children=[str(i + 1)] * (i < n - 1))
        for i in range(n)
    }
    assert _cycles(models) == []
    models[str(n - 1)].children.append("0")
    assert len(_cycles(models)[0]) == n
