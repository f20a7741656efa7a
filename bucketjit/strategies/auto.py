"""A strategy whose buckets are learnt from the calls."""

from __future__ import annotations

import dataclasses

from bucketjit.strategies.base import logical_size, positive_int


@dataclasses.dataclass(frozen=True)
class Auto:
    """Learn the buckets from the sizes that come, and from what compiling and running cost.

    A size that no bucket holds gets a power of two. A better bucket is compiled when the seconds
    that it would have saved reach what compiling it costs. Several variables are learnt together.
    A bucketed function with a directory for its executables (`BucketedExec.with_persistence`)
    starts with the buckets that are there.

    Where there are no calls to learn from (a saved function, a warm-up, several processes that
    agree on a bucket), it is `Pow2`.

    Args:
        buckets: The largest number of buckets that are learnt. Sizes that none of them holds get
            further ones.

    Raises:
        TypeError: If ``buckets`` is not an int.
        ValueError: If it is below 1.

    Examples:
        >>> import bucketjit, jax.numpy as jnp, numpy as np
        >>> total = bucketjit.jit(jnp.sum, buckets="auto")
        >>> for n in (100, 37, 200):
        ...     _ = total(np.ones(n, np.float32))
        >>> [(dict(bucket.sizes), bucket.why) for bucket in total.stats().learnt]
        [({'batch': 128}, 'no bucket held a call'), ({'batch': 256}, 'no bucket held a call')]
    """

    buckets: int = 20

    def __post_init__(self) -> None:
        object.__setattr__(self, "buckets", positive_int("buckets", self.buckets))

    def bucket(self, n: int, /) -> int:
        """Return the power of two that holds a size; see `Pow2`."""
        return 1 << max(0, logical_size(n) - 1).bit_length()
