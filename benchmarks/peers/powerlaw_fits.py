"""The fits of `powerlaw`, run by an interpreter that has it: ``python powerlaw_fits.py FILE FAMILY``.

FILE is a NumPy array of values. Prints one line of JSON: seconds, and what was found.
"""

import contextlib
import importlib.metadata
import io
import json
import sys
import time
import warnings


def main(path: str, family: str) -> None:
    """Fit one family with its xmin; print the seconds and the result."""
    import numpy as np
    import powerlaw

    warnings.simplefilter("ignore")
    values = np.load(path)
    version = importlib.metadata.version("powerlaw")
    options = {} if family == "power_law" else {"xmin_distribution": family}
    if version.startswith("2"):
        options |= {"verbose": 0, "parameter_ranges": {"alpha": [1.0, 100.0]}}
    start = time.perf_counter()
    with contextlib.redirect_stdout(io.StringIO()), np.errstate(all="ignore"):
        fitted = powerlaw.Fit(values, **options)
        found = getattr(fitted, family)
        result = {"xmin": float(found.xmin), "alpha": float(found.alpha), "ks": float(found.D)}
    print(json.dumps({"seconds": time.perf_counter() - start, "powerlaw": version, **result}))


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2])
