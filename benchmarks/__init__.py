"""Benchmarks: asv classes in ``bench_*.py``, run without asv by ``run.py``; comparisons with others in ``peers/``."""
