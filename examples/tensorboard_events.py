"""Executors in TensorBoard: what happens as it happens, and how much padding there is.

    python examples/tensorboard_events.py --logdir runs

`Watch` is all there is to it: a function of an event, for `with_on_event`. It takes any writer
with ``add_scalar`` and ``add_text``: that of tensorboardX, as here, or of torch.utils.tensorboard.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

import bucketjit
from bucketjit import BucketedExec
from bucketjit.types import Event

LOSS_EVERY = 5


class Watch:
    """Writes events: how long each compile took, how many there were, and the reasons of the rest.

    Events come from whichever thread compiles; writers of TensorBoard may be called from any.
    """

    def __init__(self, writer: Any) -> None:
        self.writer = writer
        self.step = 0  # of the training loop, which sets it
        self.counts: dict[str, int] = {}

    def __call__(self, event: Event) -> None:
        count = self.counts[event.kind] = self.counts.get(event.kind, 0) + 1
        self.writer.add_scalar(f"bucketjit/{event.name}/{event.kind}", count, self.step)
        if event.kind == "compile":
            self.writer.add_scalar(f"bucketjit/{event.name}/seconds", event.seconds, self.step)
        else:
            self.writer.add_text(f"bucketjit/{event.name}", str(event), self.step)


def train_step(w: Any, x: Any, y: Any) -> Any:
    """One step of linear regression."""
    loss, gradient = jax.value_and_grad(lambda w: jnp.mean((x @ w - y) ** 2))(w)
    return w - 0.1 * gradient, loss


def train(writer: Any, steps: int = 40) -> BucketedExec:
    """Train on batches of all sizes, and write what is to be seen."""
    watch = Watch(writer)
    step = bucketjit.jit(train_step, buckets=bucketjit.strategies.Pow2(min=4)).with_on_event(watch)
    rng = np.random.default_rng(0)
    w = jnp.zeros(3)
    for i in range(steps):
        watch.step = i
        x = rng.standard_normal((rng.integers(1, 40), 3)).astype(np.float32)
        w, loss = step(w, x, x @ np.array([1.0, -2.0, 0.5], np.float32))
        if i % LOSS_EVERY == 0:
            writer.add_scalar("loss", float(loss), i)
            writer.add_scalar("bucketjit/train_step/padding", step.stats().padding_waste, i)
    return step


def main(argv: Sequence[str] | None = None) -> int:
    """Train, writing to a folder that TensorBoard shows."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--logdir", default="runs", help="where to write (default: runs)")
    options = parser.parse_args(argv)
    try:
        from tensorboardX import SummaryWriter
    except ModuleNotFoundError:
        print("tensorboard_events: pip install tensorboardX", file=sys.stderr)
        return 2
    with SummaryWriter(options.logdir) as writer:
        step = train(writer)
    print(f"wrote {options.logdir}; now run: tensorboard --logdir {options.logdir}")
    print(step.stats().compiles, "compiles in", step.stats().calls, "calls")
    return 0


if __name__ == "__main__":
    sys.exit(main())
