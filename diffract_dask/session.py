"""The session: one place to add models, compute fields and get results. A facade; the work is done elsewhere."""

from __future__ import annotations

import functools
import os
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import numpy as np

from diffract_dask import config, ingest, memory, results
from diffract_dask.catalog import SKIP_MEANING
from diffract_dask.errors import (
    ConfigurationError,
    DuplicateContentWarning,
    InvalidIdentifierError,
    KernelRegistrationError,
    ModelNotFoundError,
    NothingAnalysedWarning,
    ReadOnlyStoreError,
    SessionError,
    StoreChangedError,
    did_you_mean,
)
from diffract_dask.execute import ApplySummary, run_plan
from diffract_dask.fields import Field, Level
from diffract_dask.kernel import Kernel, Registry, kernel
from diffract_dask.kernels import default_registry
from diffract_dask.lazy import lazy_dataset
from diffract_dask.plan import Plan, make_plan
from diffract_dask.results import EraseSummary
from diffract_dask.selection import Patterns, Selection
from diffract_dask.sources import open_checkpoint
from diffract_dask.store import Store
from diffract_dask.store.values import RESERVED_FIELDS

if TYPE_CHECKING:
    import pandas as pd
    import xarray as xr

__all__ = ["Session", "list_profiles"]

PROFILES = ("ram", "local")
_LOOKS = 3
_LONGEST_FIELD = 200  # array fields are folders of this name

F = TypeVar("F", bound=Callable[..., Any])
Params = Mapping[str, Mapping[str, Any]]


def list_profiles() -> list[str]:
    """Return the names that ``Session(profile=…)`` takes: ``ram`` (in memory), ``local`` (the setting ``store``)."""
    return list(PROFILES)


@dataclass(eq=False)
class _State:
    """What a session and its filtered views share."""

    store: Store
    registry: Registry
    settings: dict[str, Any] = field(default_factory=dict)


class Session:
    """Models, computations and results over one store.

    Parameters
    ----------
    store : str or path, optional
        A directory or URL of a store; made when it does not exist. The names of the profiles are taken as such.
    profile : {"ram", "local"}, optional
        ``ram`` keeps everything in memory, ``local`` uses the setting ``store`` (``./diffract.zarr``). Without
        any argument: ``ram``.
    config_path : path, optional
        YAML or JSON file with settings (see ``diffract_dask.yaml``), its ``store`` included.
    mode : {"a", "r"}
        ``r`` opens for reading only.

    Raises
    ------
    ConfigurationError
        Unknown profile, missing or malformed configuration file, store and profile both given.
    IncompatibleStoreError
        The store was written by a newer version, or needs an upgrade.

    Examples
    --------
    >>> import numpy as np
    >>> session = Session()
    >>> session.models.add({"fc.weight": np.eye(4, 3)}, model_id="m")
    'm'
    >>> summary = session.compute.apply("stable_rank")
    >>> round(float(session.results.dataset("stable_rank").stable_rank.sel(model_id="m", name="fc.weight")), 12)
    3.0
    """

    def __init__(
        self,
        store: str | os.PathLike[str] | None = None,
        *,
        profile: str | None = None,
        config_path: str | os.PathLike[str] | None = None,
        mode: str = "a",
    ) -> None:
        settings = config.load(Path(config_path)) if config_path is not None else {}
        if isinstance(store, str) and store in PROFILES and profile in (None, store):
            store, profile = None, store
        if store is not None and profile is not None:
            raise ConfigurationError(f"give a store or a profile, not both ({str(store)!r} and {profile!r})")
        if profile is not None and profile not in PROFILES:
            raise ConfigurationError(
                f"no profile {profile!r}; the profiles are {', '.join(PROFILES)}.{did_you_mean(profile, PROFILES)}"
            )
        if mode not in ("a", "r"):
            raise ConfigurationError(f"mode is {mode!r}; give 'a' (read and write) or 'r' (read only)")
        if store is None and (profile == "local" or (profile is None and "store" in settings)):
            store = config.get("store", settings)
        registry = default_registry()
        kernels = config.get("kernels", settings) or {}
        if not isinstance(kernels, Mapping) or not all(isinstance(params, Mapping) for params in kernels.values()):
            raise ConfigurationError(f"the setting 'kernels' is {kernels!r}; give parameters by kernel")
        for name, params in kernels.items():
            registry.configure(name, **params)
        timeout = config.number("lock-timeout", settings)
        self._state = _State(Store.open(store, mode=mode, lock_timeout=timeout), registry, settings)
        self._selection = Selection()
        self._name_spaces()

    def _name_spaces(self) -> None:
        self.models = Models(self._state, self._selection)
        self.compute = Compute(self._state, self._selection)
        self.results = Results(self._state, self._selection)

    @property
    def store(self) -> Store:
        """The store behind the session."""
        return self._state.store

    def filter(
        self,
        model_ids: Patterns = None,
        param_names: Patterns = None,
        param_types: Patterns = None,
        param_ids: Patterns = None,
    ) -> Session:
        """Return the same session over a part of its models and parameters; filters can be chained.

        Parameters
        ----------
        model_ids, param_names, param_types : str or iterable of str, optional
            Exact names, globs, or ``re:`` followed by a regular expression that matches in full. Those of one
            argument are alternatives, the arguments must all hold. An empty list selects nothing.
        param_ids : str or iterable of str, optional
            Exact uids.

        Raises
        ------
        FilterError
            A regular expression or a type that does not exist.
        """
        other = object.__new__(Session)
        other._state = self._state
        other._selection = Selection.of(model_ids, param_names, param_types, param_ids, within=self._selection)
        other._name_spaces()
        return other

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        """Nothing is pending between calls: every call leaves the store complete."""

    def __repr__(self) -> str:
        where = self.store.location or "memory"
        return f"<diffract_dask.Session {where!r}: {len(self.models.list())} models>"


