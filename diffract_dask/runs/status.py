"""Where a chain stands, which runs belong together, and what they scored: from files alone."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from diffract_dask.runs.catalog import Catalog, ChainInfo, StepInfo, VariationInfo
from diffract_dask.runs.records import Metric, RunRecord

__all__ = ["Progress", "Scoreboard", "Sibling", "StepProgress", "progress", "scoreboard", "siblings"]


@dataclass(frozen=True)
class StepProgress:
    """One step of a variation.

    Attributes
    ----------
    status : str
        done, running, failed, interrupted, partial, pending; stale: there are runs, of another configuration or
        code; unspecified: there is no such variant.
    fingerprint : str or None
        Of the run that it should have.
    run : str or None
        Its folder, relative to the root; None if there is none.
    stale : list of str
        Folders of runs on behalf of this variation with another fingerprint, the newest first.
    """

    step: str
    pipeline: str
    variant: str | None
    consumes: list[str]
    status: str
    fingerprint: str | None = None
    run: str | None = None
    stages: dict[str, str] = field(default_factory=dict)
    errors: dict[str, str] = field(default_factory=dict)
    stale: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Progress:
    """Where a variation of a chain stands.

    Attributes
    ----------
    outdated : bool
        A source is newer than what is known of the chain and its pipelines: the fingerprints are those of before.
    error : str or None
        Why the variation cannot be resolved.
    """

    chain: str
    variation: str
    status: str
    steps: list[StepProgress]
    outdated: bool
    error: str | None = None


def progress(catalog: Catalog, chain: str, variation: str) -> Progress:
    """Return where each step of a variation stands: of the run with the very fingerprint that is expected now.

    Raises
    ------
    UnknownNameError
        There is no such chain or variation.
    """
    info, item = catalog.chain(chain), catalog.variation(chain, variation)
    expected = catalog.expected(info, item)
    steps = [_step(catalog, info, item, step, expected.get(step.name)) for step in info.steps]
    outdated = info.outdated or any(found.outdated for step in info.steps if (found := catalog.pipeline_of(step)))
    return Progress(info.name, variation, _rolled_up(step.status for step in steps), steps, outdated, item.error)


def _step(
    catalog: Catalog, chain: ChainInfo, variation: VariationInfo, step: StepInfo, fingerprint: str | None
) -> StepProgress:
    variant = variation.mapping.get(step.name)
    told: dict[str, Any] = {"pipeline": step.pipeline, "variant": variant, "consumes": list(step.consumes)}
    record = None
    if variant is not None and fingerprint is not None:
        record = catalog.runs.exact(step.pipeline, variant, fingerprint)
    if record is not None:
        return StepProgress(
            step.name,
            status=record.status,
            fingerprint=fingerprint,
            run=record.where,
            stages=dict(record.stage_status),
            errors=dict(record.errors),
            **told,
        )
    stale = [
        other.where
        for other in catalog.runs.list_runs(step.pipeline, variant)
        if any((at.get("chain"), at.get("variation")) == (chain.name, variation.name) for at in other.memberships)
    ]
    pipeline = catalog.pipeline_of(step)
    known = pipeline is not None and variant in pipeline.variants
    status = "stale" if stale else "pending" if known else "unspecified"
    return StepProgress(step.name, status=status, fingerprint=fingerprint, stale=stale, **told)


def _rolled_up(statuses: Iterable[str]) -> str:
    found = list(statuses)
    for name in ("failed", "interrupted", "running", "unspecified", "stale", "partial"):
        if name in found:
            return name
    return "done" if all(status == "done" for status in found) else "pending"


@dataclass(frozen=True)
class Sibling:
    """The run of another variation of the same chain at the same step; `run` is None where there is none yet."""

    chain: str
    variation: str
    step: str
    variant: str | None
    run: str | None
    same: bool


def siblings(catalog: Catalog, record: RunRecord) -> list[Sibling]:
    """Return the runs of the other variations of every chain that a run belongs to, at its step.

    `same` marks variations that share this very run.
    """
    found: list[Sibling] = []
    own = {(at.get("chain"), at.get("variation"), at.get("step")) for at in record.memberships}
    for chain in dict.fromkeys(str(at["chain"]) for at in record.memberships if at.get("chain")):
        if chain in catalog.chains:
            found += _declared_siblings(catalog, catalog.chains[chain], record, own)
        else:
            found += _recorded_siblings(catalog, chain, record, own)
    return found


def _declared_siblings(catalog: Catalog, chain: ChainInfo, record: RunRecord, own: set[Any]) -> list[Sibling]:
    found = []
    for step in chain.steps:
        if step.pipeline != record.pipeline:
            continue
        for item in chain.variations.values():
            if (chain.name, item.name, step.name) in own or (chain.name, item.name, None) in own:
                continue
            variant, fingerprint = item.mapping.get(step.name), catalog.expected(chain, item).get(step.name)
            other = None
            if variant is not None and fingerprint is not None:
                other = catalog.runs.exact(step.pipeline, variant, fingerprint)
            where = None if other is None else other.where
            found.append(Sibling(chain.name, item.name, step.name, variant, where, where == record.where))
    return found


def _recorded_siblings(catalog: Catalog, chain: str, record: RunRecord, own: set[Any]) -> list[Sibling]:
    found: dict[tuple[str, str], Sibling] = {}
    for other in catalog.runs.list_runs(record.pipeline, chain=chain):
        for at in other.memberships:
            key = str(at.get("variation")), str(at.get("step") or "")
            if (
                at.get("chain") == chain
                and (chain, at.get("variation"), at.get("step")) not in own
                and key not in found
            ):
                found[key] = Sibling(chain, key[0], key[1], other.variant, other.where, other.where == record.where)
    return list(found.values())


@dataclass(frozen=True)
class MetricColumn:
    """A metric of the scoreboard: ``<step>.<stage>.<metric>``."""

    key: str
    units: str | None
    direction: str | None


@dataclass(frozen=True)
class ScoreRow:
    """What one variation scored.

    Attributes
    ----------
    values : dict
        By metric; a metric that it lacks is left out.
    deltas : dict
        Difference to the baseline, of numbers that are not truth values.
    better : dict
        Whether it is better than the baseline, of metrics with a direction; None where both are equal.
    """

    variation: str
    status: str
    values: dict[str, Any]
    deltas: dict[str, float] = field(default_factory=dict)
    better: dict[str, bool | None] = field(default_factory=dict)
    error: str | None = None


@dataclass(frozen=True)
class Scoreboard:
    """Variations of a chain by metrics."""

    chain: str
    baseline: str | None
    metrics: list[MetricColumn]
    rows: list[ScoreRow]
    outdated: bool


def scoreboard(catalog: Catalog, chain: str, baseline: str | None = None) -> Scoreboard:
    """Return what the variations of a chain scored: of the runs with the very fingerprints that are expected now.

    Raises
    ------
    UnknownNameError
        There is no such chain, or no such variation for the baseline.
    """
    info = catalog.chain(chain)
    if baseline is not None:
        catalog.variation(chain, baseline)
    columns: dict[str, MetricColumn] = {}
    seen: dict[tuple[str, str], RunRecord | None] = {}
    rows = [_scores(catalog, info, item, columns, seen) for item in info.variations.values()]
    if baseline is not None:
        against = next(row for row in rows if row.variation == baseline)
        rows = [_with_deltas(row, against, columns) for row in rows]
    outdated = info.outdated or any(found.outdated for step in info.steps if (found := catalog.pipeline_of(step)))
    return Scoreboard(info.name, baseline, [columns[key] for key in sorted(columns)], rows, outdated)


def _scores(
    catalog: Catalog,
    chain: ChainInfo,
    variation: VariationInfo,
    columns: dict[str, MetricColumn],
    seen: dict[tuple[str, str], RunRecord | None],
) -> ScoreRow:
    values: dict[str, Any] = {}
    statuses = []
    expected = catalog.expected(chain, variation)
    for step in chain.steps:
        fingerprint, variant = expected.get(step.name), variation.mapping.get(step.name)
        record = None
        if fingerprint is not None and variant is not None:
            at = (f"{step.pipeline}/{variant}", fingerprint)
            if at not in seen:
                seen[at] = catalog.runs.exact(step.pipeline, variant, fingerprint)
            record = seen[at]
        statuses.append("pending" if record is None else record.status)
        if record is None:
            continue
        for stage, metrics in catalog.runs.metrics(record).items():
            for name, metric in metrics.items():
                key = f"{step.name}.{stage}.{name}"
                values[key] = metric.value
                _note(columns, key, metric)
    return ScoreRow(variation.name, _rolled_up(statuses), values, error=variation.error)


def _note(columns: dict[str, MetricColumn], key: str, metric: Metric) -> None:
    known = columns.get(key)
    if known is None or (known.units is None and known.direction is None):
        columns[key] = MetricColumn(key, metric.units, metric.direction)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _with_deltas(row: ScoreRow, against: ScoreRow, columns: dict[str, MetricColumn]) -> ScoreRow:
    deltas: dict[str, float] = {}
    better: dict[str, bool | None] = {}
    for key, value in row.values.items():
        other = against.values.get(key)
        if not (_is_number(value) and _is_number(other)):
            continue
        try:
            deltas[key] = value - other
        except OverflowError:  # an integer beyond all floats
            continue
        direction = columns[key].direction
        if direction is not None and value == value and other == other:
            better[key] = None if value == other else (value > other) == (direction == "higher")
    return ScoreRow(row.variation, row.status, row.values, deltas, better, row.error)
