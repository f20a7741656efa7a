"""Functions saved in files: a portable StableHLO module for each bucket, and what surrounds them.

`writer` makes a ``.bkt`` file of a bucketed function, `saved_program` reads one, and `saved_engine`
serves calls from it, without the function's source. `manifest` says what is in a file, `archive`
how it is laid out, what is checked, and how arrays are written. `bucketjit._stages.modules` has
modules, and which of them are trusted. No pickle is written or read, and no text of a file is run:
`manifest` takes expressions of sizes that are arithmetic only.
"""
