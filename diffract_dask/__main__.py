"""``python -m diffract_dask``: the command ``diffract-dask``."""

from diffract_dask.cli import main

if __name__ == "__main__":
    main()
