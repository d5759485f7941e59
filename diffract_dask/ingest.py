"""Values from elsewhere: stored beside what is computed, marked, and never taken for it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import ModelNotFoundError, ParameterNotFoundError, SessionError, did_you_mean
from diffract_dask.fields import MISSING, Status
from diffract_dask.kernel import Registry
from diffract_dask.selection import Selection
from diffract_dask.store import Commit, Store
from diffract_dask.table import Aggregate

if TYPE_CHECKING:
    from diffract_dask.view import View

__all__ = [
    "aggregates",
    "erase_aggregates",
    "ingest_aggregates",
    "ingest_metrics",
    "of_models",
    "rename_in_aggregates",
]

_ATTR = "ingested_aggregates"


def ingest_metrics(
    store: Store,
    registry: Registry,
    selection: Selection,
    fields_by_uid: Mapping[str, Mapping[str, Any]],
    force: bool,
) -> None:
    """Store scalar values by uid and field, marked as ingested."""
    view = store.view()
    place = _places(store, view, selection)
    found: dict[tuple[int, str], dict[int, float]] = {}
    for uid, given in fields_by_uid.items():
        if uid not in place:
            raise ParameterNotFoundError(
                f"no parameter has the uid {uid!r}; models.parameters() lists them.{did_you_mean(str(uid), place)}"
            )
        if not isinstance(given, Mapping):
            raise SessionError(f"{uid}: give the values by field, for example {{'my_metric': 1.5}}; got {given!r}")
        model, column = place[uid]
        for name, value in given.items():
            where = f"{view.model_ids[model]}: {view.names[column]}: {name}"
            number = _number(registry, name, value, where)
            held = name in view.status and view.status[name][model, column] != MISSING
            if held and not force:
                raise SessionError(f"{where}: there is a value already; pass force=True to replace it")
            found.setdefault((model, name), {})[column] = number
    commits: dict[int, Commit] = {}
    for (model, name), numbers in found.items():
        commit = commits.setdefault(model, Commit(view.model_ids[model]))
        columns = np.array(list(numbers), np.intp)
        rows = view.row[model, columns].astype(np.intp)
        status = np.full(len(rows), Status.INGESTED, np.uint8)
        commit.values[name] = (rows, np.array(list(numbers.values()), np.float64), status)
        alone = columns[~_others_held(registry, view, name, model)[columns]]
        if len(alone):
            kernel = registry.producer(name).name
            rows = view.row[model, alone].astype(np.intp)
            if kernel in commit.keys:
                rows = np.union1d(commit.keys[kernel][0], rows)
            commit.keys[kernel] = (rows, np.zeros(len(rows), np.uint64))
    if commits:
        store.commit(list(commits.values()))
        store.refresh_view()


def _others_held(registry: Registry, view: View, name: str, model: int) -> NDArray[np.bool_]:
    """Return where the key of a field's kernel must stay, because it vouches for other outputs (or there is none)."""
    if name not in registry.fields:
        return np.ones(len(view.names), bool)
    others = [other for other in registry.producer(name).outputs if other != name and other in view.status]
    held = [~np.isin(view.status[other][model], (MISSING, Status.INGESTED)) for other in others]
    found: NDArray[np.bool_] = np.any([np.zeros(len(view.names), bool), *held], axis=0)
    return found


def _places(store: Store, view: View, selection: Selection) -> dict[str, tuple[int, int]]:
    place: dict[str, tuple[int, int]] = {}
    mask = selection.mask(view)
    for model in np.flatnonzero(mask.any(axis=1)):
        uids = store.parameters(view.model_ids[model]).uid
        for column in np.flatnonzero(mask[model]):
            place[str(uids[view.row[model, column]])] = (int(model), int(column))
    return place


def _number(registry: Registry, name: Any, value: Any, where: str) -> float:
    if name in registry.fields:
        if registry.field(name).dims or registry.producer(name).level != "slice":
            raise SessionError(f"{where}: only scalar slice-level fields can be ingested as metrics")
    elif not isinstance(name, str) or not name.isidentifier():
        raise SessionError(f"{where}: a field name is an identifier: letters, digits and underscores")
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise SessionError(f"{where}: {value!r} is not a number") from error


# Of whole models: an attribute of the first model that a value is of.


