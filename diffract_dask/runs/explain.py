"""Why two runs differ: in code, configuration or upstream, stage by stage."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from diffract_dask.runs import encoding, snapshots
from diffract_dask.runs.differences import Entry, config_diff, text_diff
from diffract_dask.runs.listing import RunRegistry
from diffract_dask.runs.records import RunRecord

__all__ = ["Difference", "SourceChange", "StageDifference", "UpstreamDifference", "why"]


@dataclass(frozen=True)
class SourceChange:
    """A source file that differs between the snapshots of two runs.

    Attributes
    ----------
    module : str
    kind : {"changed", "added", "removed"}
    diff : str
        Unified.
    """

    module: str
    kind: str
    diff: str


@dataclass(frozen=True)
class UpstreamDifference:
    """A step whose upstream runs differ; `why` goes on from there, with their folders relative to the root."""

    step: str
    a: str | None
    b: str | None
    a_run: str | None = None
    b_run: str | None = None


@dataclass(frozen=True)
class StageDifference:
    """A stage of two runs.

    Attributes
    ----------
    kind : {"same", "differs", "only_in_a", "only_in_b", "unknown"}
        Unknown: one of the runs has no key for it.
    code_changed, bound_changed, config_changed, inputs_changed, upstream_changed : bool
    entries : list of Entry
        The differences in what the stage reads of the configuration.
    inputs : list of str
        Earlier stages whose keys differ.
    upstream : list of str
        Steps, or artifacts of steps, whose digests differ.
    outputs : list of str
        Files that differ, though the keys may be the same.
    """

    stage: str
    kind: str
    key_a: str | None = None
    key_b: str | None = None
    code_changed: bool = False
    bound_changed: bool = False
    config_changed: bool = False
    inputs_changed: bool = False
    upstream_changed: bool = False
    entries: list[Entry] = field(default_factory=list)
    inputs: list[str] = field(default_factory=list)
    upstream: list[str] = field(default_factory=list)
    outputs: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Difference:
    """Two runs.

    Attributes
    ----------
    same : bool
        Equal fingerprints.
    reasons : list of str
        What differs: pipeline, variant, config, code, stages, upstream, versions, outputs.
    entries : list of Entry
        Of the merged configurations.
    sources : list of SourceChange
    versions : dict
        ``[a, b]`` by package, where they differ.
    """

    a: str
    b: str
    same: bool
    reasons: list[str]
    entries: list[Entry]
    stages: list[StageDifference]
    upstream: list[UpstreamDifference]
    sources: list[SourceChange]
    versions: dict[str, list[str | None]]


def why(registry: RunRegistry, a: RunRecord | str, b: RunRecord | str) -> Difference:
    """Return why two runs differ; they may be of different variants and pipelines.

    Parameters
    ----------
    registry : RunRegistry
    a, b : RunRecord or str
        A text is a run's folder relative to the root.

    Raises
    ------
    RunNotFoundError
        There is no such run.
    """
    a, b = (registry.at(item) if isinstance(item, str) else item for item in (a, b))
    entries = config_diff(_config(registry, a), _config(registry, b))
    stages = [_stage(registry, a, b, name) for name in dict.fromkeys([*a.stages, *b.stages])]
    upstream = [
        UpstreamDifference(
            step, a.upstream.get(step), b.upstream.get(step), a.upstream_runs.get(step), b.upstream_runs.get(step)
        )
        for step in dict.fromkeys([*a.upstream, *b.upstream])
        if a.upstream.get(step) != b.upstream.get(step)
    ]
    told = {**a.versions, "python": a.python}, {**b.versions, "python": b.python}
    versions = {
        name: [told[0].get(name), told[1].get(name)]
        for name in dict.fromkeys([*told[0], *told[1]])
        if told[0].get(name) != told[1].get(name)
    }
    code = any(stage.code_changed or stage.bound_changed for stage in stages) or a.code != b.code
    reasons = {
        "pipeline": a.pipeline != b.pipeline,
        "variant": a.variant != b.variant,
        "config": bool(entries),
        "code": code,
        "stages": a.stages != b.stages,
        "upstream": bool(upstream) or any(stage.upstream_changed for stage in stages),
        "versions": bool(versions),
        "outputs": any(stage.outputs for stage in stages),
    }
    return Difference(
        a.where,
        b.where,
        a.fingerprint == b.fingerprint,
        [name for name, found in reasons.items() if found],
        entries,
        stages,
        upstream,
        _sources(registry, a, b),
        versions,
    )


def _config(registry: RunRegistry, record: RunRecord) -> Mapping[str, Any]:
    data = encoding.read_json(f"{record.fdir}/config.json", {})
    return data if isinstance(data, dict) else {}


def _stage(registry: RunRegistry, a: RunRecord, b: RunRecord, name: str) -> StageDifference:
    if name not in a.stages or name not in b.stages:
        return StageDifference(name, "only_in_b" if name not in a.stages else "only_in_a")
    keys = a.stage_keys.get(name), b.stage_keys.get(name)
    metas = registry.meta(a, name), registry.meta(b, name)
    parts = _parts(metas[0]), _parts(metas[1])
    codes = a.code.get(name, parts[0]["code"]), b.code.get(name, parts[1]["code"])
    entries = config_diff(parts[0]["config"], parts[1]["config"]) if all(metas) else []
    inputs = _unequal(parts[0]["inputs"], parts[1]["inputs"]) if all(metas) else []
    upstream = _unequal(_flat(parts[0]["upstream"]), _flat(parts[1]["upstream"])) if all(metas) else []
    files = [
        {path: entry.get("sha256") for path, entry in meta.get("outputs", {}).items()} if meta else {} for meta in metas
    ]
    outputs = _unequal(*files) if all("outputs" in meta for meta in metas) else []
    kind = "unknown" if None in keys else "same" if keys[0] == keys[1] else "differs"
    return StageDifference(
        name,
        kind,
        *keys,
        code_changed=codes[0] != codes[1],
        bound_changed=all(bool(meta) for meta in metas) and parts[0]["bound"] != parts[1]["bound"],
        config_changed=bool(entries),
        inputs_changed=bool(inputs),
        upstream_changed=bool(upstream),
        entries=entries,
        inputs=inputs,
        upstream=upstream,
        outputs=outputs,
    )


def _parts(meta: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a stage's key is made of; diffman 0.3.0 called code fn, and inputs upstream."""
    found = meta.get("components")
    found = found if isinstance(found, dict) else {}
    if "fn" in found:
        found = {"code": found["fn"], "config": found.get("config", {}), "inputs": found.get("upstream", {})}
    return {
        "code": found.get("code"),
        "bound": found.get("bound"),
        "config": found.get("config") or {},
        "inputs": found.get("inputs") or {},
        "upstream": found.get("upstream") or {},
    }


