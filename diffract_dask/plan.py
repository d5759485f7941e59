"""What to run: which kernels, on which slices, by which route, in how much memory, and why.

Cells of the (model_id, name) table with equal content form one *class*: tied parameters, frozen layers of a
fork, the same file added twice. Keys depend on content alone, so everything is decided once per class; values
that the store holds for any cell of a class are copied to the others, and only the rest is computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import memory
from diffract_dask.fields import MISSING, Status
from diffract_dask.kernel import GIVEN, SHAPE, WEIGHTS, Kernel, Keys, Registry, canonical_json, mix, model_key
from diffract_dask.sources import dtypes

if TYPE_CHECKING:
    from diffract_dask.store import Store
    from diffract_dask.view import View

__all__ = ["Cells", "Group", "ModelStep", "Plan", "Step", "expected_keys", "field_attrs", "make_plan"]

Mask = NDArray[np.bool_]
Index = NDArray[np.intp]

_SHAPE_ROOT = np.uint64(0x5EED5A4E)


@dataclass(frozen=True, eq=False)
class Cells:
    """The analysed cells of a view and their classes of equal content.

    Attributes
    ----------
    model, name : (C,) int arrays
        Position of each cell in the view.
    of : (C,) int array
        Class of each cell.
    canonical : (C,) bool array
        False for a parameter that is tied to an earlier one of its model.
    weights, shapes : (K,) uint64 arrays
        Root keys of each class: of its content (0 unknown) and of its shape.
    rows, cols : (K,) int64 arrays
    lookup : (M, N) int array
        Cell at each position of the view, -1 where there is none.
    """

    model: Index
    name: Index
    of: Index
    canonical: Mask
    weights: Keys
    shapes: Keys
    rows: NDArray[np.int64]
    cols: NDArray[np.int64]
    lookup: Index

    @property
    def n_classes(self) -> int:
        """Number of classes."""
        return len(self.weights)

    def of_model(self, position: int, chosen: Mask) -> Index:
        """Return the cells of one model that are in `chosen`; cells are in the order of models."""
        start, stop = np.searchsorted(self.model, [position, position + 1])
        found: Index = start + np.flatnonzero(chosen[start:stop])
        return found

    @classmethod
    def of_view(cls, view: View) -> Cells:
        """Return the cells of `view`."""
        model, name = np.nonzero(view.analysed & view.present)
        digest = view.digest[model, name]
        own = view.canonical[model, name]
        flat = model * max(1, len(view.names)) + np.where(own < 0, name, own)
        known = digest != 0
        label = np.empty(len(model), np.intp)
        _, inverse = np.unique(digest[known], return_inverse=True)
        label[known] = inverse
        offset = int(inverse.max()) + 1 if inverse.size else 0
        _, inverse = np.unique(flat[~known], return_inverse=True)
        label[~known] = inverse + offset
        n = int(label.max()) + 1 if label.size else 0
        first = np.zeros(n, np.intp)
        first[label[::-1]] = np.arange(len(label))[::-1]
        rows = view.rows[model, name][first].astype(np.int64)
        cols = view.cols[model, name][first].astype(np.int64)
        lookup = np.full(view.present.shape, -1, np.intp)
        lookup[model, name] = np.arange(len(model))
        return cls(
            model,
            name,
            label,
            (own < 0) | (own == name),
            digest[first],
            shape_keys(rows, cols),
            rows,
            cols,
            lookup,
        )


def shape_keys(rows: NDArray[np.int64], cols: NDArray[np.int64]) -> Keys:
    """Return the root keys of shapes, which are known before any weight is read."""
    one = np.uint64(1)
    return mix(_SHAPE_ROOT, [rows.astype(np.uint64) + one, cols.astype(np.uint64) + one])


def expected_keys(
    kernels: Iterable[Kernel], registry: Registry, roots: Mapping[str, np.uint64], weights: Keys, shapes: Keys
) -> dict[str, Keys]:
    """Return the key that each slice-level kernel's values must have, from the root keys of the slices."""
    keys: dict[str, Keys] = {}
    for kernel in kernels:
        if kernel.level != "slice":
            continue
        inputs = [
            weights if name == WEIGHTS else shapes if name == SHAPE else keys[registry.producer(name).name]
            for name in kernel.inputs
        ]
        keys[kernel.name] = mix(roots[kernel.name], inputs or [shapes])
    return keys


