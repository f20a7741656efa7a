#!/usr/bin/env bash
# jax 0.10.2 with jaxlib 0.10.2, on eight devices of a CPU.
#
# A function under jax.jit(fn, in_shardings=...) has one sharding for each argument, however it comes. Yet
# XLA compiles again for the same shape where an array is on the mesh already, with the very sharding that
# in_shardings names: once for host arrays, once more if the second argument is placed, and again if the
# first one is. A training loop whose state comes back compiles its step twice. The modules are the same
# text. An array that is on no mesh (jnp.asarray) takes the executable of host arrays, but a program that
# cuts it for the mesh is compiled for its shape, which a host array does not need.
#
# Seen, compiles after each call:
#   host arrays: 1
#   second argument by jnp.asarray: 2
#   second argument placed as in_shardings says: 3
#   first argument placed as in_shardings says: 4
#   host arrays again: 4
#   modules that differ: 0
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2
export JAX_PLATFORMS=cpu XLA_FLAGS=--xla_force_host_platform_device_count=8
"$folder/venv/bin/python" - <<'PY' | tee "$folder/seen"
import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

compiles = []
jax.monitoring.register_event_duration_secs_listener(
    lambda event, *_, **__: compiles.append(event) if "backend_compile" in event else None
)
mesh = jax.make_mesh((8,), ("rows",), axis_types=(AxisType.Auto,))
whole, rows = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, PartitionSpec("rows"))
step = jax.jit(lambda w, x: (jnp.tanh(x @ w).mean(), x * 2), in_shardings=(whole, rows))
w, x = np.ones(3, np.float32), np.ones((48, 3), np.float32)
loose = jnp.asarray(x)
placed, state = jax.device_put(x, rows), jax.device_put(w, whole)
jax.block_until_ready((loose, placed, state))
before = len(compiles)
for name, args in (
    ("host arrays", (w, x)),
    ("second argument by jnp.asarray", (w, loose)),
    ("second argument placed as in_shardings says", (w, placed)),
    ("first argument placed as in_shardings says", (state, x)),
    ("host arrays again", (w, x)),
):
    jax.block_until_ready(step(*args))
    print(f"{name}: {len(compiles) - before}")
texts = {step.lower(*args).as_text() for args in ((w, x), (w, placed), (state, x))}
print(f"modules that differ: {len(texts) - 1}")
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
