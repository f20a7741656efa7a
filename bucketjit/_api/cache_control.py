"""The methods that inspect and clear a cache, and limit what is compiled."""

from __future__ import annotations

from collections.abc import Callable

from bucketjit._compile.budget import CompileGuard
from bucketjit._compile.cache import CacheInfo
from bucketjit._config import is_int_from
from bucketjit._runtime.engine import Engine
from bucketjit._stages.warmup import check_seconds
from bucketjit.errors import SpecError


class CacheControl:
    """The methods of `BucketedExec` about its cache and its compiles."""

    _engine: Engine

    def cache_size(self) -> int:
        """How many executables the cache holds."""
        return len(self._engine.cache)

    def cache_info(self) -> CacheInfo:
        """Hits, misses, bound and size of the cache, as in `functools.lru_cache`."""
        return self._engine.cache.info()

    def cache_clear(self) -> None:
        """Drop every executable and program, and reset the counters."""
        self._forget()
        self._engine.clear()

    _forget: Callable[[], None]  # forgets what was made of the executables besides

    def pin(self, pinned: bool = True, **sizes: int) -> int:
        """Keep executables in the cache whatever else is compiled: they are not evicted.

        Args:
            pinned: False to allow their eviction again.
            **sizes: Padded sizes by dimension variable. All executables with these sizes are
                pinned; without any sizes, all executables.

        Returns:
            The number of executables that were pinned, or released.

        Raises:
            SpecError: ``pinned`` is no bool, a size is no int, or no executable has a dimension
                of that name.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> double = BucketedExec(lambda x: 2 * x).with_pow2().with_maxsize(2)
            >>> for n in (3, 5):
            ...     _ = double(np.ones(n))
            >>> double.pin(batch=4)
            1
            >>> for n in (9, 17):
            ...     _ = double(np.ones(n))
            >>> [dict(bucket.sizes) for bucket in double.stats().buckets]
            [{'batch': 4}, {'batch': 32}]
        """
        if not isinstance(pinned, bool):
            raise SpecError(
                f"pin: pinned is True or False, got {pinned!r}; sizes go by name: pin(batch=8)"
            )
        for variable, size in sizes.items():
            if not is_int_from(size, 0):
                raise SpecError(f"pin: {variable} must be a padded size, an int, got {size!r}")
        cache = self._engine.cache
        entries = cache.items()
        known = {variable for _, entry in entries for variable in entry.sizes}
        if entries and (unknown := sizes.keys() - known):
            raise SpecError(
                f"pin: no executable has a dimension {min(unknown)!r}, "
                f"they have {', '.join(sorted(known)) or 'none'}"
            )
        if not entries:
            self._engine.signer.refuse_unknown(dict.fromkeys(sizes, "a size to pin"))
        meant = [
            key for key, entry in entries if all(entry.sizes.get(v) == n for v, n in sizes.items())
        ]
        return sum(cache.pin(key, pinned) for key in meant)

    def forbid_compiles(self) -> CompileGuard:
        """Compile nothing any more: a call that needs a compile raises `CompileBudgetError`.

        Executables are still loaded from files. ``jit`` itself may compile an executable once more,
        for arguments that are placed differently than before (committed to a device, say); that
        happens, with a warning.

        Returns:
            A guard that allows compiles again: as a context manager (``with
            executor.forbid_compiles(): ...``) at the end of the block, or by its ``release()``.

        Examples:
            >>> import numpy as np
            >>> from bucketjit import BucketedExec
            >>> double = BucketedExec(lambda x: 2 * x).with_pow2()
            >>> _ = double(np.ones(3))
            >>> with double.forbid_compiles():
            ...     double(np.ones(5))
            Traceback (most recent call last):
                ...
            bucketjit.errors.CompileBudgetError: <lambda>: a call with batch=5 needs the bucket ...
        """
        return CompileGuard(self._engine.provider.allowance)

    def wait_for_compiles(self, timeout: float | None = None) -> bool:
        """Wait until nothing is left to compile in the background.

        Args:
            timeout: The largest number of seconds to wait; None for no limit.

        Returns:
            Whether nothing is left to compile.

        Raises:
            SpecError: ``timeout`` is no number, or negative.
        """
        check_seconds("wait_for_compiles: timeout", timeout)
        workers = self._engine.provider.workers
        return workers is None or workers.wait(timeout)
