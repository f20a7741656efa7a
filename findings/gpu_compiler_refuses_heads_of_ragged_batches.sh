#!/usr/bin/env bash
# jax 0.10.2 with jax-cuda12-plugin 0.10.2 (Python 3.11 and later). No GPU is needed: its compiler runs
# anywhere, for a chip that is described to it.
#
# The heads of an attention that are joined and projected compile for an H100 in a batch of 8 rows of 64,
# and not in one of 7 rows of 50 or of 5 of 30: the tiles of the fused product do not fit, and XLA raises
# an internal error. Neither part alone does. So a program that is compiled at the exact shape of each
# batch may not compile at all, where one that is rounded up does. Not tried: a machine with the GPU,
# whose compiler measures kernels besides.
#
# Seen:
#   8 rows of 64: compiled
#   7 rows of 50: INTERNAL: Couldn't find output tile sizes
#   5 rows of 30: INTERNAL: Couldn't find output tile sizes
#   7 rows of 50, attention alone: compiled
#   7 rows of 50, projection alone: compiled
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 \
    jax-cuda12-plugin==0.10.2 jax-cuda12-pjrt==0.10.2
export JAX_PLATFORMS=cpu
"$folder/venv/bin/python" - <<'PY' 2>/dev/null | tee "$folder/seen"
import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

H100 = """
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  threads_per_block_limit: 1024  threads_per_warp: 32  core_count: 132  fpus_per_core: 128
  shared_memory_per_block: 49152  shared_memory_per_core: 233472  threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647  block_dim_limit_y: 65535  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000  l2_cache_size: 52428800  clock_rate_ghz: 1.98
  device_memory_size: 84942979072  shared_memory_per_block_optin: 232448
  registers_per_core_limit: 65536  registers_per_block_limit: 65536
}
platform_name: "CUDA"  device_description_str: "NVIDIA H100 80GB HBM3"
dnn_version_info { major: 9 minor: 8 }  runtime_version { major: 12 minor: 9 }
"""
chip = topologies.get_topology_desc("one", "cuda", target_config=H100, topology="1x1x1").devices[0]


def attention(h):
    weights = jax.nn.softmax(jnp.einsum("bshd,bthd->bhst", h, h))
    return jnp.einsum("bhst,bthd->bshd", weights, h)


def joined(w, h):
    return h.reshape(h.shape[0], h.shape[1], 64) @ w


def tried(function, *shapes):
    at = SingleDeviceSharding(chip)
    args = [jax.ShapeDtypeStruct(shape, "float32", sharding=at) for shape in shapes]
    try:
        jax.jit(function).lower(*args).compile()
    except jax.errors.JaxRuntimeError as error:
        return str(error).split(" that satisfy")[0]
    return "compiled"


for b, s in ((8, 64), (7, 50), (5, 30)):
    print(f"{b} rows of {s}:", tried(lambda w, h: joined(w, attention(h)), (64, 64), (b, s, 4, 16)))
print("7 rows of 50, attention alone:", tried(attention, (7, 50, 4, 16)))
print("7 rows of 50, projection alone:", tried(joined, (64, 64), (7, 50, 4, 16)))
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
