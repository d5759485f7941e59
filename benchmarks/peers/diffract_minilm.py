"""diffract-core on MiniLM in memory; run by its own interpreter: ``python diffract_minilm.py FILE REPEATS``."""

import importlib.metadata
import json
import sys
import time

FIELDS = ("frob_norm", "stable_rank", "effective_rank", "nuclear_norm", "hard_rank", "esd_max", "esd_min")


def main(path: str, repeats: int) -> None:
    """Print one line of JSON with the seconds of each run."""
    import numpy
    from diffract import Session
    from safetensors.numpy import load_file

    weights = {name: w for name, w in load_file(path).items() if w.ndim == 2 and w.dtype.kind == "f"}
    seconds = []
    for _ in range(repeats):
        with Session(profile="ram") as session:
            session.models.add(weights, model_id="minilm")
            start = time.perf_counter()
            session.compute.apply(*FIELDS)
            seconds.append(time.perf_counter() - start)
    versions = {"diffract-core": importlib.metadata.version("diffract-core"), "numpy": numpy.__version__}
    print(json.dumps({"seconds": seconds, "matrices": len(weights), "versions": versions}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
