"""Train the CNN of `train_digits.py` on several processes whose batches are uneven.

    python examples/train_digits_on_processes.py
    python examples/train_digits_on_processes.py --processes 4 --epochs 3

Every step, the images of a batch of 64 are dealt out unevenly: one process gets 20 of them and the
other 44, say, as happens where each process reads files of its own. The same steps are made in
three ways, from the same parameters:

* *alone*: one process sees all rows of a batch, with `bucketjit.jit`,
* *agreed*: each process gives its own rows to `with_processes`; the processes agree on a bucket for
  each step, and `jax.lax.pmean` weighs by the rows of each,
* *by hand*: each process pads its rows to 64, with masks and sums written by hand, under `jax.jit`.

Each way runs twice, and the second run is timed, when everything is compiled. At the end the
parameters of all ways must be equal (relative difference below 1e-5), and those of all processes
must be the same; otherwise the script exits with status 1.
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from train_digits import (
    Batch,
    Params,
    State,
    forward,
    init_params,
    load_images,
    mean_loss,
    relative_difference,
    shuffled_batches,
)

import bucketjit
from bucketjit.strategies import Pow2

BATCH_SIZE = 64
TOLERANCE = 1e-5
AXIS = "processes"

Step = Callable[[State, Any, Any], tuple[State, jax.Array]]


# --- The training step: the mean over the rows of all processes -----------------------------------


def make_optimizer(options: argparse.Namespace) -> optax.GradientTransformation:
    """Plain gradient descent: Adam would magnify the rounding of gradients that are almost zero."""
    return optax.sgd(options.learning_rate)


def updated(optimizer: optax.GradientTransformation, state: State, grads: Params) -> State:
    """The state after a step of the optimiser."""
    updates, moments = optimizer.update(grads, state.moments, state.params)
    return State(optax.apply_updates(state.params, updates), moments)


def make_step_alone(optimizer: optax.GradientTransformation) -> Step:
    """The step of a process that sees all rows."""

    def step_alone(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(state.params, images, labels)
        return updated(optimizer, state, grads), loss

    return step_alone


def make_step_agreed(optimizer: optax.GradientTransformation) -> Step:
    """The step of a process that sees its own rows: the same, and two lines of `pmean`."""

    def step_agreed(state: State, images: jax.Array, labels: jax.Array) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(mean_loss)(state.params, images, labels)
        loss = jax.lax.pmean(loss, AXIS)
        grads = jax.lax.pmean(grads, AXIS)
        return updated(optimizer, state, grads), loss

    return step_agreed


def make_step_by_hand(optimizer: optax.GradientTransformation, mesh: jax.sharding.Mesh) -> Step:
    """The step of a process that has padded its rows, with the masks that this needs."""

    def summed_loss(
        params: Params, images: jax.Array, labels: jax.Array, is_real: jax.Array
    ) -> jax.Array:
        losses = optax.softmax_cross_entropy_with_integer_labels(forward(params, images), labels)
        return jnp.sum(jnp.where(is_real, losses, 0))

    def of_shard(
        state: State, images: jax.Array, labels: jax.Array, is_real: jax.Array
    ) -> tuple[State, jax.Array]:
        loss, grads = jax.value_and_grad(summed_loss)(state.params, images, labels, is_real)
        count = jax.lax.psum(jnp.sum(is_real), AXIS)
        loss, grads = jax.tree.map(lambda x: jax.lax.psum(x, AXIS) / count, (loss, grads))
        return updated(optimizer, state, grads), loss

    rows = NamedSharding(mesh, P(AXIS))
    specs = (P(), P(AXIS), P(AXIS), P(AXIS))
    # Without check_vma: the gradient of replicated parameters is that of this process's rows.
    whole = jax.jit(
        jax.shard_map(of_shard, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False)
    )

    def padded(values: np.ndarray) -> jax.Array:
        local = np.zeros((BATCH_SIZE, *values.shape[1:]), values.dtype)
        local[: len(values)] = values
        return jax.make_array_from_process_local_data(rows, local)

    def step_by_hand(state: State, images: Any, labels: Any) -> tuple[State, jax.Array]:
        is_real = np.ones(len(labels), bool)
        return whole(state, padded(images), padded(labels), padded(is_real))

    return step_by_hand


# --- The batches ----------------------------------------------------------------------------------


def batches_of(options: argparse.Namespace) -> Iterator[Batch]:
    """The batches of all epochs, whole; the same on every process."""
    training, _ = load_images()
    rng = np.random.default_rng(options.seed)
    for _ in range(options.epochs):
        yield from shuffled_batches(training, BATCH_SIZE, rng)


def dealt_out(options: argparse.Namespace, rank: int) -> Iterator[Batch]:
    """The rows of one process: an uneven part of each batch, of one row at least."""
    rng = np.random.default_rng(options.seed + 1)
    for images, labels in batches_of(options):
        shares = rng.dirichlet(np.full(options.processes, 4.0))
        ends = np.cumsum(1 + np.floor(shares * (len(labels) - options.processes))).astype(int)
        ends[-1] = len(labels)
        start = 0 if rank == 0 else ends[rank - 1]
        yield images[start : ends[rank]], labels[start : ends[rank]]


# --- One training ---------------------------------------------------------------------------------


def train(step: Step, state: State, batches: Callable[[], Iterator[Batch]]) -> dict[str, Any]:
    """Train twice from the same state; the second time is measured."""
    for _ in range(2):
        trained, steps, began = state, 0, time.perf_counter()
        for images, labels in batches():
            trained, loss = step(trained, images, labels)
            steps += 1
        jax.block_until_ready(trained)
        seconds = time.perf_counter() - began
    params = {name: np.asarray(value) for name, value in trained.params.items()}
    return {"params": params, "loss": float(loss), "steps": steps, "seconds": seconds}


def run_process(options: argparse.Namespace) -> dict[str, dict[str, Any]]:
    """What one process does: the trainings of the job, or the one that is made alone."""
    optimizer = make_optimizer(options)
    params = init_params(jax.random.key(options.seed))
    params = {name: np.asarray(value) for name, value in params.items()}
    state = State(params, optimizer.init(params))
    if options.rank is None:
        step = bucketjit.jit(make_step_alone(optimizer), buckets=Pow2(min=8))
        return {"alone": train(step, state, lambda: batches_of(options))}
    mesh = jax.make_mesh((options.processes,), (AXIS,), axis_types=(AxisType.Auto,))
    agreed = bucketjit.jit(
        make_step_agreed(optimizer), dynamic_axes=(None, "b, ...", "b"), buckets=Pow2(min=8)
    )
    agreed = agreed.with_processes(mesh, AXIS).with_agreement(timeout=60)

    def mine() -> Iterator[Batch]:
        return dealt_out(options, options.rank)

    found = {"agreed": train(agreed, state, mine)}
    found["agreed"]["buckets"] = sorted(b.sizes["b"] for b in agreed.stats().buckets)
    by_hand = make_step_by_hand(optimizer, mesh)
    found["by hand"] = train(by_hand, state, mine)
    return found


# --- The processes --------------------------------------------------------------------------------


def start(options: argparse.Namespace, folder: Path, rank: int | None, port: int) -> Any:
    """Start one process of this script."""
    command = [sys.executable, __file__, "--folder", str(folder), "--port", str(port)]
    for name in ("processes", "epochs", "seed", "learning_rate"):
        command += [f"--{name.replace('_', '-')}", str(getattr(options, name))]
    command += [] if rank is None else ["--rank", str(rank)]
    return subprocess.Popen(command, env={**os.environ, "JAX_PLATFORMS": "cpu"})


def worker(options: argparse.Namespace) -> None:
    """Run as one of the processes, and leave what it found in the folder."""
    if options.rank is not None:
        jax.config.update("jax_cpu_collectives_implementation", "gloo")
        jax.distributed.initialize(f"localhost:{options.port}", options.processes, options.rank)
    for name, found in run_process(options).items():
        name = f"{name} {options.rank or 0}"
        np.savez(Path(options.folder, f"{name}.npz"), **found.pop("params"))
        Path(options.folder, f"{name}.json").write_text(json.dumps(found))


def run_all(options: argparse.Namespace, folder: Path) -> None:
    """Run the job, then the process alone, so that they do not share the cores."""
    with socket.socket() as listening:
        listening.bind(("localhost", 0))
        port = listening.getsockname()[1]
    for ranks in (range(options.processes), (None,)):
        started = [start(options, folder, rank, port) for rank in ranks]
        if any([process.wait() for process in started]):
            sys.exit("a process has failed")


def read(folder: Path, name: str) -> tuple[Params, dict[str, Any]]:
    """What one process has left."""
    told = json.loads(Path(folder, f"{name}.json").read_text())
    return dict(np.load(Path(folder, f"{name}.npz"))), told


def parse_options(argv: list[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--processes", type=int, default=2, help="default: 2")
    parser.add_argument("--epochs", type=int, default=2, help="default: 2")
    parser.add_argument("--learning-rate", type=float, default=0.05, help="default: 0.05")
    parser.add_argument("--seed", type=int, default=0, help="parameters and order (default: 0)")
    for name, kind in (("folder", str), ("rank", int), ("port", int)):
        parser.add_argument(f"--{name}", type=kind, help=argparse.SUPPRESS)
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    """Train in three ways, print a table, and fail if the parameters differ."""
    options = parse_options(argv)
    if options.folder is not None:
        worker(options)
        return 0
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        run_all(options, folder)
        found = {way: read(folder, f"{way} 0") for way in ("alone", "agreed", "by hand")}
        others = [read(folder, f"agreed {r}")[0] for r in range(1, options.processes)]
    exact, alone = found["alone"]
    print(f"{'':<12}{'processes':>10}{'steps/s':>10}{'last loss':>12}{'difference':>12}")
    problems = []
    for way, (params, told) in found.items():
        apart = relative_difference(params, exact)
        rate = told["steps"] / told["seconds"]
        count = 1 if way == "alone" else options.processes
        print(f"{way:<12}{count:>10}{rate:>10.1f}{told['loss']:>12.6f}{apart:>12.1e}")
        if not apart <= TOLERANCE:  # so written, NaN fails too
            problems.append(f"{way}: parameters {apart:.1e} apart, allowed {TOLERANCE:.0e}")
    _, agreed = found["agreed"]
    if any(relative_difference(other, found["agreed"][0]) for other in others):
        problems.append("the processes ended with different parameters")
    rate, padded = (t["steps"] / t["seconds"] for t in (agreed, found["by hand"][1]))
    print(
        f"\n{agreed['steps']} steps in the buckets {', '.join(map(str, agreed['buckets']))}:"
        f" {rate / (alone['steps'] / alone['seconds']):.2f} times the steps of one process,"
        f" {rate / padded:.2f} times those padded by hand to {BATCH_SIZE} rows"
    )
    for problem in problems:
        print(f"FAILED: {problem}", file=sys.stderr)
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
