"""Training on ragged batches: a whole run from a cold start, and one step beside the other.

    python -m benchmarks.training
    python -m benchmarks.training training-warm --quick

Plain ``jax.jit`` sets the numbers: the parameters that the others end with are compared with its.
Dropping the last batch is no contender, because it trains to other numbers.
"""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from benchmarks.alone import run_alone
from benchmarks.measuring import in_turn, paired_ratio, rss_mib
from benchmarks.sections import Column, Options, Row, Section, add_ratios, print_sections
from bucketjit import Fallback
from bucketjit.strategies import Pow2
from examples.compile_counter import CompileCounter

EXAMPLES, BATCH = 1413, 64  # 22 batches, and a ragged last one of 5
LARGEST = 256
RATE = 0.05
TOLERANCE = 1e-3  # of parameters, relative to the way they have come
EXACT, BY_HAND, OURS = "jax.jit per shape", "expert pow2", "bucketjit, pow2"

Params = dict[str, Any]
Batch = tuple[np.ndarray, np.ndarray]
Step = Callable[[Params, np.ndarray, np.ndarray], tuple[Params, Any]]


@dataclass(frozen=True)
class Task:
    """A model and what it is trained on.

    Attributes:
        shape: Shape of one example.
        weights: Shapes of its parameters by name.
        logits: ``logits(params, x)`` of the ten classes.
    """

    shape: tuple[int, ...]
    weights: dict[str, tuple[int, ...]]
    logits: Callable[[Params, Any], Any]

    def params(self) -> Params:
        """Initial parameters, always the same."""
        rng = np.random.default_rng(0)
        return {
            name: jnp.asarray(rng.standard_normal(shape) * np.prod(shape[:-1]) ** -0.5, jnp.float32)
            for name, shape in self.weights.items()
        }

    def losses(self, params: Params, x: Any, labels: Any) -> Any:
        """The loss of each example."""
        logits = self.logits(params, x)
        picked = jnp.take_along_axis(logits, labels[:, None], -1)[:, 0]
        return jax.nn.logsumexp(logits, -1) - picked


def _mlp(params: Params, x: Any) -> Any:
    return jnp.tanh(jnp.tanh(x @ params["first"]) @ params["second"]) @ params["last"]


def _cnn(params: Params, x: Any) -> Any:
    for name in ("first", "second"):
        x = jax.lax.conv_general_dilated(
            x, params[name], (2, 2), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
        )
        x = jnp.tanh(x)
    return x.mean((1, 2)) @ params["last"]


TASKS = {
    "MLP": Task((784,), {"first": (784, 256), "second": (256, 256), "last": (256, 10)}, _mlp),
    "CNN": Task(
        (16, 16, 1), {"first": (3, 3, 1, 16), "second": (3, 3, 16, 32), "last": (32, 10)}, _cnn
    ),
}


def epochs(task: Task, count: int) -> Iterator[Batch]:
    """Every example once an epoch, in batches of 64; the last one holds what is left over."""
    rng = np.random.default_rng(1)
    x = rng.standard_normal((EXAMPLES, *task.shape), np.float32)
    labels = rng.integers(0, 10, EXAMPLES, np.int32)
    for _ in range(count):
        order = rng.permutation(EXAMPLES)
        for start in range(0, EXAMPLES, BATCH):
            picked = order[start : start + BATCH]
            yield x[picked], labels[picked]


def random_sizes(task: Task, count: int) -> Iterator[Batch]:
    """Batches of 1 to 256."""
    rng = np.random.default_rng(1)
    for n in rng.integers(1, LARGEST + 1, count):
        yield rng.standard_normal((n, *task.shape), np.float32), rng.integers(0, 10, n, np.int32)


# By name: the batches, and how many epochs or batches they are, in full and quick.
STREAMS: dict[str, tuple[Callable[[Task, int], Iterator[Batch]], int, int]] = {
    "epochs of 22 batches of 64 and one of 5": (epochs, 10, 1),
    "random batches of 1 to 256": (random_sizes, 500, 4),
}


def _descend(value_and_grad: Any, params: Params, *args: Any) -> tuple[Params, Any]:
    value, grads = value_and_grad(params, *args)
    return jax.tree.map(lambda p, g: p - RATE * g, params, grads), value


def plain_step(task: Task) -> Step:
    """A training step as one writes it."""

    def step(params: Params, x: Any, labels: Any) -> tuple[Params, Any]:
        loss = jax.value_and_grad(lambda p: task.losses(p, x, labels).mean())
        return _descend(loss, params)

    return step


def _by_hand(task: Task) -> Step:
    """What an expert writes: NumPy's padding to a power of two, and a masked loss."""
    bucket_of = Pow2().bucket

    def masked(params: Params, x: Any, labels: Any, n: Any) -> tuple[Params, Any]:
        real = jnp.arange(len(x)) < n

        def loss(p: Params) -> Any:
            return jnp.where(real, task.losses(p, x, labels), 0).sum() / n

        return _descend(jax.value_and_grad(loss), params)

    compiled = jax.jit(masked)

    def step(params: Params, x: np.ndarray, labels: np.ndarray) -> tuple[Params, Any]:
        n = len(x)
        padded_x = np.zeros((bucket_of(n), *x.shape[1:]), x.dtype)
        padded_x[:n] = x
        padded_labels = np.zeros(bucket_of(n), labels.dtype)
        padded_labels[:n] = labels
        return compiled(params, padded_x, padded_labels, np.int32(n))

    return step


