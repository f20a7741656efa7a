"""What only an accelerator can show; run by `make accelerator`, and as tests on CPU.

    python -m tests.accelerator

A check is a function that raises if something is wrong. It needs JAX, NumPy and cachetools, and
neither pytest nor a virtual environment. `checks` lists them, `test_accelerator.py` has them as
tests, `__main__` runs them one after the other, then the short benchmarks.
"""
