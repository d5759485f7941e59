"""What tasks give back, as commits of the store: a value goes to every cell of its class that is in scope."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog, graph
from diffract_dask.kernel import Keys
from diffract_dask.plan import Plan, expected_keys, field_attrs
from diffract_dask.store import Commit

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["Failure", "Writer"]

Index = NDArray[np.intp]


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
    """Results by field and kernel for cells, put together once at the end: pieces are many and small."""

    def __init__(self) -> None:
        self.values: dict[str, list[tuple[Index, Any, NDArray[np.uint8]]]] = {}
        self.keys: dict[str, list[tuple[Index, Keys]]] = {}
        self.digests: list[tuple[Index, list[str]]] = []
        self.failures: list[tuple[int, str, str]] = []
        self.ran: dict[str, list[Index]] = {}


class Writer:
    """Commits copies and batches of one plan, and counts what it did.

    Attributes
    ----------
    computed, copied : dict of str to int
        Cells by field.
    failures : list of Failure
    seconds : dict of str to float
        Time in tasks by kernel.
    kernel_slices : dict of str to int
        Slices that each kernel ran on.
    """

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan = plan
        self.store = store
        self.computed: dict[str, int] = {}
        self.copied: dict[str, int] = {}
        self.failures: list[Failure] = []
        self.seconds: dict[str, float] = {}
        self.kernel_slices: dict[str, int] = {}
        self._old_failures: dict[str, Mapping[tuple[str, str], str]] = {}
        cells = plan.cells
        self._order = np.argsort(cells.of, kind="stable")
        self._edges = np.searchsorted(cells.of[self._order], np.arange(cells.n_classes + 1))

    def copy(self) -> None:
        """Commit values that the store holds for equal content."""
        batch = _Batch()
        cells = self.plan.cells
        for step in self.plan.steps.values():
            to = np.flatnonzero(step.copy)
            if not len(to):
                continue
            for part in self._one_shape(to):
                source = step.source[cells.of[part]]
                for name in step.stored_fields:
                    values, status = graph.stored_values(self.plan, self.store, name, source)
                    batch.values.setdefault(name, []).append((part, values, status))
                    self.copied[name] = self.copied.get(name, 0) + len(part)
            batch.keys[step.kernel.name] = [(to, step.expected[cells.of[to]])]
        self._send(batch)

    def _one_shape(self, to: Index) -> Iterator[Index]:
        labels = self.plan.cells.of[to]
        shapes = np.stack([self.plan.cells.rows[labels], self.plan.cells.cols[labels]], axis=1)
        _, part = np.unique(shapes, axis=0, return_inverse=True)
        for which in range(int(part.max()) + 1):
            yield to[part.ravel() == which]

    def commit(self, blocks: Sequence[graph.Block], bundles: Sequence[graph.Bundle]) -> None:
        """Commit the results of one batch of blocks."""
        batch = _Batch()
        for block, bundle in zip(blocks, bundles, strict=True):
            self._add_block(batch, block, bundle)
            for name, seconds in bundle.seconds.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._send(batch)

    def _add_block(self, batch: _Batch, block: graph.Block, bundle: graph.Bundle) -> None:
        plan, cells = self.plan, self.plan.cells
        classes = block.classes
        counts = self._edges[classes + 1] - self._edges[classes]
        at = np.repeat(np.arange(len(classes)), counts)
        to = np.concatenate([self._order[self._edges[c] : self._edges[c + 1]] for c in classes])
        weights = cells.weights[classes]
        if bundle.digests is not None:
            weights = np.array([catalog.digest_key(digest) for digest in bundle.digests], np.uint64)
            changed = weights != cells.weights[classes]
            if changed.any():
                # What was read is the content of this model's file; other models of the class may differ from it.
                mine = ~changed[at] | (cells.model[to] == plan.view.model_ids.index(block.group.model_id))
                to, at = to[mine], at[mine]
                batch.digests.append((to[changed[at]], [bundle.digests[i] for i in at[changed[at]]]))
        keys = expected_keys(plan.kernels, plan.registry, plan.roots, weights, cells.shapes[classes])
        for name in block.group.kernels:
            step = plan.steps[name]
            self.kernel_slices[name] = self.kernel_slices.get(name, 0) + bundle.n
            receives = step.store[to]
            if not receives.any():
                continue
            cell, index = to[receives], at[receives]
            for output in step.stored_fields:
                self.computed[output] = self.computed.get(output, 0) + len(cell)
                values, status = bundle.values[output][index], bundle.status[output][index]
                batch.values.setdefault(output, []).append((cell, values, status))
            batch.keys.setdefault(name, []).append((cell, keys[name][index]))
            batch.ran.setdefault(name, []).append(cell)
            failed = {i: reason for (i, kernel), reason in bundle.failures.items() if kernel == name}
            batch.failures += (
                [(int(c), name, failed[int(i)]) for c, i in zip(cell, index, strict=True) if int(i) in failed]
                if failed
                else []
            )

    def _send(self, batch: _Batch) -> None:
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
        self._put_failures(commits, batch)
        if commits:
            self.store.commit(list(commits.values()))

    def _put_values(
        self, commits: dict[int, Commit], name: str, parts: Sequence[tuple[Index, Any, NDArray[np.uint8]]]
    ) -> None:
        to = np.concatenate([cells for cells, _, _ in parts])
        status = np.concatenate([part for _, _, part in parts])
        arrays: list[NDArray[Any]] | None = None
        scalars = np.full(len(to), np.nan)
        if self.plan.registry.field(name).dims:
            arrays = [array for _, values, _ in parts for array in values]
        else:
            scalars = np.concatenate([values for _, values, _ in parts])
        kernel = self.plan.registry.producer(name)
        attrs = field_attrs(kernel, name, self.plan.steps[kernel.name].params)
        for commit, rows, at in self._by_model(commits, to):
            commit.values[name] = (rows, scalars[at], status[at])
            if arrays is not None:
                commit.arrays[name] = (rows, [arrays[i] for i in at])
            commit.attrs[name] = attrs

    def _put_failures(self, commits: dict[int, Commit], batch: _Batch) -> None:
        """Note the reasons of what failed, and forget those of what failed before and did not now."""
        cells, view = self.plan.cells, self.plan.view
        failed = {(cell, kernel): reason for cell, kernel, reason in batch.failures}
        for (cell, kernel), reason in failed.items():
            name = view.names[cells.name[cell]]
            commit = commits[int(cells.model[cell])]
            commit.failures[name, kernel] = reason
            self.failures.append(Failure(commit.model_id, name, kernel, reason))
        for kernel, parts in batch.ran.items():
            for commit, _, at in self._by_model(commits, np.concatenate(parts)):
                old = {name for name, who in self._failures_of(commit.model_id) if who == kernel}
                if old:
                    ran = np.concatenate(parts)[at]
                    names = {view.names[cells.name[c]] for c in ran if (int(c), kernel) not in failed}
                    commit.failures.update({(name, kernel): "" for name in old & names})

    def _failures_of(self, model_id: str) -> Mapping[tuple[str, str], str]:
        if model_id not in self._old_failures:
            self._old_failures[model_id] = self.store.failures(model_id)
        return self._old_failures[model_id]

    def _by_model(self, commits: dict[int, Commit], to: Index) -> Iterator[tuple[Commit, Index, Index]]:
        """Yield (commit, rows in the model's parameters, positions in `to`) of each model that cells belong to."""
        models = self.plan.cells.model[to]
        order = np.argsort(models, kind="stable")
        found, starts = np.unique(models[order], return_index=True)
        for model, at in zip(found.tolist(), np.split(order, starts[1:]), strict=True):
            commit = commits.setdefault(model, Commit(self.plan.view.model_ids[model]))
            yield commit, self.plan.view.row[model, self.plan.cells.name[to[at]]].astype(np.intp), at
