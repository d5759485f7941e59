"""What a session reads from the store: datasets, tables, status; and what it erases or takes in from elsewhere."""

from __future__ import annotations

import os
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import numpy as np
from numpy.typing import NDArray

from diffract_dask import config, ingest, memory
from diffract_dask.errors import FieldNotFoundError, LinkBrokenWarning, SessionError, StaleValuesWarning, did_you_mean
from diffract_dask.export import Aggregate, Sources, Table, export_table, tabulate
from diffract_dask.fields import MISSING, STATUS_MEANING, Status
from diffract_dask.kernel import Registry
from diffract_dask.modellevel import evaluate_models
from diffract_dask.plan import Plan, field_attrs, labels, make_plan
from diffract_dask.selection import Selection
from diffract_dask.store import Store

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

    from diffract_dask.view import View

__all__ = ["EraseSummary", "ResultsOf", "list_kernels", "parameter_table"]


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
        models = self._models(view)
        columns = (
            np.flatnonzero(mask.any(axis=0))
            if not self.selection.whole_models
            else np.flatnonzero((mask & view.present)[models].any(axis=0))
        )
        variables: dict[str, Any] = {}
        for name in names:
            variables.update(self._variable(name, view, mask, models, columns, plan))
        self._warn_if_stale(plan)
        warn_of_broken_links(self.store, self.selection, stacklevel=4)
        return xr.Dataset(_padded(variables), view.coordinates(models, columns))

    def _models(self, view: View) -> NDArray[np.intp]:
        """Return the positions of the models in scope, in the order in which they are shown."""
        chosen = set(self.selection.models(view.model_ids))
        return view.order[[view.model_ids[i] in chosen for i in view.order]]

    def _level(self, name: str, view: View) -> str:
        """Return the level of a field, be it one that a kernel makes or one that is only stored."""
        if name in self.registry.fields:
            return self.registry.producer(name).level
        return "slice" if name in view.status else "model"

    def _dims(self, name: str, view: View) -> tuple[str, ...]:
        return self.registry.field(name).dims if name in self.registry.fields else view.dims.get(name, ())

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
        if name in self.registry.fields:
            kernel = self.registry.producer(name)
            attrs = {**field_attrs(kernel, name, self.registry.params(kernel.name)), **view.attrs.get(name, {})}
        attrs = labels(attrs)
        if self._level(name, view) == "model":
            values = np.full(len(view.model_ids), np.nan)
            if self.selection.whole_models and name in view.model_values:
                values = view.model_values[name]
            elif not self.selection.whole_models and plan is not None and name in plan.fields:
                values = self._partial(plan, name)
            elif name not in self.registry.fields:
                values = ingest.of_models(self.given(), name, view)
            return {name: ("model_id", values[models], attrs)}
        if self._dims(name, view):
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
        dims = self._dims(name, view)
        have = mask & (view.status[name] != MISSING) if name in view.status else np.zeros_like(mask)
        have = have[np.ix_(models, columns)]
        rows, cols = (x[np.ix_(models, columns)] for x in (view.rows, view.cols))
        size = {"sval": np.minimum(rows, cols), "row": rows, "col": cols}
        inner = tuple(int(size[dim][have].max(initial=0)) for dim in dims)
        values = np.full((*have.shape, *inner), np.nan)
        for i, model in enumerate(models):
            at = np.flatnonzero(have[i])
            try:
                found = self.store.arrays(view.model_ids[model], name, view.row[model, columns[at]])
            except FieldNotFoundError:  # of this model, numbers are stored that an earlier declaration made
                found = [np.empty(0)] * len(at)
            for j, array in zip(at, found, strict=True):
                have[i, j] = array.shape == tuple(int(size[dim][i, j]) for dim in dims)
                if have[i, j]:
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
        for model, (value, _, _) in evaluate_models(plan).get(name, {}).items():
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
            grouped=False,
            partial=True,
        )

    def _warn_if_stale(self, plan: Plan | None) -> None:
        if plan is None:
            return
        view, cells = plan.view, plan.cells
        stale = set()
        for name in plan.fields:
            kernel = self.registry.producer(name)
            if kernel.level == "slice" and name in view.status:
                old = plan.scope & ~plan.steps[kernel.name].current
                old &= ~np.isin(view.status[name][cells.model, cells.name], (MISSING, Status.INGESTED))
            elif kernel.level == "model" and plan.whole_models and name in view.model_status:
                old = ~plan.model_steps[kernel.name].current & (view.model_status[name] != MISSING)
                old &= np.isin(np.arange(len(old)), cells.model[plan.scope])
            else:
                continue
            if old.any():
                stale.add(kernel.name)
        if stale:
            warnings.warn(
                f"stored values of {', '.join(sorted(stale))} were computed with other parameters, another version or "
                "other weights; compute.apply(…) computes them anew, results.status(…) tells which",
                StaleValuesWarning,
                stacklevel=4,
            )

    def _require(self, names: Iterable[str], view: View) -> None:
        """FieldNotFoundError for a field that no kernel produces and the store does not hold."""
        known = {*self.registry.fields, *view.status, *view.model_values}
        for name in names:
            if name not in known and name not in {a["field"] for a in self.given()}:
                raise FieldNotFoundError(
                    f"no kernel produces the field {name!r} and the store does not hold it.{did_you_mean(name, known)}"
                )

    def given(self) -> list[Aggregate]:
        """Return the ingested aggregates whose models are all in scope."""
        return ingest.aggregates(self.store, self.selection)

    def status(self, fields: Sequence[str]) -> xr.Dataset:
        """Return ``state`` and ``reason`` as text over (field, model_id, name)."""
        import xarray as xr

        view = self.store.view()
        names = list(dict.fromkeys(fields)) or [*view.status, *view.model_status]
        self._require(names, view)
        mask = self.selection.mask(view)
        models = self._models(view)
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
        is_model = self._level(name, view) == "model"
        codes = np.full(mask.shape, MISSING, np.uint8)
        table = view.model_status if is_model else view.status
        if name in table:
            codes[:] = table[name][:, np.newaxis] if is_model else table[name]
        known = name in self.registry.fields
        current = self._current(name, view, plan, is_model)
        left_out = mask & ~view.analysed & (codes == MISSING) & (not is_model)
        held = mask & (codes != MISSING)
        stale = held & ~current & (codes != Status.INGESTED)
        failed = held & ~stale & (codes == Status.FAILED)
        state[mask] = "missing"
        for where, word in ((held, "fresh"), (stale, "stale"), (failed, "failed"), (left_out, "skipped")):
            state[where] = word
        state[held & (codes == Status.INGESTED)] = "ingested"
        for code in np.unique(codes[held & ~stale & (codes != Status.OK)]):
            reason[held & ~stale & (codes == code)] = STATUS_MEANING[Status(int(code))]
        reason[held & (codes == Status.INGESTED)] = ""
        reason[stale] = "parameter, version, weights or inputs changed" if known else "no kernel here makes this field"
        for model_id, text in self.store.broken_links().items():
            position = view.model_ids.index(model_id)
            lost = held[position] & np.isin(state[position], ("fresh", "stale", "failed"))
            state[position, lost], reason[position, lost] = "stale", f"linked file {text}"
        for model in np.flatnonzero(left_out.any(axis=1)):
            at = np.flatnonzero(left_out[model])
            reasons = self.store.parameters(view.model_ids[model]).skip_reason[view.row[model, at]]
            reason[model, at] = [str(text) for text in reasons]
        for model in np.flatnonzero(failed.any(axis=1)):
            found = self.store.failures(view.model_ids[model])
            for column in np.flatnonzero(failed[model]):
                parameter = "" if is_model else view.names[column]
                for kernel in self.registry.closure([name]):  # an input's kernel may have raised, and not be stored
                    reason[model, column] = found.get((parameter, kernel.name), reason[model, column])

    def _current(self, name: str, view: View, plan: Plan | None, is_model: bool) -> NDArray[np.bool_]:
        """Return where stored values of a field are those that would be computed."""
        current = np.zeros(view.present.shape, bool)
        if plan is None or name not in self.registry.fields:
            return current
        kernel = self.registry.producer(name).name
        if is_model:
            current[:] = plan.model_steps[kernel].current[:, np.newaxis]
        else:
            current[plan.cells.model, plan.cells.name] = plan.steps[kernel].current
        return current

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
        given = self.given()
        held = [n for n in names if n in self.registry.fields or n in view.status or n in view.model_values]
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
        given = ingest.erase_aggregates(self.store, self.selection, names if fields else None)
        names = [name for name in names if name in stored]
        if not self.selection.whole_models:  # the others are of whole models
            names = [name for name in names if name in view.status]
        kernels = self._emptied(names, stored)
        mask = self.selection.mask(view)
        affected: list[str] = []
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
        self.store.refresh_view()
        return EraseSummary((), tuple(dict.fromkeys([*names, *given])), tuple(affected))

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


