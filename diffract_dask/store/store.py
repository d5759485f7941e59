"""The store: models with their weights and results in Zarr, and the view over all of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from diffract_dask.catalog import Checkpoint, Parameters
from diffract_dask.errors import FieldNotFoundError, ReadOnlyStoreError, StoreError, did_you_mean
from diffract_dask.sources import dtypes
from diffract_dask.store.access import Access
from diffract_dask.store.adding import Added, carry_over, write_model
from diffract_dask.store.arrays import ArraySpec, loads
from diffract_dask.store.lock import first_count, new_staging
from diffract_dask.store.objects import Objects
from diffract_dask.store.opening import Location, check_version, create, open_objects
from diffract_dask.store.slices import Slices
from diffract_dask.store.tables import (
    MODELS,
    Header,
    check_id,
    check_step,
    column_updates,
    count_objects,
    folder_of,
    read_parameters,
)
from diffract_dask.store.values import (
    Commit,
    Stage,
    commit_stages,
    erase_stages,
    ingest_commit,
    read_arrays,
    read_failures,
)
from diffract_dask.store.viewing import Viewing
from diffract_dask.store.weights import Stack
from diffract_dask.view import View

if TYPE_CHECKING:
    import xarray as xr

__all__ = ["Store"]


class Store:
    """Models, their weights and results, in one directory, object store, or this process's memory.

    Made by :meth:`open`. One process writes at a time and any number read; every call leaves the store complete.
    A process that is killed leaves nothing that readers see.
    """

    def __init__(self, objects: Objects, location: str | None, *, read_only: bool, lock_timeout: float = 60.0) -> None:
        self._objects = objects
        self._access = Access(objects, location, read_only=read_only, lock_timeout=lock_timeout)
        self._viewing = Viewing(self._access)
        self._stacks: dict[tuple[str, str, str], Stack] = {}

    @classmethod
    def open(cls, location: Location = None, mode: str = "a", *, lock_timeout: float = 60.0) -> Store:
        """Open a store, and make one where there is none.

        Parameters
        ----------
        location : str, path, zarr store or None
            A directory (``~`` is expanded), a URL (``s3://…``), a Zarr store; None keeps everything in memory.
        mode : {"a", "r+", "r"}
            Read and write, and make it if need be; read and write; read only.
        lock_timeout : float
            Seconds to wait for another writer.

        Raises
        ------
        StoreError
            There is none and it may not be made, or something else lies there.
        IncompatibleStoreError
            Its version is not the one that this package reads.
        """
        if mode not in ("a", "r+", "r"):
            raise StoreError(f"mode is {mode!r}; give 'a' (read and write, make it if need be), 'r+' or 'r'")
        objects, name = open_objects(location, read_only=mode == "r")
        read_only = mode == "r" or objects.store.read_only
        if not objects.exists("zarr.json"):
            if mode != "a" or read_only:
                raise StoreError(f"there is no store at {name!r}; make one by opening it with mode='a'")
            create(objects, name)
        check_version(objects, name)
        return cls(objects, name, read_only=read_only, lock_timeout=lock_timeout)

    def __repr__(self) -> str:
        return f"<Store {self.location or 'in memory'!r}, {len(self.model_ids())} models>"

    def __reduce__(self) -> tuple[Any, ...]:
        return partial(Store, read_only=True, lock_timeout=self._access.timeout), (self._objects, self.location)

    @property
    def location(self) -> str | None:
        """The directory or URL; None in memory."""
        return self._access.location

    @property
    def read_only(self) -> bool:
        """Whether the store is open for reading only."""
        return self._access.read_only

    @property
    def in_memory(self) -> bool:
        """Whether the store exists in this process only."""
        return self._objects.in_memory

    # ------------------------------------------------------------------------------------------------- writing

    def lock(self, timeout: float | None = None) -> AbstractContextManager[None]:
        """Return a context that holds the write lock; re-entrant. Each writing call takes it for itself.

        Raises
        ------
        ReadOnlyStoreError
            On entering: the store is open for reading.
        StoreLockedError
            On entering: another writer did not finish in time; the message names host, process and time.
        """
        return self._access.lock(timeout)

    def add_model(
        self,
        model_id: str,
        checkpoint: Checkpoint,
        *,
        step: float | None = None,
        parents: Sequence[str] = (),
        attrs: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        replace: bool = False,
        link: bool = False,
    ) -> Added:
        """Add a model, complete or not at all.

        Parameters
        ----------
        model_id : str
            Any non-empty printable text.
        checkpoint : Checkpoint
            Read during the call; nothing of it is kept alive.
        step : float, optional
            Orders models.
        parents : sequence of str
            Models that it was made from; they need not be in the store.
        attrs : mapping, optional
            JSON values.
        overrides : mapping, optional
            As for :func:`diffract_dask.catalog.describe`.
        replace : bool
            Take the place of a model of this id; results stay where the weights are the same.
        link : bool
            Copy no weights; read them from the checkpoint's file when they are needed.

        Raises
        ------
        ModelAlreadyExistsError
            The id is taken, and `replace` is not given.
        InvalidIdentifierError, ParameterNotFoundError, SourceError, StoreLockedError, ReadOnlyStoreError
        """
        header = Header(
            folder="",
            model_id=check_id(model_id),
            step=check_step(step),
            parents=tuple(check_id(parent) for parent in parents),
            source=checkpoint.source,
            framework=checkpoint.framework,
            link=link,
            commits=first_count(),
        ).with_attrs({**checkpoint.attrs, **(attrs or {})})
        if self.read_only:
            raise ReadOnlyStoreError(f"the store {self.location!r} is open for reading; open it with mode='a'")
        if not replace:
            self._access.check_free(model_id)
        write = partial(
            write_model, self._objects, model_id=model_id, checkpoint=checkpoint, overrides=overrides, link=link
        )
        if self._objects.root is None:  # no renaming: written in its place, and invisible until its header is there
            with self.lock():
                header = self._placed(header, replace)
                return self._publish(header, header.prefix, write)
        staging = new_staging()
        try:
            written = write(staging)
            with self.lock():
                return self._publish(self._placed(header, replace), staging, lambda _: written)
        finally:
            self._objects.delete_dir(staging)

    def _placed(self, header: Header, replacing: bool) -> Header:
        """Return the header with a folder that is free; the lock is held."""
        if not replacing:
            self._access.check_free(header.model_id)
        old = self._access.find(header.model_id)
        taken = [*self._access.table()]
        if not self._objects.in_memory:  # where a killed writer may have left a folder that is no model
            taken += self._objects.list_dir(MODELS)
        return replace(header, folder=folder_of(header.model_id, taken), replaces=old.folder if old else "")

    def _publish(self, header: Header, prefix: str, write: Callable[[str], tuple[Parameters, str]]) -> Added:
        """Make a model visible that lies at `prefix`, or is written there now."""
        access, in_place = self._access, prefix == header.prefix
        try:
            parameters, content = write(prefix)
            added = datetime.now(UTC).isoformat(timespec="microseconds")
            header = replace(header, content=content, added=added, count=len(parameters))
            if header.replaces:
                carry_over(self._objects, access.header(header.model_id), prefix, header, parameters)
        except BaseException:
            self._objects.delete_dir(prefix)
            raise
        equal = [entry for entry in access.table().values() if content and entry.content == content]
        same_as = [
            entry.model_id for entry in sorted(equal, key=lambda e: e.order) if entry.model_id != header.model_id
        ]
        access.begin()
        for key, data in {**count_objects(header), "zarr.json": header.object()}.items():
            self._objects.set(f"{prefix}/{key}", data, fresh=not in_place)
        if not in_place:
            self._objects.move(prefix, header.prefix)
        if header.replaces:
            access.remove(header.replaces)
        access.note(header)
        access.keep_table(header, parameters)
        self._viewing.refresh(documents=False)
        return Added(header.model_id, parameters, same_as)

    def erase_model(self, *model_ids: str) -> None:
        """Remove models with everything of them; ModelNotFoundError, and nothing is removed, if one is not there."""
        access = self._access
        with self.lock():
            folders = [access.entry(model_id).folder for model_id in dict.fromkeys(model_ids)]
            access.begin()
            for folder in folders:
                access.remove(folder)
            self._viewing.refresh(documents=False)

    def rename(self, old: str, new: str) -> None:
        """Give a model another id. Keys and values stay; uids follow the id."""
        check_id(new)
        access = self._access
        with self.lock():
            header = access.header(old)
            if old == new:
                return
            access.check_free(new)
            uids = column_updates(read_parameters(self._objects, header.prefix, new), ("uid",))
            access.begin()
            self._objects.set_many({f"{header.prefix}/{key}": data for key, data in uids.items()})
            access.rewrite(replace(header, model_id=new))
            self._viewing.refresh(documents=False)

    def set_model_attrs(self, model_id: str, /, **attrs: Any) -> None:
        """Set attributes of a model, ``step`` and ``parent`` among them; None removes one."""
        with self.lock():
            header = self._access.header(model_id).with_attrs(attrs)
            self._access.begin()
            self._access.rewrite(header)
            self._viewing.refresh(documents=False)

    def commit(self, commits: Sequence[Commit]) -> None:
        """Write results: keys to 0, values and statuses, then the keys.

        The view has them after :meth:`refresh_view`.

        Raises
        ------
        ModelNotFoundError, StoreError, StoreLockedError, ReadOnlyStoreError
        KernelRegistrationError
            A field has a name that the store uses itself.
        """
        with self.lock():
            self._access.run([partial(self._commit_stages, commit) for commit in commits])

    def _commit_stages(self, commit: Commit) -> tuple[list[Stage], Header]:
        header = self._access.header(commit.model_id)
        return commit_stages(self._objects, header, header.count, partial(self._access.parameters, header), commit)

    def ingest(self, model_id: str, given: Mapping[str, tuple[Any, Any]]) -> None:
        """Store values that the user gives, ``{field: (indices, values)}``: status ingested, no key."""
        self.commit([ingest_commit(model_id, given)])

    def erase_fields(
        self,
        model_id: str,
        fields: Iterable[str],
        kernels: Iterable[str],
        indices: NDArray[Any] | None = None,
    ) -> None:
        """Remove stored values and the keys of the kernels that made them.

        Parameters
        ----------
        model_id : str
        fields, kernels : iterable of str
            Those that the model does not hold are passed over.
        indices : int array, optional
            Parameters; default: all, and values of the model itself.
        """
        with self.lock():
            header = self._access.header(model_id)
            table = partial(self._access.parameters, header)
            make = partial(
                erase_stages, self._objects, header, header.count, table, list(fields), list(kernels), indices
            )
            self._access.run([make])

    # ------------------------------------------------------------------------------------------------- reading

    def model_ids(self) -> list[str]:
        """Return the ids of all models by (step, added, natural order); those without a step come last."""
        return [entry.model_id for entry in self._access.sorted()]

    def model_attrs(self, model_id: str) -> dict[str, Any]:
        """Return a model's attributes: model_id, source, framework, added, link, step, parent, and the user's."""
        return self._access.header(model_id).public()

    def parameters(self, model_id: str) -> Parameters:
        """Return the table of a model's parameters; it is shared, do not change it."""
        return self._access.parameters(self._access.header(model_id))

    @staticmethod
    def slice_dtype(stored: str) -> np.dtype[Any]:
        """Return the dtype in which slices of the stored type `stored` are given."""
        return dtypes.decoded(stored)

    def slices(self, model_id: str, indices: Sequence[int] | NDArray[Any]) -> Slices:
        """Return the weights of some parameters, all of one (rows, cols) and stored type, to be read when asked.

        Raises
        ------
        StoreError
            They differ in shape or type, some are linked and some not, or one has no data in the store.
        """
        header = self._access.header(model_id)
        table = self._access.parameters(header)
        at = np.asarray(indices, np.intp)
        kinds = table.kinds[at]
        first, which = np.zeros(min(1, len(at)), np.intp), np.zeros(len(at), np.intp)
        if len(at) and (kinds != kinds[0]).any():
            _, first, which = np.unique(kinds, return_index=True, return_inverse=True)
        found = {(int(table.rows[i]), int(table.cols[i]), str(table.dtype[i]), bool(table.path[i])) for i in at[first]}
        if len(found) != 1:
            raise StoreError(f"{model_id}: slices of one shape and type are wanted, not of {sorted(found)}")
        rows, cols, dtype, is_linked = found.pop()
        shapes, digests = tuple(table.shape[at]), tuple(table.digest[at])
        if is_linked:
            locations = tuple(place for i in at if (place := table.location(int(i))) is not None)
            return Slices(rows, cols, dtype, shapes, digests, locations)
        if not table.stack[at[first]].all():
            lost = next(i for i in at if not table.stack[i])
            reason = table.skip_reason[lost]
            raise StoreError(f"{model_id}: the store has no data of {table.name[lost]!r} ({reason})")
        stacks = tuple(self._stack(header, table.stack[i]) for i in at[first])
        return Slices(rows, cols, dtype, shapes, digests, (), stacks, which, table.index[at], self._objects)

    def parameter(self, model_id: str, index: int) -> Slices:
        """Return one parameter of any shape as a slice, dimension 0 × the rest; a vector as one column.

        Raises
        ------
        StoreError
            It has no data in the store.
        """
        shape = self.parameters(model_id).shape[index]
        return replace(self.slices(model_id, [index]), rows=shape[0] if shape else 1, cols=math.prod(shape[1:]))

    def _stack(self, header: Header, name: str) -> Stack:
        key = (header.folder, header.added, name)
        if key not in self._stacks:
            prefix = f"{header.prefix}/weights/{name}/weights"
            self._stacks[key] = Stack(prefix, ArraySpec.parse(loads(self._objects.require(f"{prefix}/zarr.json"))))
        return self._stacks[key]

    def arrays(self, model_id: str, field: str, indices: Sequence[int] | NDArray[Any]) -> list[NDArray[np.float64]]:
        """Return a stored array field of some parameters; NaN where nothing is stored.

        Raises
        ------
        FieldNotFoundError
            The model holds no array field of this name.
        """
        at = np.asarray(indices, np.intp)
        if not len(at):
            return []
        header = self._access.header(model_id)
        attrs = self._access.field_attrs(header.folder)
        dims = attrs.get(field, {}).get("dims")
        if not dims:
            known = [name for name, own in attrs.items() if own.get("dims")]
            raise FieldNotFoundError(f"{model_id}: no array field {field!r} is stored.{did_you_mean(field, known)}")
        return read_arrays(self._objects, header.prefix, self._access.parameters(header), field, dims, at)

    def failures(self, model_id: str) -> dict[tuple[str, str], str]:
        """Return why kernels failed, by (name, kernel); the name is empty for the model itself."""
        return read_failures(self._objects, self._access.header(model_id).prefix)

    def datatree(self) -> xr.DataTree:
        """Return everything in the store as a lazy DataTree, as it lies there."""
        import xarray as xr

        source = self._objects.root or self._objects.store
        return xr.open_datatree(source, engine="zarr", consolidated=False)  # type: ignore[arg-type]

    # ---------------------------------------------------------------------------------------------------- view

    def view(self) -> View:
        """Return the table of all models, up to date.

        If the view on disk is behind, it is brought up to date; in memory only, if the store is read-only or
        another process is writing. Linked files that have changed lose their digests, so that they are read anew.
        """
        return self._viewing.view()

    def broken_links(self) -> dict[str, str]:
        """Return, by linked model, which of its files is missing or holds another checkpoint now."""
        return self._viewing.broken_links()

    def refresh_view(self, timeout: float | None = None) -> None:
        """Write what has changed into the view on disk."""
        self._viewing.refresh(timeout)
