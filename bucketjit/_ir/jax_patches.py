"""Install the patches of `bucketjit._jax.patches` while a function is traced.

They replace functions of JAX that refuse symbolic sizes without need. The replacements are global,
so other threads call them, too. For plain sizes they do what the originals do.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from bucketjit._ir import primitives
from bucketjit._ir.associative_scan import associative_scan_of
from bucketjit._jax.jaxprs import modules_of_jax
from bucketjit._jax.patches import operations, shapes
from bucketjit._jax.patches.lifetimes import CACHES, leaving_nothing, weak_finalizers
from bucketjit._jax.patches.patch import Patch
from bucketjit._jax.patches.selections import SELECTIONS
from bucketjit._jax.patches.shard_collectives import uneven_collectives

_ABSENT = object()  # of a name that the owner did not have, such as ``len`` in a module


class Replacing:
    """A context manager that installs patches while any thread is inside it. It nests."""

    def __init__(
        self, *patches: Patch, context: Callable[[], AbstractContextManager[None]] = nullcontext
    ) -> None:
        self.patches = patches
        self._context = context
        self._lock = threading.Lock()
        self._uses = weakref.WeakSet[object]()  # the contexts that are open, in all threads
        self._originals: list[tuple[Any, Any, Any]] = []  # in order of installation
        self._bare: dict[str, int] = {}  # modules without an original, and how many names they had

    @contextmanager
    def __call__(self) -> Iterator[None]:
        use = threading.Lock()  # any object that can be referenced weakly: it goes with the frame
        try:
            with self._lock:
                if not self._uses:
                    self._remove()  # what is there if an interrupt came in between
                    self._install()
                self._uses.add(use)
            with self._context():
                yield
        finally:
            with self._lock:
                self._uses.discard(use)
                if not self._uses:
                    self._remove()

    def misses(self, function: object) -> bool:
        """Whether a function is an original, in a place where its patch does not replace it."""
        return any(function is original for _, _, original in self._originals)

    def _install(self) -> None:
        wide = []
        for patch in self.patches:
            names = patch.owner if isinstance(patch.owner, dict) else vars(patch.owner)
            original = names.get(patch.name, _ABSENT)
            replacement = patch.around(original)
            if patch.everywhere:
                wide.append((patch.name, original, replacement))
            else:
                self._replace(patch.owner, patch.name, original, replacement)
        for key, module in modules_of_jax().items() if wide else ():  # there are a thousand modules
            names = getattr(module, "__dict__", {})
            if self._bare.get(key) == len(names):
                continue
            held = [each for each in wide if names.get(each[0]) is each[1]]
            for name, original, replacement in held:
                self._replace(module, name, original, replacement)
            if not held:
                self._bare[key] = len(names)

    def _remove(self) -> None:
        while self._originals:  # the last first: two patches may share a name
            _set(*self._originals[-1])
            self._originals.pop()  # only now: an interrupt may come in between

    def _replace(self, owner: Any, name: Any, original: Any, replacement: Any) -> None:
        self._originals.append((owner, name, original))
        _set(owner, name, replacement)


def _set(owner: Any, name: Any, value: Any) -> None:
    if isinstance(owner, dict):
        owner[name] = value
    elif value is _ABSENT:
        vars(owner).pop(name, None)
    else:
        setattr(owner, name, value)


lenient_jax = Replacing(
    operations.associative_scans(associative_scan_of),
    operations.open_scans,
    *operations.SEARCHES,
    *operations.SHUFFLES,
    operations.open_reductions,
    *operations.DEBUG_CALLBACKS,
    *shapes.INDICES,
    *shapes.BRIEF_DECISIONS,
    *operations.SYMBOLIC_INDICES,
    shapes.lengths,
    shapes.inferred_sizes,
    shapes.squeezes,
)
"""While active, JAX traces more programs with symbolic sizes."""

selecting_jax = Replacing(*SELECTIONS)
"""While active, selections ask `bucketjit._jax.patches.traced_sizes.selecting` what to do."""

uneven_shards = Replacing(
    *uneven_collectives(
        primitives.axis_of_shards,
        primitives.mean_over_shards,
        primitives.sum_over_shards,
        primitives.refuse_groups,
    )
)
"""While active, collectives know uneven shards; see `bucketjit._ir.primitives`."""

forgetful_jax = Replacing(weak_finalizers, *CACHES, context=leaving_nothing)
"""While active, traces that fail can be freed, and none leaves anything behind in JAX."""
