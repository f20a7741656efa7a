"""One call, from its arguments to its results: the engine, its decisions, and what is counted.

The package may import `bucketjit._compile` and what is below it. It knows neither derivatives nor
the executor that users hold.
"""
