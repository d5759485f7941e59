"""What differs between variations of a chain, and between a chain and its parent."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diffract_dask.errors import RunError
from diffract_dask.runs.catalog import Catalog, ChainInfo, StepInfo, VariantInfo, VariationInfo
from diffract_dask.runs.differences import Column, Entry, Row, config_diff, table_of

__all__ = [
    "ChainDiff",
    "StepComparison",
    "StepDiff",
    "VariationComparison",
    "VariationDiff",
    "chain_diff",
    "variation_diff",
]


@dataclass(frozen=True)
class StepComparison:
    """One step of several variations side by side."""

    step: str
    pipeline: str
    columns: list[Column]
    rows: list[Row]


@dataclass(frozen=True)
class VariationComparison:
    """Several variations of a chain side by side, step by step."""

    chain: str
    variations: list[str]
    steps: list[StepComparison]


def variation_diff(catalog: Catalog, chain: str, variations: Iterable[str]) -> VariationComparison:
    """Return the configurations of variations of a chain side by side, step by step.

    Raises
    ------
    UnknownNameError
        There is no such chain or variation.
    RunError
        There are fewer than two.
    """
    info, named = catalog.chain(chain), list(variations)
    if len(named) < 2:
        raise RunError(f"a comparison is of two variations or more, not of {len(named)}")
    chosen = [catalog.variation(chain, name) for name in named]
    steps = []
    for step in info.steps:
        columns, configs = [], []
        for variation in chosen:
            found, error = _variant_of(catalog, step, variation)
            fingerprint = None if found is None else found.fingerprint
            columns.append(
                Column(variation.name, variation.mapping.get(step.name), found is not None, fingerprint, error)
            )
            configs.append(None if found is None else found.config)
        table = table_of(columns, configs)
        steps.append(StepComparison(step.name, step.pipeline, table.columns, table.rows))
    return VariationComparison(info.name, named, steps)


def _variant_of(catalog: Catalog, step: StepInfo, variation: VariationInfo) -> tuple[VariantInfo | None, str | None]:
    name = variation.mapping.get(step.name)
    if name is None:
        return None, variation.error or f"variation {variation.name!r} names no variant for step {step.name!r}"
    info = catalog.pipeline_of(step)
    if info is None:
        return None, f"nothing is known of pipeline {step.pipeline!r}"
    found = info.variants.get(name)
    return found, None if found else f"pipeline {step.pipeline!r} has no variant {name!r}"


@dataclass(frozen=True)
class StepDiff:
    """A step in which a variation differs from the parent's: another variant, another configuration, or both."""

    step: str
    kind: str
    parent: str | None
    child: str | None
    entries: list[Entry] = field(default_factory=list)


@dataclass(frozen=True)
class VariationDiff:
    """A variation beside the one of the parent chain that it corresponds to.

    Attributes
    ----------
    kind : {"matches", "differs", "only_in_child", "only_in_parent", "no_parent", "unresolved"}
    error : str or None
        Why it cannot be resolved.
    """

    variation: str
    kind: str
    parent_variation: str | None = None
    by: str | None = None
    base: str | None = None
    mapping: dict[str, str] = field(default_factory=dict)
    forks_of_unresolved: str | None = None
    error: str | None = None
    steps: list[StepDiff] = field(default_factory=list)


@dataclass(frozen=True)
class ChainDiff:
    """A chain against its parent, variation by variation."""

    chain: str
    parent: str | None
    orphan: bool
    steps: list[StepDiff]
    variations: list[VariationDiff]


def chain_diff(catalog: Catalog, chain: str) -> ChainDiff:
    """Return how a chain differs from its parent: its steps, and its variations by variant names and configurations.

    Raises
    ------
    UnknownNameError
        There is no such chain.
    """
    child = catalog.chain(chain)
    parent = catalog.chains.get(child.parent) if child.parent is not None else None
    if child.parent is None or parent is None:
        kind = "no_parent" if child.parent is None else "only_in_child"
        found = [
            VariationDiff(
                name, "unresolved" if item.error else kind, base=item.base, mapping=item.mapping, error=item.error
            )
            for name, item in child.variations.items()
        ]
        return ChainDiff(child.name, child.parent, child.parent is not None, [], found)
    found = [_variation_matched(catalog, parent, child, item) for item in child.variations.values()]
    taken = {match.parent_variation for match in found}
    found += [
        VariationDiff(name, "only_in_parent", name, base=item.base, mapping=item.mapping)
        for name, item in parent.variations.items()
        if name not in taken
    ]
    return ChainDiff(child.name, parent.name, False, _chain_steps(parent, child), found)


def _chain_steps(parent: ChainInfo, child: ChainInfo) -> list[StepDiff]:
    old = {step.name: step.pipeline for step in parent.steps}
    new = {step.name: step.pipeline for step in child.steps}
    found = []
    for name in dict.fromkeys([*old, *new]):
        if old.get(name) != new.get(name):
            kind = "added" if name not in old else "removed" if name not in new else "changed"
            found.append(StepDiff(name, kind, old.get(name), new.get(name)))
    return found


def _variation_matched(catalog: Catalog, parent: ChainInfo, child: ChainInfo, item: VariationInfo) -> VariationDiff:
    told: dict[str, Any] = {"base": item.base, "mapping": item.mapping, "error": item.error}
    if item.error is not None:
        return VariationDiff(item.name, "unresolved", **told)
    if item.forks_of is not None and item.forks_of not in parent.variations:
        return VariationDiff(item.name, "only_in_child", forks_of_unresolved=item.forks_of, **told)
    target, by = (item.forks_of, "forks_of") if item.forks_of is not None else (item.name, "name")
    if target not in parent.variations:
        return VariationDiff(item.name, "only_in_child", **told)
    other = parent.variations[target]
    steps = _step_diffs(catalog, parent, child, other, item)
    return VariationDiff(item.name, "differs" if steps else "matches", target, by, steps=steps, **told)


def _step_diffs(
    catalog: Catalog, parent: ChainInfo, child: ChainInfo, old: VariationInfo, new: VariationInfo
) -> list[StepDiff]:
    tables = {step.name: step for step in parent.steps}, {step.name: step for step in child.steps}
    found = []
    for step in dict.fromkeys([*old.mapping, *new.mapping]):
        names = old.mapping.get(step), new.mapping.get(step)
        if None in names:
            found.append(StepDiff(step, "added" if names[0] is None else "removed", *names))
            continue
        configs = [
            found_variant.config if (found_variant := _variant_of(catalog, table[step], item)[0]) else {}
            for table, item in zip(tables, (old, new), strict=True)
        ]
        entries = config_diff(*configs)
        if entries or names[0] != names[1]:
            found.append(StepDiff(step, "differs" if entries else "renamed", *names, entries=entries))
    return found
