"""What differs between configurations, variants and pipelines, and between sources."""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from diffract_dask.errors import RunError, UnknownNameError
from diffract_dask.runs import encoding
from diffract_dask.runs.catalog import Catalog, ChainInfo, PipelineInfo, VariantInfo

__all__ = [
    "Comparison",
    "Entry",
    "Overrides",
    "SourceDiff",
    "VariantDiff",
    "compare",
    "config_diff",
    "describe",
    "overrides",
    "source_diff",
    "variant_diff",
]


@dataclass(frozen=True)
class Entry:
    """A key that differs; a value that is absent is told apart from null by `kind`.

    Attributes
    ----------
    path : str
        Dotted.
    kind : {"added", "removed", "changed"}
    parent, child : object
        Plain JSON data.
    """

    path: str
    kind: str
    parent: Any
    child: Any


def config_diff(parent: Mapping[str, Any], child: Mapping[str, Any]) -> list[Entry]:
    """Return the keys in which two configurations differ, given as plain JSON data (`encoding.encode`).

    1, 1.0 and True differ; so do a key that is null and one that is absent.
    """
    found: list[Entry] = []
    _differ(parent, child, "", found)
    return found


def _plain(value: Any) -> bool:
    """Return whether a value is a mapping of the user, and not the written form of something else."""
    return isinstance(value, Mapping) and not (len(value) == 1 and _TAG.match(next(iter(value))))


_TAG = re.compile(r"\$(?!\$)")  # a user's own key has one more


def _below(where: str, key: str) -> str:
    """Return the dotted path of a key; one that has dots itself is quoted."""
    name = key.removeprefix("$") if key.startswith("$$") else key
    name = f"'{name}'" if "." in name else name
    return f"{where}.{name}" if where else name


def _differ(parent: Mapping[str, Any], child: Mapping[str, Any], where: str, found: list[Entry]) -> None:
    for key in dict.fromkeys([*parent, *child]):
        path = _below(where, key)
        if key not in child:
            found.append(Entry(path, "removed", parent[key], None))
        elif key not in parent:
            found.append(Entry(path, "added", None, child[key]))
        elif _plain(parent[key]) and _plain(child[key]) and parent[key] and child[key]:
            _differ(parent[key], child[key], path, found)
        elif encoding.plain_text(parent[key]) != encoding.plain_text(child[key]):
            found.append(Entry(path, "changed", parent[key], child[key]))


def leaves(config: Mapping[str, Any], where: str = "") -> dict[str, Any]:
    """Return the leaves of a configuration by dotted path."""
    found: dict[str, Any] = {}
    for key, value in config.items():
        path = _below(where, key)
        if _plain(value) and value:
            found.update(leaves(value, path))
        else:
            found[path] = value
    return found


@dataclass(frozen=True)
class Description:
    """A variant with its merged configuration, as plain JSON data."""

    pipeline: str
    module: str
    variant: str
    fingerprint: str
    base: str | None
    base_module: str | None
    forks_of: str | None
    overrides: dict[str, Any]
    config: dict[str, Any]
    runs: list[str]
    outdated: bool


def describe(catalog: Catalog, pipeline: str, variant: str) -> Description:
    """Return a variant: its layers, its merged configuration, its fingerprint, and the folders of its runs.

    Raises
    ------
    UnknownNameError
        There is no such pipeline or variant.
    """
    info, found = catalog.pipeline(pipeline), catalog.variant(pipeline, variant)
    runs = [record.where for record in catalog.runs.list_runs(info.name, variant)]
    return Description(
        info.name,
        found.module,
        found.name,
        found.fingerprint,
        found.base,
        found.base_module,
        found.forks_of,
        found.overrides,
        found.config,
        runs,
        info.outdated,
    )


@dataclass(frozen=True)
class Overrides:
    """What a variant adds to its base."""

    pipeline: str
    variant: str
    base: str | None
    overrides: dict[str, Any]
    base_config: dict[str, Any]
    config: dict[str, Any]
    entries: list[Entry]


