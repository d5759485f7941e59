"""Where runs meet weights: checkpoints and weight stores as artifacts, registering checkpoints, the lineage of models.

The only module of this folder that imports the rest of the package; it is imported when it is used.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from functools import lru_cache
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import SKIP_MEANING, Checkpoint, Tensor, digest, natural_key
from diffract_dask.errors import ArtifactError, StoreError
from diffract_dask.fields import MISSING
from diffract_dask.runs.arrays import ArrayRef, Selection
from diffract_dask.runs.encoding import encode
from diffract_dask.runs.readers import Content
from diffract_dask.session import Session
from diffract_dask.sources import dtypes, open_checkpoint
from diffract_dask.store import Store

if TYPE_CHECKING:
    from diffract_dask.runs.context import RunContext

__all__ = [
    "Lineage",
    "LineageModel",
    "lineage",
    "read_checkpoint",
    "read_weight_store",
    "register_checkpoint",
    "stored_metrics",
]

_WHOLE_BYTES = 64 * 2**20
_SPAN_BYTES = 16 * 2**20

StoreLike = str | os.PathLike[str] | Session | Store


# ------------------------------------------------------------------------------------------------- reading


@contextmanager
def read_checkpoint(path: Path) -> Iterator[Content]:
    """Open a checkpoint that a source takes; each parameter is an array."""
    checkpoint = open_checkpoint(str(path))
    attrs = {"framework": checkpoint.framework, **checkpoint.attrs}
    yield Content([_tensor(tensor) for tensor in checkpoint.tensors], attrs=attrs)


def _tensor(tensor: Tensor) -> ArrayRef:
    attrs = {"parameter": tensor.name}
    if not tensor.readable:
        reason = SKIP_MEANING.get(tensor.skip, tensor.skip) if tensor.skip else f"its type is {tensor.dtype}"  # type: ignore[call-overload]
        return _refusing(tensor.name, tensor.shape, tensor.dtype, str(reason), attrs)
    shape = tensor.shape

    def read(selection: Selection) -> NDArray[Any]:
        rows = selection[0] if shape else slice(0, 1)
        values = dtypes.decode(np.asarray(tensor.read(rows.start, rows.stop)), tensor.dtype)
        return values[(slice(None), *selection[1:])] if shape else values.reshape(())

    row = math.prod(shape[1:]) if len(shape) > 1 else 0
    chunks = (1, *shape[1:]) if row else None
    return ArrayRef(tensor.name, shape, dtypes.decoded(tensor.dtype), read, chunks, tensor.dtype, attrs)


def _refusing(address: str, shape: tuple[int, ...], stored: str, why: str, attrs: Mapping[str, Any]) -> ArrayRef:
    def refuse(selection: Selection) -> NDArray[Any]:
        raise ArtifactError(f"{address!r} cannot be read: {why}")

    return ArrayRef(address, shape, np.dtype("V0"), refuse, stored=stored, attrs=attrs, refusal=why)


@contextmanager
def read_weight_store(path: Path) -> Iterator[Content]:
    """Open a store of weights: each parameter of each model is the array ``model_id/name``, with the stored metrics."""
    store = Store.open(path, mode="r")
    arrays: list[ArrayRef] = []
    models = {}
    for model_id in store.model_ids():
        models[model_id] = store.model_attrs(model_id)
        arrays += _stored(store, model_id)
    yield Content(arrays, models=models, metrics=lambda model_id: _metrics(store, model_id))


def _stored(store: Store, model_id: str) -> Iterator[ArrayRef]:
    table = store.parameters(model_id)
    for i, (name, shape, stored) in enumerate(zip(table.name, table.shape, table.dtype, strict=True)):
        attrs = {"model": model_id, "parameter": str(name)}
        if table.digest[i]:
            attrs["digest"] = str(table.digest[i])
        address = f"{model_id}/{name}"
        if not (table.stack[i] or table.path[i] or 0 in shape):
            reason = str(table.skip_reason[i])
            yield _refusing(address, shape, stored, SKIP_MEANING.get(reason, reason), attrs)  # type: ignore[call-overload]
            continue
        dtype = dtypes.decoded(stored)
        read, chunks = _parameter_reader(store, model_id, i, shape, dtype)
        yield ArrayRef(address, shape, dtype, read, chunks, stored, attrs)


def _parameter_reader(
    store: Store, model_id: str, i: int, shape: tuple[int, ...], dtype: np.dtype[Any]
) -> tuple[Callable[[Selection], NDArray[Any]], tuple[int, ...] | None]:
    """Return what reads a part of a parameter, and the parts that it reads well."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes <= _WHOLE_BYTES:

        @lru_cache(maxsize=1)
        def whole() -> NDArray[Any]:
            return np.asarray(store.parameter(model_id, i).load()[0]).reshape(shape)

        return lambda selection: whole()[selection], shape or None
    rows, cols = shape[0], math.prod(shape[1:])
    inner = math.prod(shape[2:])

    def read(selection: Selection) -> NDArray[Any]:
        along, across = selection[0], slice(0, cols)
        if len(shape) > 1:
            across = slice(selection[1].start * inner, selection[1].stop * inner)
        slices = store.parameter(model_id, i)
        span = along if rows >= cols else across
        block = np.concatenate(list(slices.blocks(span.start, span.stop, _SPAN_BYTES)))
        values = block[:, across] if rows >= cols else block.T[along]
        values = values.reshape(len(values), *([-1, *shape[2:]] if len(shape) > 1 else []))
        return values[(slice(None), slice(None), *selection[2:])[: len(shape)]]

    unit = max(1, _SPAN_BYTES // (dtype.itemsize * min(rows, cols)))
    if rows >= cols:
        return read, (min(rows, unit), *shape[1:])
    return read, (rows, max(1, unit // inner), *shape[2:])


def stored_metrics(store: StoreLike, model_id: str) -> dict[str, dict[str, float]]:
    """Return the scalar metrics of a model, ``{field: {parameter: value}}``; ``""`` stands for the whole model.

    Nothing if the store or the model is gone.
    """
    try:
        opened = Store.open(store, mode="r") if isinstance(store, str | os.PathLike) else _opened(store)
    except StoreError:
        return {}
    return _metrics(opened, model_id)


def _metrics(store: Store, model_id: str) -> dict[str, dict[str, float]]:
    view = store.view()
    if model_id not in view.model_ids:
        return {}
    at = view.model_ids.index(model_id)
    found: dict[str, dict[str, float]] = {}
    present = np.flatnonzero(view.present[at])
    for name, values in view.values.items():
        held = {view.names[i]: float(values[at, i]) for i in present if view.status[name][at, i] != MISSING}
        if held:
            found[name] = held
    for name, of_models in view.model_values.items():
        if view.model_status[name][at] != MISSING:
            found[name] = {"": float(of_models[at])}
    return found


# ------------------------------------------------------------------------------------------------- registering


def register_checkpoint(
    ctx: RunContext,
    store: StoreLike,
    checkpoint: Any,
    *,
    model_id: str | None = None,
    parent: str | Sequence[str] | None = None,
    step: float | None = None,
    link: bool = False,
    attrs: Mapping[str, Any] | None = None,
) -> tuple[str, dict[str, Any]]:
    """Add a checkpoint to a weight store as a model that names the run it comes from.

    Parameters
    ----------
    ctx : RunContext
    store : path, Session or Store
    checkpoint : object
        A path, or whatever else ``session.models.add`` takes.
    model_id : str, optional
        Default: pipeline, variant, the run's short fingerprint, and the step.
    parent : str or sequence of str, optional
        Models that it was made from.
    step : float, optional
        Of the training.
    link : bool
        Leave the weights in the file.
    attrs : mapping, optional
        More attributes of the model.

    Returns
    -------
    model_id : str
    entry : dict
        For the run's record. Its ``status`` is ``added``, ``same`` (the store has this content under this id already)
        or ``replaced``; then ``replaced`` says what was there.
    """
    opened = open_checkpoint(checkpoint)
    target = _opened(store)
    chosen = model_id if model_id is not None else _default_id(ctx, step)
    parents = [parent] if isinstance(parent, str) else list(parent or ())
    content = _content(opened)
    run = _run_attrs(ctx, target)
    config = encode(ctx.config, "config", whole=False)
    own = {**(attrs or {}), "run": run, "config": config, "checkpoint_digest": content}
    entry: dict[str, Any] = {
        "model_id": chosen,
        "store": _relative(target.location, ctx.root),
        "stage": ctx.stage,
        "step": step,
        "parent": parents,
        "content": content,
        "source": _relative(opened.source, ctx.path) if isinstance(checkpoint, str | os.PathLike) else opened.source,
        "registered": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    with target.lock():
        before = target.model_attrs(chosen) if chosen in target.model_ids() else None
        if before is not None and _holds(target, chosen, before, content, opened):
            changed = {k: v for k, v in {**own, "step": step, "parent": parents}.items() if before.get(k) != v}
            if changed:
                target.set_model_attrs(chosen, **changed)
            return chosen, {**entry, "status": "same"}
        if before is not None:
            replaced = {"content": before.get("checkpoint_digest")} | {k: before.get(k) for k in ("run", "added")}
            own["replaced"] = [*before.get("replaced", []), replaced]
            entry["replaced"] = replaced
        target.add_model(chosen, opened, step=step, parents=parents, attrs=own, replace=before is not None, link=link)
    return chosen, {**entry, "status": "added" if before is None else "replaced"}


def _opened(store: StoreLike) -> Store:
    if isinstance(store, Store):
        return store
    return store.store if isinstance(store, Session) else Store.open(store)


def _default_id(ctx: RunContext, step: float | None) -> str:
    record = ctx.record
    name = f"{record.pipeline}/{record.variant}/{record.short_fp}"
    return name if step is None else f"{name}@{step:g}"


def _content(checkpoint: Checkpoint) -> str:
    """Return a hash over names, types, shapes and entries; reads the whole checkpoint, a piece at a time."""
    rows = []
    for tensor in sorted(checkpoint.tensors, key=lambda one: one.name):
        held = digest(tensor.read, tensor.shape, tensor.dtype) if tensor.readable and 0 not in tensor.shape else ""
        rows.append(f"{tensor.name}\0{tensor.dtype}\0{tensor.shape}\0{held}")
    return blake2b("\n".join(rows).encode("utf8", "surrogatepass"), digest_size=16).hexdigest()


def _holds(store: Store, model_id: str, attrs: Mapping[str, Any], content: str, checkpoint: Checkpoint) -> bool:
    """Return whether the store has this content; of a model that was added otherwise, by the digests of all of it."""
    if "checkpoint_digest" in attrs:
        return bool(attrs["checkpoint_digest"] == content)
    table = store.parameters(model_id)
    tensors = {tensor.name: tensor for tensor in checkpoint.tensors}
    if set(tensors) != set(table.name):
        return False
    for name, known in zip(table.name, table.digest, strict=True):
        tensor = tensors[name]
        if not known or not tensor.readable or known != digest(tensor.read, tensor.shape, tensor.dtype):
            return False
    return True


def _run_attrs(ctx: RunContext, store: Store) -> dict[str, Any]:
    record = ctx.record
    beside = None if store.location is None else os.path.dirname(store.location)
    return {
        "pipeline": record.pipeline,
        "variant": record.variant,
        "fingerprint": record.fingerprint,
        "stage": ctx.stage,
        "chain": record.chain,
        "variation": record.variation,
        "path": record.where,
        "root": _relative(str(ctx.root), beside),
    }


def _relative(path: str | None, start: str | os.PathLike[str] | None) -> str | None:
    """Return a local path relative to a folder, so that both can be moved together; anything else as it is."""
    if path is None or start is None or "://" in path or not os.path.isabs(path):
        return path
    try:
        return Path(os.path.relpath(path, start)).as_posix()
    except ValueError:  # on another drive
        return path


# ------------------------------------------------------------------------------------------------- lineage


@dataclass(frozen=True, slots=True)
class LineageModel:
    """One model in a lineage.

    Parameters
    ----------
    model_id : str
    step : float or None
    parents : list of str
    missing_parents : list of str
        Those that the store does not hold.
    children : list of str
        By step.
    run : dict or None
        Pipeline, variant and fingerprint of the run that made it.
    replaced : int
        How many times its content was replaced.
    """

    model_id: str
    step: float | None
    parents: list[str]
    missing_parents: list[str] = field(default_factory=list)
    children: list[str] = field(default_factory=list)
    run: dict[str, Any] | None = None
    replaced: int = 0


@dataclass(frozen=True, slots=True)
class Lineage:
    """The fork forest of the models of a store.

    Parameters
    ----------
    models : list of LineageModel
        All, in the order of the store: by step.
    roots : list of str
        Models without a parent in the store.
    orphans : list of str
        Models that name a parent which the store does not hold.
    cycles : list of list of str
        Models that are, over others, their own parents; none of them can be reached from a root.
    """

    models: list[LineageModel]
    roots: list[str]
    orphans: list[str]
    cycles: list[list[str]]

    def walk(self) -> Iterator[tuple[int, LineageModel]]:
        """Yield each model once with its depth, below its first parent; those in cycles come last, at depth 0."""
        by_id = {model.model_id: model for model in self.models}
        left = dict(by_id)
        for start in [*self.roots, *by_id]:
            pending = [(0, start)]
            while pending:
                depth, model_id = pending.pop()
                model = left.pop(model_id, None)
                if model is None:
                    continue
                yield depth, model
                own = [c for c in model.children if (_first(by_id[c], by_id) == model_id)]
                pending += [(depth + 1, child) for child in reversed(own)]

    def as_dict(self) -> dict[str, Any]:
        """Return plain data for JSON."""
        rows = [{name: getattr(model, name) for name in LineageModel.__slots__} for model in self.models]
        return {"models": rows, "roots": self.roots, "orphans": self.orphans, "cycles": self.cycles}


def _first(model: LineageModel, known: Mapping[str, LineageModel]) -> str:
    return next(parent for parent in model.parents if parent in known)


def lineage(store: StoreLike) -> Lineage:
    """Return which models of a store were made from which.

    Parameters
    ----------
    store : path, Session or Store

    Examples
    --------
    >>> session = Session()
    >>> for size, name, parent in ((2, "a", None), (3, "b", "a"), (4, "c", "gone")):
    ...     _ = session.models.add({"w": np.eye(size)}, name, parent=parent)
    >>> found = lineage(session)
    >>> found.roots, found.orphans, [(depth, model.model_id) for depth, model in found.walk()]
    (['a', 'c'], ['c'], [(0, 'a'), (1, 'b'), (0, 'c')])
    """
    opened = Store.open(store, mode="r") if isinstance(store, str | os.PathLike) else _opened(store)
    models: dict[str, LineageModel] = {}
    for model_id in opened.model_ids():
        attrs = opened.model_attrs(model_id)
        run = attrs.get("run")
        models[model_id] = LineageModel(
            model_id,
            attrs.get("step"),
            list(attrs.get("parent") or ()),
            run=run if isinstance(run, dict) else None,
            replaced=len(attrs.get("replaced") or ()),
        )
    for model in models.values():
        for parent in dict.fromkeys(model.parents):
            if parent in models:
                models[parent].children.append(model.model_id)
            else:
                model.missing_parents.append(parent)
    roots = [m.model_id for m in models.values() if not any(parent in models for parent in m.parents)]
    orphans = [m.model_id for m in models.values() if m.missing_parents]
    return Lineage(list(models.values()), roots, orphans, _cycles(models))


def _cycles(models: Mapping[str, LineageModel]) -> list[list[str]]:
    """Return the strongly connected groups of more than one model, or of one that is its own parent (Tarjan 1972)."""
    number: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    on_stack: set[str] = set()
    found: list[list[str]] = []
    for start in models:
        if start in number:
            continue
        work = [(start, iter(models[start].children))]
        number[start] = low[start] = len(number)
        stack.append(start)
        on_stack.add(start)
        while work:
            here, children = work[-1]
            child = next(children, None)
            if child is None:
                work.pop()
                if work:
                    low[work[-1][0]] = min(low[work[-1][0]], low[here])
                if low[here] == number[here]:
                    group = stack[stack.index(here) :]
                    del stack[stack.index(here) :]
                    on_stack.difference_update(group)
                    if len(group) > 1 or here in models[here].parents:
                        found.append(sorted(group, key=natural_key))
            elif child not in number:
                number[child] = low[child] = len(number)
                stack.append(child)
                on_stack.add(child)
                work.append((child, iter(models[child].children)))
            elif child in on_stack:
                low[here] = min(low[here], number[child])
    return found
