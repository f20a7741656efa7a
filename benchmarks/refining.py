"""What it takes to fix the sizes of a serialized module, without its Python code.

python -m benchmarks.refining
"""

from __future__ import annotations

import statistics
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src.interpreters.mlir import refine_polymorphic_shapes

import bucketjit
from benchmarks.alone import ROOT
from benchmarks.sections import Column, Options, Row, Section, print_sections

WIDTH, INNER, TOKENS, POSITIONS = 384, 1536, 30522, 512  # of all-MiniLM-L6-v2
ROUNDS, QUICK_ROUNDS = 15, 1


def _example() -> Any:
    sys.path.insert(0, str(ROOT / "examples"))
    import embed_sentences

    return embed_sentences


def _weights(layers: int) -> dict[str, Any]:
    """Weights of the shapes of MiniLM's, by the names that the example's ``encode`` reads."""
    rng = np.random.default_rng(0)

    def drawn(*shape: int) -> Any:
        return jnp.asarray(0.02 * rng.standard_normal(shape), jnp.float32)

    weights = {
        "embeddings.word_embeddings.weight": drawn(TOKENS, WIDTH),
        "embeddings.position_embeddings.weight": drawn(POSITIONS, WIDTH),
        "embeddings.token_type_embeddings.weight": drawn(2, WIDTH),
    }
    square = (WIDTH, WIDTH)
    dense = {f"attention.self.{part}": square for part in ("query", "key", "value")}
    dense |= {"attention.output.dense": square, "intermediate.dense": (INNER, WIDTH)}
    dense |= {"output.dense": (WIDTH, INNER)}
    norms = ["embeddings.LayerNorm"]
    for layer in range(layers):
        at = f"encoder.layer.{layer}"
        for name, (outputs, inputs) in dense.items():
            weights[f"{at}.{name}.weight"] = drawn(outputs, inputs)
            weights[f"{at}.{name}.bias"] = drawn(outputs)
        norms += [f"{at}.attention.output.LayerNorm", f"{at}.output.LayerNorm"]
    for name in norms:
        weights |= {f"{name}.weight": drawn(WIDTH) + 1, f"{name}.bias": drawn(WIDTH)}
    return weights


def _by_jax(blob: bytes, structs: Any) -> Callable[[], Any]:
    """The way without `refine`: trace and lower a call of what was read, at fixed sizes.

    A compile of the result runs the same shape refinement, so that is timed with it.
    """

    def lower() -> Any:
        call = jax.export.deserialize(bytearray(blob)).call
        module = jax.jit(call).lower(*structs).compiler_ir()
        with module.context:
            return refine_polymorphic_shapes(module)

    return lower


def _ms(run: Callable[[], Any], rounds: int) -> tuple[float, float]:
    """The median of the time, and of the CPU time, which tells more on a machine that is busy."""
    run()
    times, of_cpu = [], []
    for _ in range(rounds):
        began, busy = time.perf_counter(), time.process_time()
        run()
        of_cpu.append(1e3 * (time.process_time() - busy))
        times.append(1e3 * (time.perf_counter() - began))
    return statistics.median(times), statistics.median(of_cpu)


def refining(options: Options) -> list[Row]:
    """The encoder of the example, its weights as arguments and as constants of the module."""
    encode = _example().encode
    weights = _weights(_example().LAYERS)
    tokens = jax.ShapeDtypeStruct((5, 24), jnp.int32)
    params = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), weights)
    fixed = jax.ShapeDtypeStruct((16, 32), jnp.int32)
    cases: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
        "arguments": (encode, (None, "b, s"), (params,)),
        "constants": (lambda ids: encode(weights, ids), "b, s", ()),
    }
    if options.quick:
        del cases["constants"]
    found: list[Row] = []
    for name, (fn, axes, before) in cases.items():
        exported = bucketjit.jit(fn, dynamic_axes=axes).export_dynamic(*before, tokens)
        blob = bytes(exported.serialize())
        rounds = QUICK_ROUNDS if options.quick else ROUNDS
        ms, cpu = _ms(lambda blob=blob: bucketjit.refine(blob, {"b": 16, "s": 32}), rounds)
        by_jax, _ = _ms(_by_jax(blob, (*before, fixed)), max(1, rounds // 5))
        row = {"weights": name, "mb": len(blob) / 1e6, "ms": ms, "cpu_ms": cpu}
        found.append({**row, "jax_ms": by_jax})
    return found


SECTIONS = (
    Section(
        "refining",
        "Fixing the sizes of an exported module",
        "The encoder of `make demo-sentences`, exported with open sizes and serialized: "
        "`bucketjit.refine` to 16 sentences of 32 tokens, and what JAX does with the same bytes "
        "before it compiles them for these sizes: `jit(deserialize(...).call).lower(...)` and "
        "shape refinement. With weights as *arguments* the module holds code alone; as "
        "*constants* it holds them too.",
        (
            Column("weights", "weights as"),
            Column("mb", "bytes, MB", ".2f"),
            Column("ms", "refine, ms", ".1f"),
            Column("cpu_ms", "of CPU, ms", ".1f"),
            Column("jax_ms", "by JAX, ms", ".1f"),
        ),
        "benchmarks.refining:refining",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
