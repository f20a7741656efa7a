"""The ``with_...`` methods that need the source of the function.

A function that was loaded from a file (`bucketjit.types.Loaded`) has those of
`bucketjit._api.resource_builders` alone.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Self

from bucketjit._api.options import bound
from bucketjit._compile.files.directory import Distrusted, check_directory
from bucketjit._config import AheadOfCalls, Config, Persistent, is_positive_int
from bucketjit.errors import SpecError


class SourceBuilders:
    """The methods about files of executables, and compiles ahead of calls."""

    _config: Config

    _with: Callable[..., Self]  # a new bucketed function with some options changed

    def with_ahead_compile(self, workers: int | None = None) -> Self:
        """Compile all buckets that the strategies list, with the first call that a program serves.

        Strategies with a largest bucket list their buckets (`strategies.buckets_of`: those of
        `with_buckets`, ``with_pow2(max=64)``, `strategies.fit`). All combinations are compiled,
        several at the same time; variables of other strategies have the bucket of the first call.
        That call waits for all compiles, or for loading what is in files (`with_persistence`);
        later calls find their buckets. It is like `warmup` with the first call as the example, and
        each executable is run once. Other signatures, derivatives, and programs for other sizes
        have their own first call.

        Some buckets are compiled only when a call needs them, and the reason is logged: those for
        which the function raises; all, if the cache has no room for them; those beyond a compile
        budget, which is spent on the bucket of the call first; and all buckets of functions that
        are traced at each size. Calls of other threads wait for their own bucket only.

        Args:
            workers: Number of threads that compile; by default one per core, up to four.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``workers`` is not a positive int.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_buckets([8, 64])
            >>> eager = total.with_ahead_compile()
            >>> _ = eager(np.ones(5, np.float32))
            >>> sorted(bucket.sizes["n"] for bucket in eager.stats().buckets)
            [8, 64]
        """
        if workers is not None and not is_positive_int(workers):
            raise SpecError(f"workers must be a positive int or None, got {workers!r}")
        return self._with(ahead=AheadOfCalls(workers))

    def with_persistence(
        self,
        directory: str | os.PathLike[str] | None,
        *,
        max_bytes: int | None = None,
    ) -> Self:
        """Keep executables in files, so that the next process loads what this one compiles.

        A process that finds the executable of a bucket in a file traces the function once, and
        loads the file: no masking, no lowering, no compile.

        Without this method the directory ``bucketjit`` in JAX's own compilation cache
        (``jax_compilation_cache_dir``) is used, if JAX has one. It gets all executables; but if
        ``jax_persistent_cache_min_compile_time_secs`` is not JAX's default (1.0), only those that
        took that long to compile.

        Files are found by what their executables depend on: the program, its constants, the types
        and placement of the arguments, versions, device and configuration. Damaged files are
        reported (`PersistenceWarning`) and replaced. Executables that cannot be identified safely
        are not stored, with an event that says why: those with host callbacks, primitives of other
        libraries, rules of `with_rules`, or arguments on several devices.

        Several processes may share the directory, also on several machines that have it on a
        network file system; there are no locks. Processes that need an executable at the same time
        compile it each.

        **An executable is machine code: whoever can write into the directory can run code as
        you.** A directory that others can write into is refused, and a missing one is created for
        you alone.

        Args:
            directory: The directory; several processes may share it. None to store nothing.
            max_bytes: The largest size of all files; whenever one is written, the least recently
                used are removed beyond that. None for no bound.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: The directory is a file, others can write into it, or ``max_bytes`` is no
                positive int.

        Examples:
            >>> import tempfile, numpy as np
            >>> from bucketjit import BucketedExec
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     double = BucketedExec(lambda x: 2 * x).with_pow2().with_persistence(directory)
            ...     _ = double(np.ones(3, np.float32))
            ...     again = double.with_persistence(directory)  # as another process would
            ...     _ = again(np.ones(4, np.float32))
            >>> double.stats().compiles, again.stats().compiles, again.stats().loads
            (1, 0, 1)
        """
        max_bytes = bound("max_bytes", max_bytes)
        if directory is None:
            return self._with(persistence=Persistent())
        if not isinstance(directory, str | os.PathLike) or not os.fspath(directory):
            raise SpecError(f"directory must be a path or None, got {directory!r}")
        path = Path(os.fspath(directory)).expanduser().absolute()
        try:
            check_directory(path)
        except FileNotFoundError:
            pass  # made when the first executable is written
        except (Distrusted, OSError, ValueError) as error:
            raise SpecError(f"with_persistence: {error}") from None
        return self._with(persistence=Persistent(str(path), max_bytes))
