"""A strategy that does not round."""

from __future__ import annotations

import dataclasses

from bucketjit.strategies.base import logical_size


@dataclasses.dataclass(frozen=True)
class Exact:
    """Give every size its own bucket: no padding, and one compile per size.

    Examples:
        >>> Exact().bucket(7)
        7
    """

    def bucket(self, n: int, /) -> int:
        """Return the size itself.

        Args:
            n: The logical size, 0 or more.

        Returns:
            ``n``, as a Python int.

        Raises:
            TypeError: If ``n`` is not an int.
            ValueError: If ``n`` is negative.
        """
        return logical_size(n)
