"""Answers as strict JSON data, for the command line and for servers."""

from __future__ import annotations

import dataclasses
from pathlib import PurePath
from typing import Any

from diffract_dask.runs import encoding
from diffract_dask.runs.config import Config
from diffract_dask.runs.records import RunRecord

__all__ = ["as_json"]


def as_json(answer: Any) -> Any:
    """Return an answer, or a list of them, as plain data that strict JSON can hold.

    Numbers that are not finite become ``{"$float": "nan"}``. Records tell their folder relative to the root, and their
    status.
    """
    if isinstance(answer, RunRecord):
        return {**encoding.strict(answer.as_dict()), "run": answer.where, "status": answer.status}
    if isinstance(answer, Config):
        return encoding.encode(answer)
    if dataclasses.is_dataclass(answer) and not isinstance(answer, type):
        return {item.name: as_json(getattr(answer, item.name)) for item in dataclasses.fields(answer)}
    if isinstance(answer, dict):
        return {str(key): as_json(value) for key, value in answer.items()}
    if isinstance(answer, (list, tuple)):
        return [as_json(item) for item in answer]
    return answer.as_posix() if isinstance(answer, PurePath) else encoding.strict(answer)
