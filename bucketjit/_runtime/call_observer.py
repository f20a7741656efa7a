"""What an engine tells of its calls to an observer, which learns from them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall


class CallObserver(Protocol):
    """Learns from masked calls after they ran; see `bucketjit._precompile.adaptive`."""

    def learn(self, signed: SignedCall, call: ResolvedCall) -> None:
        """Remember a call as an example of its signature; called on the slow path only."""

    def note(self, sizes: Mapping[str, int]) -> None:
        """Count a call of these logical sizes; called for every call, on the fast path too."""
