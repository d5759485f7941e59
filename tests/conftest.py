"""Fixtures that several test modules share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from projects import Project

ROOT = Path(__file__).resolve().parent.parent


@pytest.fixture(scope="session")
def real_weights() -> Callable[[str], Path]:
    """Return ``real_weights("minilm/model.safetensors")``: the path of a fetched file; skips where it is absent."""
    folder = Path(os.environ.get("DIFFRACT_DASK_REAL_WEIGHTS") or ROOT / ".real-weights")

    def path(name: str) -> Path:
        found = folder / name
        if not found.exists():
            pytest.skip(f"no {name} in {folder}: fetch it with `make real-weights`")
        return found

    return path


@pytest.fixture
def store_path(tmp_path: Path) -> str:
    """Return where a test may make a store."""
    return str(tmp_path / "store.zarr")


@pytest.fixture
def no_compute(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Fail at any attempt to run a Dask graph: by threads, in this thread, by processes or by a client.

    The list that the fixture returns names the attempts, should the code under test swallow the failure.
    """
    import dask.local
    import dask.multiprocessing
    import dask.threaded
    import distributed

    attempts: list[str] = []

    def refuse(what: str) -> Callable[..., None]:
        def attempt(*args: object, **kwargs: object) -> None:
            attempts.append(what)
            pytest.fail(f"a Dask graph was run ({what}), and this test expects that none is")

        return attempt

    for module in (dask.local, dask.threaded, dask.multiprocessing):
        monkeypatch.setattr(module, "get_async", refuse(module.__name__))
    monkeypatch.setattr(distributed.Client, "_graph_to_futures", refuse("distributed"))
    yield attempts
    assert not attempts


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Project]:
    """Return a folder of user modules that can be imported; they, and what they declare, are forgotten afterwards."""
    monkeypatch.chdir(tmp_path)
    folder = Project(tmp_path)
    yield folder
    folder.forget()
