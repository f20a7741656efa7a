"""Calls that were made before: what was proposed for them, and the handlers of agreed buckets.

The fast path of one process goes from the shapes of the arguments to a handler. Here the exchange
is between the two: from the shapes to the proposal, and from the agreed bucket to the handler.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from typing import Any, Generic, TypeVar

from bucketjit._runtime.engine import Engine
from bucketjit._runtime.fast_path.dispatch import CallArguments, DispatchTable
from bucketjit._runtime.fast_path.handler import Handler
from bucketjit._runtime.fast_path.layout import Layout, arguments_of, layout_of
from bucketjit._runtime.fast_path.memory import RememberedCalls, ServedCall
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall

V = TypeVar("V")

_MOST = 4096  # calls whose proposal is remembered

Given = tuple[tuple[Any, ...], Mapping[str, Any]]  # the arguments of a call


class Recall(Generic[V]):
    """Remembers the calls of one engine. It is emptied when the engine is."""

    def __init__(self) -> None:
        self._epoch: object = None
        self._version = 0
        self._tables: dict[Layout, DispatchTable] = {}
        self._proposed: dict[Hashable, V] = {}
        self._of_buckets: dict[str, RememberedCalls] = {}

    def proposed(self, engine: Engine, given: Given, tree: Any) -> V | None:
        """What was proposed for a call of the same shapes; None for a new one.

        Args:
            engine: The engine.
            given: The arguments of the call.
            tree: The tree of its leaves.
        """
        if engine.provider.epoch is not self._epoch or engine.refusals.version != self._version:
            self._epoch, self._version = engine.provider.epoch, engine.refusals.version
            self.forget()
        for layout, table in self._tables.items():
            try:
                found = self._proposed.get((layout, table.key(*given), tree))
            except TypeError:  # a static argument that cannot be hashed
                return None
            if found is not None:
                return found
        return None

    def forget(self) -> None:
        """Forget all calls."""
        self._tables.clear()
        self._proposed.clear()
        self._of_buckets.clear()

    def propose(self, signed: SignedCall, call: ResolvedCall, given: Given, proposal: V) -> None:
        """Remember what was proposed for a call.

        Args:
            signed: The call.
            call: The same call, resolved.
            given: Its arguments.
            proposal: What was proposed.
        """
        opened = signed.signature.open_leaves(call.tokens)
        layout = layout_of(signed, opened, *given, arguments_of(signed, *given))
        if layout is None:
            return
        if len(self._proposed) >= _MOST:
            self._proposed.clear()
        table = self._tables.setdefault(layout, DispatchTable(layout, None))
        self._proposed[layout, table.key(*given), signed.tree] = proposal

    def handler(self, name: str, given: Given) -> Handler | None:
        """The handler of a call in the agreed bucket; None if the slow path has to serve it.

        Args:
            name: The name of the executable.
            given: The arguments of the call.
        """
        memory = self._of_buckets.get(name)
        return None if memory is None else memory.fast_path.find(*given)

    def remember(
        self,
        engine: Engine,
        name: str,
        signed: SignedCall,
        call: ResolvedCall,
        given: Given,
        served: ServedCall,
    ) -> None:
        """Let the next call of the same shapes in the same bucket be served by a handler.

        Args:
            engine: The engine.
            name: The name of the executable.
            signed: The call.
            call: The same call, resolved.
            given: Its arguments.
            served: How it was served.
        """
        memory = self._of_buckets.get(name)
        if memory is None:
            memory = RememberedCalls(engine.cache, engine.counters, engine.lock)
            self._of_buckets[name] = memory
            with engine.lock:
                engine.memories_apart.add(memory)
        memory.add_masked(signed, CallArguments(*given), call, served)
