"""The sections of `bench/gpu_check.py`, one module each, and their common parts.

A section is a module with a generator `checks(place)`: it yields each `Check` as soon as it knows it, so that a section
that is ended early still shows its results. Sections use the commands of HetSeq, the names that `hetseq` exports and
torch; `tests/unit/bench/test_bench_gpu_check.py` holds them to that.
"""
