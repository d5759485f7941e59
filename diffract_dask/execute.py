"""Running a plan: batches through Dask, results committed by the client while the next batch computes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog, config, graph, memory
from diffract_dask.fields import Status
from diffract_dask.kernel import Keys
from diffract_dask.linalg import blas_threads
from diffract_dask.modellevel import evaluate_models
from diffract_dask.plan import Plan, Step, expected_keys, field_attrs
from diffract_dask.store import Commit

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["ApplySummary", "Failure", "run_plan"]


@dataclass(frozen=True)
class Failure:
    """One value that a kernel did not give."""

    model_id: str
    name: str
    kernel: str
    reason: str

    def __str__(self) -> str:
        return f"{self.model_id}: {self.name}: kernel {self.kernel!r} failed: {self.reason}"


@dataclass(frozen=True)
class ApplySummary:
    """What an ``apply`` did.

    Attributes
    ----------
    fields : tuple of str
        As requested.
    computed, copied, reused : dict of str to int
        Number of parameters (models for model-level fields) by field: computed now; taken from equal content
        elsewhere in the store; already stored and fresh.
    failed : tuple of Failure
        Values that stayed NaN because a kernel raised, those of earlier calls included.
    kernel_slices : dict of str to int
        Distinct slices that each kernel ran on.
    seconds : float
        Wall time.
    kernel_seconds : dict of str to float
        Time in tasks by kernel, summed over workers.
    levels : dict of str to str
        Level of each field.
    """

    fields: tuple[str, ...]
    computed: dict[str, int] = field(default_factory=dict)
    copied: dict[str, int] = field(default_factory=dict)
    reused: dict[str, int] = field(default_factory=dict)
    failed: tuple[Failure, ...] = ()
    kernel_slices: dict[str, int] = field(default_factory=dict)
    seconds: float = 0.0
    kernel_seconds: dict[str, float] = field(default_factory=dict)
    levels: dict[str, str] = field(default_factory=dict)

    @property
    def parameter_fields(self) -> tuple[str, ...]:
        """Slice-level fields that were computed, those computed on the way included."""
        return tuple(name for name in self.computed if self.levels[name] == "slice")

    @property
    def in_model_fields(self) -> tuple[str, ...]:
        """Model-level fields that were computed."""
        return tuple(name for name in self.computed if self.levels[name] == "model")

    @property
    def skipped(self) -> tuple[tuple[str, str], ...]:
        """Requested fields of which nothing had to be computed, with the reason."""
        return tuple(
            (name, "stored and fresh" if self.reused.get(name) or self.copied.get(name) else "nothing in scope")
            for name in self.fields
            if name not in self.computed
        )

    def __str__(self) -> str:
        def total(counts: Mapping[str, int]) -> int:
            return sum(counts.get(name, 0) for name in self.fields)

        text = (
            f"{len(self.fields)} fields: {total(self.computed)} values computed, {total(self.copied)} copied, "
            f"{total(self.reused)} reused, {len(self.failed)} failed in {self.seconds:.2f} s"
        )
        return "\n".join([text, *(f"  {failure}" for failure in self.failed[:10])]) + (
            f"\n  … and {len(self.failed) - 10} more" if len(self.failed) > 10 else ""
        )


def run_plan(
    plan: Plan,
    store: Store,
    *,
    replan: Callable[[], Plan],
    settings: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> ApplySummary:
    """Run a plan and store its results.

    Parameters
    ----------
    replan : callable
        Makes the same plan again from the refreshed view: digests of linked weights are known only after they
        were read, and model-level values are over what is stored by then.
    progress : bool, optional
        Show a progress bar; by default as the setting ``progress`` says.
    """
    started = time.perf_counter()
    writer = _Writer(plan, store)
    if plan.nothing_to_do:
        return _summary(plan, writer, started, {})
    writer.copy()
    total = sum(len(group.classes) for group in plan.groups)
    interval = float(config.get("view-interval", settings))
    refreshed = time.perf_counter()
    with _bar(total, progress, settings) as advance, _runner(plan.resources) as submit:
        parts = graph.batches(
            graph.blocks(plan, store, token=uuid4().hex[:8], keep={k: s.stored_fields for k, s in plan.steps.items()}),
            float(config.get("batch-seconds", settings)),
            plan.resources.workers,
        )
        running: tuple[list[graph.Block], Future[list[graph.Bundle]]] | None = None
        for batch in parts:
            following = (batch, submit(batch)) if running is None else None
            if running is not None:
                done, bundles = running[0], running[1].result()
                following = (batch, submit(batch))
                writer.commit(done, bundles)
                advance(sum(bundle.n for bundle in bundles))
                if time.perf_counter() - refreshed > interval:
                    store.refresh_view()
                    refreshed = time.perf_counter()
            running = following
        if running is not None:
            bundles = running[1].result()
            writer.commit(running[0], bundles)
            advance(sum(bundle.n for bundle in bundles))
    models: dict[str, int] = {}
    if any(step.run.any() for step in plan.model_steps.values()):
        models = _commit_models(replan(), store)
    store.refresh_view()
    return _summary(plan, writer, started, models)


class _Writer:
    """Turns bundles into commits: one value goes to every cell of its class that is in scope."""

    def __init__(self, plan: Plan, store: Store) -> None:
        self.plan = plan
        self.store = store
        self.computed: dict[str, int] = {}
        self.copied: dict[str, int] = {}
        self.failures: list[Failure] = []
        self.seconds: dict[str, float] = {}
        self.kernel_slices: dict[str, int] = {}
        self.attrs = {
            name: field_attrs(step.kernel, name, step.params)
            for step in plan.steps.values()
            for name in step.stored_fields
        }
        cells = plan.cells
        self._order = np.argsort(cells.of, kind="stable")
        self._edges = np.searchsorted(cells.of[self._order], np.arange(cells.n_classes + 1))

    def copy(self) -> None:
        """Commit values that the store holds for equal content."""
        commits: dict[int, Commit] = {}
        for step in self.plan.steps.values():
            to = np.flatnonzero(step.copy)
            if not len(to):
                continue
            source = step.source[self.plan.cells.of[to]]
            for name in step.stored_fields:
                self.copied[name] = self.copied.get(name, 0) + len(to)
                if self.plan.registry.field(name).dims:
                    self._copy_arrays(commits, name, to, source)
                else:
                    values, status = graph.stored_values(self.plan, self.store, name, source)
                    self._put(commits, name, to, values, status)
            self._put_keys(commits, step, to, step.expected[self.plan.cells.of[to]])
        self._send(commits)

    def _copy_arrays(
        self, commits: dict[int, Commit], name: str, to: NDArray[np.intp], source: NDArray[np.intp]
    ) -> None:
        shapes = np.stack([self.plan.cells.rows, self.plan.cells.cols], axis=1)[self.plan.cells.of[to]]
        _, part = np.unique(shapes, axis=0, return_inverse=True)
        for which in np.unique(part):
            at = np.flatnonzero(part.ravel() == which)
            values, status = graph.stored_values(self.plan, self.store, name, source[at])
            self._put(commits, name, to[at], values, status)

    def commit(self, batch: Sequence[graph.Block], bundles: Sequence[graph.Bundle]) -> None:
        """Commit the results of one batch."""
        commits: dict[int, Commit] = {}
        for block, bundle in zip(batch, bundles, strict=True):
            self._commit_block(commits, block, bundle)
            for name, seconds in bundle.seconds.items():
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
        self._send(commits)

    def _commit_block(self, commits: dict[int, Commit], block: graph.Block, bundle: graph.Bundle) -> None:
        plan, cells = self.plan, self.plan.cells
        classes = block.classes
        counts = self._edges[classes + 1] - self._edges[classes]
        at = np.repeat(np.arange(len(classes)), counts)
        to = np.concatenate([self._order[self._edges[c] : self._edges[c + 1]] for c in classes])
        new_keys: dict[str, Keys] | None = None
        if bundle.digests is not None:
            keys = np.array([catalog.digest_key(digest) for digest in bundle.digests], np.uint64)
            changed = keys != cells.weights[classes]
            if changed.any():
                model = plan.view.model_ids.index(block.group.model_id)
                mine = ~changed[at] | (cells.model[to] == model)
                to, at = to[mine], at[mine]
                self._put_digests(commits, to[changed[at]], [bundle.digests[i] for i in at[changed[at]]])
                new_keys = expected_keys(plan.kernels, plan.registry, plan.roots, keys, cells.shapes[classes])
        for name in block.group.kernels:
            step = plan.steps[name]
            self.kernel_slices[name] = self.kernel_slices.get(name, 0) + bundle.n
            receives = step.store[to]
            if not receives.any():
                continue
            cell, index = to[receives], at[receives]
            for output in step.stored_fields:
                self.computed[output] = self.computed.get(output, 0) + len(cell)
                self._put(commits, output, cell, bundle.values[output][index], bundle.status[output][index])
            wanted = new_keys[name][index] if new_keys is not None else step.expected[classes][index]
            self._put_keys(commits, step, cell, wanted)
            self._put_failures(commits, name, cell, index, bundle)

    def _put(
        self,
        commits: dict[int, Commit],
        name: str,
        to: NDArray[np.intp],
        values: NDArray[Any],
        status: NDArray[np.uint8],
    ) -> None:
        is_array = bool(self.plan.registry.field(name).dims)
        for commit, rows, at in self._by_model(commits, to):
            scalars = np.full(len(at), np.nan) if is_array else values[at]
            _append(commit.values, name, (rows, scalars, status[at]))
            if is_array:
                old: tuple[NDArray[np.intp], list[NDArray[Any]]] = commit.arrays.get(name, (np.empty(0, np.intp), []))
                commit.arrays[name] = (np.concatenate([old[0], rows]), [*old[1], *values[at]])
            commit.attrs[name] = self.attrs[name]

    def _put_keys(self, commits: dict[int, Commit], step: Step, to: NDArray[np.intp], keys: Keys) -> None:
        for commit, rows, at in self._by_model(commits, to):
            _append(commit.keys, step.kernel.name, (rows, keys[at]))

    def _put_digests(self, commits: dict[int, Commit], to: NDArray[np.intp], digests: list[str]) -> None:
        for commit, rows, at in self._by_model(commits, to):
            digested: tuple[NDArray[np.intp], list[str]] = commit.digests or (np.empty(0, np.intp), [])
            commit.digests = (np.concatenate([digested[0], rows]), [*digested[1], *(digests[i] for i in at)])

    def _put_failures(
        self,
        commits: dict[int, Commit],
        kernel: str,
        to: NDArray[np.intp],
        index: NDArray[np.intp],
        bundle: graph.Bundle,
    ) -> None:
        reasons = {i: reason for (i, name), reason in bundle.failures.items() if name == kernel}
        for commit, _, at in self._by_model(commits, to):
            for i in at:
                name = self.plan.view.names[self.plan.cells.name[to[i]]]
                reason = reasons.get(int(index[i]), "")
                if reason:
                    self.failures.append(Failure(commit.model_id, name, kernel, reason))
                    commit.failures[name, kernel] = reason
                elif (name, kernel) in self._old_failures(commit.model_id):
                    commit.failures[name, kernel] = ""

    def _old_failures(self, model_id: str) -> Mapping[tuple[str, str], str]:
        cache = self.__dict__.setdefault("_known_failures", {})
        if model_id not in cache:
            cache[model_id] = self.store.failures(model_id)
        found: Mapping[tuple[str, str], str] = cache[model_id]
        return found

    def _by_model(
        self, commits: dict[int, Commit], to: NDArray[np.intp]
    ) -> Iterator[tuple[Commit, NDArray[np.intp], NDArray[np.intp]]]:
        models = self.plan.cells.model[to]
        for model in np.unique(models):
            at = np.flatnonzero(models == model)
            commit = commits.get(int(model))
            if commit is None:
                commit = commits[int(model)] = Commit(self.plan.view.model_ids[model])
            yield commit, self.plan.view.row[model, self.plan.cells.name[to[at]]].astype(np.intp), at

    def _send(self, commits: Mapping[int, Commit]) -> None:
        if commits:
            self.store.commit(list(commits.values()))


def _append(table: dict[str, Any], name: str, columns: tuple[NDArray[Any], ...]) -> None:
    old = table.get(name)
    table[name] = columns if old is None else tuple(np.concatenate(pair) for pair in zip(old, columns, strict=True))


def _commit_models(plan: Plan, store: Store) -> dict[str, int]:
    """Evaluate and store the model-level kernels; return how many models each field was computed for."""
    counts: dict[str, int] = {}
    commits: dict[int, Commit] = {}
    results = evaluate_models(plan, store)
    for name, step in plan.model_steps.items():
        for model in np.flatnonzero(step.run):
            commit = commits.setdefault(int(model), Commit(plan.view.model_ids[model]))
            for output in step.kernel.outputs:
                value, status, reason = results[output][int(model)]
                commit.model_values[output] = (value, status)
                commit.attrs[output] = field_attrs(step.kernel, output, step.params)
                commit.failures["", name] = reason
                counts[output] = counts.get(output, 0) + 1
            commit.model_keys[name] = int(step.expected[model])
    if plan.whole_models and commits:
        store.commit(list(commits.values()))
    return counts


def _summary(plan: Plan, writer: _Writer, started: float, models: Mapping[str, int]) -> ApplySummary:
    registry = plan.registry
    computed = {**writer.computed, **models}
    reused: dict[str, int] = {}
    for name in plan.fields:
        kernel = registry.producer(name)
        if kernel.level == "slice":
            count = int((plan.steps[kernel.name].fresh & plan.scope).sum())
        else:
            in_scope = np.unique(plan.cells.model[plan.scope])
            count = int((~plan.model_steps[kernel.name].run[in_scope]).sum())
        if count:
            reused[name] = count
    return ApplySummary(
        plan.fields,
        computed,
        dict(writer.copied),
        reused,
        tuple([*writer.failures, *_earlier_failures(plan, writer)]),
        dict(writer.kernel_slices),
        time.perf_counter() - started,
        dict(writer.seconds),
        {name: registry.producer(name).level for name in {*computed, *plan.fields}},
    )


def _earlier_failures(plan: Plan, writer: _Writer) -> list[Failure]:
    """Return failures of earlier calls that the request met again and did not retry."""
    found: list[Failure] = []
    for step in plan.steps.values():
        for name in step.stored_fields:
            if name not in plan.view.status:
                continue
            status = plan.view.status[name][plan.cells.model, plan.cells.name]
            for cell in np.flatnonzero(plan.scope & step.fresh & (status == Status.FAILED)):
                model_id = plan.view.model_ids[plan.cells.model[cell]]
                parameter = plan.view.names[plan.cells.name[cell]]
                reason = writer.store.failures(model_id).get((parameter, step.kernel.name))
                if reason:
                    found.append(Failure(model_id, parameter, step.kernel.name, f"{reason} (not retried)"))
    return list(dict.fromkeys(found))


@contextlib.contextmanager
def _runner(have: memory.Resources) -> Iterator[Callable[[list[graph.Block]], Future[list[graph.Bundle]]]]:
    """Yield ``submit(batch) -> Future`` on the active client or on threads; an interrupt stops what runs."""
    stop = threading.Event()
    client = memory.active_client() if have.distributed else None
    runner = ThreadPoolExecutor(1, "diffract-dask-batch")
    pool = ThreadPoolExecutor(have.workers, "diffract-dask") if client is None else None

    def on_threads(batch: list[graph.Block]) -> list[graph.Bundle]:
        import dask.threaded

        def check(*_: Any) -> None:
            if stop.is_set():
                raise InterruptedError("interrupted")

        tasks, keys = graph.build(batch)
        # Held over the batch: between two tasks the count must not jump back and forth.
        with blas_threads(1) if not batch[0].alone else contextlib.nullcontext():
            result = dask.threaded.get(tasks, keys, pool=pool, callbacks=[(None, None, check, check, None)])
        return list(result)

    def on_client(batch: list[graph.Block]) -> list[graph.Bundle]:
        import dask

        assert client is not None
        tasks, keys = graph.build(batch)
        with dask.config.set({"distributed.admin.large-graph-warning-threshold": "1 GiB"}):
            futures = client.get(tasks, keys, sync=False)
        waiting.extend(futures)
        try:
            return list(client.gather(futures))
        finally:
            waiting.clear()

    waiting: list[Any] = []
    try:
        yield lambda batch: runner.submit(on_threads if client is None else on_client, batch)
    except BaseException:
        stop.set()
        if client is not None and waiting:
            client.cancel(list(waiting))
        raise
    finally:
        runner.shutdown(wait=True, cancel_futures=True)
        if pool is not None:
            pool.shutdown(wait=True, cancel_futures=True)


@contextlib.contextmanager
def _bar(total: int, progress: bool | None, settings: Mapping[str, Any] | None) -> Iterator[Callable[[int], object]]:
    """Yield a function that advances a progress bar on standard error; nothing where that is no terminal."""
    wanted = progress if progress is not None else config.get("progress", settings)
    if wanted in ("auto", None):
        wanted = sys.stderr.isatty()
    if not wanted:
        yield lambda n: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="slice", desc="computing") as bar:
        yield bar.update
