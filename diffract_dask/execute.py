"""Running a plan: batches through Dask, results committed by the client while the next batch computes."""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np

from diffract_dask import config, graph, memory
from diffract_dask.commits import Failure, Writer, is_there
from diffract_dask.errors import ConfigurationError, KernelError, ModelChangedWarning
from diffract_dask.fields import Status
from diffract_dask.linalg import blas_threads
from diffract_dask.modellevel import evaluate_models, keys_of
from diffract_dask.plan import Plan, field_attrs
from diffract_dask.store import Commit

if TYPE_CHECKING:
    from diffract_dask.store import Store

__all__ = ["ApplySummary", "Failure", "run_plan"]

_HELD = 8  # one part in so many of the budget for what a batch brings to this process; two batches are there at once
_MORE_ROUNDS = 3  # after what was to be read turned out to be gone, or to be something else


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

    def __repr__(self) -> str:
        return f"<ApplySummary of {self}>"

    def __str__(self) -> str:
        def total(counts: Mapping[str, int]) -> int:
            return sum(counts.get(name, 0) for name in self.fields)

        text = (
            f"{len(self.fields)} field{'s' * (len(self.fields) != 1)}: {total(self.computed)} values computed, "
            f"{total(self.copied)} copied, {total(self.reused)} reused, {len(self.failed)} failed "
            f"in {self.seconds:.2f} s"
        )
        return "\n".join([text, *(f"  {failure}" for failure in self.failed[:10])]) + (
            f"\n  … and {len(self.failed) - 10} more" if len(self.failed) > 10 else ""
        )


def run_plan(
    plan: Plan,
    store: Store,
    *,
    replan: Callable[[Collection[str]], Plan],
    settings: Mapping[str, Any] | None = None,
    progress: bool | None = None,
) -> ApplySummary:
    """Run a plan and store its results.

    Parameters
    ----------
    replan : callable
        Makes the same plan again from the refreshed view: digests of linked weights are known only after they
        were read, and model-level values are over what is stored by then. Takes the models that cannot be read. Slices
        that failed are not run once more.
    progress : bool, optional
        Show a progress bar; by default as the setting ``progress`` says.
    """
    started = time.perf_counter()
    writer = Writer(plan, store)
    if plan.nothing_to_do:
        return _summary(plan, writer, started, {})
    _run_slices(plan, store, writer, settings, progress)
    for _ in range(_MORE_ROUNDS):
        if not writer.again:
            break
        now = replan(writer.avoided)
        writer = Writer(now, store, writer)
        _run_slices(now, store, writer, settings, progress)
    models: dict[str, int] = {}
    if any(step.run.any() for step in plan.model_steps.values()):
        with store.lock():  # no other writer is half way through the same values
            models = _commit_models(replan(()), store, writer, set(writer.plan.view.model_ids))
    store.refresh_view()
    _tell(writer)
    return _summary(plan, writer, started, models)


def _tell(writer: Writer) -> None:
    """Say which models changed meanwhile; raise the error of one that is there and could not be read."""
    plan, store = writer.plan, writer.store
    for model_id, error in writer.unreadable:
        if is_there(store, plan.view, plan.view.model_ids.index(model_id)):
            error.add_note("What could be read is computed and stored.")
            raise error
        writer.gone.add(model_id)
    if writer.gone:
        warnings.warn(
            f"{', '.join(map(repr, sorted(writer.gone)))}: changed, renamed or erased while values were computed, so "
            "that not all are stored; run the same call again for what is left",
            ModelChangedWarning,
            stacklevel=4,
        )


