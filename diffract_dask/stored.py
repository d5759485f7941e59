"""Values that the store holds, as inputs of what is computed: those that were there when the plan was made, or none."""

from __future__ import annotations

import contextlib
import copy
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.errors import FieldNotFoundError, ModelNotFoundError, StoreChangedError
from diffract_dask.fields import MISSING
from diffract_dask.plan import Plan

if TYPE_CHECKING:
    from diffract_dask.store import Store
    from diffract_dask.view import View

__all__ = ["StoredArrays", "stored_values"]


def stored_values(plan: Plan, store: Store, name: str, cells: NDArray[np.intp]) -> tuple[Any, NDArray[np.uint8]]:
    """Return the stored values ``(n, …)`` and statuses of one field at some cells, all of one shape."""
    view = plan.view
    models, names = plan.cells.model[cells], plan.cells.name[cells]
    status = view.status[name][models, names]
    if not plan.registry.field(name).dims:
        return view.values[name][models, names], status
    return np.stack(StoredArrays(plan, store, name, cells).read()), status


class _Reader:
    """A store, and where its models and names are: looked up once for as long as nothing changes."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self._watching = copy.copy(store)  # a copy reads only: it does not look after linked files each time
        self._known: tuple[View, dict[str, int], dict[str, int]] | None = None

    def __reduce__(self) -> tuple[Any, ...]:
        return _Reader, (self.store,)

    def look(self) -> tuple[View, dict[str, int], dict[str, int]]:
        """Return the present view, and the positions of its models and names."""
        view, known = self._watching.view(), self._known
        if known is None or known[0] is not view:
            models = {model_id: i for i, model_id in enumerate(view.model_ids)}
            known = self._known = view, models, {name: i for i, name in enumerate(view.names)}
        return known


class StoredArrays:
    """An array field at some cells, as it was stored when a plan was made; to be read now or inside a task."""

    def __init__(self, plan: Plan, store: Store, field_name: str, cells: NDArray[np.intp]) -> None:
        models, names = plan.cells.model[cells], plan.cells.name[cells]
        if plan.reader is None:
            plan.reader = _Reader(store)
        self.reader: _Reader = plan.reader
        self.field, self.kernel = field_name, plan.registry.producer(field_name).name
        self.models, self.names = [plan.view.model_ids[i] for i in models], [plan.view.names[i] for i in names]
        self.rows = plan.view.row[models, names]
        self.keys = plan.view.keys[self.kernel][models, names]

    def read(self) -> list[NDArray[np.float64]]:
        """Return one array per cell; StoreChangedError if the store holds others by now."""
        found: list[Any] = [None] * len(self.models)
        with contextlib.suppress(ModelNotFoundError, FieldNotFoundError, IndexError):  # a model that was replaced
            for model_id in dict.fromkeys(self.models):
                at = [i for i, model in enumerate(self.models) if model == model_id]
                for i, array in zip(at, self.reader.store.arrays(model_id, self.field, self.rows[at]), strict=True):
                    found[i] = array
            if self._are_there():  # now: a writer takes the keys away before it touches the values
                return found
        raise StoreChangedError(
            f"stored values of {self.field!r} were changed or erased after the plan was made; run the same call again"
        )

    def _are_there(self) -> bool:
        view, models, names = self.reader.look()
        known = all(model in models for model in self.models) and all(name in names for name in self.names)
        if not known or self.field not in view.status or self.kernel not in view.keys:
            return False
        at = [models[model] for model in self.models], [names[name] for name in self.names]
        same = view.keys[self.kernel][at] == self.keys
        return bool((same & (view.status[self.field][at] != MISSING)).all())