def warn_of_broken_links(store: Store, selection: Selection, *, stacklevel: int) -> None:
    """Warn of linked models in scope whose files are missing or hold another checkpoint now."""
    broken = store.broken_links()
    lost = [f"{model_id!r}: {broken[model_id]}" for model_id in selection.models(list(broken))]
    if lost:
        shown = "; ".join(lost[:3]) + (f"; and {len(lost) - 3} more" if len(lost) > 3 else "")
        warnings.warn(
            f"linked files: {shown}. Stored values are those of the file as it was; add the model again with "
            "replace=True to take the file as it is",
            LinkBrokenWarning,
            stacklevel=stacklevel + 1,
        )


def _padded(variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return array fields with NaN at the end, so that those with a dimension in common agree in its size."""
    sizes: dict[str, int] = {}
    arrays = {name: made for name, made in variables.items() if np.ndim(made[1]) > 2}
    for dims, values, _ in arrays.values():
        for dim, n in zip(dims, values.shape, strict=True):
            sizes[dim] = max(n, sizes.get(dim, 0))
    found = dict(variables)
    for name, (dims, values, attrs) in arrays.items():
        more = [(0, sizes[dim] - n) for dim, n in zip(dims, values.shape, strict=True)]
        if any(n for _, n in more):
            found[name] = (dims, np.pad(values, more, constant_values=np.nan), attrs)
    return found


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
