"""Pipelines, variants, forks and chains: where results come from, and how they differ.

>>> import diffract_dask.runs as dm
>>> variant = dm.register("base", scan=dict(width=5e-6, step=1e-7))
>>> wide = dm.register("wide", base="base", scan=dict(width=8e-6))
>>> wide.config.scan.width, wide.config.scan.step
(8e-06, 1e-07)

Runs are folders of JSON below one root, beside a git repository of the sources. Nothing here loads Dask, xarray or
Zarr, and what only reads imports no code of the user.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from diffract_dask.runs.answers import as_json
    from diffract_dask.runs.artifact_diffs import diff_artifacts
    from diffract_dask.runs.artifacts import diff_run_artifacts, list_artifacts, preview_run_artifact
    from diffract_dask.runs.catalog import Catalog
    from diffract_dask.runs.chaindiffs import chain_diff, variation_diff
    from diffract_dask.runs.chains import Chain, ChainStep, Variation
    from diffract_dask.runs.config import UNSET, Config, replace
    from diffract_dask.runs.context import RunContext
    from diffract_dask.runs.differences import compare, describe, overrides, source_diff, variant_diff
    from diffract_dask.runs.discovery import discover, load_module, scan_import
    from diffract_dask.runs.disk import disk_usage, merge, prune
    from diffract_dask.runs.encoding import fingerprint
    from diffract_dask.runs.explain import why
    from diffract_dask.runs.finding import find
    from diffract_dask.runs.forks import forest
    from diffract_dask.runs.listing import RunRegistry
    from diffract_dask.runs.pipelines import Pipeline
    from diffract_dask.runs.previews import preview
    from diffract_dask.runs.records import Metric, RunRecord
    from diffract_dask.runs.stages import Stage
    from diffract_dask.runs.status import progress, scoreboard, siblings
    from diffract_dask.runs.variants import Variant, VariantRegistry, register, registry
    from diffract_dask.runs.weights import lineage

_HOME = {
    "UNSET": "config",
    "Catalog": "catalog",
    "Chain": "chains",
    "ChainStep": "chains",
    "Config": "config",
    "Metric": "records",
    "Pipeline": "pipelines",
    "RunContext": "context",
    "RunRecord": "records",
    "RunRegistry": "listing",
    "Stage": "stages",
    "Variant": "variants",
    "VariantRegistry": "variants",
    "Variation": "chains",
    "as_json": "answers",
    "chain_diff": "chaindiffs",
    "compare": "differences",
    "describe": "differences",
    "diff_artifacts": "artifact_diffs",
    "diff_run_artifacts": "artifacts",
    "discover": "discovery",
    "disk_usage": "disk",
    "find": "finding",
    "fingerprint": "encoding",
    "forest": "forks",
    "lineage": "weights",
    "list_artifacts": "artifacts",
    "load_module": "discovery",
    "merge": "disk",
    "overrides": "differences",
    "preview": "previews",
    "preview_run_artifact": "artifacts",
    "progress": "status",
    "prune": "disk",
    "register": "variants",
    "registry": "variants",
    "replace": "config",
    "scan_import": "discovery",
    "scoreboard": "status",
    "siblings": "status",
    "source_diff": "differences",
    "variant_diff": "differences",
    "variation_diff": "chaindiffs",
    "why": "explain",
}

__all__ = [
    "UNSET",
    "Catalog",
    "Chain",
    "ChainStep",
    "Config",
    "Metric",
    "Pipeline",
    "RunContext",
    "RunRecord",
    "RunRegistry",
    "Stage",
    "Variant",
    "VariantRegistry",
    "Variation",
    "as_json",
    "chain_diff",
    "compare",
    "describe",
    "diff_artifacts",
    "diff_run_artifacts",
    "discover",
    "disk_usage",
    "find",
    "fingerprint",
    "forest",
    "lineage",
    "list_artifacts",
    "load_module",
    "merge",
    "overrides",
    "preview",
    "preview_run_artifact",
    "progress",
    "prune",
    "register",
    "registry",
    "replace",
    "scan_import",
    "scoreboard",
    "siblings",
    "source_diff",
    "variant_diff",
    "variation_diff",
    "why",
]


def __getattr__(name: str) -> Any:
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(import_module(f"{__name__}.{_HOME[name]}"), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_HOME})