@dataclass(eq=False)
class Step:
    """One slice-level kernel of a plan.

    Attributes
    ----------
    run : (K,) bool array
        Classes to compute.
    source : (K,) int array
        A cell that holds fresh values, -1 if none does.
    copy : (C,) bool array
        Cells that receive values from another cell of their class.
    store : (C,) bool array
        Cells that receive computed values.
    stored_fields : tuple of str
        Outputs that are written.
    reasons : dict
        Number of classes to run by reason.
    """

    kernel: Kernel
    params: dict[str, Any]
    expected: Keys
    run: Mask
    source: Index
    copy: Mask
    store: Mask
    fresh: Mask
    stored_fields: tuple[str, ...]
    reasons: dict[str, int] = field(default_factory=dict)


@dataclass(eq=False)
class ModelStep:
    """One model-level kernel of a plan, the models (M,) to run it for, and their expected keys."""

    kernel: Kernel
    params: dict[str, Any]
    expected: Keys
    run: Mask


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
    groups: list[Group] = field(default_factory=list)

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
    settings: Mapping[str, Any] | None = None,
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
    settings : mapping, optional
        Settings of the session.

    Raises
    ------
    FieldNotFoundError, ConfigurationError
        Unknown field, kernel or parameter.
    OverBudgetError
        A slice fits in no form; raised before anything runs.
    """
    kernels = registry.closure(fields)
    for name in params or {}:
        registry.kernel(name)
    chosen = {kernel.name: registry.params(kernel.name, params) for kernel in kernels}
    roots = {kernel.name: kernel.root(chosen[kernel.name]) for kernel in kernels}
    cells = Cells.of_view(view)
    scope = selected[cells.model, cells.name]
    expected = expected_keys(kernels, registry, roots, cells.weights, cells.shapes)
    steps = {
        kernel.name: _step(kernel, chosen[kernel.name], expected, kernels, fields, view, cells, retry_failed)
        for kernel in kernels
        if kernel.level == "slice"
    }
    plan = Plan(tuple(fields), view, cells, registry, kernels, roots, steps, {}, scope, whole_models, resources)
    requested = {registry.producer(name).name for name in fields}
    wanted = {name: scope.copy() if name in requested else np.zeros_like(scope) for name in steps}
    _plan_models(plan, chosen, requested, wanted, np.unique(cells.model[scope]), retry_failed)
    _plan_slices(plan, wanted)
    plan.groups = _groups(plan, store, settings)
    return plan


def _step(
    kernel: Kernel,
    params: dict[str, Any],
    expected: Mapping[str, Keys],
    kernels: Sequence[Kernel],
    fields: Sequence[str],
    view: View,
    cells: Cells,
    retry_failed: bool,
) -> Step:
    """Return the step of one kernel with what the store already holds for it."""
    stored = tuple(name for name, f in kernel.outputs.items() if f.persist or name in fields)
    demanded = {name for other in kernels for name in other.inputs if name in kernel.outputs}
    key = expected[kernel.name]
    have = (
        view.keys[kernel.name][cells.model, cells.name]
        if kernel.name in view.keys
        else np.zeros(len(cells.of), np.uint64)
    )
    fresh: Mask = (have == key[cells.of]) & (have != 0)
    for name in {*stored, *demanded}:
        if name not in view.status:
            fresh[:] = False
            break
        status = view.status[name][cells.model, cells.name]
        fresh &= status != MISSING
        if retry_failed:
            fresh &= status != Status.FAILED
    source = np.full(cells.n_classes, -1, np.intp)
    source[cells.of[fresh]] = np.flatnonzero(fresh)
    none = np.zeros(cells.n_classes, bool)
    empty = np.zeros(len(cells.of), bool)
    return Step(kernel, params, key, none, source, empty, empty.copy(), fresh, stored)


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
    demanded = set(requested)
    for kernel in reversed(levelled):
        if kernel.name in demanded:
            demanded |= {plan.registry.producer(name).name for name in kernel.inputs if name not in GIVEN}
    keys: dict[str, Keys] = {}
    for kernel in levelled:
        keys[kernel.name] = model_keys(plan, kernel, keys)
        run = np.zeros(len(view.model_ids), bool)
        run[models] = True
        if plan.whole_models and kernel.name in view.model_keys:
            same = (view.model_keys[kernel.name] == keys[kernel.name]) & (keys[kernel.name] != 0)
            for name in kernel.outputs:
                status = view.model_status[name] if name in view.model_status else np.full(len(run), MISSING)
                same &= status != MISSING
                if retry_failed:
                    same &= status != Status.FAILED
            run &= ~same
        plan.model_steps[kernel.name] = ModelStep(kernel, chosen[kernel.name], keys[kernel.name], run)
        mine: Mask = run[cells.model] & (plan.scope if not plan.whole_models else True)
        for name in kernel.inputs:
            if name not in GIVEN and plan.registry.producer(name).level == "slice":
                wanted[plan.registry.producer(name).name] |= mine


def model_keys(plan: Plan, kernel: Kernel, others: Mapping[str, Keys]) -> Keys:
    """Return the expected keys (M,) of a model-level kernel, 0 where an input's key is not known yet."""
    view, cells = plan.view, plan.cells
    result = np.zeros(len(view.model_ids), np.uint64)
    chosen = cells.canonical if plan.whole_models else cells.canonical & plan.scope
    for position in range(len(view.model_ids)):
        mine = cells.of_model(position, chosen)
        root = plan.roots[kernel.name]
        inputs: list[Keys] = []
        for name in kernel.inputs:
            producer = WEIGHTS if name in GIVEN else plan.registry.producer(name).name
            if producer in others:
                root = mix(root, [others[producer][position : position + 1]])[0]
            else:
                keys = plan.steps[producer].expected if producer in plan.steps else cells.weights
                inputs.append(keys[cells.of[mine]])
        if root != 0 and inputs and len(mine):
            result[position] = model_key(root, [view.names[i] for i in cells.name[mine]], inputs)
        elif not inputs:
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
    if not step.run.any() or not step.kernel.persist:
        return {"needed by the others": int(step.run.sum())} if step.run.any() else {}
    name = step.kernel.name
    held = np.zeros(cells.n_classes, bool)
    if name in view.keys:
        held[cells.of[view.keys[name][cells.model, cells.name] != 0]] = True
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


