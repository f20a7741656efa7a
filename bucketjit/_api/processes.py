"""The methods of a bucketed function that several processes of a job call together."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal, Self

from bucketjit._config import Agreed
from bucketjit._processes.shard_axis import checked_axis
from bucketjit.errors import SpecError


class Processes:
    """The methods of `BucketedExec` for several processes."""

    _with: Any  # a method of `BucketedExec`

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
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(lambda x: x.sum(), dynamic_axes="n").with_pow2()
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
        made: Self = self._with(agreed=Agreed(float(timeout), by))
        return made

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
            >>> from bucketjit import BucketedExec
            >>> def loss(w, x):
            ...     return jax.lax.pmean(((x @ w) ** 2).mean(), "d")
            >>> mesh = jax.make_mesh((1,), ("d",))
            >>> losses = BucketedExec(loss, dynamic_axes=(None, "b, _")).with_pow2()
            >>> on_mesh = losses.with_processes(mesh, "d")
            >>> float(on_mesh(np.ones(2, np.float32), np.ones((5, 2), np.float32)))
            4.0
        """
        made: Self = self._with(sharded=checked_axis(mesh, axis))
        return made