def overrides(catalog: Catalog, pipeline: str, variant: str) -> Overrides:
    """Return what a variant adds to its base; a variant without one adds everything.

    Raises
    ------
    UnknownNameError
        There is no such pipeline or variant, or the base's module is not known.
    """
    info, found = catalog.pipeline(pipeline), catalog.variant(pipeline, variant)
    base: dict[str, Any] = {}
    if found.base is not None:
        base = _base_of(catalog, found).config
    return Overrides(
        info.name, variant, found.base, found.overrides, base, found.config, config_diff(base, found.config)
    )


def _base_of(catalog: Catalog, variant: VariantInfo) -> VariantInfo:
    module = variant.base_module or variant.module
    for info in catalog.pipelines.values():
        if info.module == module and variant.base in info.variants:
            return info.variants[str(variant.base)]
    raise UnknownNameError(
        f"variant {variant.name!r} builds on {variant.base!r} of module {module!r}, of which nothing is known here; "
        "run one of its pipelines, or scan with --import"
    )


@dataclass(frozen=True)
class VariantMatch:
    """A variant beside the one of the parent pipeline that it corresponds to.

    Attributes
    ----------
    variant : str
        Of the child; of the parent where only that has it.
    parent_variant : str or None
    kind : {"matches", "differs", "only_in_child", "only_in_parent", "no_parent"}
    by : {"forks_of", "name"} or None
    forks_of_unresolved : str or None
        The parent has no variant of the name that ``forks_of`` gives.
    entries : list of Entry
    """

    variant: str
    kind: str
    parent_variant: str | None = None
    by: str | None = None
    base: str | None = None
    forks_of_unresolved: str | None = None
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class StageDiff:
    """A stage that differs between a pipeline and its parent: added, removed, or changed in what is named."""

    stage: str
    kind: str
    changed: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class VariantDiff:
    """A pipeline against its parent, variant by variant, and stage by stage.

    Attributes
    ----------
    orphan : bool
        The parent is not known; every variant is then only in the child.
    """

    pipeline: str
    parent: str | None
    orphan: bool
    variants: list[VariantMatch]
    stages: list[StageDiff]


def variant_diff(catalog: Catalog, pipeline: str) -> VariantDiff:
    """Return how a pipeline's variants differ from those of its parent, matched by ``forks_of``, else by name.

    Raises
    ------
    UnknownNameError
        There is no such pipeline.
    """
    child = catalog.pipeline(pipeline)
    if child.parent is None:
        alone = [VariantMatch(name, "no_parent", base=item.base) for name, item in child.variants.items()]
        return VariantDiff(child.name, None, False, alone, [])
    parent = catalog.pipelines.get(child.parent)
    among = parent.variants if parent is not None else {}
    found = [_matched(item, among) for item in child.variants.values()]
    taken = {match.parent_variant for match in found}
    found += [VariantMatch(name, "only_in_parent", name) for name in among if name not in taken]
    stages = _stage_diffs(parent, child) if parent is not None else []
    return VariantDiff(child.name, child.parent, parent is None, found, stages)


def _matched(item: VariantInfo, among: Mapping[str, VariantInfo]) -> VariantMatch:
    if item.forks_of is not None and item.forks_of not in among:
        return VariantMatch(item.name, "only_in_child", base=item.base, forks_of_unresolved=item.forks_of)
    target, by = (item.forks_of, "forks_of") if item.forks_of is not None else (item.name, "name")
    if target not in among:
        return VariantMatch(item.name, "only_in_child", base=item.base)
    entries = config_diff(among[target].config, item.config)
    return VariantMatch(item.name, "differs" if entries else "matches", target, by, base=item.base, entries=entries)


def _stage_diffs(parent: PipelineInfo, child: PipelineInfo) -> list[StageDiff]:
    old = {stage["name"]: stage for stage in parent.stages}
    new = {stage["name"]: stage for stage in child.stages}
    found = []
    for name in dict.fromkeys([*old, *new]):
        if name not in new:
            found.append(StageDiff(name, "removed"))
        elif name not in old:
            found.append(StageDiff(name, "added"))
        else:
            changed = [key for key in new[name] if new[name].get(key) != old[name].get(key)]
            if changed:
                found.append(StageDiff(name, "changed", changed))
    return found


@dataclass(frozen=True)
class SourceDiff:
    """The sources of a pipeline or chain and its parent, as a unified diff.

    Attributes
    ----------
    diff : str
        Empty where both are equal, or there is no parent.
    missing : list of str
        Those whose source is in no snapshot and no file.
    """

    name: str
    parent: str | None
    diff: str
    missing: list[str]
    orphan: bool = False


