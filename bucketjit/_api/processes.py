"""The methods of a bucketed function that several processes of a job call together."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, Literal, Self, TypeVar

from bucketjit._config import Agreed
from bucketjit._processes.agreement import Agreement
from bucketjit._processes.batches import agreed_batches
from bucketjit._runtime.engine import Engine
from bucketjit.errors import SpecError

T = TypeVar("T")


class Processes:
    """The methods of `BucketedExec` for several processes."""

    _engine: Engine
    _with: Any  # a method of `BucketedExec`

    def with_agreement(
        self,
        timeout: float = 60,
        by: Literal["kv"] | Callable[[dict[str, int]], Mapping[str, int]] = "kv",
    ) -> Self:
        """Run each call in the same bucket on all processes of a ``jax.distributed`` job.

        Before a call runs, the processes tell each other its bucket, and all take the largest size
        of each variable. So they run the same executable, and collectives in it are safe. Every
        process must make the same calls in the same order, as with any program for several
        processes. Name the open axes by ``dynamic_axes``: a guess from the arguments may differ
        from process to process.

        If one process cannot pad its call, calls another function, raises, ends, or does not come,
        every process gets an `AgreementError` that names it, and no process runs the call. A bucket
        is compiled in the thread of the call, on all processes; there are no stand-ins.

        With one process, this changes nothing, and costs nothing.

        Args:
            timeout: How long a call waits for the other processes, in seconds. A process that
                compiles is waited for longer, as long as it gives signs of life.
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

    def agreed(self, batches: Iterable[T]) -> Iterator[T]:
        """Iterate over batches, and agree on the bucket of each one while the last one is in use.

        The exchange of `with_agreement` takes one to three milliseconds, and waits for the slowest
        process. In a loop over ``agreed(batches)`` it happens beside the step of the batch before.
        For that, the loop takes one batch ahead of the step. The calls must get the arrays of the
        batch as they come from the loop, not copies of them; other calls are agreed on when they
        are made.

        The loop ends when the batches of all processes end. With one process it is a plain loop.

        Args:
            batches: The batches of this process. Every process must have equally many.

        Returns:
            An iterator over the same batches.

        Raises:
            SpecError: There is no agreement.
            AgreementError: A process has no batch where others have one, or raises, ends, or leaves
                the loop.
            Exception: What ``batches`` raises, after the batches before it.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(lambda x: x.sum()).with_pow2().with_agreement()
            >>> [float(total(x)) for x in total.agreed([np.ones(3), np.ones(5)])]
            [3.0, 5.0]
        """
        if not isinstance(agreement := self._engine.together, Agreement):
            raise SpecError("agreed: there is no agreement; add .with_agreement() before")
        return agreed_batches(self._engine, agreement, batches)
