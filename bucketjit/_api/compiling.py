"""The methods of a bucketed function about compiles before calls, files of them, and processes."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sized
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, Self

from bucketjit._api.bucket_builders import BucketBuilders
from bucketjit._api.options import bound
from bucketjit._config import Agreed, Persistent
from bucketjit._jax.tracebacks import boundary
from bucketjit._runtime.call_path import P, R
from bucketjit.errors import SpecError

if TYPE_CHECKING:
    from bucketjit._stages.warmup import WarmupReport


class Compiling(BucketBuilders[P, R]):
    """The methods that need the source of the function; a loaded one has none of them."""

    @boundary
    def warmup(
        self,
        *args: Any,
        sizes: Any = None,
        workers: int | None = None,
        time_budget: float | None = None,
        progress: bool = True,
        first_run: bool = False,
        rows: Any = None,
        in_axes: Any = None,
        **kwargs: Any,
    ) -> WarmupReport:
        """Compile buckets before calls need them, several at the same time.

        Buckets that are compiled already are skipped, so a warm-up that was interrupted, or ran out
        of time, is continued by calling it again. The largest bucket is compiled first.

        Without ``dynamic_axes``, a call with another size along an axis that was taken as static
        opens that axis. New shapes are then served by buckets of the opened program, which have to
        be compiled too: so name the axes that vary. With `Check.EXACT`, the exact shapes that
        results are compared with are compiled by the calls.

        Args:
            *args: Arguments like those of the calls; ``jax.ShapeDtypeStruct`` will do for arrays.
                Arrays that will be committed to a device should be committed here too.
            sizes: Sizes of the calls: a dict of a variable to sizes or to a strategy that has a
                largest bucket (`strategies.buckets_of`; a strategy of your own lists its buckets as
                ``boundaries``), of which all combinations are warmed up; a list of dicts of a
                variable to a size; or, of a single variable, its strategy. By default the sizes of
                ``args``, and with `with_persistence` all buckets of their program that the
                directory has. Of more than 4,096 combinations, only the smallest and the largest
                size in each bucket are looked at.
            workers: Number of threads that compile; by default one per core, up to four.
            time_budget: Seconds after which no further compile begins.
            progress: Whether to tell on standard error, in a line for each executable, how far it
                is; examples/progress.py has a bar.
            first_run: Whether to run each executable once, on zeros, as soon as it is compiled.
                On CPU, the first run of one with many matrix multiplications takes longer, by
                45 ms for a 6-layer encoder. Executables that have effects, callbacks or a
                ``while_loop``, take over 10 GFLOP or 1 GiB, or are for another device than the
                host, are not run.
            rows: For `map`: numbers of examples in a batch, each rounded up to a power of two. The
                executables of these batches are compiled for ``sizes``, in place of those of single
                examples, and `map` then takes no others for their buckets.
            in_axes: For ``rows``: which arguments are lists of examples, as in `map`. Here they are
                given for one example.
            **kwargs: Keyword arguments like those of the calls.

        Returns:
            What was compiled, what was in the cache, what failed and why, and what is left.

        Raises:
            SpecError: ``sizes`` is malformed, or names a dimension that these arguments lack;
                ``workers`` or ``time_budget`` is out of range, or a flag is no bool.
            ArgumentError: Calls do not take such arguments. Errors that the function itself raises
                for some sizes are in the report.

        Examples:
            >>> import jax, jax.numpy as jnp
            >>> import bucketjit
            >>> total = bucketjit.jit(jnp.sum, dynamic_axes="n", buckets="pow2")
            >>> like = jax.ShapeDtypeStruct((1,), jnp.float32)
            >>> report = total.warmup(like, sizes={"n": range(1, 65)}, progress=False)
            >>> [bucket["n"] for bucket in report.compiled]
            [64, 32, 16, 8, 4, 2, 1]
            >>> total.warmup(like, sizes=[{"n": 3}, {"n": 5}], progress=False).present
            ({'n': 4}, {'n': 8})
            >>> total.warmup(like, sizes={"n": [3, 5]}, rows=[1, 16], progress=False).compiled
            ({'rows': 16, 'n': 8}, {'rows': 16, 'n': 4}, {'rows': 1, 'n': 8}, {'rows': 1, 'n': 4})
        """
        from bucketjit._runtime.rows.map import rows_to_compile
        from bucketjit._stages.warmup import WarmupReport, check_options, warm_up

        check_options(workers, time_budget, progress=progress, first_run=first_run)
        if self._plain is not None:  # calls would not use what is compiled
            return WarmupReport((), (), (), (), (), 0.0)
        is_asked = sizes is not None and not (isinstance(sizes, Sized) and len(sizes) == 0)
        if is_asked and not (args or kwargs):
            raise SpecError(
                "warmup: sizes are those of arguments, and there are none; give the arguments of "
                "one call first: warmup(jax.ShapeDtypeStruct((8, 64), 'float32'), sizes=...)"
            )
        engine = self._engine
        call = engine.signer.sign(args, kwargs, structs=True)
        batches = []
        if rows is not None:
            batches = rows_to_compile(engine.signer, call, args, kwargs, rows, in_axes)
        how = workers, time_budget, progress, first_run
        return warm_up(engine, call, sizes, *how, batches)

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
            >>> import bucketjit
            >>> total = bucketjit.jit(jnp.sum, dynamic_axes="n", buckets=[8, 64])
            >>> eager = total.with_ahead_compile()
            >>> _ = eager(np.ones(5, np.float32))
            >>> sorted(bucket.sizes["n"] for bucket in eager.stats().buckets)
            [8, 64]
        """
        return self._with(ahead=bound("workers", workers) or 0)

    def with_persistence(
        self, directory: str | os.PathLike[str] | None, *, max_bytes: int | None = None
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
            >>> import bucketjit
            >>> with tempfile.TemporaryDirectory() as directory:
            ...     double = bucketjit.jit(lambda x: 2 * x, buckets=[4, 8])
            ...     double = double.with_persistence(directory)
            ...     _ = double(np.ones(3, np.float32))
            ...     again = double.with_persistence(directory)  # as another process would
            ...     _ = again(np.ones(4, np.float32))
            >>> double.stats().compiles, again.stats().compiles, again.stats().loads
            (1, 0, 1)
        """
        from bucketjit._compile.files.directory import Distrusted, check_directory

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

    def with_agreement(
        self,
        timeout: float = 60,
        by: Literal["kv"] | Callable[[dict[str, int]], Mapping[str, int]] = "kv",
    ) -> Self:
        """Run each call in the same bucket on all processes of a ``jax.distributed`` job.

        Before a call runs, the processes tell each other its bucket, and all take the largest size
        of each variable. So they run the same executable. Every process must make the same calls in
        the same order, from one thread, as with any program for several processes. Name the open
        axes by ``dynamic_axes``: a guess from the arguments may differ from process to process.

        If processes make different calls, or one cannot pad its call, every process gets an
        `AgreementError` that names the call of each, and no process runs it. It gets one, too, if
        another one raises, or does not come. A bucket is compiled in the thread of the call.

        With one process, this changes nothing, and costs nothing.

        Args:
            timeout: How long a call waits for the other processes, in seconds. It must be longer
                than it takes one process to trace and compile what the others have already.
            by: ``"kv"`` exchanges the buckets through the key-value store of ``jax.distributed``.
                Or a function that knows better: it takes the bucket of this process, a dict from
                variables to sizes, and returns that of all processes.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``timeout`` is not a positive number, or ``by`` is something else.

        Examples:
            >>> import numpy as np
            >>> import bucketjit
            >>> total = bucketjit.jit(lambda x: x.sum(), dynamic_axes="n", buckets="pow2")
            >>> float(total.with_agreement()(np.ones(5, np.float32)))
            5.0
            >>> fixed = total.with_agreement(by=lambda bucket: {"n": 64})
            >>> float(fixed(np.ones(5, np.float32))), dict(fixed.stats().buckets[0].sizes)
            (5.0, {'n': 64})
        """
        number = not isinstance(timeout, bool) and isinstance(timeout, int | float)
        if not number or not 0 < timeout < math.inf:
            raise SpecError(
                f"with_agreement: timeout must be a positive number of seconds, got {timeout!r}"
            )
        if by != "kv" and not callable(by):
            raise SpecError(
                "with_agreement: by must be 'kv' or a function from the bucket of this process to "
                f"that of all processes, got {by!r}"
            )
        return self._with(agreed=Agreed(float(timeout), by))

    def with_processes(self, mesh: Any, axis: str) -> Self:
        """Run the function on the shards of a mesh, of which each process gives its own rows.

        The function is that of **one shard**, as for ``jax.shard_map`` without checked types:
        arguments with open axes are the rows of the shard, and it combines shards by
        ``jax.lax.psum``, ``pmean``, ``pmax`` and ``pmin`` over ``axis``. Processes may give
        different numbers of rows. All other arguments, such as parameters, must be the same on all
        processes.

        A ``pmean`` weighs by the rows of each shard, so that the mean over uneven shards is that of
        the whole batch; so is the mean of their gradients. ``psum(x.shape[0], axis)`` is the number
        of all rows. Collectives of open axes (``all_gather``, ``ppermute``) are refused.

        A process with several devices in the mesh gives them its rows in parts as even as possible.
        Results whose first axis is one of rows are those of this process. Other results must be
        the same on all shards; they are global arrays, which the next call takes as they are.

        No call runs at its exact shape, as shards differ: what cannot be masked is an error.

        Args:
            mesh: The mesh, a ``jax.sharding.Mesh``.
            axis: The axis of the mesh along which the shards are.

        Returns:
            A new bucketed function.

        Raises:
            SpecError: ``mesh`` is no mesh, or has no such axis; or processes share a shard.

        Examples:
            >>> import jax, numpy as np
            >>> import bucketjit
            >>> def loss(w, x):
            ...     return jax.lax.pmean(((x @ w) ** 2).mean(), "d")
            >>> mesh = jax.make_mesh((1,), ("d",))
            >>> losses = bucketjit.jit(loss, dynamic_axes=(None, "b, _"), buckets="pow2")
            >>> on_mesh = losses.with_processes(mesh, "d")
            >>> float(on_mesh(np.ones(2, np.float32), np.ones((5, 2), np.float32)))
            4.0
        """
        from bucketjit._processes.build_shards import checked_axis

        return self._with(sharded=checked_axis(mesh, axis))
