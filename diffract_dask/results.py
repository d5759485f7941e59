"""What a session reads from the store: datasets, tables, status; and what it erases or takes in from elsewhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from diffract_dask import config, memory
from diffract_dask.errors import (
    FieldNotFoundError,
    ModelNotFoundError,
    ParameterNotFoundError,
    SessionError,
    StaleValuesWarning,
    did_you_mean,
)
from diffract_dask.export import Aggregate, Sources, Table, export_table, tabulate
from diffract_dask.fields import MISSING, STATUS_MEANING, Status
from diffract_dask.kernel import Registry
from diffract_dask.modellevel import evaluate_models
from diffract_dask.plan import Plan, field_attrs, make_plan
from diffract_dask.selection import Selection
from diffract_dask.store import Commit, Store
from diffract_dask.view import public_attrs

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from diffract_dask.view import View

__all__ = ["EraseSummary", "ResultsOf", "list_kernels", "parameter_table"]

_INGESTED = "ingested_aggregates"


@dataclass(frozen=True)
class EraseSummary:
    """What an ``erase`` removed: models, fields, and the uids of the parameters concerned."""

    models: tuple[str, ...] = ()
    fields: tuple[str, ...] = ()
    affected_uids: tuple[str, ...] = ()


@dataclass(frozen=True)
class ResultsOf:
    """Results of one store under a selection, as the present configuration sees them."""

    store: Store
    registry: Registry
    selection: Selection
    settings: Mapping[str, Any]

    # ------------------------------------------------------------------------------------------ reading

    def dataset(self, fields: Sequence[str]) -> xr.Dataset:
        """Return `fields` (default: every stored scalar field) over (model_id, name)."""
        import xarray as xr

        view = self.store.view()
        names = list(dict.fromkeys(fields)) or [*view.values, *view.model_values]
        self._require(names, view)
        mask = self.selection.mask(view)
        plan = self._plan([n for n in names if n in self.registry.fields], view, mask)
        models = np.flatnonzero(np.isin(view.model_ids, self.selection.models(view.model_ids)))
        models = models[np.argsort([self.store.model_ids().index(view.model_ids[i]) for i in models])]
        columns = (
            np.flatnonzero(mask.any(axis=0))
            if not self.selection.whole_models
            else np.flatnonzero((mask & view.present)[models].any(axis=0))
        )
        variables: dict[str, Any] = {}
        for name in names:
            variables.update(self._variable(name, view, mask, models, columns, plan))
        self._warn_if_stale(plan)
        return xr.Dataset(variables, view.coordinates(models, columns))

    def _variable(
        self,
        name: str,
        view: View,
        mask: NDArray[np.bool_],
        models: NDArray[np.intp],
        columns: NDArray[np.intp],
        plan: Plan | None,
    ) -> dict[str, Any]:
        attrs = {"long_name": name.replace("_", " "), "units": "1", **view.attrs.get(name, {})}
        known = name in self.registry.fields
        if known:
            kernel = self.registry.producer(name)
            attrs = {**field_attrs(kernel, name, self.registry.params(kernel.name)), **view.attrs.get(name, {})}
        attrs = public_attrs(attrs)
        level = self.registry.producer(name).level if known else ("slice" if name in view.values else "model")
        if level == "model":
            values = np.full(len(view.model_ids), np.nan)
            if self.selection.whole_models and name in view.model_values:
                values = view.model_values[name]
            elif not self.selection.whole_models and plan is not None:
                values = self._partial(plan, name)
            return {name: ("model_id", values[models], attrs)}
        if known and self.registry.field(name).dims:
            return self._arrays(name, view, mask, models, columns, attrs)
        values = view.values[name] if name in view.values else np.full(mask.shape, np.nan)
        shown = np.where(mask, values, np.nan)[np.ix_(models, columns)]
        return {name: (("model_id", "name"), shown, attrs)}

    def _arrays(
        self,
        name: str,
        view: View,
        mask: NDArray[np.bool_],
        models: NDArray[np.intp],
        columns: NDArray[np.intp],
        attrs: dict[str, Any],
    ) -> dict[str, Any]:
        """Return a ragged array field, padded with NaN at the end, and its length."""
        dims = self.registry.field(name).dims
        have = mask & (view.status[name] != MISSING) if name in view.status else np.zeros_like(mask)
        have = have[np.ix_(models, columns)]
        rows, cols = (x[np.ix_(models, columns)] for x in (view.rows, view.cols))
        size = {"sval": np.minimum(rows, cols), "row": rows, "col": cols}
        inner = tuple(int(size[dim][have].max(initial=0)) for dim in dims)
        values = np.full((*have.shape, *inner), np.nan)
        for i, model in enumerate(models):
            at = np.flatnonzero(have[i])
            found = self.store.arrays(view.model_ids[model], name, view.row[model, columns[at]])
            for j, array in zip(at, found, strict=True):
                place: tuple[Any, ...] = (i, j, *(slice(0, n) for n in array.shape))
                values[place] = array
        result = {name: (("model_id", "name", *dims), values, attrs)}
        if len(dims) == 1:
            result[f"{name}_size"] = (
                ("model_id", "name"),
                np.where(have, size[dims[0]], 0),
                {"long_name": f"Number of values of {name}", "units": "1"},
            )
        return result

    def _partial(self, plan: Plan, name: str) -> NDArray[np.float64]:
        """Return a model-level field over the parameters in scope, where all its inputs are stored and fresh."""
        values = np.full(len(plan.view.model_ids), np.nan)
        if any(step.run.any() or step.copy.any() for step in plan.steps.values()):
            return values
        for model, (value, _, _) in evaluate_models(plan, self.store).get(name, {}).items():
            values[model] = value
        return values

    def _plan(
        self, fields: Sequence[str], view: View, mask: NDArray[np.bool_], *, whole: bool | None = None
    ) -> Plan | None:
        """Return the plan for `fields`, only to see what is stale; it is never run."""
        if not fields:
            return None
        unlimited = memory.Resources(1, 1, 2**62, False)
        return make_plan(
            list(fields),
            view=view,
            store=self.store,
            registry=self.registry,
            selected=mask,
            whole_models=self.selection.whole_models if whole is None else whole,
            resources=unlimited,
            settings=self.settings,
        )

    def _warn_if_stale(self, plan: Plan | None) -> None:
        if plan is None:
            return
        stale = [
            name
            for name, step in plan.steps.items()
            if name in plan.view.keys
            and (plan.scope & ~step.fresh & (plan.view.keys[name][plan.cells.model, plan.cells.name] != 0)).any()
        ]
        shown = [name for name in stale if set(plan.steps[name].stored_fields) & set(plan.fields)]
        if shown:
            warnings.warn(
                f"stored values of {', '.join(sorted(shown))} were computed with other parameters, another version or "
                "other weights; compute.apply(…) computes them anew, results.status(…) tells which",
                StaleValuesWarning,
                stacklevel=4,
            )

    def _require(self, names: Iterable[str], view: View) -> None:
        """FieldNotFoundError for a field that no kernel produces and the store does not hold."""
        known = {*self.registry.fields, *view.values, *view.model_values, *(a["field"] for a in self._given(view))}
        for name in names:
            if name not in known:
                raise FieldNotFoundError(
                    f"no kernel produces the field {name!r} and the store does not hold it.{did_you_mean(name, known)}"
                )

    def status(self, fields: Sequence[str]) -> xr.Dataset:
        """Return ``state`` and ``reason`` as text over (field, model_id, name)."""
        import xarray as xr

        view = self.store.view()
        names = list(dict.fromkeys(fields)) or [*view.status, *view.model_status]
        self._require(names, view)
        mask = self.selection.mask(view)
        models = np.array([view.model_ids.index(m) for m in self.selection.models(self.store.model_ids())], np.intp)
        columns = np.flatnonzero(mask.any(axis=0))
        plan = self._plan([n for n in names if n in self.registry.fields], view, mask)
        state = np.full((len(names), *mask.shape), "", object)
        reason = state.copy()
        for i, name in enumerate(names):
            self._state_of(name, view, mask, plan, state[i], reason[i])
        at = np.ix_(np.arange(len(names)), models, columns)
        coordinates = {**view.coordinates(models, columns), "field": np.array(names, object)}
        dims = ("field", "model_id", "name")
        return xr.Dataset({"state": (dims, state[at]), "reason": (dims, reason[at])}, coordinates)

    def _state_of(
        self,
        name: str,
        view: View,
        mask: NDArray[np.bool_],
        plan: Plan | None,
        state: NDArray[np.object_],
        reason: NDArray[np.object_],
    ) -> None:
        """Fill in the state and the reason of one field for every parameter in scope."""
        is_model = name in self.registry.fields and self.registry.producer(name).level == "model"
        is_model |= name not in self.registry.fields and name not in view.status
        codes = np.full(mask.shape, MISSING, np.uint8)
        table = view.model_status if is_model else view.status
        if name in table:
            codes[:] = table[name][:, np.newaxis] if is_model else table[name]
        fresh = self._fresh(name, view, plan, is_model)
        for model, column in zip(*np.nonzero(mask), strict=True):
            code = int(codes[model, column])
            if not view.analysed[model, column] and not is_model:
                state[model, column], reason[model, column] = "skipped", self._skip(view, model, column)
            elif code == MISSING:
                state[model, column] = "missing"
            elif code == Status.INGESTED:
                state[model, column] = "ingested"
            elif not fresh[model, column]:
                state[model, column], reason[model, column] = "stale", "parameter, version, weights or inputs changed"
            elif code == Status.FAILED:
                who = self.registry.producer(name).name
                found = self.store.failures(view.model_ids[model])
                key = ("" if is_model else view.names[column], who)
                state[model, column], reason[model, column] = "failed", found.get(key, STATUS_MEANING[Status.FAILED])
            else:
                state[model, column] = "fresh"
                reason[model, column] = STATUS_MEANING[Status(code)] if code else ""

    def _fresh(self, name: str, view: View, plan: Plan | None, is_model: bool) -> NDArray[np.bool_]:
        fresh = np.zeros(view.present.shape, bool)
        if plan is None or name not in self.registry.fields:
            return fresh
        kernel = self.registry.producer(name).name
        if is_model:
            fresh[:] = ~plan.model_steps[kernel].run[:, np.newaxis]
        else:
            fresh[plan.cells.model, plan.cells.name] = plan.steps[kernel].fresh
        return fresh

    def _skip(self, view: View, model: int, column: int) -> str:
        parameters = self.store.parameters(view.model_ids[model])
        return str(parameters.skip_reason[view.row[model, column]])

    # ------------------------------------------------------------------------------------------ exporting

    def export(
        self,
        fields: Sequence[str],
        sources: str,
        export_format: str | None,
        path: str | os.PathLike[str] | None,
        options: Mapping[str, Any],
    ) -> Any:
        """Return or write a :class:`~diffract_dask.export.Table` of `fields` in one of the formats."""
        if not fields:
            raise SessionError("name the fields to export, for example export_metrics('frob_norm', 'stable_rank')")
        default = str(config.get("export-format", self.settings))
        return export_table(self.table(fields, sources), export_format, path, default=default, **options)

    def table(self, fields: Sequence[str], sources: str = "metrics") -> Table:
        """Return the rows of an export: every parameter in scope that has a value or could have one."""
        view = self.store.view()
        names = list(dict.fromkeys(fields))
        self._require(names, view)
        given = self._given(view)
        held = [n for n in names if n in self.registry.fields or n in view.values or n in view.model_values]
        dataset = self.dataset(held)
        missing: dict[str, NDArray[np.bool_]] = {}
        models = [view.model_ids.index(str(m)) for m in dataset.model_id.values]
        columns = [view.names.index(str(n)) for n in dataset.name.values]
        for name in held:
            if dataset[name].dims[:2] == ("model_id", "name"):
                status = view.status[name] if name in view.status else np.full(view.present.shape, MISSING)
                missing[name] = status[np.ix_(models, columns)] == MISSING
            elif self.selection.whole_models:
                status = view.model_status[name] if name in view.model_status else np.full(len(view.model_ids), MISSING)
                missing[name] = status[models] == MISSING
            else:
                missing[name] = np.isnan(dataset[name].values)
        declared = {name: self.registry.field(name) for name in names if name in self.registry.fields}
        kept = [a for a in given if a["field"] in names]
        rows = self._parameter_rows(view)
        return tabulate(
            dataset, rows, names, declared=declared, missing=missing, aggregates=kept, sources=cast(Sources, sources)
        )

    def _parameter_rows(self, view: View) -> list[dict[str, Any]]:
        """Return identity and metadata of the analysed parameters in scope, by model, then name."""
        rows: list[dict[str, Any]] = []
        mask = self.selection.mask(view) & view.analysed
        for model_id in self.selection.models(self.store.model_ids()):
            model = view.model_ids.index(model_id)
            parameters = self.store.parameters(model_id)
            for column in np.flatnonzero(mask[model]):
                i = int(view.row[model, column])
                rows.append(
                    {
                        "uid": parameters.uid[i],
                        "name": parameters.name[i],
                        "model_id": model_id,
                        "parameter_type": parameters.type[i],
                        "metadata": {
                            "shape": list(parameters.shape[i]),
                            "dtype": parameters.dtype[i],
                            **parameters.attrs[i],
                        },
                    }
                )
        return rows

    def _given(self, view: View) -> list[Aggregate]:
        """Return the ingested aggregates whose models are all in scope."""
        found: list[Aggregate] = []
        for model_id in self.selection.models(view.model_ids):
            for item in self.store.model_attrs(model_id).get(_INGESTED, []):
                models = tuple(item["context_models"])
                if set(self.selection.models(models)) == set(models):
                    names = tuple(item["context_params"])
                    found.append(
                        {
                            "field": item["field"],
                            "context_models": models,
                            "context_params": names,
                            "value": item["value"],
                        }
                    )
        return found

    # ------------------------------------------------------------------------------------------ changing

    def erase(self, fields: Sequence[str], dependents: bool, erase_all: bool) -> EraseSummary:
        """Remove stored values of `fields` in scope."""
        if bool(fields) == erase_all:
            raise SessionError("name the fields to erase, or pass erase_all=True; not both or neither")
        view = self.store.view()
        stored = [*view.status, *view.model_status]
        names = list(dict.fromkeys(fields)) if fields else stored
        self._require(names, view)
        if dependents:
            names += [name for name in self._dependents(names) if name not in names]
        names = [name for name in names if name in stored]
        kernels = self._emptied(names, stored)
        mask = self.selection.mask(view)
        affected: list[str] = []
        models: list[str] = []
        for model in np.flatnonzero(mask.any(axis=1)):
            rows = view.row[model, mask[model]].astype(np.intp)
            model_id = view.model_ids[model]
            held = np.zeros(mask.shape[1], bool)
            for name in names:
                held |= view.status[name][model] != MISSING if name in view.status else False
            whole = any(name in view.model_status and view.model_status[name][model] != MISSING for name in names)
            held &= mask[model]
            if not (held.any() or whole):
                continue
            self.store.erase_fields(model_id, names, kernels, None if self.selection.whole_models else rows)
            parameters = self.store.parameters(model_id)
            affected += [str(parameters.uid[i]) for i in view.row[model, held]]
            models.append(model_id)
        self.store.refresh_view()
        return EraseSummary((), tuple(names), tuple(affected))

    def _dependents(self, names: Sequence[str]) -> list[str]:
        """Return every field that is computed, directly or not, from one of `names`."""
        reached = set(names)
        grown = True
        while grown:
            grown = False
            for kernel in self.registry.kernels.values():
                new = set(kernel.outputs) - reached
                if new and reached & set(kernel.inputs):
                    reached |= new
                    grown = True
        return [name for name in self.registry.fields if name in reached]

    def _emptied(self, names: Sequence[str], stored: Sequence[str]) -> list[str]:
        """Return the kernels of which nothing stays stored, so that their keys go too."""
        return [
            kernel.name
            for kernel in self.registry.kernels.values()
            if set(kernel.outputs) & set(names) and not (set(kernel.outputs) & set(stored)) - set(names)
        ]

    def ingest_metrics(self, fields_by_uid: Mapping[str, Mapping[str, Any]], force: bool) -> None:
        """Store scalar values by uid and field, marked as ingested."""
        view = self.store.view()
        place = self._places(view)
        commits: dict[str, Commit] = {}
        for uid, given in fields_by_uid.items():
            if uid not in place:
                raise ParameterNotFoundError(
                    f"no parameter has the uid {uid!r}; models.parameters() lists them.{did_you_mean(str(uid), place)}"
                )
            model, column = place[uid]
            for name, value in given.items():
                self._check_ingest(name, value, force, view, model, column)
                commit = commits.setdefault(view.model_ids[model], Commit(view.model_ids[model]))
                rows, values, status = commit.values.get(
                    name, (np.empty(0, np.intp), np.empty(0), np.empty(0, np.uint8))
                )
                commit.values[name] = (
                    np.append(rows, int(view.row[model, column])),
                    np.append(values, float(value)),
                    np.append(status, np.uint8(Status.INGESTED)),
                )
                if name in self.registry.fields:
                    kernel = self.registry.producer(name).name
                    rows, keys = commit.keys.get(kernel, (np.empty(0, np.intp), np.empty(0, np.uint64)))
                    commit.keys[kernel] = (np.append(rows, int(view.row[model, column])), np.append(keys, np.uint64(0)))
        self.store.commit(list(commits.values()))
        self.store.refresh_view()

    def _places(self, view: View) -> dict[str, tuple[int, int]]:
        place: dict[str, tuple[int, int]] = {}
        mask = self.selection.mask(view)
        for model in np.flatnonzero(mask.any(axis=1)):
            uids = self.store.parameters(view.model_ids[model]).uid
            for column in np.flatnonzero(mask[model]):
                place[str(uids[view.row[model, column]])] = (int(model), int(column))
        return place

    def _check_ingest(self, name: str, value: Any, force: bool, view: View, model: int, column: int) -> None:
        where = f"{view.model_ids[model]}: {view.names[column]}: {name}"
        if name in self.registry.fields:
            if self.registry.field(name).dims or self.registry.producer(name).level != "slice":
                raise SessionError(f"{where}: only scalar slice-level fields can be ingested as metrics")
        elif not name.isprintable() or not name:
            raise SessionError(f"{where}: a field name is non-empty printable text")
        try:
            float(value)
        except (TypeError, ValueError) as error:
            raise SessionError(f"{where}: {value!r} is not a number") from error
        held = name in view.status and view.status[name][model, column] != MISSING
        if held and not force:
            raise SessionError(f"{where}: there is a value already; pass force=True to replace it")

    def ingest_aggregates(self, aggregates: Sequence[Mapping[str, Any]], force: bool) -> None:
        """Store values of models or groups of models with the first model that they are of."""
        known = self.store.model_ids()
        changed: dict[str, list[dict[str, Any]]] = {}
        for item in aggregates:
            try:
                name, models = str(item["field_name"]), [str(m) for m in item["context_models"]]
                value = np.asarray(item["value"]).tolist()
            except KeyError as error:
                raise SessionError(
                    f"an aggregate needs field_name, context_models and value; {error} is missing in {dict(item)!r}"
                ) from error
            for model_id in models:
                if model_id not in known:
                    raise ModelNotFoundError(f"no model {model_id!r}.{did_you_mean(model_id, known)}")
            entry = {
                "field": name,
                "context_models": sorted(models),
                "context_params": sorted(map(str, item.get("context_params") or ())),
                "value": value,
            }
            home = entry["context_models"][0]
            there = changed.setdefault(home, list(self.store.model_attrs(home).get(_INGESTED, [])))
            same = [e for e in there if all(e[k] == entry[k] for k in ("field", "context_models", "context_params"))]
            if same and not force:
                raise SessionError(f"{name} of {', '.join(models)}: there is a value already; pass force=True")
            there[:] = [e for e in there if e not in same] + [entry]
        for model_id, entries in changed.items():
            self.store.set_model_attrs(model_id, **{_INGESTED: entries})


def parameter_table(store: Store, selection: Selection, model_id: str | None) -> pd.DataFrame:
    """Return every parameter in scope as a table, skipped ones included."""
    import pandas as pd

    view = store.view()
    mask = selection.mask(view)
    frames = []
    columns = (
        "name uid type shape dtype rows cols nbytes digest tied_to used skip_reason module".split()  # noqa: SIM905
    )
    for chosen in [model_id] if model_id is not None else selection.models(store.model_ids()):
        model = view.model_ids.index(chosen)
        rows = np.sort(view.row[model, mask[model]])
        parameters = store.parameters(chosen)
        frame = pd.DataFrame({column: getattr(parameters, column)[rows] for column in columns})
        frame["used"] = [None if u < 0 else bool(u) for u in frame["used"]]
        extra = [parameters.attrs[i] for i in rows]
        for key in sorted({key for attrs in extra for key in attrs}):
            frame[key] = [attrs.get(key) for attrs in extra]
        frame.insert(0, "model_id", chosen)
        frames.append(frame)
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame(columns=["model_id", *columns])


def list_kernels(registry: Registry, verbose: bool) -> list[str]:
    """Return the kernels by name; verbose: ``name (inputs; parameter=value): level``."""
    if not verbose:
        return sorted(registry.kernels)
    lines = []
    for name in sorted(registry.kernels):
        kernel = registry.kernels[name]
        params = ", ".join(f"{key}={value!r}" for key, value in registry.params(name).items())
        inside = "; ".join(part for part in (", ".join(kernel.inputs), params) if part)
        lines.append(f"{name} ({inside}): {kernel.level}")
    return lines
