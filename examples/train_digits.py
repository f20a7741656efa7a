"""Train a small CNN on real images, with ragged batches and without writing a single mask.

    python examples/train_digits.py
    python examples/train_digits.py --epochs 8 --plot digits.png

The data are scikit-learn's handwritten digits: 1,797 images of 8x8 pixels, 1,413 to train on
(22 batches of 64 and a ragged last one of 5) and 384 held out. After every epoch the held-out
images are evaluated in chunks of random size, as requests arrive at a server.

The same loop runs twice, from the same seed and over the same batches:

* with `jax.jit`, which compiles once per shape,
* with `bucketjit.jit(..., buckets=Pow2(min=8))`, which compiles once per bucket.

Two comparisons follow. *Call by call*: every call the first run made is made again with the
bucketed functions, from the same state and the same batch; losses, updated parameters and counts of
recognised digits must agree within 1e-5 relative, otherwise the script exits with status 1.
*Run by run*: how far the losses of the two whole trainings are apart, each on its own parameters
from the first step to the last. That is shown and not judged: rounding alone can flip a relu or the
winner of a max pooling somewhere, and two long trainings then part, whatever computed them.

The last line says what buckets saved, and what share of the rows is padding.
"""

import argparse
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from compile_counter import CompileCounter
from jax.flatten_util import ravel_pytree
from progress import Progress
from sklearn.datasets import load_digits

import bucketjit
from bucketjit import BucketedExec
from bucketjit.strategies import Pow2

TRAIN_IMAGES = 1413  # 22 * 64 + 5: the last of the usual batches of 64 is ragged
LARGEST_CHUNK = 200
TOLERANCE = 1e-5

Params = dict[str, jax.Array]
Batch = tuple[np.ndarray, np.ndarray]


# --- The model and the training step: plain JAX, no padding, no masks -----------------------------


class State(NamedTuple):
    """What a training step reads and returns."""

    params: Params
    moments: optax.OptState


def init_params(key: jax.Array) -> Params:
    """Draw the parameters of the CNN: two convolutions and a dense layer."""
    keys = jax.random.split(key, 3)
    he = jax.nn.initializers.he_normal()
    he_conv = jax.nn.initializers.he_normal(in_axis=(0, 1, 2), out_axis=3)
    return {
        "conv1": he_conv(keys[0], (3, 3, 1, 16)),
        "bias1": jnp.zeros(16),
        "conv2": he_conv(keys[1], (3, 3, 16, 32)),
        "bias2": jnp.zeros(32),
        "dense": he(keys[2], (2 * 2 * 32, 10)),
        "bias3": jnp.zeros(10),
    }


def convolve(x: jax.Array, kernel: jax.Array, bias: jax.Array) -> jax.Array:
    """A 3x3 convolution over images of shape (batch, height, width, channels)."""
    layout = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=layout) + bias


def max_pool(x: jax.Array) -> jax.Array:
    """Halve height and width, keeping the largest of every four pixels."""
    window = (1, 2, 2, 1)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def forward(params: Params, images: jax.Array) -> jax.Array:
    """The logits of the ten digits, for images of shape (batch, 8, 8, 1)."""
    x = max_pool(jax.nn.relu(convolve(images, params["conv1"], params["bias1"])))
    x = max_pool(jax.nn.relu(convolve(x, params["conv2"], params["bias2"])))
    return x.reshape(x.shape[0], -1) @ params["dense"] + params["bias3"]


def mean_loss(params: Params, images: jax.Array, labels: jax.Array) -> jax.Array:
    """The mean cross entropy over the batch."""
    logits = forward(params, images)
    return optax.softmax_cross_entropy_with_integer_labels(logits, labels).mean()


