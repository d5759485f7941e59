"""Access to the models of a store: the write lock, what is known of every model, and single models' tables."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffract_dask.catalog import Parameters
from diffract_dask.errors import (
    ModelAlreadyExistsError,
    ModelNotFoundError,
    ReadOnlyStoreError,
    StoreError,
    did_you_mean,
)
from diffract_dask.store.arrays import loads
from diffract_dask.store.lock import Generation, WriteLock, new_staging, sweep
from diffract_dask.store.objects import Objects
from diffract_dask.store.tables import MODELS, Header, read_header, read_headers, read_parameters
from diffract_dask.store.values import Stage, write_stages
from diffract_dask.store.viewfile import INDEX, VIEW, ViewFile
from diffract_dask.view import sort_key

__all__ = ["Access", "Entry"]

_CACHED_TABLES = 256


@dataclass(frozen=True, slots=True)
class Entry:
    """What has to be known of every model at all times."""

    folder: str
    model_id: str
    step: float | None
    added: str
    commits: int
    content: str
    link: bool

    @classmethod
    def of(cls, header: Header) -> Entry:
        return cls(
            header.folder, header.model_id, header.step, header.added, header.commits, header.content, header.link
        )

    @property
    def prefix(self) -> str:
        """Where the model lies."""
        return f"{MODELS}/{self.folder}"

    @property
    def order(self) -> tuple[Any, ...]:
        """What models are sorted by."""
        return sort_key(self.step, self.added, self.model_id)


class Access:
    """One store as this process sees it.

    Parameters
    ----------
    objects : Objects
    location : str, optional
    read_only : bool
    lock_timeout : float
        Seconds to wait for another writer.
    """

    def __init__(self, objects: Objects, location: str | None, *, read_only: bool, lock_timeout: float) -> None:
        self.objects, self.location, self.read_only = objects, location, read_only
        self.timeout = lock_timeout
        self.generation = Generation(objects)
        self.write_lock = WriteLock(objects, location)
        self.count = 0
        self.dirty = False
        self.stamped: int | None = None
        self.recover: Callable[[], None] = lambda: None
        self._swept = self._failed = False
        self._guard = threading.RLock()
        self._entries: dict[str, Entry] | None = None
        self._entries_at: int | None = None
        self._sorted: list[Entry] | None = None
        self._root: tuple[bytes | None, dict[str, Any]] = (None, {})
        self._tables: OrderedDict[tuple[str, str, int, str], Parameters] = OrderedDict()

    @contextmanager
    def lock(self, timeout: float | None = None) -> Iterator[None]:
        """Hold the write lock; see :meth:`Store.lock`.

        The count of writes is odd from the first change on. It becomes even when the outermost hold ends well;
        otherwise the next writer finds it odd, and cleans up.
        """
        if self.read_only:
            raise ReadOnlyStoreError(f"the store {self.location!r} is open for reading; open it with mode='a'")
        with self.write_lock.hold(self.timeout if timeout is None else timeout) as outermost:
            if outermost:
                self._enter()
            try:
                yield
            except BaseException:
                self._failed = True
                self._entries = None
                raise
            if outermost and self.dirty and not self._failed:
                self.generation.write(self.count + 1)
                self.dirty = False
                self._entries_at = self.count + 1

    def _enter(self) -> None:
        """Look at what the last writer left; clean up and rebuild the view if it did not finish."""
        self.count = self.generation.read()
        self.dirty, self.stamped, self._failed = False, None, False
        crashed = self.count % 2 == 1
        if crashed or not self._swept:
            sweep(self.objects, crashed=crashed)
            self._swept = True
        if crashed:
            self.count += 1
            self._entries = None
            self.begin()
            self.recover()

    def begin(self) -> None:
        """Mark that a write goes on: called before the first change, and before one that the view does not have."""
        if not self.dirty or self.stamped is not None:
            self.table()  # what is known now stays known: from here on only this process changes it
            self.count += 2 if self.dirty else 1
            self.generation.write(self.count)
            self.dirty, self.stamped = True, None

    @property
    def next_count(self) -> int:
        """The count of writes when the present hold of the lock has ended."""
        return self.count + 1 if self.dirty else self.count

    def run(self, prepare: Sequence[Callable[[], tuple[list[Stage], Header]]]) -> None:
        """Write one change after the other; on object stores, all of them stage by stage, many objects at once."""
        if self.objects.root is None and len(prepare) > 1:
            made = [make() for make in prepare]
            if len({header.folder for _, header in made}) < len(made):
                raise StoreError("two commits of one model were given at once; merge them into one")
            self.begin()
            for part in zip(*(stages for stages, _ in made), strict=True):
                write_stages(self.objects, [Stage.merged(part)], new_staging)
            for _, header in made:
                self.note(header)
            return
        for make in prepare:
            stages, header = make()
            self.begin()
            write_stages(self.objects, stages, new_staging)
            self.note(header)

    def rewrite(self, header: Header) -> None:
        """Replace a model's header, with a new count of writes."""
        done = header.done()
        self.objects.overwrite(header.count_key, header.started().count_bytes())
        self.objects.set(f"{header.prefix}/zarr.json", done.object())
        self.objects.overwrite(header.count_key, done.count_bytes())
        self.note(done)

    def note(self, header: Header) -> None:
        """Keep what is known of a model that this process has just written."""
        if self._entries is not None:
            self._entries[header.folder] = Entry.of(header)
            self._sorted = None

    def remove(self, folder: str) -> None:
        """Remove a model's folder: for readers in one step."""
        prefix = f"{MODELS}/{folder}"
        if self.objects.root is None:
            self.objects.delete(f"{prefix}/zarr.json")
        else:
            staging = new_staging()
            self.objects.move(prefix, staging)
            prefix = staging
        self.objects.delete_dir(prefix)
        if self._entries is not None:
            self._entries.pop(folder, None)
            self._sorted = None

    def table(self) -> dict[str, Entry]:
        """Return what is known of all models, by folder; read anew if something was written since."""
        with self._guard:
            if self._entries is not None and self.write_lock.held and self.dirty:
                return self._entries
            count = self.generation.read()
            if self._entries is None or self._entries_at != count or count % 2:
                self._entries = self._read_entries(count)
                self._entries_at, self._sorted = count, None
            return self._entries

    def _read_entries(self, count: int) -> dict[str, Entry]:
        base = self.view_file()
        if count % 2 or base.generation != count:
            headers, _ = read_headers(self.objects)
            return {folder: Entry.of(header) for folder, header in headers.items()}
        ids, added = base.of_models("model_id"), base.of_models("added")
        steps = [None if np.isnan(step) else float(step) for step in base.of_models("step")]
        links = [i in base.links for i in range(len(ids))]
        rows = zip(base.folders, ids, steps, added, base.commits, base.contents, links, strict=True)
        return {row[0]: Entry(*row) for row in rows}

    def view_file(self) -> ViewFile:
        """Return the view as it is on disk; none if somebody removed it."""
        if not all(self.objects.exists(f"{group}/zarr.json") for group in (VIEW, INDEX)):
            return ViewFile(self.objects, {})
        data = self.objects.get("zarr.json")
        if data != self._root[0]:
            self._root = data, loads(data)
        return ViewFile(self.objects, self._root[1])

    def sorted(self) -> list[Entry]:
        """Return what is known of all models, by (step, added, natural order)."""
        with self._guard:
            entries = self.table()
            if self._sorted is None:
                self._sorted = sorted(entries.values(), key=lambda entry: entry.order)
            return self._sorted

    def find(self, model_id: str) -> Entry | None:
        """Return what is known of a model, None if there is none of this id."""
        return next((entry for entry in self.table().values() if entry.model_id == model_id), None)

    def entry(self, model_id: str) -> Entry:
        """Return what is known of a model; ModelNotFoundError with the nearest ids."""
        entry = self.find(model_id)
        if entry is None:
            where = f"the store {self.location!r}" if self.location else "the store in memory"
            near = did_you_mean(str(model_id), [entry.model_id for entry in self.table().values()])
            raise ModelNotFoundError(f"no model {model_id!r} in {where}.{near}")
        return entry

    def check_free(self, model_id: str) -> None:
        """ModelAlreadyExistsError if there is a model of this id."""
        if self.find(model_id) is not None:
            raise ModelAlreadyExistsError(
                f"the store has a model {model_id!r} already; pass replace=True to replace it, or choose another id"
            )

    def header(self, model_id: str) -> Header:
        """Return a model's header as it is now."""
        entry = self.entry(model_id)
        header = read_header(self.objects, entry.folder)
        if header is None:  # erased or replaced by another process since
            self._entries = None
            header = read_header(self.objects, self.entry(model_id).folder)
        if header is None:
            raise ModelNotFoundError(f"the model {model_id!r} was erased a moment ago")
        return header

    def parameters(self, header: Header) -> Parameters:
        """Return the table of a model's parameters; it is shared and must not be changed."""
        with self._guard:
            if header.state in self._tables:
                self._tables.move_to_end(header.state)
                return self._tables[header.state]
        return self.keep_table(header, read_parameters(self.objects, header.prefix, header.model_id))

    def keep_table(self, header: Header, parameters: Parameters) -> Parameters:
        """Keep a table in memory for the next call."""
        with self._guard:
            self._tables[header.state] = parameters
            if len(self._tables) > _CACHED_TABLES:
                self._tables.popitem(last=False)
        return parameters

    def field_attrs(self, folder: str) -> dict[str, dict[str, Any]]:
        """Return the attributes of a model's fields."""
        document = loads(self.objects.get(f"{MODELS}/{folder}/scalars/zarr.json"))
        attrs: dict[str, dict[str, Any]] = document.get("attributes", {}).get("fields", {})
        return attrs
