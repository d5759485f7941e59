"""What a stage's function is given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from diffract_dask.runs.records import RunRecord

if TYPE_CHECKING:
    from diffract_dask.runs.config import Config
    from diffract_dask.runs.variants import Variant

__all__ = ["RunContext"]


class RunContext:
    """A run, as the function of one of its stages sees it. It can be sent to other threads and processes.

    Attributes
    ----------
    variant : Variant
    record : RunRecord
        A copy; changing it changes nothing on disk.
    stage : str
        The stage that runs.
    path : Path
        The run's folder; `fdir` is the same as text.
    root : Path
        The folder of all runs.
    upstream : dict
        Record of the upstream run, by step of the chain.
    """

    def __init__(
        self,
        path: Path,
        root: Path,
        variant: Variant,
        record: RunRecord,
        stage: str,
        upstream: Mapping[str, RunRecord],
    ) -> None:
        self.path = path
        self.root = root
        self.variant = variant
        self.record = record
        self.stage = stage
        self.upstream = dict(upstream)

    @property
    def fdir(self) -> str:
        """The run's folder as text."""
        return str(self.path)

    @property
    def config(self) -> Config:
        """The variant's merged configuration."""
        return self.variant.config

    def stage_dir(self, stage: str | None = None) -> Path:
        """Return the folder of a stage, by default of the one that runs; its ``outputs/`` exists."""
        raise NotImplementedError

    def artifact(
        self,
        stage: str,
        relpath: str | os.PathLike[str],
        source: str | os.PathLike[str] | None = None,
        *,
        how: str = "copy",
    ) -> Path:
        """Keep a file or folder as ``stages/<stage>/outputs/<relpath>`` and return where it lies.

        `how` is "copy", "link" or "move"; without `source`, the path to write to is returned, its folder made.
        """
        raise NotImplementedError

    def metric(
        self, stage: str, name: str, value: Any, *, units: str | None = None, direction: str | None = None
    ) -> None:
        """Report a number, truth value or text; the last one of a name counts."""
        raise NotImplementedError

    def upstream_artifact(self, step: str, relpath: str | os.PathLike[str] = "") -> Path:
        """Return the path of a file of an upstream run, which exists; `relpath` starts at that run's folder."""
        raise NotImplementedError

    def checkpoint(
        self,
        store: str | os.PathLike[str],
        path: Any,
        model_id: str | None = None,
        *,
        parent: str | list[str] | None = None,
        step: float | None = None,
        **options: Any,
    ) -> str:
        """Register a checkpoint in a weight store, with this run and its configuration; return its model id."""
        from diffract_dask.runs import weights

        model_id, entry = weights.register_checkpoint(
            self, store, path, model_id=model_id, parent=parent, step=step, **options
        )
        self._note_checkpoint(entry)
        return str(model_id)

    def _note_checkpoint(self, entry: dict[str, Any]) -> None:
        raise NotImplementedError

    def log(self, message: str) -> None:
        """Add a line to the run's ``run.log``."""
        raise NotImplementedError
