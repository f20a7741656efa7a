"""Ragged rows: a function of one example runs for many examples, in batches.

A call of `BucketedExec.map` goes through these files, in this order:

- `map` checks what the user chose, `examples` finds the lists among the arguments.
- `kinds` signs each example, and decides what examples of equal shapes do.
- `run` groups examples, runs the batches, and what has to run alone; `batches` chooses the number
  of rows of each batch, and whether they run at once or in turn, and fills, cuts and checks it.
- `map` puts the results together: a list, a `stacked.Ragged`, a sum or a mean. It also says which
  batches a warm-up compiles, and what a call would do.

The executable of a batch is made in `bucketjit._compile.rows`.
"""
