"""Pipelines: stages in order, checked when they are declared."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping

from diffract_dask.errors import DeclarationError, UnknownNameError, did_you_mean
from diffract_dask.runs.code import StageCode, file_of
from diffract_dask.runs.config import UNSET, paths, pick
from diffract_dask.runs.listing import RunRegistry
from diffract_dask.runs.naming import check_kind, check_name
from diffract_dask.runs.records import RunRecord
from diffract_dask.runs.stages import Stage, run_fingerprint
from diffract_dask.runs.variants import Variant, owner, registry

__all__ = ["Pipeline"]


class Pipeline:
    """Stages that run one after the other for a variant.

    Parameters
    ----------
    name : str
        Names the folder of its runs.
    stages : iterable of Stage
    parent : str
        The name of the pipeline that this one is forked from.
    module : str
        Whose variants it runs; by default the module that makes it.

    Raises
    ------
    DeclarationError
        Two stages have one name, or an input does not come earlier.
    """

    def __init__(
        self, name: str, stages: Iterable[Stage], *, parent: str | None = None, module: str | None = None
    ) -> None:
        frame = sys._getframe(1)
        self.name = check_name(name, "pipeline")
        check_kind(stages, Iterable, f"the stages of pipeline {name!r}")
        self.stages = tuple(stages)
        self.parent = parent
        self.module = module or owner(frame)
        here = self.module == owner(frame)
        self.source_file: str | None = frame.f_globals.get("__file__") if here else file_of(self.module)
        seen: list[str] = []
        for stage in self.stages:
            if not isinstance(stage, Stage):
                raise DeclarationError(f"pipeline {name!r} has {stage!r} among its stages; wrap it: Stage(name, fn)")
            if stage.name in seen:
                raise DeclarationError(f"pipeline {name!r} has two stages {stage.name!r}")
            for needed in stage.inputs:
                if needed not in seen:
                    raise DeclarationError(
                        f"stage {stage.name!r} of pipeline {name!r} needs {needed!r}, which is no earlier stage."
                        f"{did_you_mean(needed, seen)}"
                    )
            seen.append(stage.name)
        if not self.stages:
            raise DeclarationError(f"pipeline {name!r} has no stages")
        registry.note(self)

    def __repr__(self) -> str:
        return f"Pipeline({self.name!r}, {[stage.name for stage in self.stages]})"

    @property
    def stage_names(self) -> list[str]:
        """The names of the stages, in order."""
        return [stage.name for stage in self.stages]

    def variant(self, name: str) -> Variant:
        """Return a variant of the pipeline's module."""
        return registry.get(self.module, name)

    def codes(self) -> dict[str, StageCode]:
        """Return what the code of each stage comes to at this moment."""
        return {stage.name: stage.code() for stage in self.stages}

    def fingerprint(self, variant: Variant, upstream: Mapping[str, RunRecord] | None = None) -> str:
        """Return the fingerprint of the run that `run` would make."""
        codes = self.codes()
        declared = [stage.declaration(codes[stage.name]) for stage in self.stages]
        above = {step: record.fingerprint for step, record in (upstream or {}).items()}
        return run_fingerprint(variant.fingerprint, declared, above)

    def run(
        self,
        variant: Variant | str,
        registry: RunRegistry,
        *,
        force: str | Iterable[str] | None = None,
        only: str | Iterable[str] | None = None,
        upstream: Mapping[str, RunRecord] | None = None,
        chain: str | None = None,
        variation: str | None = None,
        step: str | None = None,
    ) -> RunRecord:
        """Run the stages that are not done yet, in this process, and return the record.

        Parameters
        ----------
        variant : Variant or str
            A name means a variant of the pipeline's module.
        registry : RunRegistry
            Where the run is kept.
        force : str or iterable of str
            Stages to run though they are done.
        only : str or iterable of str
            Run no others; what they need must be done.
        upstream : mapping
            Records of the runs that this one reads, by step.
        chain, variation, step : str
            On whose behalf it runs.

        Returns
        -------
        RunRecord
            Its `stage_status` says what this call did: done, cached, skipped.

        Raises
        ------
        UnknownNameError
            A stage, config key or step has no such name; nothing has run.
        RunInputError
            What a stage needs is missing; nothing has run.
        RunLockedError
            Another process works on the same run.
        """
        from diffract_dask.runs.running import run

        check_kind(registry, RunRegistry, "the registry of a run")
        check_kind(upstream or {}, Mapping, "upstream= of a run, records by step,")
        if isinstance(variant, str):
            variant = self.variant(variant)
        return run(self, variant, registry, force, only, upstream or {}, (chain, variation, step))

    def check_keys(self, variant: Variant) -> None:
        """Refuse config keys that no variant of the module has.

        Raises
        ------
        UnknownNameError
            The message has the nearest keys.
        """
        known = [variant, *registry.for_module(self.module).values(), *registry.for_module(variant.module).values()]
        for stage in self.stages:
            for key in stage.config_keys:
                if all(pick(other.config, key) is UNSET for other in known):
                    every = dict.fromkeys(path for other in known for path in paths(other.config))
                    raise UnknownNameError(
                        f"stage {stage.name!r} of pipeline {self.name!r} reads the config key {key!r}, which no "
                        f"variant of {self.module} has.{did_you_mean(key, every)}"
                    )
