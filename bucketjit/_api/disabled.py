"""Calls under ``BUCKETJIT_DISABLE=1``: ``jax.jit`` of the function, and no more."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from bucketjit._arrays.padding import without_padding
from bucketjit._arrays.results import as_numpy, as_padded
from bucketjit._config import Config, Out
from bucketjit._environment import DISABLE
from bucketjit._runtime.call_counts import CallCounter
from bucketjit._runtime.counters import Counters
from bucketjit._tracing.signer import Signer
from bucketjit.errors import MaskingError

_REASON = f"{DISABLE} is set: plain jit"
WHY = MaskingError(_REASON, f"leave {DISABLE} out of the environment")


class PlainJit:
    """A function under ``jax.jit``, with the static and donated arguments of its bucketed function.

    Python ints that ``dynamic_axes`` declares as sizes are static, as the function needs their
    values. Results have the form of ``out``, though nothing is padded.
    """

    def __init__(self, config: Config, signer: Signer, counters: Counters) -> None:
        self._config = config
        self._signer = signer
        self._counters = counters
        self._jitted = functools.cache(self._jit)

    def __call__(self, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """Run the function."""
        if self._config.copy_inputs:
            args, kwargs = self._signer.with_copies(args, kwargs)
        args, kwargs = without_padding((args, dict(kwargs)))
        result = self._jitted(*self._sizes(args, kwargs))(*args, **kwargs)
        self._counters.call(CallCounter({}, reason=_REASON))
        match self._config.out:
            case Out.JAX:
                return result
            case Out.NUMPY:
                return jax.tree_util.tree_map(as_numpy, result)
        return jax.tree_util.tree_map(as_padded, result)

    def _sizes(
        self, args: tuple[Any, ...], kwargs: Mapping[str, Any]
    ) -> tuple[frozenset[int], frozenset[str]]:
        """Positions and names of the arguments that are sizes themselves."""
        nums = [i for i, x in enumerate(args) if _is_int(x)]
        names = [name for name, x in kwargs.items() if _is_int(x)]
        if not nums and not names:
            return frozenset(), frozenset()
        opened = self._signer.arguments_with_open_axes(len(args), list(kwargs))
        in_place, named = (set(), set()) if opened is None else opened
        return frozenset(in_place.intersection(nums)), frozenset(named.intersection(names))

    def _jit(self, sizes: frozenset[int], named_sizes: frozenset[str]) -> Any:
        given = self._signer.parameters
        return jax.jit(
            self._config.fn,
            static_argnums=sorted(given.static_nums | sizes),
            static_argnames=sorted(given.static_names | named_sizes),
            donate_argnums=sorted(given.donated),
            compiler_options=dict(self._config.compiler_options) or None,
        )


def _is_int(value: object) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)
