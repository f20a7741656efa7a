"""What XLA's CPU backend computes wrongly, and how buckets avoid it.

`workarounds` is the only door. It says which compiler options and hooks a program needs, and
whether an executable must be compiled again. No other package of bucketjit knows of XLA's library
YNN. The package may import `bucketjit._masking` and what is below it.

All defects were seen with jaxlib 0.10.2 and 0.12, in plain ``jax.jit`` too, at some sizes only.
Padding changes sizes, so it can trigger a defect or hide it.

- A value may be computed by each kernel that reads it, and rounded differently there, so that it
  does not equal its own maximum (`recomputed_values`, `compute_once`).
  Test: ``tests/xla_defects/test_recomputed_values.py``.
  Delete when XLA rounds a value equally wherever it is computed.
- Reductions in YNN lose NaN if operations that choose between floats, such as ``relu``, are fused
  into them (`nan_reductions`, before compiling).
  Test: ``tests/xla_defects/test_nan_reductions.py``.
  Delete when a maximum in YNN keeps NaN.
- Reductions in YNN return numbers that were never computed if they are fused with a product one of
  whose operands is broadcast along a free axis (`broadcast_operands`, before compiling).
  Test: ``tests/xla_defects/test_broadcast_operands.py``.
  Delete when ``(x @ jnp.ones((256, 256))).sum(1)`` is right in 4,096 rows.
- Both of these, and conversions to integers of 8 bits that do not saturate, are searched for in the
  executable too, for programs that did not show them (`compiled_reductions`, after compiling).
  Test: ``tests/xla_defects/test_compiled_reductions.py``.
  Delete with the two above.
"""