def ingest_aggregates(store: Store, given: Iterable[Mapping[str, Any]], force: bool) -> None:
    """Store values of models or groups of models with the first model that they are of."""
    known = store.model_ids()
    changed: dict[str, list[dict[str, Any]]] = {}
    for item in given:
        entry = _entry(item, known)
        home = entry["context_models"][0]
        there = changed.setdefault(home, list(store.model_attrs(home).get(_ATTR, [])))
        same = [e for e in there if all(e[k] == entry[k] for k in ("field", "context_models", "context_params"))]
        if same and not force:
            models = ", ".join(entry["context_models"])
            raise SessionError(f"{entry['field']} of {models}: there is a value already; pass force=True")
        there[:] = [e for e in there if e not in same] + [entry]
    for model_id, entries in changed.items():
        store.set_model_attrs(model_id, **{_ATTR: entries})


def _entry(item: Any, known: Sequence[str]) -> dict[str, Any]:
    missing = [key for key in ("field_name", "context_models", "value") if key not in item] if _is_mapping(item) else []
    if missing or not _is_mapping(item):
        raise SessionError(f"an aggregate is a dict with field_name, context_models and value; got {item!r}")
    models, params = _texts(item["context_models"]), _texts(item.get("context_params") or ())
    if not models:
        raise SessionError(f"{item['field_name']}: context_models is empty; name the models that the value is of")
    for model_id in models:
        if model_id not in known:
            raise ModelNotFoundError(f"no model {model_id!r}.{did_you_mean(model_id, known)}")
    value = np.asarray(item["value"]).tolist()
    return {
        "field": str(item["field_name"]),
        "context_models": sorted(models),
        "context_params": sorted(params),
        "value": value,
    }


def _is_mapping(item: Any) -> bool:
    return isinstance(item, Mapping)


def _texts(given: Any) -> list[str]:
    return [given] if isinstance(given, str) else [str(text) for text in given]


def aggregates(store: Store, selection: Selection) -> list[Aggregate]:
    """Return the ingested aggregates whose models are all in the store and in scope."""
    found: list[Aggregate] = []
    chosen = selection.models(store.model_ids())
    for model_id in chosen:
        for item in store.model_attrs(model_id).get(_ATTR, []):
            models, names = tuple(item["context_models"]), tuple(item["context_params"])
            if set(models) <= set(chosen):
                found.append(
                    {"field": item["field"], "context_models": models, "context_params": names, "value": item["value"]}
                )
    return found


def of_models(given: Iterable[Aggregate], name: str, view: View) -> NDArray[np.float64]:
    """Return an ingested aggregate as one number per model of `view`; NaN where it has none, or no number."""
    values = np.full(len(view.model_ids), np.nan)
    for item in given:
        single = len(item["context_models"]) == 1 and not item["context_params"]
        if item["field"] == name and single and isinstance(item["value"], (int, float)):
            values[view.model_ids.index(item["context_models"][0])] = item["value"]
    return values


def erase_aggregates(store: Store, selection: Selection, names: Sequence[str] | None) -> list[str]:
    """Remove ingested aggregates (`names` None: all) of the models in scope, and return the fields removed."""
    gone: list[str] = []
    if not selection.whole_models:
        return gone
    chosen = set(selection.models(store.model_ids()))
    for model_id in sorted(chosen):
        entries = store.model_attrs(model_id).get(_ATTR, [])
        erased = [e for e in entries if (names is None or e["field"] in names) and set(e["context_models"]) <= chosen]
        if erased:
            kept = [entry for entry in entries if entry not in erased]
            store.set_model_attrs(model_id, **{_ATTR: kept or None})
            gone += [entry["field"] for entry in erased]
    return list(dict.fromkeys(gone))


def rename_in_aggregates(store: Store, old: str, new: str) -> None:
    """Let ingested aggregates of a model follow its new id."""
    moved: list[dict[str, Any]] = []
    for model_id in store.model_ids():
        entries = store.model_attrs(model_id).get(_ATTR, [])
        mine = [entry for entry in entries if old in entry["context_models"]]
        if mine:
            store.set_model_attrs(model_id, **{_ATTR: [entry for entry in entries if entry not in mine] or None})
            moved += mine
    for entry in moved:
        models = sorted(new if model == old else model for model in entry["context_models"])
        there = store.model_attrs(models[0]).get(_ATTR, [])
        store.set_model_attrs(models[0], **{_ATTR: [*there, {**entry, "context_models": models}]})
