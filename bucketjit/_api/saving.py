"""The method of a bucketed function that saves it in a file."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Any

from bucketjit._artifact.archive import checked_path
from bucketjit._artifact.writer import SaveOptions, save
from bucketjit._jax.tracebacks import boundary
from bucketjit._jax.transformations import only_differentiated
from bucketjit._processes.together import refuse_apart
from bucketjit._runtime.derivatives import Derivatives
from bucketjit._runtime.engine import Engine
from bucketjit.errors import ArtifactError


class Saving:
    """The method of `BucketedExec` that saves it."""

    _engine: Engine
    _derivatives: Derivatives

    @boundary
    def save(
        self,
        path: str | os.PathLike[str],
        *args: Any,
        sizes: Any = None,
        platforms: Sequence[str] | None = None,
        derivatives: int = 0,
        dynamic: bool = False,
        executables: bool = False,
        key: str | bytes | None = None,
        **kwargs: Any,
    ) -> None:
        """Save the function in a file, from which `bucketjit.load` serves it without its source.

        The file has a portable StableHLO module for each bucket, masks included, and the arrays
        that the function closes over, once. A process that loads it needs bucketjit and JAX;
        ``python -m bucketjit unpack`` makes of it what other programs can run. Equal functions make
        equal files.

        Args:
            path: The file, by custom ``.bkt``. It is replaced at once when all is written.
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
                Static arguments become a part of what is saved.
            sizes: Sizes of the calls whose buckets are saved, in any form that `warmup` takes. By
                default those of the executables in the cache; if there are none, those of ``args``.
            platforms: The platforms to save for, such as ``["cpu", "cuda", "tpu"]``; by default
                that of this process.
            derivatives: How many times the loaded function can be differentiated in reverse mode,
                by ``jax.grad`` and ``jax.vjp``.
            dynamic: Whether to save a module of all sizes besides. It serves calls beyond the
                buckets, and compiles once for each of their sizes.
            executables: Whether to save compiled executables besides, for machines like this one
                and the same versions; see ``trust_executables`` of `bucketjit.load`. Not for files
                that are to be equal.
            key: A secret to sign the file with; `bucketjit.load` with the same key then refuses
                files that somebody else has made.
            **kwargs: Keyword arguments like those of the calls.

        Raises:
            ArtifactError: The function cannot be saved: it is not masked, calls back into Python,
                or has trees of classes that JAX cannot serialize. Or JAX traces the call of `save`.
            SpecError: ``path``, ``sizes`` or another option is malformed.
            ArgumentError: Calls do not take such arguments.
            MissingExtraError: flatbuffers is not installed; the extra ``export`` installs it.
            OSError: The file cannot be written. An older one is then as it was.

        Warns:
            FallbackWarning: The file will not serve some sizes below its largest buckets.

        Examples:
            >>> import os, tempfile
            >>> import jax, jax.numpy as jnp, numpy as np
            >>> import bucketjit
            >>> mean = bucketjit.BucketedExec(jnp.mean, dynamic_axes="n").with_pow2()
            >>> like = jax.ShapeDtypeStruct((1,), jnp.float32)
            >>> path = os.path.join(tempfile.mkdtemp(), "mean.bkt")
            >>> mean.save(path, like, sizes={"n": range(1, 9)})
            >>> loaded = bucketjit.load(path)
            >>> float(loaded(np.array([1, 2, 6], np.float32)))
            3.0
        """
        refuse_apart(self._engine.config, "save")
        asked = SaveOptions(sizes, platforms, derivatives, dynamic, executables, key)
        if not only_differentiated():
            raise ArtifactError(
                "save: it is called inside jax.jit, jax.vmap or another function that JAX traces, "
                "which does so once for many calls; call it outside"
            )
        save(self._engine, self._derivatives, checked_path(path, "save"), args, kwargs, asked)
