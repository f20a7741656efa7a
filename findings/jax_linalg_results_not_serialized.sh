#!/usr/bin/env bash
# jax 0.10.2 (Python 3.11 and later).
#
# jnp.linalg.eigh, svd, qr, slogdet and eig return named tuples of JAX's own. jax.export exports a
# function that returns one, and calls it; `Exported.serialize` refuses it, as JAX registers no
# serialization for its own types. A plain tuple of the same arrays is serialized.
#
# Seen:
#   eigh exported, not serialized: EighResult
#   svd exported, not serialized: SVDResult
#   qr exported, not serialized: QRResult
#   slogdet exported, not serialized: SlogdetResult
#   eig exported, not serialized: EigResult
#   a plain tuple is serialized
set -euo pipefail
folder=$(mktemp -d)
trap 'rm -rf "$folder"' EXIT
"${PYTHON:-python3}" -m venv "$folder/venv"
"$folder/venv/bin/pip" install --quiet jax==0.10.2 jaxlib==0.10.2 flatbuffers==25.12.19
JAX_PLATFORMS=cpu "$folder/venv/bin/python" - <<'PY' | tee "$folder/seen"
import re

import jax
import jax.numpy as jnp
from jax import export

x = jax.ShapeDtypeStruct((3, 3), "float32")
for name in ("eigh", "svd", "qr", "slogdet", "eig"):
    function = getattr(jnp.linalg, name)
    exported = export.export(jax.jit(lambda a: function(a)))(x)
    try:
        exported.serialize()
        print(f"{name} is serialized")
    except ValueError as error:
        kind = re.search(r"unregistered type .*\.(\w+)'", str(error))[1]
        print(f"{name} exported, not serialized: {kind}")
assert export.export(jax.jit(lambda a: tuple(jnp.linalg.eigh(a))))(x).serialize()
print("a plain tuple is serialized")
PY
sed -n 's/^#   //p' "$0" | diff - "$folder/seen"
