"""Every error and warning of the package, in one tree.

Each class has a stable ``kind`` (for programs) and a message (for people) that says what failed, where, what
was expected and found, the nearest names, and the call that fixes it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable
from typing import ClassVar

__all__ = [
    "ArtifactError",
    "ArtifactNotFoundError",
    "CircularDependencyError",
    "ConfigurationError",
    "CorruptFileError",
    "DeclarationError",
    "DiffractError",
    "DuplicateContentWarning",
    "FieldNotFoundError",
    "FilterError",
    "FrozenConfigError",
    "IncompatibleStoreError",
    "InvalidIdentifierError",
    "KernelError",
    "KernelNotFoundError",
    "KernelRegistrationError",
    "LinkBrokenError",
    "LinkBrokenWarning",
    "MatrixError",
    "MissingExtraError",
    "ModelAlreadyExistsError",
    "ModelChangedWarning",
    "ModelNotFoundError",
    "NothingAnalysedWarning",
    "OverBudgetError",
    "ParameterNotFoundError",
    "ReadOnlyStoreError",
    "RunError",
    "RunFormatError",
    "RunInputError",
    "RunLockedError",
    "RunNotFoundError",
    "SessionError",
    "SourceError",
    "StaleValuesWarning",
    "StoreChangedError",
    "StoreError",
    "StoreLockedError",
    "UnencodableError",
    "UnknownNameError",
    "UnsafePickleError",
    "UnsupportedSourceError",
    "did_you_mean",
]


def did_you_mean(name: str, known: Iterable[str], n: int = 3) -> str:
    """Return ``" Did you mean 'a', 'b'?"`` for the names nearest to `name`, or an empty string.

    >>> did_you_mean("stable_rnk", ["stable_rank", "frob_norm"])
    " Did you mean 'stable_rank'?"
    """
    near = difflib.get_close_matches(name, list(known), n=n, cutoff=0.6)
    return f" Did you mean {', '.join(repr(x) for x in near)}?" if near else ""


class DiffractError(Exception):
    """Base of every error that the package raises on purpose."""

    kind: ClassVar[str] = "error"


class SessionError(DiffractError):
    """A request to a session that cannot be carried out."""

    kind = "session"


class ModelNotFoundError(SessionError):
    """No model has this id."""

    kind = "model_not_found"


class ModelAlreadyExistsError(SessionError):
    """A model has this id already and ``replace=True`` was not given."""

    kind = "model_exists"


class ParameterNotFoundError(SessionError):
    """No parameter has this name or uid."""

    kind = "parameter_not_found"


class InvalidIdentifierError(SessionError):
    """A model id or a name is empty or not printable."""

    kind = "invalid_identifier"


class FilterError(SessionError):
    """A selection that is not well formed (a bad regular expression, an unknown type)."""

    kind = "filter"


class ConfigurationError(SessionError):
    """A setting, profile or configuration file that is missing or wrong."""

    kind = "configuration"


class StoreError(DiffractError):
    """The store cannot be read or written."""

    kind = "store"


class IncompatibleStoreError(StoreError):
    """The store's schema is newer than this package, or older and not upgraded yet."""

    kind = "store_version"


class ReadOnlyStoreError(StoreError):
    """A write to a store that is open for reading only."""

    kind = "store_read_only"


class StoreChangedError(StoreError):
    """What the store holds was changed by another process after it was looked at."""

    kind = "store_changed"


class StoreLockedError(StoreError):
    """Another process holds the write lock and did not release it in time."""

    kind = "store_locked"


class SourceError(DiffractError):
    """A checkpoint that cannot be read."""

    kind = "source"


class UnsupportedSourceError(SourceError):
    """No source accepts this object or file."""

    kind = "source_unsupported"


class CorruptFileError(SourceError):
    """A file whose size, header or index contradicts its content."""

    kind = "source_corrupt"


class UnsafePickleError(SourceError):
    """A pickle that would run code; nothing in it was executed."""

    kind = "source_unsafe"


class MissingExtraError(SourceError):
    """A package is needed that the core does not install; the message names the extra."""

    kind = "missing_extra"


class LinkBrokenError(SourceError):
    """A linked file is missing, shorter than recorded, or changed."""

    kind = "link_broken"


class KernelError(DiffractError):
    """A kernel that cannot be registered, found or configured."""

    kind = "kernel"


class KernelNotFoundError(KernelError, SessionError):
    """No kernel has this name."""

    kind = "kernel_not_found"


class FieldNotFoundError(KernelNotFoundError):
    """No kernel produces this field and the store does not hold it."""

    kind = "field_not_found"


class KernelRegistrationError(KernelError):
    """A declaration that contradicts itself or another kernel."""

    kind = "kernel_registration"


class CircularDependencyError(KernelRegistrationError):
    """Kernels that need each other's fields in a circle."""

    kind = "kernel_circular"


class MatrixError(DiffractError, ValueError):
    """An array that is not a matrix, or a stack of matrices, of real numbers."""

    kind = "matrix"


class RunError(DiffractError):
    """A pipeline, chain, run or artifact that cannot be declared, run or found."""

    kind = "run"


class DeclarationError(RunError, ValueError):
    """A pipeline, variant, chain or variation whose declaration contradicts itself or another one."""

    kind = "run_declaration"


class UnknownNameError(RunError, LookupError):
    """No stage, step, variant, variation, config key, pipeline or chain has this name."""

    kind = "run_unknown_name"


class FrozenConfigError(RunError, TypeError):
    """A change to a configuration, which is fixed once it is made."""

    kind = "run_frozen_config"


class UnencodableError(RunError, TypeError):
    """A value that has no canonical form: it cannot be part of a configuration or of a fingerprint."""

    kind = "run_unencodable"


class RunInputError(RunError):
    """What a run, or a stage of it, starts from is missing."""

    kind = "run_input"


class RunNotFoundError(RunError, LookupError):
    """No run has this pipeline, variant and fingerprint, or more than one has."""

    kind = "run_not_found"


class RunFormatError(RunError):
    """A run was written by a later version, and would be written over."""

    kind = "run_format"


class RunLockedError(RunError):
    """Another process or thread works on the same run and did not end in time."""

    kind = "run_locked"


class ArtifactError(RunError, ValueError):
    """An artifact or a metric that cannot be kept: a path outside the run, a value that is no scalar."""

    kind = "run_artifact"


class ArtifactNotFoundError(ArtifactError, FileNotFoundError):
    """The file that is to be kept, or that a run should hold, does not exist."""

    kind = "run_artifact_not_found"


class OverBudgetError(DiffractError):
    """Nothing fits in the memory budget; raised before anything runs, with both numbers."""

    kind = "over_budget"


class DuplicateContentWarning(UserWarning):
    """The model that was added has the same content as one already there."""


class NothingAnalysedWarning(UserWarning):
    """No parameter of the model can be analysed; the message counts the reasons."""


class LinkBrokenWarning(UserWarning):
    """Values of a linked model are asked for whose file is missing, or holds another checkpoint now."""


class StaleValuesWarning(UserWarning):
    """Values are shown that the present configuration would compute anew."""


class ModelChangedWarning(UserWarning):
    """A model was changed, renamed or erased while its values were computed; not all of them are stored."""
