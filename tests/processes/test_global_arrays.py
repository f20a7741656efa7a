"""Arrays on the devices of several processes: served where they need no padding, else refused."""

from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from bucketjit import BucketedExec
from tests.processes.launch import run_processes


def global_arrays(rank: int) -> dict[str, Any]:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,))

    def spread(n: int) -> jax.Array:
        rows = np.arange(n * 3, dtype=np.float32).reshape(n, 3)
        placed = NamedSharding(mesh, P("d"))
        return jax.make_array_from_callback(rows.shape, placed, lambda index: rows[index])

    mean = BucketedExec(lambda x: x.mean(0), dynamic_axes="n, _").with_pow2()
    scaled = BucketedExec(lambda x, y: (x * 2, y * 1), dynamic_axes=("n, _", "m")).with_pow2()
    found: dict[str, Any] = {"fits": np.asarray(mean(spread(8))).tolist()}
    for name, call in {
        "padded": lambda: mean(spread(6)),
        "explained": lambda: mean.explain(spread(6)),
        "other axis": lambda: scaled(spread(8), np.ones(3, np.float32)),
    }.items():
        try:
            found[name] = str(call())
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    found["afterwards"] = [mean(spread(8)).shape, mean(np.ones((3, 3), np.float32)).tolist()]
    both = scaled(spread(8), np.ones(4, np.float32))
    found["two axes"] = [x.shape for x in both]
    return found


def test_a_global_array_that_needs_padding_is_refused_by_name() -> None:
    first, second = [x.result for x in run_processes(global_arrays, 2)]
    assert first == second
    assert first["fits"] == np.arange(24, dtype=np.float32).reshape(8, 3).mean(0).tolist()
    refusal = "x: an array of shape (6, 3) on the devices of several processes cannot be padded to"
    for name in ("padded", "explained"):
        assert first[name].startswith(f"ArgumentError: {refusal} (8, 3)")
        assert ".with_processes(mesh, axis)" in first[name]
    assert "would have to be cut to n=8, m=3" in first["other axis"]
    assert first["afterwards"] == [[3], [1, 1, 1]]
    assert first["two axes"] == [[8, 3], [4]]
