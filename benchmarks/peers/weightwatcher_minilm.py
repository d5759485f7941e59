"""WeightWatcher with its defaults on MiniLM; run by its own interpreter: ``python THIS_FILE FILE REPEATS``."""

import contextlib
import importlib.metadata
import io
import json
import logging
import sys
import time


def main(path: str, repeats: int) -> None:
    """Print one line of JSON with the seconds of each run."""
    with contextlib.redirect_stdout(io.StringIO()):  # it prints while it is imported
        import weightwatcher
    from safetensors.torch import load_file

    logging.disable(logging.CRITICAL)
    weights = load_file(path)
    seconds = []
    rows = 0
    for _ in range(repeats):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
            start = time.perf_counter()
            rows = len(weightwatcher.WeightWatcher(model=weights).analyze())
            seconds.append(time.perf_counter() - start)
    versions = {name: importlib.metadata.version(name) for name in ("weightwatcher", "torch", "numpy")}
    print(json.dumps({"seconds": seconds, "matrices": rows, "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
