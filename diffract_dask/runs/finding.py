"""Finding runs, variants and chains by fingerprint, name or value of the configuration."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from diffract_dask.errors import RunError
from diffract_dask.runs import encoding
from diffract_dask.runs.catalog import Catalog
from diffract_dask.runs.config import UNSET
from diffract_dask.runs.differences import leaves

__all__ = ["Found", "find"]

_HEX = re.compile(r"[0-9a-f]{4,64}")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    "=": lambda a, b: a == b,
    "!=": lambda a, b: a != b,
    "<": lambda a, b: a < b,
    "<=": lambda a, b: a <= b,
    ">": lambda a, b: a > b,
    ">=": lambda a, b: a >= b,
}
_SPELT = {"none": None, "true": True, "false": False, "inf": float("inf"), "-inf": float("-inf"), "nan": float("nan")}
_CONDITION = re.compile(r"\s*([^=<>!]+?)\s*(<=|>=|!=|==|=|<|>)\s*(.+?)\s*")


@dataclass(frozen=True)
class Found:
    """Something that was found.

    Attributes
    ----------
    kind : {"run", "variant", "pipeline", "chain", "variation"}
    name : str
        ``pipeline/variant`` of runs and variants, ``chain/variation`` of variations.
    by : {"fingerprint", "name", "config"}
    fingerprint : str or None
    run : str or None
        Folder relative to the root.
    """

    kind: str
    name: str
    by: str
    fingerprint: str | None = None
    run: str | None = None
    started: str | None = None
    status: str | None = None


def find(catalog: Catalog, query: str) -> list[Found]:
    """Return what a query finds.

    Parameters
    ----------
    catalog : Catalog
    query : str
        The start of a fingerprint (four digits or more); a part of a name; or a condition on the configuration:
        ``scan.step=1e-8``, ``probe.amp>0.1``.

    Raises
    ------
    RunError
        The query is empty.
    """
    text = query.strip()
    if not text:
        raise RunError("a query is the start of a fingerprint, a part of a name, or a condition such as scan.step=1e-8")
    condition, lowered = _CONDITION.fullmatch(text), text.lower()
    if condition:
        found = _by_config(catalog, *condition.groups())
    else:
        found = _by_fingerprint(catalog, lowered) if _HEX.fullmatch(lowered) else []
    return found + [item for item in _by_name(catalog, lowered) if (item.kind, item.name, item.run) not in _ids(found)]


def _ids(found: list[Found]) -> set[tuple[str, str, str | None]]:
    return {(item.kind, item.name, item.run) for item in found}


def _by_fingerprint(catalog: Catalog, prefix: str) -> list[Found]:
    found = [
        Found("variant", f"{info.name}/{item.name}", "fingerprint", item.fingerprint)
        for info in catalog.pipelines.values()
        for item in info.variants.values()
        if item.fingerprint.startswith(prefix)
    ]
    for record in catalog.runs.find(prefix):
        name = f"{record.pipeline}/{record.variant}"
        found.append(Found("run", name, "fingerprint", record.fingerprint, record.where, record.started, record.status))
    return found


def _by_name(catalog: Catalog, text: str) -> list[Found]:
    found = []
    for info in catalog.pipelines.values():
        if text in info.name.lower():
            found.append(Found("pipeline", info.name, "name"))
        for item in info.variants.values():
            name = f"{info.name}/{item.name}"
            if text in name.lower():
                found.append(Found("variant", name, "name", item.fingerprint))
    for chain in catalog.chains.values():
        if text in chain.name.lower():
            found.append(Found("chain", chain.name, "name"))
        found += [
            Found("variation", f"{chain.name}/{name}", "name")
            for name in chain.variations
            if text in f"{chain.name}/{name}".lower()
        ]
    for record in catalog.runs.list_runs():
        name = f"{record.pipeline}/{record.variant}"
        if text in name.lower():
            found.append(Found("run", name, "name", record.fingerprint, record.where, record.started, record.status))
    return found


def _by_config(catalog: Catalog, path: str, sign: str, wanted: str) -> list[Found]:
    test = _COMPARE["=" if sign == "==" else sign]
    try:
        value: Any = encoding.decode(encoding.loads(wanted))
    except ValueError:
        value = _SPELT.get(wanted.lower(), wanted.strip("'\""))

    def holds(config: Any) -> bool:
        given = leaves(config) if isinstance(config, dict) else {}
        found = given.get(path, given.get(f"'{path}'", UNSET))
        if found is UNSET:
            return False
        present = encoding.decode(found)
        if isinstance(present, bool) != isinstance(value, bool):
            return False
        try:
            return bool(test(present, value))
        except (TypeError, ValueError):
            return False

    found = [
        Found("variant", f"{info.name}/{item.name}", "config", item.fingerprint)
        for info in catalog.pipelines.values()
        for item in info.variants.values()
        if holds(item.config)
    ]
    for record in catalog.runs.list_runs():
        if holds(encoding.read_json(f"{record.fdir}/config.json", {})):
            name = f"{record.pipeline}/{record.variant}"
            found.append(Found("run", name, "config", record.fingerprint, record.where, record.started, record.status))
    return found
