"""Says in one line what bucketing has saved: compiles against padding."""

from __future__ import annotations

import statistics
from collections.abc import Mapping
from typing import Any

from bucketjit._events import counted

SHAPES_KEPT = 2**14  # different shapes of calls that are counted


def summary_of(stats: Mapping[str, Any]) -> str | None:
    """What bucketing has saved, in one line.

    Args:
        stats: The fields of a `bucketjit.types.Stats`.

    Returns:
        The line; None if a field that it needs is missing, as other versions may have others.

    Raises:
        Exception: A field read from JSON has another type than in a snapshot.

    Examples:
        >>> stats = dict(calls=90, compiles=6, loads=0, compile_seconds=1.05, fallback_calls=0)
        >>> stats |= dict(buckets=[], padding_waste=0.18)
        >>> summary_of({**stats, "shapes": 46})
        '46 shapes, 6 executables: 40 compiles, about 7 s, saved; padding 18 %'
        >>> summary_of({**stats, "shapes": 4})
        '4 shapes, 6 executables: no compile saved yet; padding 18 %'
    """
    try:
        calls, shapes, compiles = stats["calls"], stats["shapes"], stats["compiles"]
        seconds, waste, fallbacks = (
            stats[name] for name in ("compile_seconds", "padding_waste", "fallback_calls")
        )
        # The first includes those that were evicted, the second those from before a reset.
        executables = max(compiles + stats["loads"], len(stats["buckets"]))
    except KeyError:
        return None
    built = counted(executables, "executable")
    if not calls:
        return f"no calls yet{f', {built} ready' if executables else ''}"
    least = "at least " if shapes >= SHAPES_KEPT else ""
    # Calls that run one operation at a time have no shape to compile for.
    called = f"{least}{counted(shapes, 'shape')}" if shapes else counted(calls, "call")
    saved = shapes - executables
    if saved > 0:
        about = f", about {_shown(saved * _usual(stats))}," if compiles and seconds else ""
        told = f"{least}{counted(saved, 'compile')}{about} saved"
    elif fallbacks >= calls:
        told = "no compile saved, because every call ran at its exact shape"
    else:
        told = "no compile saved yet"
    parts = [f"{called}, {built}: {told}"]
    if fallbacks < calls:
        parts.append(f"padding {_percent(waste)}")
        if fallbacks:
            parts.append(f"{fallbacks:,} of {counted(calls, 'call')} ran at the exact shape")
    return "; ".join(parts)


def _usual(stats: Mapping[str, Any]) -> float:
    """Seconds of a usual compile: those in the background also wait, so the mean may be far off."""
    mean = stats["compile_seconds"] / stats["compiles"]
    if stats["loads"]:
        return mean  # seconds of buckets may be those of reading a file
    buckets = (b if isinstance(b, Mapping) else vars(b) for b in stats["buckets"])
    each = [b["compile_seconds"] for b in buckets if "compile_seconds" in b]
    return min(mean, statistics.median_low(each)) if each else mean


def _percent(share: float) -> str:
    """A share as text; one that is not 0 is not rounded to it."""
    return "under 1 %" if 0 < share < 0.005 else f"{100 * share:.0f} %"


def _shown(seconds: float) -> str:
    """A rough duration as text."""
    if seconds < 0.1:
        return f"{max(1e3 * seconds, 1):.0f} ms"
    if seconds < 120:
        return f"{seconds:.1f} s" if seconds < 2 else f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
