"""What to run: which kernels, on which slices, by which route, in how much memory, and why.

Everything is decided once per class of equal content (:mod:`diffract_dask.cells`): values that the store holds for
any cell of a class are copied to the others, and only the rest is computed.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import memory
from diffract_dask.catalog import natural_key
from diffract_dask.cells import Cells, expected_key
from diffract_dask.errors import ConfigurationError, ModelNotFoundError, StoreChangedError
from diffract_dask.fields import MISSING, Status
from diffract_dask.kernel import GIVEN, Kernel, Keys, Registry, after_failure, canonical_json, mix, model_key
from diffract_dask.sources import dtypes
from diffract_dask.view import public_attrs

if TYPE_CHECKING:
    from diffract_dask.store import Store
    from diffract_dask.view import View

__all__ = ["INCOMPLETE", "Group", "ModelStep", "Plan", "Step", "field_attrs", "labels", "make_plan", "model_keys"]

INCOMPLETE = (Status.FAILED, Status.LEADING_ONLY)
"""Statuses of values that keep the key of what they should be; what is computed from them has another key."""

Mask = NDArray[np.bool_]
Index = NDArray[np.intp]


@dataclass(eq=False)
class Step:
    """One slice-level kernel of a plan.

    Attributes
    ----------
    run : (K,) bool array
        Classes to compute.
    source : (K,) int array
        A cell that holds everything that is asked for or that other kernels read, -1 if none does.
    failed : (K,) bool array
        Classes whose fresh values are those of a failure.
    copy : (C,) bool array
        Cells that receive values from another cell of their class.
    store : (C,) bool array
        Cells that receive computed values.
    current : (C,) bool array
        Cells whose stored values, as far as there are any, are those that would be computed.
    fresh : (C,) bool array
        Current ones that hold everything that is asked for.
    stored_fields : tuple of str
        Outputs that are written.
    asked : tuple of str
        Those of them that are requested, or read from the store by model-level kernels: only these take the place of
        ingested values.
    reasons : dict
        Number of classes to run by reason.
    """

    kernel: Kernel
    params: dict[str, Any]
    expected: Keys
    run: Mask
    source: Index
    failed: Mask
    copy: Mask
    store: Mask
    current: Mask
    fresh: Mask
    stored_fields: tuple[str, ...]
    asked: tuple[str, ...]
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class ModelStep:
    """One model-level kernel of a plan.

    Attributes
    ----------
    expected : (M,) uint64 array
        Keys that the values must have, 0 where an input's key is not known yet.
    run : (M,) bool array
        Models to run it for.
    current : (M,) bool array
        Models whose stored values, as far as there are any, are those that would be computed.
    failed : (M,) bool array
        Models whose fresh value is that of a failure.
    """

    kernel: Kernel
    params: dict[str, Any]
    expected: Keys
    run: Mask
    current: Mask
    failed: Mask


@dataclass(eq=False)
class Group:
    """Slices of one model that run together: the same shape, dtype, residence and kernels.

    Attributes
    ----------
    classes : (n,) int array
        Classes of the slices, in the order of `rows_in_model`.
    rows_in_model : (n,) int array
        Position of each slice's representative in the model's parameters.
    kernels : tuple of str
        To run, in order.
    layout : memory.Layout
        Whole or streamed, slices per block, spans, projected bytes.
    rounding : float
        Unit roundoff of the stored dtype.
    """

    model_id: str
    rows: int
    cols: int
    dtype: np.dtype[Any]
    linked: bool
    classes: Index
    rows_in_model: Index
    kernels: tuple[str, ...]
    layout: memory.Layout
    rounding: float


@dataclass(eq=False)
class Plan:
    """The kernels still to run for a request, in order, with their memory need."""

    fields: tuple[str, ...]
    view: View
    cells: Cells
    registry: Registry
    kernels: list[Kernel]
    roots: dict[str, np.uint64]
    steps: dict[str, Step]
    model_steps: dict[str, ModelStep]
    scope: Mask
    whole_models: bool
    resources: memory.Resources
    partial: bool = False
    groups: list[Group] = field(default_factory=list)
    reader: Any = None  # of stored arrays, made by who first reads one

    @cached_property
    def members(self) -> Mask:
        """Cells that model-level values are over: those in scope, and all if models are taken whole; tied ones once."""
        return self.cells.canonical if self.whole_models else self.cells.distinct(self.scope)

    @cached_property
    def _rank(self) -> Index:
        names = [natural_key(name) for name in self.view.names]
        rank = np.empty(len(names), np.intp)
        rank[sorted(range(len(names)), key=names.__getitem__)] = np.arange(len(names))
        return rank

    def members_of(self, model: int) -> Index:
        """Return the cells that a model's model-level values are over, in natural order of their names.

        Not in the order of the view, which depends on what other models there are.
        """
        mine = self.cells.of_model(model, self.members)
        return mine[np.argsort(self._rank[self.cells.name[mine]])]

    @property
    def nothing_to_do(self) -> bool:
        """Whether every requested value is in the store and fresh."""
        return not (
            any(step.run.any() or step.copy.any() for step in self.steps.values())
            or any(step.run.any() for step in self.model_steps.values())
        )

    @property
    def peak_bytes(self) -> int:
        """Projected peak of all tasks that run at once, in bytes."""
        return max((group.layout.peak_bytes for group in self.groups), default=0)

    def explain(self) -> str:
        """Return a table: what would run, on how many slices, by which route, with how much memory, and why."""
        lines = [f"Plan for {', '.join(self.fields)}"]
        n_models = len(np.unique(self.cells.model[self.scope])) if self.scope.any() else 0
        lines.append(
            f"  scope: {int(self.scope.sum())} parameters of {n_models} models; "
            f"{len(np.unique(self.cells.of[self.scope]))} distinct slices"
        )
        if self.nothing_to_do:
            return "\n".join([*lines, "  nothing to do: every value is stored and fresh"])
        rows = [("kernel", "run", "copy", "route", "why")]
        for name, step in self.steps.items():
            if step.run.any() or step.copy.any():
                why = ", ".join(f"{reason} {count}" for reason, count in step.reasons.items())
                rows.append((name, str(int(step.run.sum())), str(int(step.copy.sum())), self._routes(name), why))
        for name, model_step in self.model_steps.items():
            if model_step.run.any():
                rows.append((name, str(int(model_step.run.sum())), "0", "model", "missing or inputs changed"))
        widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
        lines += ["  " + "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        blocks = sum(group.layout.n_blocks(len(group.classes)) for group in self.groups)
        lines.append(
            f"  memory: at most {memory.show(self.peak_bytes)} in tasks at once, of a budget of "
            f"{memory.show(self.resources.budget)}; {blocks} blocks on {self.resources.workers} workers"
        )
        return "\n".join(line.rstrip() for line in lines)

    def __repr__(self) -> str:
        return self.explain()

    def _routes(self, kernel_name: str) -> str:
        step = self.steps[kernel_name]
        counts: dict[str, int] = {}
        for group in self.groups:
            if kernel_name in group.kernels:
                route = memory.route(step.kernel, step.params, group.rows, group.cols, group.dtype, group.layout)
                counts[route] = counts.get(route, 0) + len(group.classes)
        return ", ".join(f"{route} {n}" if len(counts) > 1 else route for route, n in counts.items())


def make_plan(
    fields: Sequence[str],
    *,
    view: View,
    store: Store,
    registry: Registry,
    selected: Mask,
    whole_models: bool,
    resources: memory.Resources,
    params: Mapping[str, Mapping[str, Any]] | None = None,
    retry_failed: bool = False,
    retried: bool = False,
    unreadable: Collection[str] = (),
    settings: Mapping[str, Any] | None = None,
    grouped: bool = True,
    partial: bool = False,
) -> Plan:
    """Decide what must run so that `fields` are stored and fresh for the selected parameters.

    Parameters
    ----------
    fields : sequence of str
        Requested fields.
    selected : (M, N) bool array
        Scope, over the positions of `view`.
    whole_models : bool
        False under a parameter filter: model-level values would not be over the whole model and are not stored.
    params : mapping, optional
        Parameters of this call, by kernel name.
    retried : bool
        Slices that failed were run again already: only model-level kernels are.
    unreadable : collection of str
        Models whose weights are read only where no other model has the same content.
    settings : mapping, optional
        Settings of the session.
    grouped : bool
        False for a plan that is only looked at: it cannot be run.
    partial : bool
        Where a whole spectrum does not fit, take its leading part. Without it, leading parts that are stored are
        computed anew.

    Raises
    ------
    FieldNotFoundError, ConfigurationError
        Unknown field, kernel or parameter.
    OverBudgetError
        A slice fits in no form; raised before anything runs.
    StoreChangedError
        The store is not as `view` says.
    """
    kernels = registry.closure(fields)
    _check_params(registry, params)
    chosen = {kernel.name: registry.params(kernel.name, params) for kernel in kernels}
    roots = {kernel.name: kernel.root(chosen[kernel.name]) for kernel in kernels}
    cells = Cells.of_view(view)
    scope = selected[cells.model, cells.name]
    plan = Plan(tuple(fields), view, cells, registry, kernels, roots, {}, {}, scope, whole_models, resources, partial)
    keys: dict[str, Keys] = {}
    for kernel in kernels:
        if kernel.level == "slice":
            failed = {name: step.failed for name, step in plan.steps.items()}
            keys[kernel.name] = expected_key(kernel, registry, roots, cells.weights, cells.shapes, keys, failed)
            plan.steps[kernel.name] = _step(
                plan, kernel, chosen[kernel.name], keys[kernel.name], retry_failed and not retried
            )
    requested = {registry.producer(name).name for name in fields}
    wanted = {name: scope.copy() if name in requested else np.zeros_like(scope) for name in plan.steps}
    _plan_models(plan, chosen, requested, wanted, np.unique(cells.model[scope]), retry_failed)
    _plan_slices(plan, wanted)
    if grouped:
        plan.groups = _groups(plan, store, unreadable, settings)
    return plan


def _check_params(registry: Registry, params: Any) -> None:
    """Raise where the parameters of one call name a kernel or a parameter that does not exist."""
    if params is None:
        return
    if not isinstance(params, Mapping) or not all(isinstance(own, Mapping) for own in params.values()):
        raise ConfigurationError(
            f"params={params!r}: give parameters by kernel, for example params={{'hard_rank': {{'rtol': 1e-6}}}}"
        )
    for name, own in params.items():
        registry.kernel(name).parameters(own)


def _step(plan: Plan, kernel: Kernel, params: dict[str, Any], key: Keys, retry_failed: bool) -> Step:
    """Return the step of one kernel with what the store already holds for it."""
    view, cells = plan.view, plan.cells
    read = {name for other in plan.kernels if other.level == "model" for name in other.inputs}
    asked = tuple(name for name in kernel.outputs if name in plan.fields or name in read)
    stored = tuple(name for name, f in kernel.outputs.items() if f.persist or name in asked)
    have = (
        view.keys[kernel.name][cells.model, cells.name]
        if kernel.name in view.keys
        else np.zeros(len(cells.of), np.uint64)
    )
    current: Mask = (have == key[cells.of]) & (have != 0)
    fresh, usable, failed = current.copy(), current.copy(), current.copy()
    for name in _required(plan, kernel):
        status = view.status[name][cells.model, cells.name] if name in view.status else np.uint8(MISSING)
        held = (status != MISSING) & (status != Status.INGESTED)
        if retry_failed:
            held &= status != Status.FAILED
        if not plan.partial:
            held &= status != Status.LEADING_ONLY
        usable &= held
        failed &= np.isin(status, INCOMPLETE)
        if name in asked:
            fresh &= held
    failed &= usable
    source = np.full(cells.n_classes, -1, np.intp)
    source[cells.of[usable]] = np.flatnonzero(usable)
    raised = np.zeros(cells.n_classes, bool)
    raised[cells.of[failed]] = True
    none = np.zeros(cells.n_classes, bool)
    empty = np.zeros(len(cells.of), bool)
    return Step(kernel, params, key, none, source, raised, empty, empty.copy(), current, fresh, stored, asked)


def _required(plan: Plan, kernel: Kernel) -> list[str]:
    """Return the outputs that a cell must hold to be a source: those that are asked for or that other kernels read."""
    return [
        name for name in kernel.outputs if name in plan.fields or any(name in other.inputs for other in plan.kernels)
    ]


def _plan_models(
    plan: Plan,
    chosen: Mapping[str, dict[str, Any]],
    requested: set[str],
    wanted: dict[str, Mask],
    models: Index,
    retry_failed: bool,
) -> None:
    """Fill the model-level steps and mark the slices whose values they read as wanted."""
    view, cells = plan.view, plan.cells
    levelled = [kernel for kernel in plan.kernels if kernel.level == "model"]
    keys: dict[str, Keys] = {}
    failed: dict[str, Mask] = {}
    fresh: dict[str, Mask] = {}
    current: dict[str, Mask] = {}
    for kernel in levelled:
        keys[kernel.name] = model_keys(plan, kernel, keys, failed)
        name = kernel.name
        current[name], fresh[name], failed[name] = _fresh_models(plan, kernel, keys[name], retry_failed)
    needed = {kernel.name: np.zeros(len(view.model_ids), bool) for kernel in levelled}
    for kernel in reversed(levelled):
        run = needed[kernel.name]
        if kernel.name in requested:
            run[models] = True
        run &= ~fresh[kernel.name]
        mine: Mask = run[cells.model] & (plan.scope if not plan.whole_models else True)
        for producer in {plan.registry.producer(name).name for name in kernel.inputs if name not in GIVEN}:
            if producer in needed:
                needed[producer] |= run
            else:
                wanted[producer] |= mine
    for kernel in levelled:
        name = kernel.name
        plan.model_steps[name] = ModelStep(kernel, chosen[name], keys[name], needed[name], current[name], failed[name])


def _fresh_models(plan: Plan, kernel: Kernel, expected: Keys, retry_failed: bool) -> tuple[Mask, Mask, Mask]:
    """Return for which models the values of a model-level kernel are current, fresh, and those of a failure."""
    view = plan.view
    current = np.zeros(len(view.model_ids), bool)
    if plan.whole_models and kernel.name in view.model_keys:
        current = (view.model_keys[kernel.name] == expected) & (expected != 0)
    fresh, failed = current.copy(), current.copy()
    for name in _required(plan, kernel):
        if name not in view.model_status:
            fresh[:] = False
            break
        status = view.model_status[name]
        fresh &= status != MISSING
        if retry_failed:
            fresh &= status != Status.FAILED
        failed &= status == Status.FAILED
    return current, fresh, failed & fresh


def model_keys(plan: Plan, kernel: Kernel, others: Mapping[str, Keys], failed: Mapping[str, Mask]) -> Keys:
    """Return the expected keys (M,) of a model-level kernel, 0 where an input's key is not known yet.

    Parameters
    ----------
    others, failed : mappings of str to array
        Keys of the model-level kernels that come before, and of which models their values are those of a failure.
    """
    view, cells = plan.view, plan.cells
    result = np.zeros(len(view.model_ids), np.uint64)
    producers = [plan.registry.producer(name).name for name in kernel.inputs]
    sliced = [plan.steps[name] for name in producers if name in plan.steps]
    keys = [after_failure(step.expected, step.failed) for step in sliced]
    for position in range(len(view.model_ids)):
        mine = cells.of_model(position, plan.members)
        root = plan.roots[kernel.name]
        for name in producers:
            if name in others:
                here = slice(position, position + 1)
                root = mix(root, [after_failure(others[name][here], failed[name][here])])[0]
        if root != 0 and keys and len(mine):
            names = [view.names[i] for i in cells.name[mine]]
            result[position] = model_key(root, names, [own[cells.of[mine]] for own in keys])
        elif not keys:
            result[position] = root
    return result


def _plan_slices(plan: Plan, wanted: Mapping[str, Mask]) -> None:
    """Walk the kernels backwards: run what is wanted and not held, and what that needs in turn."""
    cells = plan.cells
    needed = {name: np.zeros(cells.n_classes, bool) for name in plan.steps}
    receives = plan.scope.copy()
    for mask in wanted.values():
        receives |= mask
    for kernel in reversed([kernel for kernel in plan.kernels if kernel.level == "slice"]):
        step = plan.steps[kernel.name]
        missing = wanted[kernel.name] & ~step.fresh
        need = needed[kernel.name]
        need[cells.of[missing]] = True
        step.run = need & (step.source < 0)
        step.copy = missing & (step.source[cells.of] >= 0)
        step.store = step.run[cells.of] & receives if step.stored_fields else np.zeros_like(missing)
        for name in kernel.inputs:
            if name not in GIVEN:
                needed[plan.registry.producer(name).name] |= step.run
    for step in plan.steps.values():
        step.reasons = _reasons(plan, step)


def _reasons(plan: Plan, step: Step) -> dict[str, int]:
    cells, view = plan.cells, plan.view
    if not step.run.any() or not step.stored_fields:
        return {"needed by the others": int(step.run.sum())} if step.run.any() else {}
    name = step.kernel.name
    held = np.zeros(cells.n_classes, bool)
    if name in view.keys:
        there = view.keys[name][cells.model, cells.name] != 0
        for field_name in _required(plan, step.kernel):
            status = view.status[field_name][cells.model, cells.name] if field_name in view.status else MISSING
            there &= ~np.isin(status, (MISSING, Status.INGESTED))
        held[cells.of[there]] = True
    inputs_changed = np.zeros(cells.n_classes, bool)
    for field_name in step.kernel.inputs:
        if field_name not in GIVEN:
            inputs_changed |= plan.steps[plan.registry.producer(field_name).name].run
    unknown = step.expected == 0
    retried = np.zeros(cells.n_classes, bool)
    for field_name in step.stored_fields:
        if field_name in view.status:
            failed = view.status[field_name][cells.model, cells.name] == Status.FAILED
            retried[cells.of[failed]] = True
    reasons = {
        "missing": step.run & ~held,
        "weights changed": step.run & held & unknown,
        "failed before": step.run & held & ~unknown & retried,
        "inputs changed": step.run & held & ~unknown & ~retried & inputs_changed,
        "parameter or version changed": step.run & held & ~unknown & ~retried & ~inputs_changed,
    }
    return {reason: int(mask.sum()) for reason, mask in reasons.items() if mask.any()}


def _groups(plan: Plan, store: Store, unreadable: Collection[str], settings: Mapping[str, Any] | None) -> list[Group]:
    """Return the groups to run, ordered by model, then shape; OverBudgetError if a slice fits in no form."""
    steps = list(plan.steps.values())
    if not any(step.run.any() for step in steps):
        return []
    runs = np.stack([step.run for step in steps])
    busy = np.flatnonzero(runs.any(axis=0))
    cells = _representatives(plan, busy, unreadable)
    models = plan.cells.model[cells]
    which, kinds = np.unique(runs[:, busy], axis=1, return_inverse=True)
    groups: list[Group] = []
    for position in np.unique(models).tolist():
        mine = np.flatnonzero(models == position)
        rows_in_model = plan.view.row[position, plan.cells.name[cells[mine]]].astype(np.intp)
        parts = _parts(plan, store, position, busy[mine], rows_in_model, kinds.ravel()[mine])
        # The largest first: what takes longest must not be what is left when the other workers are idle.
        order = sorted(parts.items(), key=lambda part: (-part[0][0] * part[0][1], part[0]))
        for (rows, cols, dtype_name, linked, kind), members in order:
            chosen = [step for step, runs_here in zip(steps, which[:, kind], strict=True) if runs_here]
            dtype = dtypes.decoded(dtype_name)
            model_id = plan.view.model_ids[position]
            layout = memory.layout(
                [(step.kernel, step.params) for step in chosen],
                len(members),
                rows,
                cols,
                dtype,
                plan.resources,
                linked=linked,
                where=f"{model_id}: {rows} × {cols} {dtype}",
                settings=settings,
                partial=plan.partial,
            )
            at = mine[members][np.argsort(rows_in_model[members])]
            row_of = np.sort(rows_in_model[members])
            names = tuple(step.kernel.name for step in chosen)
            rounding = dtypes.rounding(dtype_name)
            groups.append(Group(model_id, rows, cols, dtype, linked, busy[at], row_of, names, layout, rounding))
    return groups


def _parts(
    plan: Plan, store: Store, position: int, labels: Index, rows_in_model: Index, kinds: Index
) -> dict[tuple[int, int, str, bool, int], list[int]]:
    """Return which slices of one model go together, by shape, stored type, residence and the kernels to run."""
    model_id = plan.view.model_ids[position]
    try:
        parameters = store.parameters(model_id)
        replaced = store.model_attrs(model_id)["added"] != plan.view.added[position]
    except ModelNotFoundError:
        replaced = True
    if replaced:
        raise StoreChangedError(f"{model_id}: erased or replaced while the plan was made; run the same call again")
    columns = (
        plan.cells.rows[labels].tolist(),
        plan.cells.cols[labels].tolist(),
        parameters.dtype[rows_in_model].tolist(),
        (parameters.stack[rows_in_model] == "").tolist(),
        kinds.tolist(),
    )
    parts: dict[tuple[int, int, str, bool, int], list[int]] = {}
    for i, part in enumerate(zip(*columns, strict=True)):
        parts.setdefault(part, []).append(i)
    return parts


def _representatives(plan: Plan, classes: Index, unreadable: Collection[str]) -> Index:
    """Return one cell per class to read the weights from: of a model that can be read and in scope, if possible."""
    cells = plan.cells
    avoided = np.isin(plan.view.model_ids, list(unreadable))[cells.model]
    order = np.lexsort((np.arange(len(cells.of)), ~cells.canonical, ~plan.scope, avoided))
    first = np.full(cells.n_classes, -1, np.intp)
    first[cells.of[order[::-1]]] = order[::-1]
    return first[classes]


def labels(attrs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of a field as a Dataset shows them: its dimensions are those of the variable."""
    return public_attrs({key: value for key, value in attrs.items() if key != "dims"})


def field_attrs(kernel: Kernel, name: str, params: Mapping[str, Any]) -> dict[str, Any]:
    """Return the attributes of one field: long_name, units, how its values were made, type and dimensions."""
    declared = kernel.outputs[name]
    return {
        "long_name": declared.long_name,
        "units": declared.units,
        "kernel": kernel.name,
        "kernel_version": str(kernel.version),
        "params": canonical_json(dict(params)),
        "dtype": declared.dtype,
        "dims": list(declared.dims),
    }
