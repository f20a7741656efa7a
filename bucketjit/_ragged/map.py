"""The whole of a call of `map`: the results of all examples, in the form that the user chose."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax

from bucketjit._config import Out
from bucketjit._ragged.examples import Examples
from bucketjit._ragged.options import Options
from bucketjit._ragged.reduction import no_examples, reduced
from bucketjit._ragged.run import MapCall
from bucketjit._ragged.stacked import Ragged, stacked
from bucketjit._runtime.engine import Engine
from bucketjit.errors import SpecError


def map_examples(
    engine: Engine,
    examples: Examples,
    options: Options,
    inside: Callable[[tuple[Any, ...], dict[str, Any]], Any] | None,
) -> Any:
    """Run a call of `map`."""
    if inside is not None:
        return _inside(examples, options, inside)
    if options.reduce is not None:
        call = MapCall(engine, examples, options)
        return reduced(call, engine, options.reduce == "mean", options.out)
    if not options.is_stacked:
        return list(MapCall(engine, examples, options).results())
    call = MapCall(engine, examples, dataclasses.replace(options, out=Out.NUMPY))
    results = list(call.results())
    if not results:
        return Ragged((), ())
    return stacked(results, call.open_axes, options.out is Out.JAX)


def _inside(
    examples: Examples,
    options: Options,
    inside: Callable[[tuple[Any, ...], dict[str, Any]], Any],
) -> Any:
    """Run the function once for each example."""
    if options.is_stacked:
        raise SpecError("map: out='stacked' is not for calls inside of jit, grad and the like")
    results = [inside(*examples.call(values)) for values in examples]
    if options.reduce is None:
        return results
    if not results:
        raise no_examples()
    total = jax.tree_util.tree_map(lambda *parts: sum(parts[1:], start=parts[0]), *results)
    if options.reduce == "sum":
        return total
    return jax.tree_util.tree_map(lambda x: x / len(results), total)
