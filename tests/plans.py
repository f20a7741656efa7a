"""A plan of one's own for buckets of several variables, as `BucketedExec.with_plan` takes it."""

from collections.abc import Mapping

from bucketjit.errors import BucketOverflowError


class Boxes:
    """The first of the buckets that holds all sizes; the last one holds all others."""

    def __init__(self, *buckets: dict[str, int]) -> None:
        self.dims = tuple(buckets[0])
        self._buckets = buckets

    def bucket_of(self, sizes: Mapping[str, int]) -> dict[str, int]:
        for bucket in self._buckets:
            if all(n <= bucket[dim] for dim, n in sizes.items()):
                return {dim: bucket[dim] for dim in sizes}
        last = self._buckets[-1]
        dim, n = next((d, n) for d, n in sizes.items() if n > last[d])
        raise BucketOverflowError(n, last[dim], dim)