STEPS: dict[str, Callable[[Task], Step]] = {
    EXACT: lambda task: jax.jit(plain_step(task)),
    BY_HAND: _by_hand,
    OURS: lambda task: bucketjit.jit(plain_step(task), fallback=Fallback.ERROR, buckets="pow2"),
}


def train(task: str, stream: str, contender: str, quick: bool, path: str) -> Row:
    """One run from a cold start; writes the parameters it ends with."""
    counter = CompileCounter()
    batches, many, few = STREAMS[stream]
    drawn = list(batches(TASKS[task], few if quick else many))
    params = TASKS[task].params()
    before = counter.compiles
    began = time.perf_counter()
    step = STEPS[contender](TASKS[task])
    for x, labels in drawn:
        params, _ = step(params, x, labels)
    jax.block_until_ready(params)
    row = {
        "steps": len(drawn),
        "total_s": time.perf_counter() - began,
        "compiles": counter.compiles - before,
        "peak_rss_mib": rss_mib("VmHWM"),
    }
    np.save(path, flat(params))
    return row


def flat(params: Params) -> np.ndarray:
    """All parameters in one vector."""
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(params)])


def cold(options: Options) -> list[Row]:
    """Each model, stream and contender from a cold start, in a process of its own."""
    found: list[Row] = []
    for task in TASKS:
        for stream in STREAMS:
            found += _compared(task, stream, options.quick)
    return found


def _compared(task: str, stream: str, quick: bool) -> list[Row]:
    found: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        exact = Path(folder) / "exact.npy"
        for contender in STEPS:
            path = exact if contender == EXACT else Path(folder) / "params.npy"
            arguments = {"task": task, "stream": stream, "contender": contender, "quick": quick}
            outcome = run_alone("benchmarks.training:train", {**arguments, "path": str(path)})
            row: Row = {"what": f"{task}, {stream}", "contender": contender}
            found.append(row)
            if outcome.status != "ok":
                row["note"] = f"{outcome.status}: {outcome.reason}"
                continue
            if not exact.exists():
                row["note"] = "failed: no parameters to compare with"
                continue
            off_by = apart(np.load(path), np.load(exact), flat(TASKS[task].params()))
            if off_by <= TOLERANCE:
                row |= {**outcome.value, "off_by": off_by}
            else:
                row["note"] = f"failed: its parameters are off by {off_by:.2g}"
    add_ratios(found, BY_HAND)
    return found


def apart(params: np.ndarray, exact: np.ndarray, start: np.ndarray) -> float:
    """How far parameters are from the exact ones, over how far those have come."""
    return float(np.linalg.norm(params - exact) / np.linalg.norm(exact - start))


def warm(options: Options) -> list[Row]:
    """Steps on ragged batches by hand and by bucketjit, all compiled, in turn in one process."""
    found: list[Row] = []
    for name in ("MLP",) if options.quick else TASKS:
        task = TASKS[name]
        params = task.params()
        steps = {key: _waiting(STEPS[key](task), params) for key in (BY_HAND, OURS)}
        batches = list(random_sizes(task, 1 if options.quick else 400))
        in_turn(steps, batches)  # compiles
        times = in_turn(steps, batches)
        found += [
            {
                "what": f"{name}, a step on a random batch of 1 to {LARGEST}",
                "contender": key,
                "p50_us": median(times[key]) * 1e6,
                "ratio": paired_ratio(times, key, BY_HAND),
            }
            for key in steps
        ]
    return found


def _waiting(step: Step, params: Params) -> Callable[[np.ndarray, np.ndarray], Any]:
    return lambda x, labels: jax.block_until_ready(step(params, x, labels))


SECTIONS = (
    Section(
        "training",
        "Training, cold",
        "Whole runs of gradient descent from a cold start, each in a process of its own. The "
        "parameters at the end are compared with those of plain `jax.jit` on the same batches: "
        "*off by* is how far apart they are, over how far they have moved. (Dropping the ragged "
        f"batch is no contender: it trains to other numbers.) *Ratio* is to *{BY_HAND}*.",
        (
            Column("contender", "contender"),
            Column("steps", "steps", "d"),
            Column("total_s", "total, s", ".2f"),
            Column("ratio", "ratio", ".2f"),
            Column("compiles", "compiles", "d"),
            Column("peak_rss_mib", "peak RSS, MiB", ".0f"),
            Column("off_by", "off by", ".0e"),
            Column("note", "note"),
        ),
        "benchmarks.training:cold",
        group="what",
    ),
    Section(
        "training-warm",
        "Training, warm",
        "One step, all buckets compiled: the two take each batch in turn, in one process. *Ratio* "
        f"is the median of the paired ratios to *{BY_HAND}*.",
        (
            Column("contender", "contender"),
            Column("p50_us", "p50, us", ".0f"),
            Column("ratio", "ratio", ".3f"),
        ),
        "benchmarks.training:warm",
        group="what",
    ),
)

if __name__ == "__main__":
    print_sections(SECTIONS, __doc__)
