"""What is declared, as far as manifests and this process tell: the side of every question that is not a run."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffract_dask.errors import DiffractError, UnknownNameError, did_you_mean
from diffract_dask.runs import encoding, manifests, snapshots
from diffract_dask.runs.chains import Chain, resolved
from diffract_dask.runs.config import Config
from diffract_dask.runs.listing import RunRegistry
from diffract_dask.runs.stages import run_fingerprint, stages_text
from diffract_dask.runs.variants import registry as declared

__all__ = ["Catalog", "ChainInfo", "PipelineInfo", "StepInfo", "VariantInfo", "VariationInfo"]


@dataclass(frozen=True)
class VariantInfo:
    """A variant as its manifest has it; `overrides` and `config` are plain JSON data."""

    name: str
    module: str
    base: str | None
    base_module: str | None
    forks_of: str | None
    overrides: dict[str, Any]
    config: dict[str, Any]
    fingerprint: str

    @property
    def values(self) -> Config:
        """The configuration with its values as they were."""
        return Config(encoding.decode(self.config))


@dataclass(frozen=True)
class PipelineInfo:
    """A pipeline as its manifest has it."""

    name: str
    module: str
    parent: str | None
    stages: list[dict[str, Any]]
    variants: dict[str, VariantInfo]
    file: str | None = None
    error: str | None = None
    snapshot: str | None = None
    source: str | None = None
    outdated: bool = False


@dataclass(frozen=True)
class StepInfo:
    """A step of a chain as its manifest has it."""

    name: str
    pipeline: str
    module: str
    consumes: tuple[str, ...]


@dataclass(frozen=True)
class VariationInfo:
    """A variation as its manifest has it.

    Attributes
    ----------
    mapping : dict
        Variant by step, the bases' included; of a variation that cannot be resolved, what it says itself.
    error : str or None
        Why it cannot be resolved.
    """

    name: str
    base: str | None
    forks_of: str | None
    overrides: dict[str, str]
    mapping: dict[str, str]
    error: str | None = None


@dataclass(frozen=True)
class ChainInfo:
    """A chain as its manifest has it."""

    name: str
    module: str
    parent: str | None
    steps: list[StepInfo]
    variations: dict[str, VariationInfo]
    file: str | None = None
    error: str | None = None
    snapshot: str | None = None
    source: str | None = None
    outdated: bool = False


@dataclass(frozen=True)
class ModuleError:
    """A module that could not be read or imported."""

    module: str
    error: str


@dataclass
class _Tables:
    pipelines: dict[str, PipelineInfo] = field(default_factory=dict)
    every: dict[tuple[str, str], PipelineInfo] = field(default_factory=dict)
    chains: dict[str, ChainInfo] = field(default_factory=dict)
    errors: list[ModuleError] = field(default_factory=list)
    texts: dict[tuple[str, str], str] = field(default_factory=dict)


class Catalog:
    """Pipelines, variants, chains and variations, by name, with the registry of their runs.

    Parameters
    ----------
    runs : RunRegistry or path
    scan_root : path, optional
        Where the sources lie: manifests that are older than the files there are marked `outdated`, and files that no
        run has shown yet are listed. Nothing is imported.
    live : bool
        Count what this process has declared too; it takes the place of what manifests say.
    """

    def __init__(
        self, runs: RunRegistry | str | Path = "runs", scan_root: str | Path | None = None, *, live: bool = True
    ) -> None:
        self.runs = runs if isinstance(runs, RunRegistry) else RunRegistry(runs)
        self.scan_root = None if scan_root is None else Path(scan_root)
        self.live = live
        self._tables: _Tables | None = None

    @property
    def pipelines(self) -> dict[str, PipelineInfo]:
        """The pipelines by name."""
        return self._read().pipelines

    @property
    def chains(self) -> dict[str, ChainInfo]:
        """The chains by name."""
        return self._read().chains

    @property
    def errors(self) -> list[ModuleError]:
        """The modules that could not be read or imported."""
        return self._read().errors

    def refresh(self) -> None:
        """Read the manifests again at the next question."""
        self._tables = None

    def pipeline(self, name: str) -> PipelineInfo:
        """Return a pipeline by its name, that of its module, or ``"module:name"`` where two modules have the name.

        Raises
        ------
        UnknownNameError
            No run and no scan has shown it.
        """
        found = self.pipelines.get(name)
        if found is not None:
            return found
        for (module, below), item in self._read().every.items():
            if name in (module, f"{module}:{below}"):
                return item
        raise UnknownNameError(self._unknown("pipeline", name, self.pipelines))

    def pipeline_of(self, step: StepInfo) -> PipelineInfo | None:
        """Return the pipeline of a step: that of the module which the chain names, should others have the name too."""
        return self._read().every.get((step.module, step.pipeline)) or self.pipelines.get(step.pipeline)

    def chain(self, name: str | Chain) -> ChainInfo:
        """Return a chain by its name.

        Raises
        ------
        UnknownNameError
            No run and no scan has shown it.
        """
        text = name.name if isinstance(name, Chain) else name
        found = self.chains.get(text)
        if found is not None:
            return found
        raise UnknownNameError(self._unknown("chain", text, self.chains))

    def _unknown(self, what: str, name: str, known: Mapping[str, Any]) -> str:
        hint = did_you_mean(name, known) or (
            f" There are {', '.join(map(repr, sorted(known)))}."
            if known
            else " None is: run one, or import them once with scan --import."
        )
        broken = [f" {item.module} could not be read: {item.error.splitlines()[-1]}." for item in self.errors]
        return f"no {what} {name!r} is known under {self.runs.root}.{hint}{''.join(broken[:3])}"

    def variant(self, pipeline: str, name: str) -> VariantInfo:
        """Return a variant of a pipeline.

        Raises
        ------
        UnknownNameError
            There is no such pipeline or variant.
        """
        info = self.pipeline(pipeline)
        if name not in info.variants:
            hint = did_you_mean(name, info.variants) or f" There are {', '.join(map(repr, info.variants))}."
            raise UnknownNameError(f"pipeline {info.name!r} has no variant {name!r}.{hint}")
        return info.variants[name]

    def variation(self, chain: str | Chain, name: str) -> VariationInfo:
        """Return a variation of a chain.

        Raises
        ------
        UnknownNameError
            There is no such chain or variation.
        """
        info = self.chain(chain)
        if name not in info.variations:
            hint = did_you_mean(name, info.variations) or f" There are {', '.join(map(repr, info.variations))}."
            raise UnknownNameError(f"chain {info.name!r} has no variation {name!r}.{hint}")
        return info.variations[name]

    def expected(self, chain: ChainInfo, variation: VariationInfo) -> dict[str, str]:
        """Return the fingerprint of the run that each step should have, as far as it can be told."""
        found: dict[str, str] = {}
        for step in chain.steps:
            pipeline, variant = self.pipeline_of(step), variation.mapping.get(step.name)
            known = pipeline.variants.get(variant) if pipeline is not None and variant is not None else None
            if pipeline is None or known is None or any(name not in found for name in step.consumes):
                continue
            above = {name: found[name] for name in step.consumes}
            found[step.name] = run_fingerprint(known.fingerprint, self._stages_text(pipeline), above)
        return found

    def _stages_text(self, pipeline: PipelineInfo) -> str:
        table = self._read().texts
        at = (pipeline.module, pipeline.name)
        if at not in table:
            table[at] = stages_text(pipeline.stages)
        return table[at]

    def source(self, item: PipelineInfo | ChainInfo) -> str | None:
        """Return the source of a pipeline or chain: of its last run, else the present file; None without either."""
        text = snapshots.show(self.runs.root, item.snapshot, item.source)
        if text is not None:
            return text
        file = self._file_of(item.module)
        try:
            return None if file is None else Path(file).read_text(encoding="utf8")
        except (OSError, ValueError):
            return None

    def _file_of(self, module: str) -> str | None:
        if self.scan_root is not None:
            from diffract_dask.runs.discovery import discover

            for found in discover(self.scan_root):
                if found.module == module:
                    return str(found.path)
        return declared.source_file(module) if self.live else None

    def _read(self) -> _Tables:
        if self._tables is None:
            found = {item["module"]: item for item in manifests.read_all(self.runs.root)}
            scanned = self._scanned(found)
            if self.live:
                found |= {name: {**found.get(name, {}), **manifests.described(name)} for name in declared.modules()}
            self._tables = _tables(list(found.values()), scanned)
        return self._tables

    def _scanned(self, found: dict[str, dict[str, Any]]) -> set[str]:
        """Add what a scan of the sources shows; return the modules whose manifests are older than their files."""
        if self.scan_root is None:
            return set()
        from diffract_dask.runs.discovery import discover

        outdated = set()
        for item in discover(self.scan_root):
            if item.module in found:
                if self._is_older(found[item.module], item.path):
                    outdated.add(item.module)
            else:
                found[item.module] = item.as_manifest()
        return outdated

    def _is_older(self, manifest: Mapping[str, Any], path: Path) -> bool:
        """Return whether a source, or one of the helpers that it calls, is not what a manifest was made from."""
        files = {manifest["module"]: (path, manifest.get("sha256"))}
        helpers = manifest.get("helpers")
        for name, digest in helpers.items() if isinstance(helpers, dict) else ():
            files[name] = (Path(str(self.scan_root), f"{name.replace('.', '/')}.py"), digest)
        return any(file.exists() and manifests.digest_of(file) != digest for file, digest in files.values())


def _tables(found: list[dict[str, Any]], outdated: set[str]) -> _Tables:
    tables = _Tables()
    for manifest in found:
        module = str(manifest["module"])
        told: dict[str, Any] = {
            "module": module,
            "file": manifest.get("file"),
            "error": manifest.get("error"),
            "snapshot": manifest.get("snapshot"),
            "source": manifest.get("source"),
            "outdated": module in outdated,
        }
        if manifest.get("error"):
            tables.errors.append(ModuleError(module, str(manifest["error"])))
        variants = {item["name"]: VariantInfo(module=module, **_only(item, _VARIANT)) for item in manifest["variants"]}
        for item in manifest["pipelines"]:
            tables.pipelines[item["name"]] = tables.every[module, item["name"]] = PipelineInfo(
                name=item["name"], parent=item["parent"], stages=item["stages"], variants=variants, **told
            )
        for item in manifest["chains"]:
            tables.chains[item["name"]] = ChainInfo(
                name=item["name"],
                parent=item["parent"],
                steps=[
                    StepInfo(step["name"], step["pipeline"], step["module"], tuple(step["consumes"]))
                    for step in item["steps"]
                ],
                variations=_variations(item),
                **told,
            )
    return tables


_VARIANT = ("name", "base", "base_module", "forks_of", "overrides", "config", "fingerprint")


def _only(item: Mapping[str, Any], keys: tuple[str, ...]) -> dict[str, Any]:
    return {key: item.get(key) for key in keys}


def _variations(chain: Mapping[str, Any]) -> dict[str, VariationInfo]:
    table = {item["name"]: (item["base"], item["overrides"]) for item in chain["variations"]}
    found = {}
    for item in chain["variations"]:
        error = None
        try:
            mapping = resolved(chain["name"], item["name"], table)
        except DiffractError as problem:
            mapping, error = dict(item["overrides"]), str(problem)
        found[item["name"]] = VariationInfo(
            item["name"], item["base"], item["forks_of"], dict(item["overrides"]), mapping, error
        )
    return found
