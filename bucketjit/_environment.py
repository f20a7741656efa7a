"""The environment variables of bucketjit, for who runs a program that someone else wrote.

- ``BUCKETJIT_DISABLE=1``: every bucketed function is ``jax.jit`` of its function. Nothing is
padded, and
  every size is compiled. ``stats().fallback_reasons`` says so.
- ``BUCKETJIT_LOG=compiles``, ``fallbacks`` or ``all``, or several with commas: events are printed
  to standard error.

They are read when a bucketed function is made, by `BucketedExec`, `jit` or a ``with_...`` method.
"""

from __future__ import annotations

import logging
import os
import sys

from bucketjit._events import Event, logger
from bucketjit.errors import MaskingError, SpecError

DISABLE, LOG = "BUCKETJIT_DISABLE", "BUCKETJIT_LOG"
DISABLED = MaskingError(f"{DISABLE} is set: plain jit", f"leave {DISABLE} out of the environment")

_YES, _NO = ("1", "true", "yes", "on"), ("", "0", "false", "no", "off")

_KINDS = {
    "compiles": {*("compile", "load", "evict", "recompile", "budget", "error", "ahead")},
    "fallbacks": {"fallback", "inlined", "recompile", "error"},
}
_CHOICES = (*_KINDS, "all")


def is_disabled() -> bool:
    """Whether ``BUCKETJIT_DISABLE`` makes bucketed functions that are plain ``jit``."""
    value = os.environ.get(DISABLE, "").strip().lower()
    if value not in (*_YES, *_NO):
        raise SpecError(f"{DISABLE}={os.environ[DISABLE]!r}: expected 1 or 0")
    return value in _YES


def log_as_asked() -> None:
    """Print the events that ``BUCKETJIT_LOG`` names to standard error, each once."""
    value = os.environ.get(LOG, "")
    names = {name for part in value.split(",") if (name := part.strip().lower())}
    if unknown := names - set(_CHOICES):
        raise SpecError(
            f"{LOG}={value!r}: there is no {sorted(unknown)[0]!r}; expected "
            f"{', '.join(_CHOICES[:-1])} or {_CHOICES[-1]}, or several with commas"
        )
    known = next((h for h in logger.handlers if isinstance(h, _ToStandardError)), None)
    if known is not None and known.names == names:
        return
    if known is not None:
        logger.removeHandler(known)
    if names:
        logger.addHandler(_ToStandardError(names))
        if not logger.isEnabledFor(logging.INFO):
            logger.setLevel(logging.INFO)


class _ToStandardError(logging.Handler):
    """Prints events of some kinds to what is standard error then."""

    def __init__(self, names: set[str]) -> None:
        super().__init__()
        self.names = names
        self.setFormatter(logging.Formatter("%(asctime)s bucketjit %(message)s"))

    def filter(self, record: logging.LogRecord) -> bool:
        event = record.args[0] if isinstance(record.args, tuple) and record.args else None
        if "all" in self.names or not isinstance(event, Event):
            return True
        return any(event.kind in _KINDS[name] for name in self.names)

    def emit(self, record: logging.LogRecord) -> None:
        if sys.stderr is not None:
            print(self.format(record), file=sys.stderr)
