"""Where a store is: opening and making one, checking its version, upgrading."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from zarr.abc.store import Store as ZarrStore
from zarr.storage import FsspecStore, LocalStore, MemoryStore

from diffract_dask.errors import IncompatibleStoreError, StoreError
from diffract_dask.store.arrays import dumps, group_document, loads
from diffract_dask.store.lock import GENERATION, Generation, WriteLock
from diffract_dask.store.objects import PARTIAL, Objects
from diffract_dask.store.tables import MODELS
from diffract_dask.store.viewfile import INDEX, VIEW, Layout, ViewFile
from diffract_dask.store.viewwriting import SCHEMA_VERSION, update_view

__all__ = ["UPGRADES", "Location", "check_version", "create", "created_by", "open_objects", "upgrade"]

Location = str | os.PathLike[str] | ZarrStore | None

_TIMEOUT = 60.0

UPGRADES: dict[int, Callable[[Objects], None]] = {}
"""What turns a store of one version into one of the next, by the version that it has. The function writes the new
version into the root as its last act."""


def created_by() -> str:
    """Return what a store says of who made it."""
    from diffract_dask import __version__

    return f"diffract_dask {__version__}"


def open_objects(location: Location, *, read_only: bool) -> tuple[Objects, str | None]:
    """Return the objects at a location, and its name.

    Parameters
    ----------
    location : str, path, zarr store or None
        A directory (``~`` is expanded), a URL that fsspec knows (``s3://…``, ``memory://…``), a Zarr store, or None:
        this process's memory.
    """
    if location is None:
        return Objects(MemoryStore()), None
    if isinstance(location, ZarrStore):
        objects = Objects(location)
        return objects, objects.root or (None if isinstance(location, MemoryStore) else str(location))
    text = os.fspath(location)
    scheme, mark, rest = text.partition("://")
    if scheme in ("file", "local"):
        text = rest
    elif mark:
        try:
            return Objects(FsspecStore.from_url(text, read_only=read_only)), text
        except (ImportError, ValueError) as error:
            raise StoreError(f"the store {text!r} cannot be opened: {error}") from error
    path = str(Path(text).expanduser().absolute())
    if os.path.exists(path) and not os.path.isdir(path):
        raise StoreError(f"{path!r} is a file; a store is a directory. To analyse a file, add it to a store")
    return Objects(LocalStore(path, read_only=read_only)), path


def check_version(objects: Objects, location: str | None) -> None:
    """Raise unless the store is of the version that this package reads and writes.

    Raises
    ------
    StoreError
        The place holds a Zarr group that is no store.
    IncompatibleStoreError
        The store is newer, or older and not upgraded.
    """
    attrs = loads(objects.get("zarr.json")).get("attributes", {})
    version = attrs.get("schema_version")
    if not isinstance(version, int):
        raise StoreError(f"{location!r} holds Zarr data that diffract_dask did not write; choose another place")
    if version > SCHEMA_VERSION:
        raise IncompatibleStoreError(
            f"the store {location!r} has version {version} (written by {attrs.get('created_by', 'unknown')}); "
            f"{created_by()} reads version {SCHEMA_VERSION}. Install a newer diffract_dask"
        )
    if version < SCHEMA_VERSION:
        raise IncompatibleStoreError(
            f"the store {location!r} has version {version}, {created_by()} reads version {SCHEMA_VERSION}; upgrade it "
            f"with diffract_dask.upgrade({location!r}) (after a copy: older packages cannot open it then)"
        )


def create(objects: Objects, location: str | None) -> None:
    """Make an empty store.

    Raises
    ------
    StoreError
        The folder holds other files.
    """
    ours = {GENERATION, MODELS, VIEW, INDEX, "zarr.json"}  # of a creation that was cut short, or goes on beside this
    strange = {name for name in objects.list_dir("") if name not in ours and not name.endswith(PARTIAL)}
    if strange:
        first = sorted(strange)[0]
        raise StoreError(f"{location!r} is no store and not empty (it holds {first!r}); choose another place")
    if objects.root is not None:
        os.makedirs(f"{objects.root}/{GENERATION}", exist_ok=True)
    with WriteLock(objects, location).hold(_TIMEOUT):
        if objects.exists("zarr.json"):
            return
        count = Generation(objects).create()
        objects.set(f"{MODELS}/zarr.json", dumps(group_document()))
        update_view(objects, Layout(ViewFile(objects, {})), {}, {"generation": count}, created_by())


def upgrade(location: Location) -> int:
    """Bring a store of an older version up to the present one and return how many steps that took.

    Stores are never upgraded on their own: packages of the older version cannot open them afterwards.

    Raises
    ------
    IncompatibleStoreError
        The store is newer, or so old that no step is known for it.
    """
    objects, name = open_objects(location, read_only=False)
    if not objects.exists("zarr.json"):
        raise StoreError(f"there is no store at {name!r}")
    steps = 0
    with WriteLock(objects, name).hold(_TIMEOUT):
        while (version := _version(objects)) < SCHEMA_VERSION:
            if version not in UPGRADES:
                raise IncompatibleStoreError(
                    f"the store {name!r} has version {version}, from which there is no way to {SCHEMA_VERSION}; export "
                    "its results with the package that wrote it"
                )
            UPGRADES[version](objects)
            if _version(objects) != version + 1:
                raise StoreError(f"the upgrade of {name!r} from version {version} did not write the next version")
            steps += 1
    check_version(objects, name)
    return steps


def _version(objects: Objects) -> int:
    return int(loads(objects.get("zarr.json")).get("attributes", {}).get("schema_version", SCHEMA_VERSION + 1))


def set_version(objects: Objects, version: int) -> None:
    """Write a version into the root: the last act of an upgrade."""
    document: dict[str, Any] = loads(objects.get("zarr.json"))
    document["attributes"] = {**document["attributes"], "schema_version": version, "created_by": created_by()}
    objects.set("zarr.json", dumps(document))
