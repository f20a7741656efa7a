#!/usr/bin/env bash
# jax 0.10.2 with libtpu 0.0.42.1 (Python 3.11 and later). No TPU is needed: its compiler runs anywhere.
#
# A larger batch may take fewer cycles on a TPU v5e, by what its compiler expects. Two dense layers take
# three times the cycles for one row that they take for two: a product of one row is written in another
# way. A convolution of 64 images takes more cycles than one of 128, in bfloat16 by 60 percent, and one
# of 4 images more than one of 8. So rounding a batch up can save cycles, and not only compiles.
#
# Seen, cycles:
#   dense layers, float32: 1 row 14760, 2 rows 4485, 16 rows 4531
#   convolution, float32: 4 images 26422, 8 images 11205, 64 images 37635, 128 images 29155
#   convolution, bfloat16: 4 images 33545, 8 images 14504, 64 images 60783, 128 images 37535
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet "jax[tpu]==0.10.2" jaxlib==0.10.2 libtpu==0.0.42.1
export JAX_PLATFORMS=cpu TPU_SKIP_MDS_QUERY=1 TPU_ACCELERATOR_TYPE=v5litepod-4
export TPU_WORKER_HOSTNAMES=localhost ALLOW_MULTIPLE_LIBTPU_LOAD=1
"$folder/venv/bin/python" - <<'PY' | tee "$folder/seen"
import re

import jax
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

device = topologies.get_topology_desc(platform="tpu", topology_name="v5e:2x2").devices[0]


def cycles(function, dtype, *shapes):
    at = SingleDeviceSharding(device)
    args = [jax.ShapeDtypeStruct(shape, dtype, sharding=at) for shape in shapes]
    text = jax.jit(function).lower(*args).compile().as_text()
    return sum(map(int, re.findall(r'"estimated_cycles":"(\d+)"', text)))


def dense(w, x):
    return jax.nn.relu(x @ w) @ w.T


def convolution(kernel, x):
    numbers = ("NHWC", "HWIO", "NHWC")
    y = jax.lax.conv_general_dilated(x, kernel, (1, 1), "SAME", dimension_numbers=numbers)
    return jax.nn.relu(y)


told = {n: cycles(dense, "float32", (256, 1024), (n, 256)) for n in (1, 2, 16)}
rows = ", ".join(f"{n} row{'s' * (n > 1)} {count}" for n, count in told.items())
print(f"dense layers, float32: {rows}")
for dtype in ("float32", "bfloat16"):
    sizes = (4, 8, 64, 128)
    counts = [cycles(convolution, dtype, (3, 3, 32, 64), (n, 16, 16, 32)) for n in sizes]
    images = ", ".join(f"{n} images {count}" for n, count in zip(sizes, counts))
    print(f"convolution, {dtype}: {images}")
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
