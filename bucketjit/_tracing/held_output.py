"""What a function prints, logs and warns of while it is traced is shown once.

A function may be traced several times for one call: again after each decision on a size, and at
sizes that nobody has passed. ``print(x.shape)`` in it would print a line each time. So output is
held while a call is traced, and that of the last trace for the call is shown: its sizes, or the
names of the variables. Output at other sizes is dropped.

Only the thread that traces is concerned. What the function shows once only, in a trace that is not
the last one, is not lost: without output of the last trace that of the first one is shown, and each
line that warns is heard once.
"""

from __future__ import annotations

import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

Show = Callable[[], object]

_thread = threading.local()  # `held`: the `Held` of the thread, or None
_lock = threading.Lock()
_users = 0  # threads that hold output; the hooks are installed while it is > 0

_NOT_HELD = ("jax", "jaxlib", "bucketjit")  # loggers whose records are no output of the function


class Held:
    """Output of the traces for one call.

    Attributes:
        is_dropped: Whether the call shows it otherwise: its function runs once more.
        is_kept: Whether it outlives the trace, so that it must not keep arguments alive.
    """

    def __init__(self) -> None:
        self.is_dropped = False
        self.is_kept = False
        self._traces: list[list[Show]] = [[]]
        self._warned: dict[Any, Show] = {}
        self._impl = _impl_of_warnings()

    def begin(self) -> None:
        """Begin another trace."""
        self._traces.append([])

    def add(self, show: Show) -> None:
        """Hold what shows some output."""
        self._traces[-1].append(show)

    def warn(self, message: Any, show: Show) -> bool:
        """Hold a warning; False if the function itself collects its warnings."""
        if _impl_of_warnings() != self._impl:
            return False
        self._warned[message.category, message.filename, message.lineno] = show
        return True

    def take(self, other: Held) -> None:
        """Hold what another one holds, as the output of another trace."""
        self.begin()
        for trace in other._traces:
            self._traces[-1] += trace
        self._warned.update(other._warned)

    def show(self) -> None:
        """Show what is to be shown."""
        some = [trace for trace in self._traces if trace]
        shown = [] if self.is_dropped or not some else self._traces[-1] or some[0]
        for show in (*shown, *self._warned.values()):
            show()


def _impl_of_warnings() -> tuple[Any, Any]:
    """What collects or shows warnings now; ``catch_warnings(record=True)`` replaces it."""
    return getattr(warnings, "_showwarnmsg_impl", None), warnings.showwarning


@contextmanager
def holding_output() -> Iterator[Held]:
    """Hold the output of this thread, and show at the end what is to be shown."""
    held = Held()
    try:
        with _into(held):
            yield held
    finally:
        held.show()


@contextmanager
def keeping_output() -> Iterator[Held]:
    """Hold the output of one trace of this thread, for `tell`."""
    held = Held()
    held.is_kept = True
    with _into(held):
        yield held


@contextmanager
def _into(held: Held) -> Iterator[None]:
    """Have the output of this thread held."""
    before = getattr(_thread, "held", None)
    _install(1)
    _thread.held = held
    try:
        yield
    finally:
        _thread.held = before
        _install(-1)


def tell(held: Held) -> None:
    """Show the output of a trace, or hand it to the context that holds that of this thread."""
    outer = getattr(_thread, "held", None)
    if outer is None:
        held.show()
    else:
        outer.take(held)


@contextmanager
def at_sizes_of_nobody() -> Iterator[None]:
    """A context for traces at sizes that no call has passed: `is_for_a_call` is False in it."""
    before = getattr(_thread, "is_for_nobody", False)
    _thread.is_for_nobody = True
    try:
        yield
    finally:
        _thread.is_for_nobody = before


def is_for_a_call() -> bool:
    """Whether this thread traces at the sizes of a call."""
    return not getattr(_thread, "is_for_nobody", False)


def begin_trace() -> None:
    """Say that another trace begins; the output of those before counts only without its own."""
    held = getattr(_thread, "held", None)
    if held is not None:
        held.begin()


class _Stream:
    """A stream whose text is held where its thread holds output."""

    def __init__(self, name: str, plain: Any) -> None:
        self.name_in_sys = name
        self.plain = plain

    def write(self, text: str) -> int:
        held = getattr(_thread, "held", None)
        # A debugger (``breakpoint()`` in the function) waits for answers to what it writes.
        if held is None or sys.gettrace() is not None:
            return int(self.plain.write(text) or 0)
        held.add(lambda: getattr(sys, self.name_in_sys).write(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _install(change: int) -> None:
    """Count the users of the hooks; install them for the first, remove them after the last."""
    global _users
    with _lock:
        _users += change
        if change > 0 and _users == 1:
            _hook()
        elif _users == 0:
            _unhook()


def _hook() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is not None and not isinstance(stream, _Stream):
            setattr(sys, name, _Stream(name, stream))
    logging.Logger.callHandlers = _held_record  # type: ignore[method-assign]
    warnings._showwarnmsg = _held_warning  # type: ignore[attr-defined]


def _unhook() -> None:
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if isinstance(stream, _Stream):
            setattr(sys, name, stream.plain)
    logging.Logger.callHandlers = _plain_record  # type: ignore[method-assign]
    warnings._showwarnmsg = _plain_warning  # type: ignore[attr-defined]


_plain_record = logging.Logger.callHandlers
_plain_warning: Any = warnings._showwarnmsg  # type: ignore[attr-defined]


def _held_record(self: logging.Logger, record: logging.LogRecord) -> None:
    held = getattr(_thread, "held", None)
    if held is None or record.name.split(".")[0] in _NOT_HELD:
        _plain_record(self, record)
        return
    if held.is_kept:
        record.msg, record.args = record.getMessage(), ()
    held.add(lambda: _plain_record(self, record))


def _held_warning(message: Any) -> None:
    held = getattr(_thread, "held", None)
    if held is None or not held.warn(message, lambda: _plain_warning(message)):
        _plain_warning(message)
