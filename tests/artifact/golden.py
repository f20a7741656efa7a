"""Files of the format by each version of JAX, which later versions must read.

``python -m tests.artifact.golden`` writes the ones of the format and the JAX that run it. A file is
written once, when the format is new, and not again.
"""

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from bucketjit import BucketedExec
from bucketjit._artifact.manifest import FORMAT

FOLDER = Path(__file__).parent / "golden"
BUCKETS = {"b": [2, 8], "s": [4, 8]}
WEIGHTS = np.linspace(-1, 1, 12, dtype=np.float32).reshape(3, 4)


def fn(params: Any, key: Any, x: Any) -> Any:
    """Masks that matter, a guard, constants, random bits, a tree, derivatives."""
    h = jnp.tanh(x @ WEIGHTS) @ params["w"]
    scores = jax.nn.softmax(h @ h.mT, axis=-1)
    pooled = (scores @ h).mean(axis=1) if x.shape[1] > 2 else h.max(axis=1)
    return {
        "pooled": pooled,
        "sorted": jnp.sort(x[..., 0], axis=-1)[:, ::-1],
        "bits": jax.random.bits(key, (x.shape[0],), np.uint32),
        "rank": (jnp.argmax(h, axis=1), None),
    }


def selecting(x: Any) -> Any:
    """Sizes that the function computes, and a decision on one of them."""
    kept = x[x > 0]
    return {"kept": kept, "top": jnp.sort(kept)[-2:] if kept.shape[0] > 0 else kept}


def selected_from(n: int) -> np.ndarray:
    """The argument of `selecting`; the same numbers in every process."""
    return np.sin(np.arange(n, dtype=np.float64) * 2 + 1).astype(np.float32)


def arguments(b: int, s: int) -> tuple[Any, Any, np.ndarray]:
    """The arguments of a call; the same numbers in every process."""
    wave = np.sin(np.arange(b * s * 3, dtype=np.float64)).astype(np.float32)
    w = np.cos(np.arange(12, dtype=np.float64)).astype(np.float32)
    return {"w": w.reshape(4, 3)}, jax.random.key(b), wave.reshape(b, s, 3)


def files() -> list[Path]:
    return sorted(FOLDER.glob("format?-jax*.bkt"))


def files_of_computed_sizes() -> list[Path]:
    return sorted(FOLDER.glob("*-computed-jax*.bkt"))


def main() -> None:
    executor = BucketedExec(fn, dynamic_axes=(None, None, "b, s, _")).with_pow2()
    name = f"format{FORMAT}-jax{jax.__version__}.bkt"
    executor.save(FOLDER / name, *arguments(2, 4), sizes=BUCKETS, derivatives=1, dynamic=True)
    print(FOLDER / name, (FOLDER / name).stat().st_size, "bytes")
    name = f"format{FORMAT}-computed-jax{jax.__version__}.bkt"
    computed = BucketedExec(selecting, dynamic_axes="n").with_pow2()
    computed.save(FOLDER / name, selected_from(5), sizes={"n": [4, 8]})
    print(FOLDER / name, (FOLDER / name).stat().st_size, "bytes")


if __name__ == "__main__":
    main()
