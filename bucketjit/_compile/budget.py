"""The compile budget: how many compiles are left, and the messages where none is."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from bucketjit._compile.cache import ExecutableCache
from bucketjit._compile.executable import Executable
from bucketjit._compile.requests import CompileRequest
from bucketjit._config import CompileBudget
from bucketjit._events import LONGEST, Event, printable, shown
from bucketjit._raised import frames_inside
from bucketjit.errors import CompileBudgetError, CompileBudgetWarning

_ADVICE = "Warm the bucket up, or round sizes up to fewer buckets."

_ADVICE_EXACT = "Warm the shape up; explain() tells why calls run exact."


@dataclass
class Spending:
    """How many compiles there were, and how many seconds they took.

    Attributes:
        compiles: The number of compiles, those under way included.
        seconds: Their seconds, those of failed compiles included.
        lock: Protects both numbers.
    """

    compiles: int = 0
    seconds: float = 0.0
    lock: threading.Lock = field(default_factory=threading.Lock)


class Allowance:
    """What may still be compiled.

    Attributes:
        spent: What was compiled since the last `clear`, each of which starts a new object.
    """

    def __init__(
        self,
        name: str,
        budget: CompileBudget,
        cache: ExecutableCache[Any, Executable],
        tell: Callable[[Event], None],
    ) -> None:
        self.spent = Spending()
        self._name = name
        self._budget = budget
        self._cache = cache
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
        """Whether a compile is allowed now."""
        spent = self.spent
        with spent.lock:
            return self._allows(spent)

    def _allows(self, spent: Spending) -> bool:
        """Whether one more compile is within the limits. The lock of ``spent`` is held."""
        budget = self._budget
        return not (
            self._forbidden
            or (budget.compiles is not None and spent.compiles + 1 > budget.compiles)
            or (budget.seconds is not None and spent.seconds >= budget.seconds)
        )

    def spend(self, request: CompileRequest, is_asked_for: bool) -> Spending:
        """Count a compile that is about to begin."""
        spent = self.spent
        # Check and count in one step: several threads may ask for the last compile.
        with spent.lock:
            if self._allows(spent):
                spent.compiles += 1
                return spent
        message = self.refusal(request)
        if not is_asked_for:
            raise CompileBudgetError(message)
        self.tell_refusal(request, message)
        if self._forbidden or self._budget.action == "error":
            raise CompileBudgetError(message)
        warnings.warn(printable(message, LONGEST), CompileBudgetWarning, stacklevel=frames_inside())
        with spent.lock:
            spent.compiles += 1
        return spent

    def tell_refusal(self, request: CompileRequest, message: str) -> None:
        """Emit an event for a compile that is not allowed."""
        # Without the function's name, with which messages begin: the event has it.
        self._tell(Event("budget", self._name, request.sizes, detail=message.split(": ", 1)[1]))

    def refusal(self, request: CompileRequest) -> str:
        """Why an executable may not be compiled and which one is nearest, as a message."""
        sizes = shown(request.logical) or "these arguments"
        wanted = f"{_kind(request.program is None)} {shown(request.sizes) or '()'}"
        return (
            f"{self._name}: a call with {sizes} needs the {wanted}, "
            f"which is not compiled, and {self._limit}. {self._nearest(request)}"
        )

    @property
    def _limit(self) -> str:
        """The limit that forbids a compile, in words."""
        if self._forbidden:
            return "compiles are forbidden (forbid_compiles)"
        budget = self._budget
        limits = [
            f"{limit} {unit}"
            for limit, unit in ((budget.compiles, "compiles"), (budget.seconds, "seconds"))
            if limit is not None
        ]
        return f"the compile budget of {' and '.join(limits)} is spent"

    def _nearest(self, request: CompileRequest) -> str:
        """The compiled bucket nearest to the requested one and what to do, in words."""
        exact = request.program is None
        advice = _ADVICE_EXACT if exact else _ADVICE
        stored = [e for _, e in self._cache.items() if e.sizes.keys() == request.sizes.keys()]
        if not stored:
            return f"No bucket is compiled. {advice}"

        def distance(entry: Executable) -> float:
            return sum(abs(entry.sizes[v] - n) / n for v, n in request.sizes.items() if n)

        nearest = min(stored, key=lambda entry: (distance(entry), entry.exact != exact))
        if nearest.sizes == request.sizes and nearest.exact == exact:
            return (
                "That one is compiled for arguments of other types or shapes, for what this call "
                "is a derivative of, or for sizes at which the function does something else. Make "
                "such a call before, or warm up these very sizes."
            )
        beyond = [v for v, n in request.logical.items() if nearest.sizes.get(v, n) < n]
        which = f" (too small in {', '.join(beyond)})" if beyond else ""
        told = f"{_kind(nearest.exact)} is {shown(nearest.sizes)}{which}"
        return f"The nearest compiled {told}. {advice}"

    def compiled_again(self, entry: Executable) -> None:
        """Count a compile of ``jit`` for arguments placed in a new way, and warn beyond a limit.

        ``jit`` compiles such arguments inside the call of an executable, so it cannot be prevented.
        """
        again = "once more, for arguments that are placed otherwise"
        self._tell(Event("compile", self._name, entry.sizes, detail=again))
        spent = self.spent
        with spent.lock:
            is_allowed = self._allows(spent)
            spent.compiles += 1
        if is_allowed:
            return
        message = (
            f"{self._name}: the {_kind(entry.exact)} {shown(entry.sizes) or '()'} was compiled "
            f"{again} (committed to a device, say) than those before, and {self._limit}. Warm "
            "it up with arguments that are placed like these."
        )
        self._tell(Event("budget", self._name, entry.sizes, detail=message.split(": ", 1)[1]))
        warnings.warn(printable(message, LONGEST), CompileBudgetWarning, stacklevel=frames_inside())


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


def _kind(exact: bool) -> str:
    """How messages call an executable."""
    return "exact shape" if exact else "bucket"
