"""What a function prints, logs and warns of while it is traced is shown once; trees of its results.

A function may be traced several times for one call: again after each decision on a size, and at
sizes that nobody has passed. ``print(x.shape)`` in it would print a line each time. So output is
held while a call is traced, and that of the last trace for the call is shown: its sizes, or the
names of the variables. Output at other sizes is dropped.

Only the thread that traces is concerned. What the function shows once only, in a trace that is not
the last one, is not lost: without output of the last trace that of the first one is shown, and each
line that warns is heard once.
"""

from __future__ import annotations

import functools
import logging
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
from jax.tree_util import PyTreeDef

from bucketjit._ir.closures import holds_a_size
from bucketjit._raised import is_of_machine

_STRUCTURAL = (type(None), list, tuple)  # containers without auxiliary data


def flat(count: int) -> Any:
    """The tree of a tuple with ``count`` leaves."""
    return jax.tree_util.tree_structure((0,) * count)


def same_tree(a: object, b: object) -> bool:
    """Whether two trees are equal, their auxiliary data included."""
    try:
        return bool(a == b)
    except Exception as error:  # ``==`` of the data returns an array, or raises
        if is_of_machine(error):
            raise
        return False


def tree_holds_a_size(tree: PyTreeDef, given: object) -> bool | None:
    """Whether the auxiliary data of a tree holds a symbolic size."""
    answers: set[bool | None] = {False}
    came: list[Any] | None = None
    for data in _data(tree):
        answer = holds_a_size(data)
        if answer is None:  # opaque data that came with the arguments was made before the trace
            came = list(_data(given)) if came is None else came
            is_given = any(data is other or same_tree(data, other) for other in came)
            answer = False if is_given else None
        answers.add(answer)
    return True if True in answers else None if None in answers else False


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
_users = 0  # threads that hold output; the hooks are installed while it is > 0
_hooked: list[tuple[Any, str, Any, Any]] = []  # an owner, a name, and what it is and was

_NOT_HELD = ("jax", "jaxlib", "bucketjit")  # loggers whose records are no output of the function


class Held:
    """Output of the traces for one call.

    Attributes:
        traces: What shows the output of each trace.
        warned: What shows each warning, by its place.
        is_dropped: Whether the call shows it otherwise: its function runs once more.
        is_kept: Whether it outlives the trace, so that it must not keep arguments alive.
    """

    def __init__(self, is_kept: bool = False) -> None:
        self.traces: list[list[Show]] = [[]]
        self.warned: dict[Any, Show] = {}
        self.is_dropped = False
        self.is_kept = is_kept
        self.impl = _impl_of_warnings()

    def show(self) -> None:
        """Show the output of the last trace, or of the first that has some, and all warnings."""
        some = [trace for trace in self.traces if trace]
        shown = [] if self.is_dropped or not some else self.traces[-1] or some[0]
        for show in (*shown, *self.warned.values()):
            show()


def _impl_of_warnings() -> tuple[Any, Any]:
    """What collects or shows warnings now; ``catch_warnings(record=True)`` replaces it."""
    return getattr(warnings, "_showwarnmsg_impl", None), warnings.showwarning


def _held() -> Held | None:
    return getattr(_thread, "held", None)


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
    held = Held(is_kept=True)
    with _into(held):
        yield held


@contextmanager
def _into(held: Held) -> Iterator[None]:
    """Have the output of this thread held."""
    before = _held()
    _install(1)
    _thread.held = held
    try:
        yield
    finally:
        _thread.held = before
        _install(-1)


def tell(held: Held) -> None:
    """Show the output of a trace, or hand it to the context that holds that of this thread."""
    outer = _held()
    if outer is None:
        held.show()
    else:
        outer.traces.append([show for trace in held.traces for show in trace])
        outer.warned.update(held.warned)


@contextmanager
def at_sizes_of_nobody() -> Iterator[None]:
    """A context for traces at sizes that no call has passed: `is_for_a_call` is False in it."""
    before = is_for_a_call()
    _thread.is_for_a_call = False
    try:
        yield
    finally:
        _thread.is_for_a_call = before


def is_for_a_call() -> bool:
    """Whether this thread traces at the sizes of a call."""
    return getattr(_thread, "is_for_a_call", True)


def begin_trace() -> None:
    """Say that another trace begins; the output of those before counts only without its own."""
    if held := _held():
        held.traces.append([])


class _Stream:
    """A stream whose text is held where its thread holds output."""

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


def _holding_records(plain: Callable[..., Any]) -> Callable[..., Any]:
    def call_handlers(self: logging.Logger, record: logging.LogRecord) -> None:
        held = _held()
        if held is None or record.name.split(".")[0] in _NOT_HELD:
            plain(self, record)
            return
        if held.is_kept:
            record.msg, record.args = record.getMessage(), ()
        held.traces[-1].append(lambda: plain(self, record))

    return call_handlers


def _holding_warnings(plain: Callable[..., Any]) -> Callable[..., Any]:
    def show(message: Any) -> None:
        held = _held()
        # Not if the function itself collects its warnings.
        if held is None or _impl_of_warnings() != held.impl:
            plain(message)
        else:
            place = message.category, message.filename, message.lineno
            held.warned[place] = lambda: plain(message)

    return show


_HOOKS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (sys, "stdout", functools.partial(_Stream, "stdout")),
    (sys, "stderr", functools.partial(_Stream, "stderr")),
    (logging.Logger, "callHandlers", _holding_records),
    (warnings, "_showwarnmsg", _holding_warnings),
)


def _install(change: int) -> None:
    """Count the users of the hooks; install them for the first, remove them after the last."""
    global _users
    with _lock:
        _users += change
        if change > 0 and _users == 1:
            for owner, name, hook in _HOOKS:
                if (plain := getattr(owner, name)) is not None:
                    _hooked.append((owner, name, hook(plain), plain))
                    setattr(owner, name, _hooked[-1][2])
        elif _users == 0:
            while _hooked:
                owner, name, hook, plain = _hooked.pop()
                if getattr(owner, name) is hook:  # nobody else has replaced it since
                    setattr(owner, name, getattr(hook, "plain", plain))