@dataclass(eq=False, repr=False)
class _NameSpace:
    _state: _State
    _selection: Selection

    def __repr__(self) -> str:
        public = [name for name in dir(type(self)) if not name.startswith("_")]
        return f"<session.{type(self).__name__.lower()}: {', '.join(public)}>"

    @property
    def _store(self) -> Store:
        return self._state.store

    @property
    def _registry(self) -> Registry:
        return self._state.registry


class Models(_NameSpace):
    """``session.models``: add, list, rename, erase, describe."""

    def add(
        self,
        model: Any,
        model_id: str | None = None,
        *,
        step: float | None = None,
        parent: str | Sequence[str] | None = None,
        attrs: Mapping[str, Any] | None = None,
        overrides: Mapping[str, Mapping[str, Any]] | None = None,
        replace: bool = False,
        link: bool = False,
    ) -> str:
        """Add a model and return its id.

        Parameters
        ----------
        model : object
            A path (safetensors file, folder or index, npz, PyTorch file), a mapping of arrays or tensors, a
            PyTorch module. Its weights are copied; later changes of the object do not matter.
        model_id : str, optional
            Any printable text; default: from the file's name or the content.
        step : float, optional
            Position along training, the axis of trajectories.
        parent : str or sequence of str, optional
            Ids of the models that this one was made from.
        attrs : mapping, optional
            Free attributes, JSON values.
        overrides : mapping, optional
            By parameter name: ``{"type": …, "skip": True or a reason or False}`` and free attributes.
        replace : bool
            Replace a model of the same id; values of unchanged parameters are kept.
        link : bool
            Copy nothing and read the file when needed (safetensors, uncompressed npz).

        Raises
        ------
        ModelAlreadyExistsError, InvalidIdentifierError, SourceError
        SessionError
            The model is named as its own parent.
        """
        checkpoint = open_checkpoint(model)
        chosen = model_id if model_id is not None else self._free_id(checkpoint.source)
        if not isinstance(chosen, str):
            raise InvalidIdentifierError(f"model_id is a {type(chosen).__name__}; give text, and a number as step=")
        parents = (parent,) if isinstance(parent, str) else tuple(parent or ())
        if chosen in parents:
            raise SessionError(f"{chosen!r} cannot be its own parent; name the model that it was made from, or none")
        added = self._store.add_model(
            chosen,
            checkpoint,
            step=step,
            parents=parents,
            attrs=dict(attrs or {}),
            overrides=overrides,
            replace=replace,
            link=link,
        )
        if added.same_as:
            warnings.warn(
                f"{chosen!r} has the same content as {', '.join(map(repr, added.same_as))}; computed values are shared",
                DuplicateContentWarning,
                stacklevel=2,
            )
        if not added.parameters.analysed.any():
            warnings.warn(nothing_analysed(chosen, added.parameters.skip_reason), NothingAnalysedWarning, stacklevel=2)
        return chosen

    def _free_id(self, source: str) -> str:
        stem = Path(source).name.removesuffix(".index.json").split(".")[0] or "model"
        taken, number, name = set(self._store.model_ids()), 1, stem
        while name in taken:
            number += 1
            name = f"{stem}-{number}"
        return name

    def list(self) -> list[str]:
        """Return the ids in scope, by step, then as they were added."""
        return self._selection.models(self._store.model_ids())

    def rename(self, model_id: str, new_model_id: str) -> None:
        """Give a model another id; no value is lost or computed again."""
        self._require(model_id)
        self._store.rename(model_id, new_model_id)
        ingest.rename_in_aggregates(self._store, model_id, new_model_id)

    def erase(self, *model_ids: str, erase_all: bool = False) -> EraseSummary:
        """Remove models with everything of them; ``erase_all=True``: all models in scope."""
        if bool(model_ids) == erase_all:
            raise SessionError("name the models to erase, or pass erase_all=True for all in scope; not both or neither")
        for model_id in model_ids:
            self._require(model_id)
        chosen = self.list() if erase_all else list(dict.fromkeys(model_ids))
        uids = [str(u) for model_id in chosen for u in self._store.parameters(model_id).uid]
        self._store.erase_model(*chosen)
        return EraseSummary(tuple(chosen), (), tuple(uids))

    def attrs(self, model_id: str, **changes: Any) -> dict[str, Any]:
        """Return a model's attributes, after setting those given (None removes one)."""
        self._require(model_id)
        if changes:
            self._store.set_model_attrs(model_id, **changes)
        return self._store.model_attrs(model_id)

    def parameters(self, model_id: str | None = None) -> pd.DataFrame:
        """Return every parameter in scope, analysed or not, one row each, with its ``skip_reason``."""
        if model_id is not None:
            self._require(model_id)
        return results.parameter_table(self._store, self._selection, model_id)

    def _require(self, model_id: str) -> None:
        known = self.list()
        if model_id not in known:
            raise ModelNotFoundError(f"no model {model_id!r} in {self._place()}.{did_you_mean(str(model_id), known)}")

    def _place(self) -> str:
        return f"the store {self._store.location!r}" if self._store.location else "this session"


