"""What a program of concrete traces knows besides its body."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from typing import Any

import cachetools
import numpy as np

from bucketjit._ir.expressions import evaluate_text, variables_of
from bucketjit._ir.host_functions import Hosts
from bucketjit._ir.interface import SizeConstants
from bucketjit._raised import is_of_machine
from bucketjit._tracing.concrete import Concrete, Sizes, Tracer, at_other_sizes
from bucketjit._tracing.output_trees import same_tree
from bucketjit._tracing.skeleton import HostFunction, Skeleton, same_constant

_REMEMBERED = 1 << 26  # bytes of size constants that each program keeps


class Pairing:
    """Checks a program of concrete traces against the trace at the logical sizes of a call.

    It implements the protocol `bucketjit._ir.program.Pairing`. Safe to use from several
    threads.

    Attributes:
        samples: The sizes that the program was made from.
        num_size_constants: How many constants are taken from the trace at the logical sizes.
        nests_by_size: Whether the tree of the outputs is taken from that trace, too.
        why: Why the function is not traced with symbolic sizes.
    """

    def __init__(
        self,
        tracer: Tracer,
        first: Concrete,
        samples: Sequence[Sizes],
        labels: Sequence[int | str],
        found: Mapping[str, int],
        label_of_size: Sequence[int],
        size_constants: Sequence[int | None],
        hosts: Hosts,
        nests_by_size: bool,
        why: str,
    ) -> None:
        self.why = why
        self._hosts = hosts
        self.nests_by_size = nests_by_size
        self.samples = tuple(dict(s) for s in samples)
        self.num_size_constants = sum(index is not None for index in size_constants)
        self._tracer = tracer
        self._skeleton = Skeleton(first.skeleton.parts, [], [])
        self._out_tree = first.out_tree
        self._labels = tuple(labels)
        # By the name of each unfitted size, the position of the label that it appears in.
        self._found = {
            name: next(i for i, x in enumerate(labels) if name in variables_of(str(x)))
            for name in found
        }
        self._offset = dict(found)
        self._label_of_size = np.asarray(label_of_size, np.intp)
        self._example = {
            label: int(np.argmax(self._label_of_size == label)) for label in self._found.values()
        }
        self._size_constants = tuple(size_constants)
        self._values = tuple(
            None if index is not None else value
            for index, value in zip(size_constants, first.skeleton.values, strict=True)
        )
        self._at: Any = cachetools.LRUCache(_REMEMBERED, getsizeof=_bytes_of)
        self._lock = threading.Lock()

    def size_constants(self, sizes: Sizes) -> SizeConstants | None:
        """What the program needs from the trace at these logical sizes."""
        key = tuple(sizes[v] for v in self._tracer.variables)
        with self._lock:
            if key in self._at:
                return self._at[key]
        # Outside the lock: this traces, which takes long and runs user code.
        size_constants = self._look(sizes)
        if _bytes_of(size_constants) <= _REMEMBERED:
            with self._lock:
                self._at[key] = size_constants
        return size_constants

    def unfitted_sizes(self, sizes: Sizes) -> dict[str, int] | None:
        """The unfitted sizes at the padded sizes of a bucket."""
        if not self._found:
            return {}
        size_constants = at_other_sizes(lambda: self.size_constants(sizes))
        return (
            None
            if size_constants is None
            else dict(zip(self._found, size_constants.sizes, strict=True))
        )

    def _look(self, sizes: Sizes) -> SizeConstants | None:
        try:
            concrete = self._tracer.at(sizes)
        except Exception as error:  # the exact run raises it again, to the user
            if is_of_machine(error):
                raise
            return None
        skeleton = concrete.skeleton
        tree = concrete.out_tree
        if not (self.nests_by_size or same_tree(tree, self._out_tree)):
            return None
        if skeleton.difference(self._skeleton):
            return None
        there = np.asarray(skeleton.sizes, np.int64)
        found = {
            name: int(there[self._example[at]]) - self._offset[name]
            for name, at in self._found.items()
        }
        if any(n < 1 for n in found.values()):  # jax.export takes every variable to be 1 or more
            return None
        # Every size of the trace must be what the expression of its label gives.
        known = {**sizes, **found}
        expected = [x if isinstance(x, int) else evaluate_text(x, known) for x in self._labels]
        if expected and (np.asarray(expected, np.int64)[self._label_of_size] != there).any():
            return None
        values: dict[int, Any] = {}
        for mine, index, value in zip(
            self._values, self._size_constants, skeleton.values, strict=True
        ):
            if index is not None:
                values[index] = (
                    self._hosts.number_of(value.function)
                    if isinstance(value, HostFunction)
                    else np.asarray(value)
                )
            elif not same_constant(mine, value):
                return None
        return SizeConstants(
            tuple(found.values()),
            tuple(values[i] for i in range(len(values))),
            tree if self.nests_by_size else None,
        )


def _bytes_of(size_constants: SizeConstants | None) -> int:
    return 1024 + (0 if size_constants is None else size_constants.nbytes)
