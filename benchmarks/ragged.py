"""What `BucketedExec.map` costs beside grouping, padding and masks that are written by hand.

    python -m benchmarks.ragged

Contenders take turns in one process, and their results are compared before anything is timed.
"""

from __future__ import annotations

import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.alone import ROOT
from benchmarks.measuring import in_turn, paired_ratio
from benchmarks.sections import Column, Options, Row, Section, print_sections
from bucketjit import strategies
from bucketjit._compile.rows import batch_sizes
from bucketjit._runtime.rows.plan import Group, default_budget, row_counts

D = 32
HAND = "by hand"


def _weights() -> np.ndarray:
    random = np.random.default_rng(0)
    return random.standard_normal((D, D)).astype(np.float32) / np.sqrt(D).astype(np.float32)


def _examples(lengths: Sequence[int]) -> list[np.ndarray]:
    random = np.random.default_rng(1)
    return [random.standard_normal((n, D)).astype(np.float32) for n in lengths]


# --- programs of one example, and the same with masks ---


def attention(w: Any, x: Any) -> Any:
    hidden = jnp.tanh(x @ w)
    return (jax.nn.softmax(hidden @ hidden.T, -1) @ hidden).mean(0)


def attention_by_hand(w: Any, x: Any, n: Any) -> Any:
    real = jnp.arange(x.shape[1]) < n[:, None]
    hidden = jnp.tanh(x @ w)
    scores = jnp.where(real[:, None], hidden @ hidden.mT, -jnp.inf)
    mixed = jax.nn.softmax(scores, -1) @ hidden
    return jnp.where(real[..., None], mixed, 0).sum(1) / n[:, None]


def mean(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w).mean(0)


def mean_by_hand(w: Any, x: Any, n: Any) -> Any:
    real = jnp.arange(x.shape[1]) < n[:, None]
    return jnp.where(real[..., None], jnp.tanh(x @ w), 0).sum(1) / n[:, None]


def recurrent(w: Any, x: Any) -> Any:
    state, _ = jax.lax.scan(lambda h, a: (jnp.tanh(h @ w + a), None), jnp.zeros(D), x)
    return state


def recurrent_by_hand(w: Any, x: Any, n: Any) -> Any:
    def step(state: Any, given: Any) -> Any:
        i, a = given
        return jnp.where(i < n[:, None], jnp.tanh(state @ w + a), state), None

    steps = jnp.arange(x.shape[1]), jnp.swapaxes(x, 0, 1)
    return jax.lax.scan(step, jnp.zeros((len(x), D)), steps)[0]


PROGRAMS = {
    "attention": (attention, attention_by_hand),
    "mean": (mean, mean_by_hand),
    "RNN by scan": (recurrent, recurrent_by_hand),
}


def executables(options: Options) -> list[Row]:
    """The executable of a batch beside one with masks by hand, on the same padded arguments."""
    return [
        _executable(f"{name}, {rows} x {length}", *pair, rows, length, 3 if options.quick else 60)
        for name, pair in PROGRAMS.items()
        for rows, length in ((64, 64), (16, 256))
    ]