class Compute(_NameSpace):
    """``session.compute``: plan, compute, declare and configure kernels."""

    def apply(
        self,
        *fields: str,
        params: Params | None = None,
        retry_failed: bool = False,
        progress: bool | None = None,
        partial: bool = False,
    ) -> ApplySummary:
        """Compute what is missing or stale of `fields` for the models in scope, and store it.

        Runs on the active :class:`distributed.Client` if there is one, else on threads.

        Parameters
        ----------
        *fields : str
        params : mapping, optional
            Kernel parameters of this call: ``{"hard_rank": {"rtol": 1e-6}}``.
        retry_failed : bool
            Run kernels again where they raised before.
        progress : bool, optional
            Show a progress bar; default: only on a terminal.
        partial : bool
            Where a whole spectrum does not fit in the budget, compute its leading part; what needs the rest is NaN.

        Raises
        ------
        FieldNotFoundError, ConfigurationError
            Unknown field, kernel or parameter, with the nearest names.
        OverBudgetError
            Something fits in memory in no form; raised before anything runs.
        """
        plan = self._plan(_named(fields), params, retry_failed, partial=partial)
        self._warn_if_empty(plan)
        results.warn_of_broken_links(self._store, self._selection, stacklevel=2)
        if self._store.read_only and not plan.nothing_to_do:
            raise ReadOnlyStoreError(f"the store {self._store.location!r} is open for reading; open it with mode='a'")
        return run_plan(
            plan,
            self._store,
            replan=lambda unreadable: self._plan(
                fields, params, retry_failed, unreadable, retried=True, partial=partial
            ),
            settings=self._state.settings,
            progress=progress,
        )

    def plan(
        self, *fields: str, params: Params | None = None, retry_failed: bool = False, partial: bool = False
    ) -> Plan:
        """Return what :meth:`apply` would run; ``.explain()`` tells on how many slices, by which route and why."""
        results.warn_of_broken_links(self._store, self._selection, stacklevel=2)
        return self._plan(_named(fields), params, retry_failed, partial=partial)

    def lazy(self, *fields: str, params: Params | None = None, partial: bool = False) -> xr.Dataset:
        """Return `fields` as lazy arrays over (model_id, name); nothing is computed or stored."""
        plan = self._plan(_named(fields), params, False, partial=partial)
        results.warn_of_broken_links(self._store, self._selection, stacklevel=2)
        return lazy_dataset(plan, self._store)

    def _plan(
        self,
        fields: Sequence[str],
        params: Params | None,
        retry_failed: bool,
        unreadable: Collection[str] = (),
        retried: bool = False,
        partial: bool = False,
    ) -> Plan:
        make = functools.partial(
            make_plan,
            list(dict.fromkeys(fields)),
            store=self._store,
            registry=self._registry,
            whole_models=self._selection.whole_models,
            resources=memory.resources(self._state.settings),
            params=params,
            retry_failed=retry_failed,
            retried=retried,
            unreadable=unreadable,
            settings=self._state.settings,
            partial=partial,
        )
        for _ in range(_LOOKS):
            view = self._store.view()
            with suppress(StoreChangedError):  # by another process, since the view was made
                return make(view=view, selected=self._selection.mask(view))
        view = self._store.view()
        return make(view=view, selected=self._selection.mask(view))

    def _warn_if_empty(self, plan: Plan) -> None:
        if not plan.fields:
            warnings.warn("no fields given; nothing is computed", NothingAnalysedWarning, stacklevel=3)
        elif not plan.scope.any():
            ids = self._selection.models(self._store.model_ids())
            reasons = results.parameter_table(self._store, self._selection, None).skip_reason
            shown = ", ".join(ids[:3])
            if not ids:
                text = "no model in scope; nothing is computed"
            elif not len(reasons) and not self._selection.whole_models:
                text = f"{shown!r}: no parameter in scope; nothing is computed"
            else:
                text = nothing_analysed(shown, reasons)
            warnings.warn(text, NothingAnalysedWarning, stacklevel=3)

    @overload
    def kernel(self, function: F, /) -> F: ...
    @overload
    def kernel(
        self,
        /,
        *,
        name: str | None = None,
        produce_fields: Sequence[str] | None = None,
        level: Level = "slice",
        batch: bool = False,
        version: int | str | None = None,
        replace: bool = False,
        **outputs: Field,
    ) -> Callable[[F], F]: ...
    def kernel(
        self,
        function: F | None = None,
        /,
        *,
        name: str | None = None,
        produce_fields: Sequence[str] | None = None,
        level: Level = "slice",
        batch: bool = False,
        version: int | str | None = None,
        replace: bool = False,
        **outputs: Field,
    ) -> F | Callable[[F], F]:
        """Declare a kernel of this session: positional parameters are input fields, keyword-only ones configuration.

        Called once per slice unless ``batch=True``. Declaring a kernel of your own again replaces it; a built-in
        one is only replaced with ``replace=True``.

        Examples
        --------
        >>> session = Session()
        >>> @session.compute.kernel
        ... def top_k_energy(weights_svals, *, k=5):
        ...     s2 = weights_svals**2
        ...     return s2[-k:].sum() / s2.sum()
        """

        def declare(func: F) -> F:
            declared: dict[str, Any] = dict(outputs)
            if not declared:
                declared = {
                    field_name: Field(long_name=field_name.replace("_", " ")) for field_name in produce_fields or ()
                }
            decorate: Callable[[F], F] = kernel(name=name, level=level, batch=batch, version=version, **declared)
            made: Kernel = decorate(func).__kernel__  # type: ignore[attr-defined]
            _check_storable(made.outputs)
            if made.level == "pair":
                raise KernelRegistrationError(
                    f"kernel {made.name!r}: kernels over pairs of models are not run by this version"
                )
            own = made.name in self._registry.kernels and made.name not in default_registry().kernels
            self._registry.add(made, replace=replace or own)
            return func

        return declare if function is None else declare(function)

    def configure_kernel(self, kernel_name: str, /, **params: Any) -> dict[str, Any]:
        """Set parameters of a kernel for this session and return all that are in force."""
        return self._registry.configure(kernel_name, **params)

    def variant(self, kernel_name: str, field_name: str, /, **params: Any) -> None:
        """Add a second field `field_name`, made by the same kernel with other parameters.

        Those that are not given are the ones in force. Declaring a variant again replaces it.
        """
        _check_storable([field_name])
        again = field_name in self._registry.variants
        self._registry.make_variant(kernel_name, field_name, params, replace=again)

    def list_available_kernels(self, verbose: bool = False) -> list[str]:
        """Return the kernels; verbose: with inputs, parameters and level."""
        return results.list_kernels(self._registry, verbose)

    def list_available_metrics(self, verbose: bool = False) -> list[str]:
        """Return the fields that can be computed; verbose: with the kernel that makes each."""
        if not verbose:
            return sorted(self._registry.fields)
        return [f"{name} <- {self._registry.producer(name).name}" for name in sorted(self._registry.fields)]

    @property
    def fields(self) -> dict[str, Field]:
        """The declaration of every field that can be computed."""
        return self._registry.fields

    @property
    def registry(self) -> Registry:
        """The kernels of this session with their configuration."""
        return self._registry


