"""What XLA's CPU backend computes wrongly, and how buckets avoid it.

`workarounds` is the door: it asks what a program needs (compiler options, and hooks that keep
values in memory), and whether what was compiled must be compiled again. Nothing else in bucketjit
knows of XLA's library. The package may import `bucketjit._masking` and what is below it.

All of these were seen with jaxlib 0.10.2 and 0.12, in plain ``jax.jit`` too, for some sizes only;
padding changes sizes, so it can lead into them and out of them.

- A value that is computed anew by each kernel that reads it is rounded differently, so it need not
  equal its own maximum (`recomputed_values`, `compute_once`).
  Test: ``tests/xla_defects/test_recomputed_values.py``.
  Delete when XLA rounds a value in one way wherever it is computed.
- Reductions of the library YNN lose NaN where they choose between floats, as ``relu`` does
  (`nan_reductions`, before compiling).
  Test: ``tests/xla_defects/test_nan_reductions.py``.
  Delete when a maximum of YNN keeps NaN.
- Products whose side is broadcast along an axis of its own, inside such a reduction, give numbers
  that were never computed (`broadcast_operands`, before compiling).
  Test: ``tests/xla_defects/test_broadcast_operands.py``.
  Delete when ``(x @ jnp.ones((256, 256))).sum(1)`` is right in 4,096 rows.
- Both, and conversions to integers of 8 bits that are not cut off, where the program did not show
  it (`compiled_reductions`, after compiling).
  Test: ``tests/xla_defects/test_compiled_reductions.py``.
  Delete with the two above.
"""
