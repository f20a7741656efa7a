"""Serves one call, from its arguments to its results: engine, decisions, counters, statistics.

`fast_path` serves calls whose shapes were seen before. The package may import `bucketjit._compile`
and what is below it. It knows neither derivatives nor the bucketed function that users hold.
"""