def make_train_step(
    optimizer: optax.GradientTransformation,
) -> Callable[[State, jax.Array, jax.Array], tuple[State, jax.Array]]:
    """The function to compile: one step of the optimiser on one batch of any size."""

    def train_step(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(state.params, images, labels)
        updates, moments = optimizer.update(grads, state.moments, state.params)
        return State(optax.apply_updates(state.params, updates), moments), loss

    return train_step


def evaluate(params: Params, images: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The mean loss of one chunk and how many of its digits are recognised."""
    correct = jnp.argmax(forward(params, images), axis=-1) == labels
    return mean_loss(params, images, labels), jnp.sum(correct)


# --- The data -------------------------------------------------------------------------------------


def load_images() -> tuple[Batch, Batch]:
    """The images to train on and those held out, shuffled once, pixels between 0 and 1."""
    digits = load_digits()
    order = np.random.default_rng(0).permutation(len(digits.target))
    images = (digits.images[order, :, :, None] / 16.0).astype(np.float32)
    labels = digits.target[order].astype(np.int32)
    cut = TRAIN_IMAGES
    return (images[:cut], labels[:cut]), (images[cut:], labels[cut:])


def shuffled_batches(data: Batch, size: int, rng: np.random.Generator) -> Iterator[Batch]:
    """Every example once, in random order; the last batch holds what is left over."""
    images, labels = data
    order = rng.permutation(len(labels))
    for start in range(0, len(order), size):
        picked = order[start : start + size]
        yield images[picked], labels[picked]


def ragged_chunks(data: Batch, rng: np.random.Generator) -> Iterator[Batch]:
    """Every example once, in chunks of random size."""
    images, labels = data
    start = 0
    while start < len(labels):
        stop = start + int(rng.integers(1, LARGEST_CHUNK + 1))
        yield images[start:stop], labels[start:stop]
        start = stop


# --- One run, with either executor ----------------------------------------------------------------


class Call(NamedTuple):
    """One call of a compiled function, kept so that it can be made again."""

    args: tuple[Any, ...]
    result: Any


@dataclass
class Run:
    """What one training measured."""

    name: str
    steps: list[Call] = field(default_factory=list)
    evaluations: list[Call] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)  # of the batch, per training step
    compiled: list[int] = field(default_factory=list)  # compiles so far, per training step
    held_out_loss: list[float] = field(default_factory=list)  # per epoch
    accuracy: list[float] = field(default_factory=list)  # on the held-out images, per epoch
    compiles: int = 0
    seconds: float = 0.0


def train(
    name: str,
    train_step: Callable[..., Any],
    evaluate_chunk: Callable[..., Any],
    state: State,
    options: argparse.Namespace,
    counter: CompileCounter,
    after_call: Callable[[Progress, str], None],
) -> Run:
    """The training loop: it does not know which executor it was given.

    `after_call(progress, when)` is called after every call of either function, to watch the caches
    grow.
    """
    training, held_out = load_images()
    rng = np.random.default_rng(options.seed)
    run = Run(name)
    compiles_before, start = counter.compiles, time.perf_counter()
    steps = options.epochs * -(-len(training[1]) // options.batch_size)
    with Progress(name, steps, "steps") as progress:
        for epoch in range(1, options.epochs + 1):
            for images, labels in shuffled_batches(training, options.batch_size, rng):
                before = state
                state, loss = train_step(state, images, labels)
                run.steps.append(Call((before, images, labels), (state, loss)))
                run.losses.append(float(loss))
                run.compiled.append(counter.compiles - compiles_before)
                progress.advance()
                after_call(progress, f"step {len(run.losses)}")

            total, correct = 0.0, 0
            for images, labels in ragged_chunks(held_out, rng):
                chunk_loss, chunk_correct = evaluate_chunk(state.params, images, labels)
                result = (chunk_loss, chunk_correct)
                run.evaluations.append(Call((state.params, images, labels), result))
                total += float(chunk_loss) * len(labels)
                correct += int(chunk_correct)
                after_call(progress, f"evaluation {epoch}")
            run.held_out_loss.append(total / len(held_out[1]))
            run.accuracy.append(correct / len(held_out[1]))
            progress.print(
                f"{name}: epoch {epoch}/{options.epochs}"
                f"  held-out loss {run.held_out_loss[-1]:.4f}  accuracy {run.accuracy[-1]:.2%}"
                f"  compiles {counter.compiles - compiles_before}"
            )
    run.seconds = time.perf_counter() - start
    run.compiles = counter.compiles - compiles_before
    return run


# --- The comparison -------------------------------------------------------------------------------


def relative_difference(ours: Any, exact: Any) -> float:
    """|ours - exact| / |exact|, with the Euclidean norm over all entries of two pytrees."""
    a, b = ravel_pytree(ours)[0], ravel_pytree(exact)[0]
    return float(np.linalg.norm(a - b) / np.linalg.norm(b))


def call_by_call(
    exact: Run, train_step: Callable[..., Any], evaluate_chunk: Callable[..., Any]
) -> dict[str, float]:
    """Make every call of the exact run again; return the largest relative differences."""
    differences: dict[str, list[float]] = defaultdict(list)
    for args, (exact_state, exact_loss) in exact.steps:
        state, loss = train_step(*args)
        differences["training loss"].append(relative_difference(loss, exact_loss))
        differences["updated parameters"].append(
            relative_difference(state.params, exact_state.params)
        )
    for args, (exact_loss, exact_correct) in exact.evaluations:
        loss, correct = evaluate_chunk(*args)
        differences["held-out loss"].append(relative_difference(loss, exact_loss))
        differences["recognised digits"].append(abs(int(correct) - int(exact_correct)))
    return {what: float(np.max(values)) for what, values in differences.items()}


def run_by_run(ours: Run, exact: Run) -> float:
    """The largest relative difference between the losses of two whole trainings."""
    a, b = np.asarray(ours.losses), np.asarray(exact.losses)
    return float(np.max(np.abs(a - b) / np.abs(b)))


# --- What is shown --------------------------------------------------------------------------------


class CacheWatch:
    """Prints both caches of the bucketed run whenever one of them has a new bucket."""

    def __init__(self, **executors: BucketedExec) -> None:
        self.executors = executors
        self.seen = 0

    def size(self) -> int:
        """How many executables the caches hold together."""
        return sum(executor.cache_size() for executor in self.executors.values())

    def __call__(self, progress: Progress, when: str) -> None:
        if self.size() == self.seen:
            return
        self.seen = self.size()
        cells = []
        for name, executor in self.executors.items():
            sizes = sorted(size for b in executor.stats().buckets for size in b.sizes.values())
            cells.append(f"{name} {{{', '.join(map(str, sizes))}}}")
        line = f"  cache after {when:<14} executables {self.seen:>2}: {'  '.join(cells)}"
        progress.print(line)

    def padded_rows(self) -> int:
        """The rows of all calls so far, padding included."""
        return sum(
            (bucket.hits + 1) * size  # the call that compiled it is not one of its hits
            for executor in self.executors.values()
            for bucket in executor.stats().buckets
            for size in bucket.sizes.values()
        )

    def print_table(self) -> None:
        """One line per bucket: its size, how often it was used and what it cost."""
        print(f"{'function':<12}{'bucket':>8}{'hits':>8}{'compile':>11}")
        for name, executor in self.executors.items():
            for bucket in sorted(executor.stats().buckets, key=lambda b: sorted(b.sizes.items())):
                sizes = " x ".join(map(str, bucket.sizes.values()))
                print(f"{name:<12}{sizes:>8}{bucket.hits:>8}{bucket.compile_seconds:>9.2f} s")


def print_side_by_side(plain: Run, bucketed: Run) -> None:
    """The two runs in two columns."""
    print(f"{'':<20}{plain.name:>14}{bucketed.name:>14}")
    for label, show in [
        ("compiles", lambda run: f"{run.compiles}"),
        ("wall time", lambda run: f"{run.seconds:.2f} s"),
        ("final train loss", lambda run: f"{run.losses[-1]:.6f}"),
        ("held-out loss", lambda run: f"{run.held_out_loss[-1]:.6f}"),
        ("held-out accuracy", lambda run: f"{run.accuracy[-1]:.2%}"),
    ]:
        print(f"{label:<20}{show(plain):>14}{show(bucketed):>14}")


def what_was_saved(plain: Run, bucketed: Run, padding: float) -> str:
    """What buckets brought and what they cost, in one line."""
    compiles, seconds = plain.compiles - bucketed.compiles, plain.seconds - bucketed.seconds
    time_saved = f"{seconds:.1f} s" if seconds > 0 else "no time"
    return (
        f"{plain.compiles} shapes, {bucketed.compiles} executables: {compiles} compiles and"
        f" {time_saved} of {plain.seconds:.1f} s saved; padding {padding:.0%}"
    )


def save_plot(path: str, *runs: Run) -> None:
    """Plot the loss and the number of executables over the steps, both runs in each."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (loss_axes, compile_axes) = pyplot.subplots(2, sharex=True, figsize=(8, 6))
    for run, style in zip(runs, ("-", "--"), strict=True):
        loss_axes.plot(run.losses, style, label=run.name)
        compile_axes.step(range(len(run.compiled)), run.compiled, style, where="post")
    loss_axes.set(ylabel="training loss", yscale="log", title="Digits: the same training twice")
    loss_axes.legend()
    compile_axes.set(xlabel="step", ylabel="executables")
    compile_axes.set_ylim(bottom=0)
    compile_axes.yaxis.get_major_locator().set_params(integer=True)
    figure.tight_layout()
    figure.savefig(path)
    print(f"plot saved to {path}")


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--epochs", type=int, default=4, help="default: 4")
    parser.add_argument("--batch-size", type=int, default=64, help="default: 64")
    parser.add_argument("--learning-rate", type=float, default=0.003, help="default: 0.003")
    parser.add_argument("--seed", type=int, default=0, help="parameters and order (default: 0)")
    parser.add_argument("--plot", metavar="FILE", help="save a plot of both runs")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train twice, show both, and fail if the losses differ."""
    options = parse_options(argv)
    counter = CompileCounter()
    optimizer = optax.adam(options.learning_rate)
    params = init_params(jax.random.key(options.seed))
    state = State(params, optimizer.init(params))
    train_step = make_train_step(optimizer)

    plain = train(
        "jax.jit",
        jax.jit(train_step),
        jax.jit(evaluate),
        state,
        options,
        counter,
        after_call=lambda progress, when: None,
    )

    bucketed_step = bucketjit.jit(train_step, buckets=Pow2(min=8))
    bucketed_evaluate = bucketjit.jit(evaluate, buckets=Pow2(min=8))
    watch = CacheWatch(train_step=bucketed_step, evaluate=bucketed_evaluate)
    bucketed = train(
        "bucketjit", bucketed_step, bucketed_evaluate, state, options, counter, after_call=watch
    )

    rows = sum(len(call.args[-1]) for call in (*bucketed.steps, *bucketed.evaluations))
    padding = 1 - rows / watch.padded_rows()

    print()
    print_side_by_side(plain, bucketed)
    print()
    watch.print_table()
    print()
    steps, chunks = len(plain.steps), len(plain.evaluations)
    worst = call_by_call(plain, bucketed_step, bucketed_evaluate)
    print(f"largest relative differences, call by call ({steps} steps, {chunks} evaluations):")
    for what, difference in worst.items():
        print(f"  {what:<20}{difference:.1e}")
    print("largest relative difference in training loss, run by run (each on its own parameters):")
    print(f"  {'training loss':<20}{run_by_run(bucketed, plain):.1e}")
    if options.plot:
        save_plot(options.plot, plain, bucketed)
    print(f"\n{what_was_saved(plain, bucketed, padding)}")

    problems = []
    for what, difference in worst.items():
        if not difference <= TOLERANCE:  # so written, NaN fails too
            problems.append(f"{what}: {difference:.1e} apart, allowed {TOLERANCE:.0e}")
    if bucketed.compiles != watch.size():
        problems.append(f"{bucketed.compiles} compiles for {watch.size()} buckets")
    for name, executor in watch.executors.items():
        for reason, count in executor.stats().fallback_reasons.items():
            problems.append(f"{name} ran {count} times at its exact shape: {reason}")
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    raise SystemExit(main())