def _groups(plan: Plan, store: Store, settings: Mapping[str, Any] | None) -> list[Group]:
    """Return the groups to run, ordered by model, then shape; OverBudgetError if a slice fits in no form."""
    steps = list(plan.steps.values())
    if not any(step.run.any() for step in steps):
        return []
    runs = np.stack([step.run for step in steps])
    busy = np.flatnonzero(runs.any(axis=0))
    cell_of = dict(zip(busy.tolist(), _representatives(plan, busy).tolist(), strict=True))
    by_model: dict[int, list[int]] = {}
    for label, cell in cell_of.items():
        by_model.setdefault(int(plan.cells.model[cell]), []).append(label)
    groups: list[Group] = []
    for position in sorted(by_model):
        model_id = plan.view.model_ids[position]
        parameters = store.parameters(model_id)
        parts: dict[tuple[int, int, str, bool, bytes], list[tuple[int, int]]] = {}
        for label in by_model[position]:
            row = int(plan.view.row[position, plan.cells.name[cell_of[label]]])
            shape = int(plan.cells.rows[label]), int(plan.cells.cols[label])
            part = (*shape, str(parameters.dtype[row]), parameters.stack[row] == "", runs[:, label].tobytes())
            parts.setdefault(part, []).append((row, label))
        for (rows, cols, dtype_name, linked, which), members in sorted(parts.items()):
            chosen = [step for step, mine in zip(steps, np.frombuffer(which, bool), strict=True) if mine]
            dtype = dtypes.decoded(dtype_name)
            layout = memory.layout(
                [(step.kernel, step.params) for step in chosen],
                len(members),
                rows,
                cols,
                dtype,
                plan.resources,
                linked=bool(linked),
                where=f"{model_id}: {rows} × {cols} {dtype}",
                settings=settings,
            )
            row_of, labels = np.array(sorted(members), np.intp).T
            names = tuple(step.kernel.name for step in chosen)
            groups.append(Group(model_id, rows, cols, dtype, linked, labels, row_of, names, layout))
    return groups


def _representatives(plan: Plan, classes: Index) -> Index:
    """Return one cell per class to read the weights from: in scope if possible."""
    cells = plan.cells
    order = np.lexsort((np.arange(len(cells.of)), ~cells.canonical, ~plan.scope))
    first = np.full(cells.n_classes, -1, np.intp)
    first[cells.of[order[::-1]]] = order[::-1]
    return first[classes]


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
