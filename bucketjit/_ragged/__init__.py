"""Ragged rows: a function of one example runs for many examples, in batches.

`BucketedExec.map` reads its arguments in `examples`, decides for each kind of example what it does
in `kinds`, groups them by `plan`, runs a batch in `batches`, and puts the results together in
`results`. `run` is the order of these steps; `reduction` is the same for sums and means.
"""
