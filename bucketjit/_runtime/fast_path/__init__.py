"""Serves calls whose shapes were seen before, without signing their arguments again.

A `FastPath` holds dispatch tables, one for each layout of arguments. A `DispatchTable` maps
the shapes and types of the arguments with open axes to a `Handler`, which serves the call. A call
that is not found takes the slow path (`bucketjit._runtime.engine`), which then remembers it here.

A warm call costs a few microseconds in all, so measure every change of a line here.
"""
