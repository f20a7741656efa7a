"""Remembers which programs cannot be masked, in any bucket or in one, and why."""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Hashable

from bucketjit._events import LONGEST, printable
from bucketjit._ir.interface import Interface
from bucketjit._raised import frames_inside
from bucketjit._runtime.computed_sizes import EagerSignatures
from bucketjit.errors import FallbackWarning, MaskingError


class Refusals:
    """The refusals found when executables were built.

    Keys are those of executables: a program, and the padded sizes of its bucket.

    Attributes:
        eager: The signatures whose function runs without ``jit`` where it runs exact.
        version: Grows whenever a program is refused: decisions from before may not hold any more.
    """

    def __init__(self) -> None:
        self.version = 0
        self.eager = EagerSignatures()
        # By the padded sizes of a bucket; None stands for all buckets.
        self._found: weakref.WeakKeyDictionary[Interface, dict[Hashable, MaskingError]]
        self._found = weakref.WeakKeyDictionary()
        # Of programs that were looked at; None for one that takes several examples.
        self._batches: weakref.WeakKeyDictionary[Interface, MaskingError | None]
        self._batches = weakref.WeakKeyDictionary()

    def note(self, key: tuple[Interface, Hashable], refusal: MaskingError) -> None:
        """Remember that a program cannot be masked."""
        program, bucket = key
        at = bucket if refusal.in_bucket else None
        self._found.setdefault(program, {})[at] = refusal.without_frames()
        self.version += 1

    def of_program(self, program: Interface) -> MaskingError | None:
        """Why a program cannot be masked in any bucket; None if it may be possible."""
        return self._found.get(program, {}).get(None)

    def of(self, key: tuple[Interface, Hashable]) -> MaskingError | None:
        """Why a program cannot be masked in a bucket; None if it may be possible."""
        program, bucket = key
        found = self._found.get(program, {})
        return found.get(None) or found.get(bucket)

    def note_batches(self, program: Interface, refusal: MaskingError | None) -> None:
        """Remember whether a program takes several examples at a time; see `rows`."""
        self._batches[program] = None if refusal is None else refusal.without_frames()
        self.version += refusal is not None

    def is_known_for_batches(self, program: Interface) -> bool:
        """Whether `note_batches` was called for a program."""
        return program in self._batches

    def of_batches(self, program: Interface) -> MaskingError | None:
        """Why a program takes one example at a time; None if it may take several."""
        return self._batches.get(program)

    def clear(self) -> None:
        """Forget all refusals."""
        self._found.clear()
        self._batches.clear()
        self.version += 1


def warn_of_fallback(name: str, refusal: MaskingError, is_eager: bool) -> None:
    """Warn that calls are not masked."""
    how = "at its exact shapes, one compile each"
    if is_eager:
        how = "without jit, operation by operation"
    message = f"{name} runs {how}: {refusal}"
    warnings.warn(printable(message, LONGEST), FallbackWarning, stacklevel=frames_inside())