class Results(_NameSpace):
    """``session.results``: labelled datasets, exports, status, erasing, values from elsewhere."""

    def dataset(self, *fields: str) -> xr.Dataset:
        """Return stored values as a Dataset over (model_id, name), models by (step, added).

        Parameters
        ----------
        *fields : str
            Default: every stored scalar field.

        Raises
        ------
        FieldNotFoundError
            A field that no kernel produces and the store does not hold.
        """
        return self._results.dataset(_named(fields))

    def tree(self) -> xr.DataTree:
        """Return the whole store as a lazy DataTree."""
        return self._store.datatree()

    def status(self, *fields: str) -> xr.Dataset:
        """Return ``state`` and ``reason`` (field, model_id, name): missing, stale, fresh, failed, ingested, skipped."""
        return self._results.status(_named(fields))

    def export_metrics(
        self, *fields: str, export_format: str | None = None, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> Any:
        """Return slice-level values in a format (dict, json, list, pandas, polars, csv, netcdf, xarray)."""
        return self._results.export(_named(fields), "metrics", export_format, path, options)

    def export_aggregates(
        self, *fields: str, export_format: str | None = None, path: str | os.PathLike[str] | None = None, **options: Any
    ) -> Any:
        """Return model-level values in a format; under a parameter filter they are over what is in scope."""
        return self._results.export(_named(fields), "aggregates", export_format, path, options)

    def export(
        self,
        *fields: str,
        sources: str = "all",
        export_format: str | None = None,
        path: str | os.PathLike[str] | None = None,
        **options: Any,
    ) -> Any:
        """Return values of every level (``sources``: all, metrics or aggregates) in a format."""
        return self._results.export(_named(fields), sources, export_format, path, options)

    def erase(self, *fields: str, dependents: bool = False, erase_all: bool = False) -> EraseSummary:
        """Remove stored values in scope; ``dependents=True``: also of what is computed from them."""
        return self._results.erase(_named(fields), dependents, erase_all)

    def ingest_metrics(self, fields_by_uid: Mapping[str, Mapping[str, Any]], *, force: bool = False) -> None:
        """Store values from elsewhere, ``{uid: {field: value}}``; they are marked and never taken for computed."""
        ingest.ingest_metrics(self._store, self._registry, self._selection, fields_by_uid, force)

    def ingest_aggregates(self, aggregates: Iterable[Mapping[str, Any]], *, force: bool = False) -> None:
        """Store values of whole models from elsewhere: dicts with field_name, context_models, value."""
        ingest.ingest_aggregates(self._store, aggregates, force)

    @property
    def _results(self) -> results.ResultsOf:
        return results.ResultsOf(self._store, self._registry, self._selection, self._state.settings)


def _named(fields: Sequence[Any]) -> tuple[str, ...]:
    """Return fields as given; SessionError with the right call where one is no name."""
    for field_name in fields:
        if not isinstance(field_name, str):
            raise SessionError(
                f"{field_name!r} is no field name; name the fields one by one, or unpack a list: f(*names)"
            )
    return tuple(fields)


def _check_storable(fields: Iterable[str]) -> None:
    """KernelRegistrationError for a field that could be computed, but not stored under its name."""
    for name in fields:
        if not name.isidentifier() or name in RESERVED_FIELDS or len(name) > _LONGEST_FIELD:
            raise KernelRegistrationError(
                f"a field cannot be called {name!r}: give an identifier of at most {_LONGEST_FIELD} characters that is "
                f"none of {', '.join(sorted(RESERVED_FIELDS))}"
            )


def nothing_analysed(model: str, skip_reasons: Iterable[str]) -> str:
    """Return a sentence that says why no parameter of a model is analysed, with counts by reason."""
    reasons, counts = np.unique([str(r) for r in skip_reasons], return_counts=True)
    if not len(reasons):
        return f"{model!r} has no parameters; nothing is analysed"
    known = {str(reason): sentence for reason, sentence in SKIP_MEANING.items()}
    shown = "; ".join(f"{n} × {r} ({known.get(r, 'as given')})" for r, n in zip(reasons, counts, strict=True))
    return f"{model!r}: nothing can be analysed: {shown}. models.parameters() shows every parameter"
