"""The compile budget: how many compiles are left, and the messages where none is."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import CompileRequest
from bucketjit._config import CompileBudget
from bucketjit._events import Event, shown, warn
from bucketjit.errors import CompileBudgetError, CompileBudgetWarning


@dataclass
class Spending:
    """How many compiles there were, those under way included, and how many seconds they took."""

    compiles: int = 0
    seconds: float = 0.0


class Allowance:
    """What may still be compiled; ``spent`` is a new object after each `clear`."""

    def __init__(self, name: str, budget: CompileBudget, tell: Callable[[Event], None]) -> None:
        self.spent = Spending()
        self._name = name
        self._budget = budget
        self._tell = tell
        self._forbidden = 0  # how many `CompileGuard`s are in force
        self._lock = threading.Lock()

    def clear(self) -> None:
        """Start counting again. Compiles under way count towards the old object."""
        self.spent = Spending()

    def forbid(self, by: int) -> None:
        """Forbid all compiles, or end one such ban."""
        with self._lock:
            self._forbidden = max(0, self._forbidden + by)

    def affordable(self) -> bool:
        budget, spent = self._budget, self.spent
        return not (
            self._forbidden
            or (budget.compiles is not None and spent.compiles + 1 > budget.compiles)
            or (budget.seconds is not None and spent.seconds >= budget.seconds)
        )

    def build(
        self, request: CompileRequest, is_asked_for: bool, stored: Iterable[Executable]
    ) -> Executable:
        """Compile a request; `CompileBudgetError` if that is not allowed. Failures cost seconds."""
        spent = self._begin()
        if spent is None:
            message = self._refusal(request, stored)
            if not is_asked_for:
                raise CompileBudgetError(message)
            self.tell_refusal(request, message)
            if self._forbidden or self._budget.action == "error":
                raise CompileBudgetError(message)
            warn(message, CompileBudgetWarning)
            spent = self._begin(is_free=True)
        assert spent is not None
        began, failed = time.perf_counter(), 1
        try:
            built = request.build()
            failed = 0
        finally:
            with self._lock:
                spent.compiles -= failed
                spent.seconds += time.perf_counter() - began
        return built

    def _begin(self, is_free: bool = False) -> Spending | None:
        """Count a compile in one step with the check: several threads may ask for the last one."""
        with self._lock:
            if not is_free and not self.affordable():
                return None
            self.spent.compiles += 1
            return self.spent

    def compiled_again(self, entry: Executable) -> None:
        """Count a compile of ``jit`` for arguments placed in a new way, and warn beyond a limit.

        ``jit`` compiles such arguments inside the call of an executable, so it cannot be prevented.
        """
        again = "once more, for arguments that are placed otherwise"
        self._tell(Event("compile", self._name, entry.sizes, detail=again))
        if self._begin() is not None:
            return
        self._begin(is_free=True)
        what = (
            f"the {_kind(entry.exact)} {shown(entry.sizes) or '()'} was compiled {again} "
            f"(committed to a device, say) than those before, and {self._limit}. Warm it up with "
            "arguments that are placed like these."
        )
        self._tell(Event("budget", self._name, entry.sizes, detail=what))
        warn(f"{self._name}: {what}", CompileBudgetWarning)

    def tell_refusal(self, request: CompileRequest, message: str) -> None:
        detail = message.removeprefix(f"{self._name}: ")  # the event has the name
        self._tell(Event("budget", self._name, request.sizes, detail=detail))

    def _refusal(self, request: CompileRequest, stored: Iterable[Executable]) -> str:
        """Why an executable may not be compiled and which one is nearest, as a message."""
        sizes = shown(request.call.sizes) or "these arguments"
        wanted = f"{_kind(request.program is None)} {shown(request.sizes) or '()'}"
        return (
            f"{self._name}: a call with {sizes} needs the {wanted}, which is not compiled, and "
            f"{self._limit}. {_nearest(request, stored)}"
        )

    @property
    def _limit(self) -> str:
        """The limit that forbids a compile, in words."""
        if self._forbidden:
            return "compiles are forbidden (forbid_compiles)"
        limits = (self._budget.compiles, "compiles"), (self._budget.seconds, "seconds")
        words = " and ".join(f"{limit} {unit}" for limit, unit in limits if limit is not None)
        return f"the compile budget of {words} is spent"


class CompileGuard:
    """Forbids compiles until it is released, or until its ``with`` block ends.

    Args:
        allowance: The allowance under which nothing may be compiled meanwhile.
    """

    def __init__(self, allowance: Allowance) -> None:
        self._allowance: Allowance | None = allowance
        allowance.forbid(1)

    def release(self) -> None:
        """Allow compiles again, unless another guard forbids them. A second call does nothing."""
        allowance, self._allowance = self._allowance, None
        if allowance is not None:
            allowance.forbid(-1)

    def __enter__(self) -> CompileGuard:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def _nearest(request: CompileRequest, stored: Iterable[Executable]) -> str:
    """The compiled bucket nearest to the requested one and what to do, in words."""
    exact = request.program is None
    advice = "Warm the bucket up, or round sizes up to fewer buckets."
    if exact:
        advice = "Warm the shape up; explain() tells why calls run exact."
    like = [entry for entry in stored if entry.sizes.keys() == request.sizes.keys()]
    if not like:
        return f"No bucket is compiled. {advice}"

    def distance(entry: Executable) -> tuple[float, bool]:
        apart = sum(abs(entry.sizes[v] - n) / n for v, n in request.sizes.items() if n)
        return apart, entry.exact != exact

    nearest = min(like, key=distance)
    if nearest.sizes == request.sizes and nearest.exact == exact:
        return (
            "That one is compiled for arguments of other types or shapes, for what this call is a "
            "derivative of, or for sizes at which the function does something else. Make such a "
            "call before, or warm up these very sizes."
        )
    small = [v for v, n in request.call.sizes.items() if nearest.sizes.get(v, n) < n]
    which = f" (too small in {', '.join(small)})" if small else ""
    phrase = f"{_kind(nearest.exact)} is {shown(nearest.sizes)}{which}"
    return f"The nearest compiled {phrase}. {advice}"


def _kind(exact: bool) -> str:
    return "exact shape" if exact else "bucket"
