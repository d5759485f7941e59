"""What tasks give back, as commits of the store: a value goes to every cell of its class that is in scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import graph
from diffract_dask.cells import expected_keys
from diffract_dask.digests import digest_keys
from diffract_dask.errors import ModelNotFoundError, StoreChangedError
from diffract_dask.fields import MISSING, Status
from diffract_dask.kernel import Keys
from diffract_dask.plan import INCOMPLETE, Plan, Step, field_attrs
from diffract_dask.store import Commit
from diffract_dask.stored import stored_values

if TYPE_CHECKING:
    from diffract_dask.store import Store
    from diffract_dask.view import View

__all__ = ["Failure", "Writer", "is_there"]

Index = NDArray[np.intp]
Statuses = NDArray[np.uint8]

_COPIED_BYTES = 256 * 2**20
_NOT_COMPUTED = (MISSING, Status.INGESTED)


@dataclass(frozen=True)
class Failure:
    """One value that a kernel did not give."""

    model_id: str
    name: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        where = f"{self.model_id}: {self.name}" if self.name else self.model_id
        return f"{where}: kernel {self.kernel!r} failed: {self.reason}"


class _Batch:
    """Results by field and kernel for cells, put together once at the end: pieces are many and small.

    Values are None where a field loses its value.
    """

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[Index, Any, Statuses]]] = {}
        self.keys: dict[str, list[tuple[Index, Keys]]] = {}
        self.digests: list[tuple[Index, list[str]]] = []
        self.doubtful: set[int] = set()
        self.failures: dict[tuple[int, str], str] = {}
        self.ran: dict[str, list[Index]] = {}


class Writer:
    """Commits copies and batches of one plan, and counts what it did.

    Parameters
    ----------
    plan : Plan
    store : Store
    before : Writer, optional
        Of an earlier round of the same request: its counts go on.

    Attributes
    ----------
    computed, copied : dict of str to int
        Cells by field.
    failures : list of Failure
    seconds : dict of str to float
        Time in tasks by kernel.
    kernel_slices : dict of str to int
        Slices that each kernel ran on.
    gone : set of str
        Models that were changed, renamed or erased since the plan was made, so that not everything could be stored.
    unreadable : list of (str, Exception)
        Models whose weights could not be read in this round, and why.
    avoided : set of str
        Those of all rounds.
    again : bool
        Whether another round has a chance to do more: what was to be read has changed; or other models have the content
        that could not be read; or a linked file held something else than its digest says. All digests of the model
        are forgotten then: part of the inputs may have been of the old content.
    """

    def __init__(self, plan: Plan, store: Store, before: Writer | None = None) -> None:
        self.plan = plan
        self.store = store
        self.computed: dict[str, int] = before.computed if before else {}
        self.copied: dict[str, int] = before.copied if before else {}
        self.failures: list[Failure] = before.failures if before else []
        self.seconds: dict[str, float] = before.seconds if before else {}
        self.kernel_slices: dict[str, int] = before.kernel_slices if before else {}
        self.gone: set[str] = before.gone if before else set()
        self.again = False
        self.unreadable: list[tuple[str, Exception]] = []
        self.avoided: set[str] = before.avoided if before else set()
        self._old_failures: dict[str, Mapping[tuple[str, str], str]] = {}
        cells = plan.cells
        self._order = np.argsort(cells.of, kind="stable")
        self._edges = np.searchsorted(cells.of[self._order], np.arange(cells.n_classes + 1))

    def copy(self) -> None:
        """Commit values that the store holds for equal content, in parts that fit in memory."""
        cells = self.plan.cells
        steps = [step for step in self.plan.steps.values() if step.copy.any()]
        if not steps:
            return
        to = np.flatnonzero(np.any([step.copy for step in steps], axis=0))
        rows, cols = cells.rows[cells.of[to]], cells.cols[cells.of[to]]
        size = sum(int(_field_bytes(step, rows, cols).sum()) for step in steps)
        for part in np.array_split(to, max(1, size // _COPIED_BYTES)):
            batch = _Batch()
            try:
                for step in steps:
                    if step.copy[part].any():
                        self._copy_step(batch, step, part[step.copy[part]])
            except StoreChangedError as error:
                self.unreadable.append((self.plan.view.model_ids[cells.model[part[0]]], error))
                self.again = True
                continue
            self._send(batch, self.copied)

    def _copy_step(self, batch: _Batch, step: Step, to: Index) -> None:
        cells, view = self.plan.cells, self.plan.view
        kernel = step.kernel.name
        batch.keys[kernel] = [(to, step.expected[cells.of[to]])]
        batch.ran[kernel] = [to]
        self._drop_others(batch, step, to, step.expected[cells.of[to]])
        source = step.source[cells.of[to]]
        for name in step.stored_fields:
            held = ~np.isin(self._status(name, source), _NOT_COMPUTED)
            lost = self._outdated(step, name, to[~held], step.expected[cells.of[to[~held]]])
            self._drop(batch, name, lost)
            for part in self._one_shape(to[held & self._may_write(step, name, to)]):
                values, status = stored_values(self.plan, self.store, name, step.source[cells.of[part]])
                batch.values.setdefault(name, []).append((part, values, status))
        for cell, origin in zip(to[step.failed[cells.of[to]]], source[step.failed[cells.of[to]]], strict=True):
            reasons = self.failures_of(view.model_ids[cells.model[origin]])
            reason = reasons.get((view.names[cells.name[origin]], kernel))
            if reason:
                batch.failures[int(cell), kernel] = f"{reason} (not retried)"

    def _one_shape(self, to: Index) -> Iterator[Index]:
        labels = self.plan.cells.of[to]
        shapes = np.stack([self.plan.cells.rows[labels], self.plan.cells.cols[labels]], axis=1)
        _, part = np.unique(shapes, axis=0, return_inverse=True)
        for which in range(int(part.max(initial=-1)) + 1):
            yield to[part.ravel() == which]

    def _status(self, name: str, cells: Index) -> Statuses:
        if name not in self.plan.view.status:
            return np.full(len(cells), MISSING, np.uint8)
        return self.plan.view.status[name][self.plan.cells.model[cells], self.plan.cells.name[cells]]

    def _may_write(self, step: Step, name: str, to: Index) -> NDArray[np.bool_]:
        """Return which cells take a computed value: an ingested one stays until its field is asked for."""
        allowed: NDArray[np.bool_] = (self._status(name, to) != Status.INGESTED) | (name in step.asked)
        return allowed

    def _outdated(self, step: Step, name: str, to: Index, keys: Keys) -> Index:
        """Return the cells that hold a value of a field under another key than `keys`."""
        view, cells, kernel = self.plan.view, self.plan.cells, step.kernel.name
        if kernel not in view.keys or not len(to):
            return to[:0]
        have = view.keys[kernel][cells.model[to], cells.name[to]]
        lost: Index = to[~np.isin(self._status(name, to), _NOT_COMPUTED) & (have != keys)]
        return lost

    def _drop(self, batch: _Batch, name: str, lost: Index) -> None:
        if len(lost):
            missing = np.full(len(lost), MISSING, np.uint8)
            batch.values.setdefault(name, []).append((lost, None, missing))

    def _drop_others(self, batch: _Batch, step: Step, to: Index, keys: Keys) -> None:
        """Take away outputs that are not written now: the kernel's new key does not vouch for their old values."""
        for name in step.kernel.outputs:
            if name not in step.stored_fields:
                self._drop(batch, name, self._outdated(step, name, to, keys))

    def commit(self, blocks: Sequence[graph.Block], bundles: Sequence[graph.Bundle]) -> None:
        """Commit the results of one batch of blocks."""
        batch = _Batch()
        alike: dict[tuple[str, tuple[str, ...], bool], tuple[list[Index], list[graph.Bundle]]] = {}
        for block, bundle in zip(blocks, bundles, strict=True):
            if bundle.error is not None:
                self.unreadable.append((block.group.model_id, bundle.error))
                if isinstance(bundle.error, StoreChangedError):
                    self.again = True
                else:
                    self.avoided.add(block.group.model_id)
                    self.again |= self._is_elsewhere(block)
                continue
            which = (block.group.model_id, block.group.kernels, bundle.digests is None)
            classes, good = alike.setdefault(which, ([], []))
            classes.append(block.classes)
            good.append(bundle)
            for name, seconds in bundle.seconds.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        for (model_id, kernels, _), (classes, good) in alike.items():
            self._add(batch, model_id, kernels, np.concatenate(classes), _joined(good))
        self._send(batch, self.computed)

    def _is_elsewhere(self, block: graph.Block) -> bool:
        """Return whether some slice of a block has the content of a slice of a model that was not found unreadable."""
        cells = self.plan.cells
        models = np.unique(cells.model[np.isin(cells.of, block.classes)])
        return any(self.plan.view.model_ids[model] not in self.avoided for model in models)

    def _add(self, batch: _Batch, model_id: str, kernels: Sequence[str], classes: Index, bundle: graph.Bundle) -> None:
        """Add what the kernels gave for some classes, read from one model, to what is to be committed."""
        plan, cells = self.plan, self.plan.cells
        first, counts = self._edges[classes], self._edges[classes + 1] - self._edges[classes]
        at = np.repeat(np.arange(len(classes)), counts)
        to = self._order[np.repeat(first - np.cumsum(counts) + counts, counts) + np.arange(len(at))]
        weights = cells.weights[classes]
        if bundle.digests is not None:
            weights = digest_keys(bundle.digests)
            changed = weights != cells.weights[classes]
            if changed.any():
                # What was read is the content of this model's file; other models of the class may differ from it.
                model = plan.view.model_ids.index(model_id)
                mine = changed[at] & (cells.model[to] == model)
                batch.digests.append((to[mine], [bundle.digests[i] for i in at[mine]]))
                trusted = ~changed | (cells.weights[classes] == 0)
                if not trusted.all():
                    self.again = True
                    batch.doubtful.add(model)
                to, at = to[trusted[at]], at[trusted[at]]
        failed = {name: step.failed[classes] for name, step in plan.steps.items()}
        for name in kernels:
            failed[name] = self._stored_failures(bundle, plan.steps[name], to, at)
        keys = expected_keys(plan.kernels, plan.registry, plan.roots, weights, cells.shapes[classes], failed)
        for name in kernels:
            step = plan.steps[name]
            self.kernel_slices[name] = self.kernel_slices.get(name, 0) + bundle.n
            receives = step.store[to] if step.stored_fields else plan.scope[to]
            if not receives.any():
                continue
            cell, index = to[receives], at[receives]
            for output in step.stored_fields:
                chosen = self._may_write(step, output, cell)
                values, status = bundle.values[output][index[chosen]], bundle.status[output][index[chosen]]
                batch.values.setdefault(output, []).append((cell[chosen], values, status))
            if step.stored_fields:
                batch.keys.setdefault(name, []).append((cell, keys[name][index]))
                self._drop_others(batch, step, cell, keys[name][index])
            batch.ran.setdefault(name, []).append(cell)
            reasons = {i: reason for (i, kernel), reason in bundle.failures.items() if kernel == name}
            for c, i in zip(cell, index, strict=True) if reasons else ():
                if int(i) in reasons:
                    batch.failures[int(c), name] = reasons[int(i)]

    def _stored_failures(self, bundle: graph.Bundle, step: Step, to: Index, at: Index) -> NDArray[np.bool_]:
        """Return on which slices of a block the next plan will find that a kernel failed."""
        failed = np.full(bundle.n, bool(step.stored_fields))
        for name in step.stored_fields:
            failed &= np.isin(bundle.status[name], INCOMPLETE)
        if failed.any():
            receives = np.flatnonzero(step.store[to])
            written = np.all([self._may_write(step, name, to[receives]) for name in step.stored_fields], axis=0)
            failed &= np.isin(np.arange(bundle.n), at[receives[written]])
        return failed

    def _send(self, batch: _Batch, counts: dict[str, int]) -> None:
        """Sort the results of a batch by model and commit them."""
        commits: dict[int, Commit] = {}
        for name, parts in batch.values.items():
            self._put_values(commits, name, parts)
        for name, pairs in batch.keys.items():
            to, keys = (np.concatenate(column) for column in zip(*pairs, strict=True))
            for commit, rows, at in self._by_model(commits, to):
                commit.keys[name] = (rows, keys[at])
        if batch.digests:
            to = np.concatenate([cells for cells, _ in batch.digests])
            digests = [digest for _, part in batch.digests for digest in part]
            for commit, rows, at in self._by_model(commits, to):
                commit.digests = (rows, [digests[i] for i in at])
        with self.store.lock():
            for model in [model for model in commits if not is_there(self.store, self.plan.view, model)]:
                self.gone.add(commits.pop(model).model_id)
            for model in batch.doubtful & commits.keys():
                known = self.store.parameters(commits[model].model_id)
                every = np.flatnonzero((known.path != "") & (known.digest != ""))
                commits[model].digests = (every, [""] * len(every))
            self._put_failures(commits, batch)
            if commits:
                self.store.commit(list(commits.values()))
        for commit in commits.values():
            for name, (_, _, status) in commit.values.items():
                made = ~np.isin(status, (MISSING, Status.FAILED))
                if made.any():
                    counts[name] = counts.get(name, 0) + int(made.sum())

    def _put_values(self, commits: dict[int, Commit], name: str, parts: Sequence[tuple[Index, Any, Statuses]]) -> None:
        to = np.concatenate([cells for cells, _, _ in parts])
        status = np.concatenate([part for _, _, part in parts])
        kernel = self.plan.registry.producer(name)
        is_array = bool(self.plan.registry.field(name).dims)
        arrays: list[NDArray[Any] | None] = []
        scalars = np.full(len(to), np.nan)
        if is_array:
            for cells, values, _ in parts:
                arrays += [None] * len(cells) if values is None else list(values)
        else:
            scalars = np.concatenate([np.full(len(c), np.nan) if v is None else v for c, v, _ in parts])
        attrs = field_attrs(kernel, name, self.plan.steps[kernel.name].params)
        for commit, rows, at in self._by_model(commits, to):
            commit.values[name] = (rows, scalars[at], status[at])
            if (status[at] != MISSING).any():
                commit.attrs[name] = attrs
            kept = [i for i, array in enumerate(at) if arrays[array] is not None] if is_array else []
            if kept:
                commit.arrays[name] = (rows[kept], [a for i in kept if (a := arrays[at[i]]) is not None])

    def _put_failures(self, commits: dict[int, Commit], batch: _Batch) -> None:
        """Note the reasons of what failed, and forget those of what failed before and did not now."""
        cells, view = self.plan.cells, self.plan.view
        for (cell, kernel), reason in batch.failures.items():
            name = view.names[cells.name[cell]]
            commit = commits.get(int(cells.model[cell]))
            if commit is not None:
                commit.failures[name, kernel] = reason.removesuffix(" (not retried)")
                self.failures.append(Failure(commit.model_id, name, kernel, reason))
        for kernel, parts in batch.ran.items():
            ran = np.concatenate(parts)
            for model in np.unique(cells.model[ran]).tolist():
                commit = commits.get(model)
                if commit is None:
                    continue
                old = {name for name, who in self.failures_of(commit.model_id) if who == kernel}
                if old:
                    here = ran[cells.model[ran] == model]
                    names = {view.names[cells.name[c]] for c in here if (int(c), kernel) not in batch.failures}
                    commit.failures.update({(name, kernel): "" for name in old & names})

    def failures_of(self, model_id: str) -> Mapping[tuple[str, str], str]:
        """Return the reasons of earlier failures of a model by (name, kernel), as they were when first looked at."""
        if model_id not in self._old_failures:
            try:
                self._old_failures[model_id] = self.store.failures(model_id)
            except ModelNotFoundError:
                self._old_failures[model_id] = {}
        return self._old_failures[model_id]

    def _by_model(self, commits: dict[int, Commit], to: Index) -> Iterator[tuple[Commit, Index, Index]]:
        """Yield (commit, rows in the model's parameters, positions in `to`) of each model that cells belong to."""
        if not len(to):
            return
        models = self.plan.cells.model[to]
        order = np.argsort(models, kind="stable")
        found, starts = np.unique(models[order], return_index=True)
        for model, at in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            commit = commits.setdefault(model, Commit(self.plan.view.model_ids[model]))
            yield commit, self.plan.view.row[model, self.plan.cells.name[to[at]]].astype(np.intp), at


