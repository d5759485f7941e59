"""Parameters of the built-in kernels: a wrong value is named where it is set, before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from diffract_dask import Session, kernels, powerlaw
from diffract_dask.errors import ConfigurationError

NO_NUMBER = ("x", "1", [1], {}, True, 1j, math.nan)
NO_COUNT = (*NO_NUMBER, None, -1, 2.5, 2.0, math.inf, 2**70)
ENDS = (*NO_NUMBER, 0.0, -1, math.inf)
WRONG: dict[str, tuple[Any, ...]] = {
    "xmin": ENDS,
    "xmax": ENDS,
    "min_tail": (*NO_COUNT, 0),
    "min_values": NO_COUNT,
    "min_spread": (*NO_NUMBER, None, -0.1, math.inf),
    "replicas": (*NO_COUNT, 0),
    "seed": NO_COUNT,
    "factor": (*NO_NUMBER, None, -1, math.inf),
    "rtol": (*NO_NUMBER, None, -1, 1.0, math.inf),
    "without_bulk": (*NO_NUMBER, -1, 1.5, math.inf),
    "p_value_threshold": (*NO_NUMBER, None, 0.0, 1.0, -1, math.inf),
}
"""Wrong values by name of the parameter."""

PARAMETERS = [
    (declared.name, parameter)
    for declared in (function.__kernel__ for function in kernels.BUILTIN)
    for parameter in declared.defaults
]
RIGHT: dict[str, tuple[Any, ...]] = {
    "xmin": (None, 1, np.float32(0.5)),
    "xmax": (None, 7),
    "min_tail": (1, np.int64(3)),
    "min_values": (0, np.int32(4)),
    "min_spread": (0, 0.5),
    "replicas": (2, np.int64(3)),
    "seed": (0, np.uint8(7)),
    "factor": (0, 2.5),
    "rtol": (0, 0.5),
    "without_bulk": (None, 1, 0.5),
    "p_value_threshold": (0.5, np.float32(0.25)),
}


@pytest.mark.parametrize(("kernel", "parameter"), PARAMETERS)
def test_a_wrong_value_is_named_where_it_is_set(kernel: str, parameter: str, no_compute: Any) -> None:
    with Session(profile="ram") as session:
        session.models.add({"w": np.eye(3)}, "m")
        output = next(iter(session.compute.registry.kernel(kernel).outputs))
        for value in WRONG[parameter]:
            if value is None and kernel == "singular_values":  # its default
                continue
            for wrong in (
                lambda value=value: session.compute.configure_kernel(kernel, **{parameter: value}),
                lambda value=value: session.compute.apply(output, params={kernel: {parameter: value}}),
            ):
                with pytest.raises(ConfigurationError, match=f"^kernel '{kernel}': .*{parameter} is .*it must be"):
                    wrong()
        assert not session.compute.registry.config[kernel]
        if len(session.compute.registry.kernel(kernel).outputs) == 1:
            with pytest.raises(ConfigurationError, match=parameter):
                session.compute.variant(kernel, "other", **{parameter: WRONG[parameter][0]})
            assert "other" not in session.compute.fields


@pytest.mark.parametrize(("kernel", "parameter"), PARAMETERS)
def test_right_values_are_taken(kernel: str, parameter: str) -> None:
    w = np.random.default_rng(0).standard_normal((12, 9))
    for value in RIGHT[parameter]:
        with Session(profile="ram") as session:
            session.models.add({"w": w}, "m")
            session.compute.configure_kernel(kernel, **{parameter: value})
            assert not session.compute.apply(*session.compute.registry.kernel(kernel).outputs).failed


def test_plain_calls_name_a_wrong_value_too() -> None:
    x = np.arange(1.0, 30.0)
    found = powerlaw.fit(x)
    for parameter in ("xmin", "xmax", "min_tail", "min_values", "min_spread"):
        for value in WRONG[parameter]:
            with pytest.raises(ConfigurationError, match=f"{parameter} is"):
                powerlaw.fit(x, **{parameter: value})
    for parameter in ("replicas", "seed", "min_tail"):
        for value in WRONG[parameter]:
            with pytest.raises(ConfigurationError, match=f"{parameter} is"):
                powerlaw.bootstrap_p_value(found, **{parameter: value})
    for parameter, wrong in {"xmin": (0, -1, 1.5, math.nan, "x"), "min_tail": (0, "x"), "min_values": (-1,)}.items():
        for value in wrong:
            with pytest.raises(ConfigurationError, match=f"{parameter} is"):
                powerlaw.fit_discrete([1, 2, 3], **{parameter: value})