def source_diff(catalog: Catalog, name: str, *, kind: str = "pipeline") -> SourceDiff:
    """Return how the source of a pipeline or chain differs from its parent's: of their last runs, else as it is now.

    Parameters
    ----------
    catalog : Catalog
    name : str
    kind : {"pipeline", "chain"}

    Raises
    ------
    UnknownNameError
        There is none of this name.
    """
    child: PipelineInfo | ChainInfo = catalog.chain(name) if kind == "chain" else catalog.pipeline(name)
    if child.parent is None:
        return SourceDiff(child.name, None, "", [])
    table: Mapping[str, PipelineInfo | ChainInfo] = catalog.chains if kind == "chain" else catalog.pipelines
    parent = table.get(child.parent)
    if parent is None:
        return SourceDiff(child.name, child.parent, "", [child.parent], orphan=True)
    texts = [catalog.source(item) for item in (parent, child)]
    missing = [item.name for item, text in zip((parent, child), texts, strict=True) if text is None]
    diff = "" if missing else text_diff(str(texts[0]), str(texts[1]), str(parent.file), str(child.file))
    return SourceDiff(child.name, parent.name, diff, missing)


def text_diff(old: str, new: str, old_name: str, new_name: str) -> str:
    """Return a unified diff of two texts; empty where they are equal."""
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), old_name, new_name, lineterm="")
    return "".join(f"{line}\n" for line in lines)


@dataclass(frozen=True)
class Column:
    """A configuration in a comparison; `present` is False where there is none, and `error` says why."""

    label: str
    variant: str | None
    present: bool
    fingerprint: str | None = None
    error: str | None = None


@dataclass(frozen=True)
class Row:
    """A key in a comparison.

    Attributes
    ----------
    values : list
        Null where `present` is False.
    present : list of bool
    equal : bool
        Whether every column has it, with one value.
    """

    path: str
    values: list[Any]
    present: list[bool]
    equal: bool


@dataclass(frozen=True)
class Comparison:
    """Configurations side by side."""

    columns: list[Column]
    rows: list[Row]


def table_of(columns: Sequence[Column], configs: Sequence[Mapping[str, Any] | None]) -> Comparison:
    """Return configurations side by side, key by key; a column without one makes no row equal."""
    flat = [leaves(config) if config is not None else None for config in configs]
    rows = []
    for path in dict.fromkeys(path for item in flat if item is not None for path in item):
        present = [item is not None and path in item for item in flat]
        values = [item[path] if item is not None and path in item else None for item in flat]
        texts = {encoding.plain_text(value) for value in values}
        rows.append(Row(path, values, present, all(present) and len(texts) == 1))
    return Comparison(list(columns), rows)


def compare(catalog: Catalog, pipelines: Iterable[str], variant: str | Sequence[str]) -> Comparison:
    """Return the configurations of variants of several pipelines side by side.

    Parameters
    ----------
    catalog : Catalog
    pipelines : iterable of str
        Two or more.
    variant : str or sequence of str
        One name for all, which in a fork may go by ``forks_of``; or one for each pipeline.

    Raises
    ------
    UnknownNameError
        There is no such pipeline.
    RunError
        There are fewer than two, or not one variant for each.
    """
    named = list(pipelines)
    if len(named) < 2:
        raise RunError(f"a comparison is of two pipelines or more, not of {len(named)}")
    wanted = [variant] * len(named) if isinstance(variant, str) else list(variant)
    if len(wanted) != len(named):
        raise RunError(f"there are {len(named)} pipelines and {len(wanted)} variants; give one for all or one for each")
    columns: list[Column] = []
    configs: list[dict[str, Any] | None] = []
    for name, want in zip(named, wanted, strict=True):
        info = catalog.pipeline(name)
        found = info.variants.get(want)
        if found is None:
            found = next((item for item in info.variants.values() if item.forks_of == want), None)
        if found is None:
            columns.append(Column(info.name, None, False, error=f"{info.name} has no variant {want!r}"))
            configs.append(None)
        else:
            columns.append(Column(info.name, found.name, True, found.fingerprint))
            configs.append(found.config)
    return table_of(columns, configs)
