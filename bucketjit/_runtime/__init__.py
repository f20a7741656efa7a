"""Serves one call, from its arguments to its results: engine, decisions, counters, derivatives.

`fast_path` serves calls whose shapes were seen before, and `rows` many examples at once. It does
not know the bucketed function that users hold.
"""
