"""Saved functions for programs in other languages: plain modules, raw arrays, and how to call them.

`unpack` writes a folder from a ``.bkt`` file. `layout` is what programs read of it, with sizes as
the trees of `size_trees`; `readme` and `prose` are what people read. Nothing here serves calls.
"""
