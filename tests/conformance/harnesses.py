"""JAX's own primitive cases, as functions of arrays alone.

`jax._src.internal_test_util.test_harnesses` holds some 5,500 of them: a function, its
arguments, and where JAX itself does not support it.
"""

import hashlib
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

DEVICE = "cpu"


@dataclass(frozen=True)
class Harness:
    """One case of JAX's.

    Attributes:
        index: Position in JAX's list, the same in every process.
        name: Its full name; not always unique.
        primitive: The primitive (or function) it is about.
        fn: The function of its array arguments.
        seed: Makes its arguments, another set for another seed.
        supported: Whether JAX says it runs on this device.
        tied_keys: Number of keys of an unstable sort, whose ties may come in any order; else 0.
    """

    index: int
    name: str
    primitive: str
    fn: Callable[..., Any]
    make: Callable[[int], list[np.ndarray]]
    supported: bool
    tied_keys: int = 0


def load() -> list[Any]:
    """JAX's list, as it stands."""
    from jax._src.internal_test_util import test_harnesses

    return test_harnesses.all_harnesses


def harness(index: int) -> Harness:
    """One case of JAX's list."""
    own = load()[index]

    def leaves(seed: int) -> tuple[list[Any], Any]:
        return jax.tree_util.tree_flatten(own.dyn_args_maker(np.random.RandomState(seed)))

    tree = leaves(0)[1]

    def fn(*values: Any) -> Any:
        out = own.dyn_fun(*jax.tree_util.tree_unflatten(tree, values))
        if own.group_name == "approx_top_k":  # which of equal values it finds is arbitrary
            return out[0], jnp.take_along_axis(values[0], out[1], axis=-1)
        return out

    unstable = own.params.get("is_stable") is False
    return Harness(
        index,
        own.fullname,
        own.group_name,
        fn,
        lambda seed: [np.asarray(jnp.asarray(x)) for x in leaves(seed)[0]],
        own.filter(DEVICE),
        own.params["num_keys"] if unstable else 0,
    )


def fingerprint(index: int) -> str | None:
    """Equal for two cases that are the same program on the same values; None if it has none.

    Without 64-bit types, the cases of float64 are those of float32 once more.
    """
    case = harness(index)
    if not case.supported:
        return None
    try:
        args = case.make(0)
        text = str(jax.make_jaxpr(case.fn)(*args))
    except Exception:  # the driver meets it again and says so
        return None
    digest = hashlib.sha256(f"{case.primitive}\n{text}".encode())
    for x in args:
        digest.update(f"{x.shape}{x.dtype}".encode() + x.tobytes())
    return digest.hexdigest()


def selection(
    *, contains: Sequence[str] = (), sample: int | None = None, seed: int = 0
) -> list[int]:
    """Indices of the cases to run.

    Args:
        contains: Keep those whose name contains one of these.
        sample: Keep this many, spread over the primitives: one of each first, then a second...
        seed: Of the sample.
    """
    chosen = [
        i
        for i, own in enumerate(load())
        if not contains or any(text in own.fullname for text in contains)
    ]
    if sample is None or sample >= len(chosen):
        return chosen
    random.Random(seed).shuffle(chosen)
    seen: Counter[str] = Counter()
    turns = []
    for i in chosen:
        group = load()[i].group_name
        seen[group] += 1
        turns.append((seen[group], i))
    return sorted(i for _, i in sorted(turns, key=lambda t: t[0])[:sample])