def _run_slices(
    plan: Plan, store: Store, writer: Writer, settings: Mapping[str, Any] | None, progress: bool | None
) -> None:
    """Copy what the store has, and compute the rest in batches, each committed while the next one runs."""
    writer.copy()
    total = sum(len(group.classes) for group in plan.groups)
    interval = config.number("view-interval", settings)
    seconds = config.number("batch-seconds", settings)
    refreshed = time.perf_counter()
    with _bar(total, progress, settings) as advance, _runner(plan) as submit:
        keep = {name: step.stored_fields for name, step in plan.steps.items()}
        blocks = graph.blocks(plan, store, token=uuid4().hex[:8], keep=keep)
        running: tuple[list[graph.Block], Future[list[graph.Bundle]]] | None = None
        for batch in graph.batches(blocks, seconds, plan.resources.workers, plan.resources.budget // _HELD):
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


def _commit_models(plan: Plan, store: Store, writer: Writer, known: set[str]) -> dict[str, int]:
    """Evaluate and store the model-level kernels for the models `known` at the start; return counts by field.

    The lock is held since before the plan was made.
    """
    counts: dict[str, int] = {}
    commits: dict[int, Commit] = {}
    for step in plan.model_steps.values():
        step.run &= np.isin(plan.view.model_ids, sorted(known))
    results = evaluate_models(plan)
    keys = keys_of(plan, results)
    for name, step in plan.model_steps.items():
        for model in map(int, np.flatnonzero(step.run)):
            made = {output: results.get(output, {}).get(model) for output in step.kernel.outputs}
            commit = commits.setdefault(model, Commit(plan.view.model_ids[model]))
            for output, result in made.items():
                if result is None:  # its slices are not what the plan was for
                    writer.gone.add(commit.model_id)
                    break
                value, status, reason = result
                commit.model_values[output] = (value, status)
                commit.attrs[output] = field_attrs(step.kernel, output, step.params)
                commit.failures["", name] = reason
                counts[output] = counts.get(output, 0) + 1
            else:
                commit.model_keys[name] = int(keys[name][model])
                if commit.failures["", name]:
                    writer.failures.append(Failure(commit.model_id, "", name, commit.failures["", name]))
    ready = [commit for commit in commits.values() if commit.model_keys]
    if plan.whole_models and ready:
        store.commit(ready)
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
    view, cells = plan.view, plan.cells
    found: dict[Failure, None] = {}
    unstored = [name for name, step in plan.steps.items() if not step.stored_fields]

    def note(model: int, parameter: str, kernels: Sequence[str]) -> None:
        model_id = view.model_ids[model]
        for kernel in kernels:
            reason = writer.failures_of(model_id).get((parameter, kernel))
            if reason:
                found[Failure(model_id, parameter, kernel, f"{reason} (not retried)")] = None

    for name, step in plan.steps.items():
        failed = np.zeros(len(cells.of), bool)
        for field_name in step.stored_fields:
            if field_name in view.status:
                failed |= view.status[field_name][cells.model, cells.name] == Status.FAILED
        for cell in np.flatnonzero(failed & plan.scope & step.fresh):
            note(int(cells.model[cell]), view.names[cells.name[cell]], [name, *unstored])
    for name, model_step in plan.model_steps.items():
        for model in np.unique(cells.model[plan.scope]):
            if model_step.failed[model]:
                note(int(model), "", [name])
    return list(found)


def _check_sendable(plan: Plan) -> None:
    """KernelError for a kernel that cannot be sent to worker processes."""
    import cloudpickle  # type: ignore[import-untyped]

    for name, step in plan.steps.items():
        if step.run.any():
            try:
                cloudpickle.dumps(step.kernel.function)
            except Exception as error:
                raise KernelError(
                    f"kernel {name!r} cannot be sent to workers ({error}): it refers to something that exists in this "
                    "process only. Make that inside the function, or compute without the client"
                ) from error


@contextlib.contextmanager
def _runner(plan: Plan) -> Iterator[Callable[[list[graph.Block]], Future[list[graph.Bundle]]]]:
    """Yield ``submit(batch) -> Future`` on the active client or on threads; an interrupt stops what runs."""
    have = plan.resources
    stop = threading.Event()
    client = memory.active_client() if have.distributed else None
    if client is not None:
        _check_sendable(plan)
    runner = ThreadPoolExecutor(1, "diffract-dask-batch")
    pool = ThreadPoolExecutor(have.workers, "diffract-dask") if client is None else None

    def on_threads(batch: list[graph.Block]) -> list[graph.Bundle]:
        import dask.threaded
        from dask.callbacks import Callback

        def check(*_: Any) -> None:
            if stop.is_set():
                raise InterruptedError("interrupted")

        tasks, keys = graph.build(batch)
        # Held over the batch: between two tasks the count must not jump back and forth.
        with blas_threads(1) if not batch[0].alone else contextlib.nullcontext():
            callbacks = [(None, None, check, check, None), *Callback.active]  # those of the caller's `with` too
            result = dask.threaded.get(tasks, keys, pool=pool, callbacks=callbacks)
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
    if not isinstance(wanted, (bool, np.bool_, int)):
        raise ConfigurationError(f"the setting 'progress' is {wanted!r}; give auto, true or false")
    if not wanted:
        yield lambda n: None
        return
    from tqdm.auto import tqdm

    with tqdm(total=total, unit="slice", desc="computing") as bar:
        yield bar.update
