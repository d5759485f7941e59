"""What modules declare, as JSON: written at each run, so that everything that only reads imports no user code.

``<root>/_manifests/<module>.json``: pipelines with their stages, variants with their configurations, chains with
their variations.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffract_dask.errors import DiffractError
from diffract_dask.runs import encoding, snapshots
from diffract_dask.runs.code import StageCode, file_of
from diffract_dask.runs.config import encode_overrides
from diffract_dask.runs.naming import folder
from diffract_dask.runs.records import SCHEMA, now
from diffract_dask.runs.snapshots import Snapshot
from diffract_dask.runs.variants import registry

if TYPE_CHECKING:
    from diffract_dask.runs.chains import Chain
    from diffract_dask.runs.pipelines import Pipeline

__all__ = ["MANIFESTS", "described", "failed", "read_all", "source_files", "write"]

MANIFESTS = "_manifests"


def described(module: str) -> dict[str, Any]:
    """Return what a module has declared in this process, as plain JSON data."""
    file = registry.source_file(module) or file_of(module)
    pipelines, chains = registry.pipelines(module), registry.chains(module)
    found = {name: _codes(item) for name, item in pipelines.items()}
    return {
        "schema": SCHEMA,
        "module": module,
        "file": f"{module.replace('.', '/')}.py" if file else None,
        "sha256": _digest(module, file),
        "error": None,
        "helpers": _helpers(found, module),
        "pipelines": [_pipeline(item, found[item.name]) for item in pipelines.values()],
        "variants": [
            {
                "name": item.name,
                "base": item.base.name if item.base else None,
                "base_module": item.base.module if item.base else None,
                "forks_of": item.forks_of,
                "overrides": encode_overrides(item.overrides),
                "config": encoding.encode(item.config, "config"),
                "fingerprint": item.fingerprint,
            }
            for item in registry.for_module(module).values()
        ],
        "chains": [_chain(item) for item in chains.values()],
    }


def _codes(pipeline: Pipeline) -> dict[str, StageCode]:
    """Return the code of each stage; a stage whose code has no hash cannot run, and stops nothing else."""
    found = {}
    for stage in pipeline.stages:
        try:
            found[stage.name] = stage.code()
        except DiffractError:
            found[stage.name] = StageCode("unknown", None, ())
    return found


def _helpers(codes: Mapping[str, Mapping[str, StageCode]], module: str) -> dict[str, str | None]:
    """Return the digests of the other modules whose code counts."""
    names = {name for stages in codes.values() for code in stages.values() for name in code.modules}
    return {name: digest_of(file_of(name)) for name in sorted(names - {module, "__main__"})}


def _pipeline(pipeline: Pipeline, found: Mapping[str, StageCode]) -> dict[str, Any]:
    return {
        "name": pipeline.name,
        "parent": pipeline.parent,
        "stages": [stage.declaration(found[stage.name]) for stage in pipeline.stages],
    }


def _chain(chain: Chain) -> dict[str, Any]:
    return {
        "name": chain.name,
        "parent": chain.parent,
        "steps": [
            {
                "name": step.name,
                "pipeline": step.pipeline.name,
                "module": step.pipeline.module,
                "consumes": list(step.consumes),
            }
            for step in chain.steps
        ],
        "variations": [
            {"name": item.name, "base": item.base, "forks_of": item.forks_of, "overrides": dict(item.overrides)}
            for item in chain.variations.values()
        ],
    }


def digest_of(file: str | os.PathLike[str] | None) -> str | None:
    """Return the SHA-256 of a source file, by which a manifest is known to be out of date."""
    try:
        return None if file is None else hashlib.sha256(Path(file).read_bytes()).hexdigest()
    except OSError:
        return None


def _digest(module: str, file: str | None) -> str | None:
    """Return the SHA-256 of a module's source, as it was when it declared what it declares."""
    text = registry.source_text(module)
    return digest_of(file) if text is None else hashlib.sha256(text).hexdigest()


_written: dict[str, tuple[int, str | None]] = {}
_lock = threading.Lock()