def _executable(
    what: str,
    one: Callable[..., Any],
    by_hand: Callable[..., Any],
    rows: int,
    length: int,
    rounds: int,
) -> Row:
    lengths = np.random.default_rng(2).integers(length // 2 + 1, length + 1, rows)
    executor = bucketjit.jit(one, dynamic_axes=(None, "s, _"), buckets="pow2")
    w, examples = jnp.asarray(_weights()), _examples(lengths)
    wanted = np.stack(
        executor.map(w, examples, in_axes=(None, 0), token_budget=rows * length, out="numpy")
    )
    ((_, entry),) = executor._engine.cache.items()
    padded = np.zeros((rows, length, D), np.float32)
    for row, example in zip(padded, examples, strict=True):
        row[: len(example)] = example
    x, n = jnp.asarray(padded), jnp.asarray(lengths, jnp.int32)
    sizes = batch_sizes([(int(k),) for k in lengths], [], rows, ())
    hand = jax.jit(by_hand)
    np.testing.assert_allclose(hand(w, x, n), wanted, rtol=1e-3, atol=1e-4)
    row, _ = _all_compared(
        {
            "map": lambda: jax.block_until_ready(entry.run(sizes, (w, x))),
            HAND: lambda: jax.block_until_ready(hand(w, x, n)),
        },
        rounds,
    )
    return {**row, "contender": what}


# --- whole calls ---


def _grouped(by_hand: Callable[..., Any], examples: Sequence[np.ndarray], least: int) -> Any:
    """Grouping as it is written by hand: by powers of two, all rows of a group at once."""

    def run(*shared: Any) -> list[Any]:
        groups = defaultdict(list)
        for i, x in enumerate(examples):
            groups[max(least, 1 << (len(x) - 1).bit_length())].append(i)
        results: list[Any] = [None] * len(examples)
        for length, members in groups.items():
            rows = 1 << (len(members) - 1).bit_length()
            padded = np.zeros((rows, length, *examples[0].shape[1:]), examples[0].dtype)
            sizes = np.ones(rows, np.int32)
            for row, i in enumerate(members):
                padded[row, : len(examples[i])] = examples[i]
                sizes[row] = len(examples[i])
            out = np.asarray(by_hand(*shared, padded, sizes))
            for row, i in enumerate(members):
                results[i] = out[row]
        return results

    return run


def rows(options: Options) -> list[Row]:
    """256 tiny examples: the whole call, from a list of arrays to a list of arrays."""
    lengths = np.clip(np.random.default_rng(0).lognormal(2.5, 0.6, 256).astype(int), 2, 64)
    examples, w = _examples(lengths), jnp.asarray(_weights())
    executor = bucketjit.jit(
        attention, dynamic_axes=(None, "s, _"), buckets=strategies.Pow2(min=16)
    )
    hand = _grouped(jax.jit(attention_by_hand), examples, 16)
    calls: dict[str, Callable[..., Any]] = {
        "map": lambda: executor.map(w, examples, in_axes=(None, 0), out="numpy"),
        "map, arrays of JAX": lambda: executor.map(w, examples, in_axes=(None, 0)),
        "a loop over calls": lambda: [np.asarray(executor(w, x)) for x in examples],
        HAND: lambda: hand(w),
    }
    for call in calls.values():
        np.testing.assert_allclose(np.stack(call()), np.stack(hand(w)), rtol=1e-3, atol=1e-4)
    return _all_compared(calls, 3 if options.quick else 40)


def sentences(options: Options) -> list[Row]:
    """MiniLM over the sentences of ``make demo-sentences``, every pass after the first."""
    sys.path.insert(0, str(ROOT / "examples"))
    import embed_sentences as demo

    try:
        params, tokenize = demo.load_model()
    except demo.MissingModelError as error:
        return [{"contender": f"left out: {error}", "ms": 0.0, "ratio": 1.0}]
    count = 24 if options.quick else 500
    examples = [np.array(tokenize(s), np.int32) for s in demo.load_sentences(count)]
    lengths = [len(x) for x in examples]

    def encode(params: Any, ids: Any) -> Any:
        return demo.encode(params, ids[None])[0]

    plan = strategies.fit(lengths, buckets=9)
    executor = bucketjit.jit(encode, dynamic_axes=(None, "s"), buckets=plan)
    by_calls = demo.ragged_batches([x.tolist() for x in examples], 32)
    exact = jax.jit(demo.encode)
    floors = {"b": strategies.Pow2(min=2), "s": strategies.Pow2(min=16)}
    powers = bucketjit.jit(demo.encode, dynamic_axes=(None, "b, s"), buckets=floors)
    hand = _encoder_by_hand(demo, params, examples, plan)
    calls: dict[str, Callable[..., Any]] = {
        "map": lambda: np.stack(executor.map(params, examples, out="numpy")),
        "equal lengths in powers of two": lambda: demo.embed(powers, params, by_calls, count),
        HAND: hand,
        "jax.jit at exact shapes": lambda: demo.embed(exact, params, by_calls, count),
    }
    wanted = calls[HAND]()
    for call in calls.values():
        np.testing.assert_allclose(call(), wanted, atol=1e-4)
    found = _all_compared(calls, 1 if options.quick else 5)
    found[0]["executables"] = executor.cache_size()
    found[0]["computed"] = 1 / (1 - executor.stats().padding_waste)
    return found


def _encoder_by_hand(
    demo: Any, params: Any, examples: Sequence[np.ndarray], plan: Any
) -> Callable[[], np.ndarray]:
    """The encoder with masks, over the same buckets, in batches of up to 2048 tokens."""

    def attend(p: Any, name: str, x: Any, real: Any) -> Any:
        def heads(part: str) -> Any:
            y = demo.linear(p, f"{name}.self.{part}", x)
            return y.reshape(*x.shape[:2], demo.HEADS, demo.HEAD_SIZE)

        scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key"))
        scores = jnp.where(real[:, None, None], scores / jnp.sqrt(demo.HEAD_SIZE), -jnp.inf)
        mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, -1), heads("value"))
        return demo.linear(p, f"{name}.output.dense", mixed.reshape(x.shape))

    @jax.jit
    def encode(p: Any, ids: Any, n: Any) -> Any:
        real = jnp.arange(ids.shape[1]) < n[:, None]
        x = (
            p["embeddings.word_embeddings.weight"][ids]
            + p["embeddings.position_embeddings.weight"][: ids.shape[1]]
            + p["embeddings.token_type_embeddings.weight"][0]
        )
        x = demo.layer_norm(p, "embeddings.LayerNorm", x)
        for layer in range(demo.LAYERS):
            name = f"encoder.layer.{layer}"
            attended = attend(p, f"{name}.attention", x, real)
            x = demo.layer_norm(p, f"{name}.attention.output.LayerNorm", x + attended)
            hidden = jax.nn.gelu(demo.linear(p, f"{name}.intermediate.dense", x), approximate=False)
            hidden = demo.linear(p, f"{name}.output.dense", hidden)
            x = demo.layer_norm(p, f"{name}.output.LayerNorm", x + hidden)
        pooled = jnp.where(real[..., None], x, 0).sum(1) / n[:, None]
        return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)

    def run() -> np.ndarray:
        groups = defaultdict(list)
        for i, x in enumerate(examples):
            groups[plan.bucket(len(x))].append(i)
        out = np.zeros((len(examples), demo.HEADS * demo.HEAD_SIZE), np.float32)
        for length, members in groups.items():
            most = max(1, 2048 // length)
            rows = min(most, 1 << (len(members) - 1).bit_length())
            for start in range(0, len(members), rows):
                part = members[start : start + rows]
                ids, n = np.zeros((rows, length), np.int32), np.ones(rows, np.int32)
                for row, i in enumerate(part):
                    ids[row, : len(examples[i])], n[row] = examples[i], len(examples[i])
                out[part] = np.asarray(encode(params, ids, n))[: len(part)]
        return out

    return run


# --- padding ---


def padding(options: Options) -> list[Row]:
    """What is computed over what is real, of lognormal lengths."""
    ladder = strategies.Exponential(1.5, min=16)
    found: list[Row] = []
    for name, strategy in (("powers of two from 16", strategies.Pow2(min=16)), ("x 1.5", ladder)):
        for examples in (250, 1000, 5000):
            random = np.random.default_rng(0)
            lengths = np.clip(random.lognormal(3.2, 0.6, examples).astype(int), 4, 256)
            counts = Counter(strategy.bucket(int(n)) for n in lengths)
            groups = [Group(n, tokens) for tokens, n in counts.items()]
            planned = row_counts(groups, default_budget(groups))
            computed = sum(
                sum(rows) * group.tokens for group, rows in zip(groups, planned, strict=True)
            )
            found.append(
                {
                    "contender": f"{name}, {examples} examples",
                    "computed": computed / int(lengths.sum()),
                    "executables": sum(len(set(rows)) for rows in planned),
                }
            )
    return found


def _all_compared(calls: dict[str, Callable[..., Any]], rounds: int) -> list[Row]:
    times = in_turn(calls, [()] * rounds)
    return [
        {
            "contender": name,
            "ms": 1e3 * median(times[name]),
            "ratio": paired_ratio(times, name, HAND),
        }
        for name in calls
    ]


_TIME = (Column("ms", "ms", ".2f"), Column("ratio", "x by hand", ".2f"))
_SIZE = (Column("executables", "executables", "d"), Column("computed", "computed/real", ".2f"))

SECTIONS = (
    Section(
        "ragged-executables",
        "Batches of ragged rows: executables alone",
        "The executable of a batch of `map` beside one with masks written by hand, on the same "
        "padded arguments.",
        (Column("contender", "program"), *_TIME),
        "benchmarks.ragged:executables",
    ),
    Section(
        "ragged-rows",
        "Batches of ragged rows: 256 tiny examples",
        "The whole call, from a list of arrays to a list of arrays. By hand: grouped by powers of "
        "two, masks included.",
        (Column("contender", ""), *_TIME),
        "benchmarks.ragged:rows",
    ),
    Section(
        "ragged-sentences",
        "Batches of ragged rows: 500 sentences",
        "MiniLM over the sentences of `make demo-sentences`, every pass after the first, over nine "
        "length buckets.",
        (Column("contender", ""), *_TIME, *_SIZE),
        "benchmarks.ragged:sentences",
    ),
    Section(
        "ragged-padding",
        "Batches of ragged rows: padding",
        "Tokens computed over tokens that are real, for lognormal lengths of 4 to 256.",
        (Column("contender", ""), *_SIZE),
        "benchmarks.ragged:padding",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