def _joined(bundles: Sequence[graph.Bundle]) -> graph.Bundle:
    """Return one bundle of the slices of several; arrays as an array of objects, for their shapes differ."""
    if len(bundles) == 1:
        return bundles[0]
    joined = graph.Bundle(sum(bundle.n for bundle in bundles))
    for name, first in bundles[0].values.items():
        parts = [bundle.values[name] for bundle in bundles]
        joined.status[name] = np.concatenate([bundle.status[name] for bundle in bundles])
        if first.ndim == 1:
            joined.values[name] = np.concatenate(parts)
        else:
            joined.values[name] = np.empty(joined.n, object)
            for i, value in enumerate(value for part in parts for value in part):
                joined.values[name][i] = value
    start = 0
    for bundle in bundles:
        joined.failures.update({(i + start, kernel): reason for (i, kernel), reason in bundle.failures.items()})
        start += bundle.n
    if bundles[0].digests is not None:
        joined.digests = [digest for bundle in bundles for digest in bundle.digests or ()]
    return joined


def is_there(store: Store, view: View, model: int) -> bool:
    """Return whether a model of `view` is still in the store under its id, and not replaced."""
    try:
        return bool(store.model_attrs(view.model_ids[model])["added"] == view.added[model])
    except ModelNotFoundError:
        return False


def _field_bytes(step: Step, rows: NDArray[np.int64], cols: NDArray[np.int64]) -> NDArray[np.int64]:
    """Return the size of the array fields that a step stores, by slice."""
    size = {"sval": np.minimum(rows, cols), "row": rows, "col": cols}
    total = np.zeros(len(rows), np.int64)
    for name in step.stored_fields:
        dims = step.kernel.outputs[name].dims
        total += 8 * np.prod([size[dim] for dim in dims], axis=0).astype(np.int64) if dims else 0
    return total
