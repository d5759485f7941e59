"""Running a plan: batches through Dask, results committed by the client while the next batch computes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from diffract_dask import config, graph, memory
from diffract_dask.commits import Failure, Writer
from diffract_dask.fields import Status
from diffract_dask.linalg import blas_threads
from diffract_dask.modellevel import evaluate_models
from diffract_dask.plan import Plan, field_attrs
from diffract_dask.store import Commit

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["ApplySummary", "Failure", "run_plan"]


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
            f"{len(self.fields)} field{'s' * (len(self.fields) != 1)}: {total(self.computed)} values computed, {total(self.copied)} copied, "
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
    writer = Writer(plan, store)
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
        models = _commit_models(replan(), store, writer.failures)
    store.refresh_view()
    return _summary(plan, writer, started, models)


def _commit_models(plan: Plan, store: Store, failures: list[Failure]) -> dict[str, int]:
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
                if reason:
                    failures.append(Failure(commit.model_id, "", name, reason))
                counts[output] = counts.get(output, 0) + 1
            commit.model_keys[name] = int(step.expected[model])
    if plan.whole_models and commits:
        store.commit(list(commits.values()))
    return counts


def _summary(plan: Plan, writer: Writer, started: float, models: Mapping[str, int]) -> ApplySummary:
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


def _earlier_failures(plan: Plan, writer: Writer) -> list[Failure]:
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