def _flat(upstream: Mapping[str, Any]) -> dict[str, Any]:
    return {
        f"{step}/{path}" if path not in ("run", "content") else f"{step} ({path})": digest
        for step, parts in upstream.items()
        for path, digest in parts.items()
    }


def _unequal(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    return [name for name in dict.fromkeys([*old, *new]) if old.get(name) != new.get(name)]


def _sources(registry: RunRegistry, a: RunRecord, b: RunRecord) -> list[SourceChange]:
    """Return the differences between the snapshots; one module of each that has no counterpart is set side by side."""
    if a.snapshot == b.snapshot and a.sources == b.sources:
        return []
    pairs = [(module, module) for module in a.sources if module in b.sources]
    left = [module for module in a.sources if module not in b.sources]
    new = [module for module in b.sources if module not in a.sources]
    if a.module in left and b.module in new:
        pairs.append((str(a.module), str(b.module)))
        left.remove(str(a.module))
        new.remove(str(b.module))
    found = []
    for one, other in pairs:
        texts = [
            snapshots.show(registry.root, record.snapshot, record.sources.get(module))
            for record, module in ((a, one), (b, other))
        ]
        if None not in texts and texts[0] != texts[1]:
            diff = text_diff(str(texts[0]), str(texts[1]), a.sources[one], b.sources[other])
            found.append(SourceChange(other, "changed", diff))
    for record, modules, kind in ((a, left, "removed"), (b, new, "added")):
        for module in modules:
            text = snapshots.show(registry.root, record.snapshot, record.sources[module]) or ""
            ends = (text, "") if kind == "removed" else ("", text)
            found.append(SourceChange(module, kind, text_diff(*ends, record.sources[module], record.sources[module])))
    return found