def write(root: Path, module: str, taken: Snapshot | None = None) -> None:
    """Write the manifest of a module, where it changed since this process last did.

    Parameters
    ----------
    root : Path
    module : str
    taken : Snapshot, optional
        One that was just taken; else one is, if the source is not what the known manifest was made from.
    """
    with _lock:
        file = registry.source_file(module) or file_of(module)
        path = root / MANIFESTS / f"{folder(module)}.json"
        stamp = (registry.count, digest_of(file))
        if _written.get(str(path)) == stamp and path.exists():
            return
        manifest = described(module)
        known = encoding.read_json(path, {})
        if taken is not None and module in taken.sources:
            manifest |= {"snapshot": taken.commit, "source": taken.sources[module]}
        elif known.get("sha256") == manifest["sha256"] and known.get("snapshot"):
            manifest |= {"snapshot": known["snapshot"], "source": known.get("source")}
        else:
            own = snapshots.take(root, {module: file} if file else {}, f"source of {module}")
            manifest |= {"snapshot": own.commit, "source": own.sources.get(module)}
        if {**known, "written": None} != {**manifest, "written": None}:
            path.parent.mkdir(parents=True, exist_ok=True)
            encoding.write_json(path, {**manifest, "written": now()})
        _written[str(path)] = stamp


def failed(root: Path, module: str, file: str | None, error: str) -> None:
    """Note that a module could not be imported; what was known of it stays."""
    path = root / MANIFESTS / f"{folder(module)}.json"
    known = encoding.read_json(path, {})
    empty: dict[str, Any] = {"schema": SCHEMA, "module": module, "file": file, "sha256": None}
    lists: dict[str, Any] = {"pipelines": [], "variants": [], "chains": []}
    path.parent.mkdir(parents=True, exist_ok=True)
    encoding.write_json(path, {**empty, **lists, **known, "error": error, "written": now()})


_TEXT = (str, type(None))
_SHAPE: dict[str, Any] = {
    "pipelines": [{"name": str, "parent": _TEXT, "stages": [{"name": str}]}],
    "variants": [
        {"name": str, "base": _TEXT, "forks_of": _TEXT, "overrides": dict, "config": dict, "fingerprint": str}
    ],
    "chains": [
        {
            "name": str,
            "parent": _TEXT,
            "steps": [{"name": str, "pipeline": str, "module": str, "consumes": [str]}],
            "variations": [{"name": str, "base": _TEXT, "forks_of": _TEXT, "overrides": {...: str}}],
        }
    ],
}


def _fits(data: Any, shape: Any) -> bool:
    """Return whether data has a shape: a class, a list of one shape, or a mapping with these keys, ... for any."""
    if isinstance(shape, list):
        return isinstance(data, list) and all(_fits(item, shape[0]) for item in data)
    if isinstance(shape, dict) and ... in shape:
        return isinstance(data, dict) and all(_fits(item, shape[...]) for item in data.values())
    if isinstance(shape, dict):
        return isinstance(data, dict) and all(name in data and _fits(data[name], shape[name]) for name in shape)
    return isinstance(data, shape)


def _damaged(module: str, path: Path) -> dict[str, Any]:
    error = f"its manifest {MANIFESTS}/{path.name} is damaged; run it, or scan with --import"
    return {"module": module, "error": error, "pipelines": [], "variants": [], "chains": []}


def read_all(root: Path) -> list[dict[str, Any]]:
    """Return the manifests below a root, the oldest first."""
    found = []
    for path in sorted((root / MANIFESTS).glob("*.json")):
        manifest = encoding.read_json(path)
        if isinstance(manifest, dict) and isinstance(manifest.get("module"), str):
            found.append(manifest if _fits(manifest, _SHAPE) else _damaged(manifest["module"], path))
    return sorted(found, key=lambda manifest: str(manifest.get("written") or ""))


def source_files(pipeline: Pipeline, codes: Mapping[str, StageCode]) -> dict[str, str]:
    """Return the source files behind a pipeline by module: its own, and those of the helpers that its stages call."""
    found: dict[str, str] = {}
    for code in codes.values():
        for module in code.modules:
            file = file_of(module)
            if file is not None:
                found[module] = file
    own = found.pop("__main__", None)
    if pipeline.source_file or own:
        found[pipeline.module] = str(pipeline.source_file or own)
    return {module: found[module] for module in sorted(found) if os.path.isfile(found[module])}


def chain_files(chain: str | None) -> dict[str, str]:
    """Return the source file of a chain by module, if this process has declared it."""
    for module in registry.modules():
        declared = registry.chains(module).get(chain or "")
        if declared is not None and declared.source_file and os.path.isfile(declared.source_file):
            return {module: declared.source_file}
    return {}
