"""What a function prints while it is traced is shown once; trees of its results.

A function may be traced several times for one call: again after each decision on a size, and at
sizes that nobody has passed. ``print(x.shape)`` in it would print a line each time. So what the
thread that traces prints is held, and that of the last trace for the call is shown: its sizes, or
the names of the variables. Without any, that of the first trace is shown.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from jax.tree_util import PyTreeDef

from bucketjit._ir.closures import holds_a_size
from bucketjit._raised import WithoutErrors

_STRUCTURAL = (type(None), list, tuple)  # containers without auxiliary data


def same_tree(a: object, b: object) -> bool:
    """Whether two trees are equal, their auxiliary data included."""
    with WithoutErrors():  # ``==`` of the data returns an array, or raises
        return bool(a == b)
    return False


def tree_holds_a_size(tree: PyTreeDef, in_tree: Any) -> bool | None:
    """Whether the auxiliary data of a tree holds a symbolic size."""
    answers = [(data, holds_a_size(data)) for data in _data(tree)]
    if any(answer for _, answer in answers):
        return True
    opaque = [data for data, answer in answers if answer is None]
    # Opaque data that came with the arguments was made before the trace.
    arguments = list(_data(in_tree)) if opaque else []
    is_old = all(any(x is y or same_tree(x, y) for y in arguments) for x in opaque)
    return False if is_old else None


def _data(tree: PyTreeDef) -> Iterator[Any]:
    """The auxiliary data of each container of a tree."""
    node = tree.node_data()
    if node is None:
        return
    kind, data = node
    if kind not in _STRUCTURAL and data is not None:
        yield data
    for child in tree.children():
        yield from _data(child)


Show = Callable[[], object]

_thread = threading.local()  # `held`: the `Held` of the thread, or None
_lock = threading.Lock()
_users = 0  # threads that hold output; the streams are replaced while it is > 0


class Held:
    """Output of the traces for one call.

    Attributes:
        traces: What shows the output of each trace.
        is_dropped: Whether nobody sees it: the function runs once more, or nobody has its sizes.
    """

    def __init__(self) -> None:
        self.traces: list[list[Show]] = [[]]
        self.is_dropped = False

    def show(self) -> None:
        """Show the output of the last trace, or of the first that has some."""
        some = [trace for trace in self.traces if trace]
        for show in [] if self.is_dropped or not some else self.traces[-1] or some[0]:
            show()


def _held() -> Held | None:
    return getattr(_thread, "held", None)


@contextmanager
def holding_output() -> Iterator[Held]:
    """Hold the output of this thread, and show at the end what is to be shown."""
    held, before = Held(), _held()
    _replace_streams(1)
    _thread.held = held
    try:
        yield held
    finally:
        _thread.held = before
        _replace_streams(-1)
        held.show()


def begin_trace() -> None:
    """Say that another trace begins; the output of those before counts only without its own."""
    if held := _held():
        held.traces.append([])


class _Stream:
    def __init__(self, name: str, plain: Any) -> None:
        self._name = name
        # A thread may have put back the stream of an earlier hook, after this was removed.
        self.plain: Any = plain.plain if isinstance(plain, _Stream) else plain

    def write(self, text: str) -> int:
        held = _held()
        # A debugger (``breakpoint()`` in the function) waits for answers to what it writes.
        if held is None or sys.gettrace() is not None:
            return int(self.plain.write(text) or 0)
        # It is shown where output goes then.
        held.traces[-1].append(lambda: getattr(sys, self._name).write(text))
        return len(text)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.plain, name)


def _replace_streams(change: int) -> None:
    """Count the users of the streams; replace them for the first, put them back after the last."""
    global _users
    with _lock:
        _users += change
        for name in ("stdout", "stderr"):
            stream = getattr(sys, name)
            if change > 0 and _users == 1 and stream is not None:
                setattr(sys, name, _Stream(name, stream))
            elif _users == 0 and isinstance(stream, _Stream):
                setattr(sys, name, stream.plain)
