"""The view of a store, kept up to date: on disk by whoever writes, in memory where it must not be written."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from diffract_dask import catalog
from diffract_dask.catalog import Parameters
from diffract_dask.errors import LinkBrokenError, ReadOnlyStoreError, StoreLockedError
from diffract_dask.sources import linked
from diffract_dask.store.access import Access, Entry
from diffract_dask.store.opening import created_by
from diffract_dask.store.tables import column_updates, content_of, read_columns, read_counts, read_header, read_headers
from diffract_dask.store.values import read_packed
from diffract_dask.store.viewfile import Layout, Record, ViewFile
from diffract_dask.store.viewwriting import update_view
from diffract_dask.view import View

__all__ = ["Viewing"]

Outdated = Callable[[Sequence[str], Sequence[int]], NDArray[np.bool_] | None]


class Viewing:
    """Makes and writes the view of one store."""

    def __init__(self, access: Access) -> None:
        self._access, self._objects = access, access.objects
        self._latest: tuple[int, View] | None = None
        access.recover = partial(self._write, anew=True)

    def view(self) -> View:
        """Return the table of all models, up to date; see :meth:`Store.view`."""
        access = self._access
        if not access.read_only:
            self._check_links()
        count = access.generation.read()
        if self._latest is not None and self._latest[0] == count and count % 2 == 0:
            return self._latest[1]
        base = access.view_file()
        if base.generation != count and not access.read_only:
            with suppress(StoreLockedError, ReadOnlyStoreError):
                self.refresh(timeout=0)
            count, base = access.generation.read(), access.view_file()
        outdated = partial(self._outdated, count)
        if count % 2 == 0 and base.generation == count:
            view = Layout(base, outdated=outdated).view(base.attrs)
        else:
            headers, _ = read_headers(self._objects)
            layout = self._layout(base, {folder: header.commits for folder, header in headers.items()}, outdated)
            layout.forget_gone()
            view = layout.view(layout.attrs(access.field_attrs))
        self._latest = (count, view)
        return view

    def refresh(self, timeout: float | None = None, *, documents: bool = True) -> None:
        """Write what has changed into the view on disk; `documents` as in :func:`update_view`."""
        access = self._access
        with access.lock(timeout):
            if access.view_file().generation != access.next_count:
                access.begin()
                self._write(documents=documents)

    def _write(self, *, anew: bool = False, documents: bool = True) -> None:
        """Write the view, the lock being held; `anew`: after a writer was killed, all of it."""
        access = self._access
        if anew:
            headers, replaced = read_headers(self._objects)
            for folder in replaced:
                access.remove(folder)
            for header in headers.values():
                if header.commits % 2:  # what a killed writer left is what there is
                    access.rewrite(header)
        commits = {folder: entry.commits for folder, entry in access.table().items()}
        layout = self._layout(access.view_file(), commits, None)
        attrs = layout.attrs(access.field_attrs)
        table = access.table()
        entries = [table[folder] for folder in layout.folders]
        state = {
            "generation": access.count + 1,
            "contents": [entry.content for entry in entries],
            "links": [i for i, entry in enumerate(entries) if entry.link],
        }
        update_view(self._objects, layout, attrs, state, created_by(), anew=anew, documents=documents)
        access.stamped = access.count + 1

    def _layout(self, base: ViewFile, commits: Mapping[str, int], outdated: Outdated | None) -> Layout:
        """Return the view on disk with what is newer than it."""
        known = dict(zip(base.folders, base.commits, strict=True))
        newer = [folder for folder, count in commits.items() if known.get(folder) != count or count % 2]
        records = [record for folder in newer if (record := self._record(folder)) is not None]
        records.sort(key=lambda record: record.header.added)
        read = {record.header.folder: record.header.commits for record in records}
        present = {f: read.get(f, count) for f, count in commits.items() if f in known or f in read}
        return Layout(base, present, records, outdated)

    def _record(self, folder: str) -> Record | None:
        """Return what a model contributes to the view, None if it is gone."""
        header = read_header(self._objects, folder)
        if header is None:
            return None
        packed = read_packed(self._objects, header.prefix, header.count)
        return Record(header, self._access.parameters(header), packed)

    def _outdated(self, made_at: int, folders: Sequence[str], commits: Sequence[int]) -> NDArray[np.bool_] | None:
        """Return which models differ from the state in which a view was made at the write count `made_at`."""
        if made_at % 2 == 0 and self._access.generation.read() == made_at:
            return None
        now = read_counts(self._objects, folders)
        return np.array([a != b or b % 2 == 1 for a, b in zip(commits, now, strict=True)], bool)

    # -------------------------------------------------------------------------------------------- linked models

    def _check_links(self) -> None:
        """Clear the digests of linked models whose files have changed; what is broken says so when it is read."""
        access = self._access
        changed = [entry for entry in access.table().values() if entry.link and self._changed_files(entry)]
        if not changed:
            return
        with suppress(StoreLockedError, ReadOnlyStoreError), access.lock(timeout=0):
            for entry in changed:
                self._forget_digests(entry)

    def _changed_files(self, entry: Entry) -> list[str]:
        """Return the files of a linked model that have another size or time than recorded, and the same layout."""
        changed, _ = self._compare_files(entry)
        return changed

    def broken_links(self) -> dict[str, str]:
        """Return, by linked model, the first of its files that is gone or holds another checkpoint now, and how."""
        broken: dict[str, str] = {}
        for entry in self._access.table().values():
            if entry.link:
                _, lost = self._compare_files(entry)
                if lost:
                    broken[entry.model_id] = lost[0]
        return broken

    def _compare_files(self, entry: Entry) -> tuple[list[str], list[str]]:
        """Return the changed files of the same layout, and a text for each that is missing or has another one."""
        header = self._access.header(entry.model_id)
        columns = read_columns(self._objects, header.prefix, header.count, ("path", "size", "mtime_ns"))
        recorded = {path: (int(size), int(mtime)) for path, size, mtime in zip(*columns, strict=True) if path}
        changed: list[str] = []
        lost: list[str] = []
        for path, state in recorded.items():
            try:
                found = Path(path).stat()
            except OSError:
                lost.append(f"{path!r} is missing")
                continue
            if (found.st_size, found.st_mtime_ns) == state:
                continue
            if _is_same_layout(self._access.parameters(header), path):
                changed.append(path)
            else:
                lost.append(f"{path!r} holds another checkpoint now")
        return changed, lost

    def _forget_digests(self, entry: Entry) -> None:
        access = self._access
        header = access.header(entry.model_id)
        table = access.parameters(header)
        table = table.select(np.arange(len(table)))
        for path in self._changed_files(entry):
            found = Path(path).stat()
            mine = table.path == path
            table.size[mine], table.mtime_ns[mine], table.digest[mine] = found.st_size, found.st_mtime_ns, ""
        if not table.sharing_known:
            table.tied_to[:] = ""
            catalog.tie(table)
        made = column_updates(table, ("size", "mtime_ns", "digest", "tied_to"))
        access.begin()
        self._objects.set_many({f"{header.prefix}/{key}": data for key, data in made.items()})
        access.rewrite(replace(header, revision=header.revision + 1, content=content_of(table, link=True)))


def _is_same_layout(parameters: Parameters, path: str) -> bool:
    location = parameters.location(int(np.flatnonzero(parameters.path == path)[0]))
    try:
        return location is not None and not linked.check(location)
    except LinkBrokenError:
        return False
