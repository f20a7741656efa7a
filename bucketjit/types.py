"""The types of options and results: for annotations, and for ``isinstance``.

=====================  ==================================================
class                  returned by
=====================  ==================================================
``Stats``              ``stats``; has ``BucketStats``, ``ProgramStats``, ``LearntBucket``
``Report``             ``report``
``Explanation``        ``explain``; it has ``MaskedEquation``
``MapExplanation``     ``explain_map``
``WarmupReport``       ``warmup``
``CacheInfo``          ``cache_info``
``CompileGuard``       ``forbid_compiles``
``Event``              what ``with_on_event`` passes to a function
``Loaded``             ``bucketjit.load``
=====================  ==================================================

Options: ``DynamicAxes`` is what ``dynamic_axes`` takes, ``Buckets`` what ``buckets`` takes.
"""

from bucketjit._api.loaded import Loaded
from bucketjit._api.options import Buckets, DynamicAxes
from bucketjit._compile.budget import CompileGuard
from bucketjit._compile.cache import CacheInfo
from bucketjit._events import Event
from bucketjit._runtime.rows.map import MapExplanation
from bucketjit._runtime.statistics import BucketStats, LearntBucket, ProgramStats, Stats
from bucketjit._stages.explain import Explanation, MaskedEquation
from bucketjit._stages.report import Report
from bucketjit._stages.warmup import WarmupReport

__all__ = [
    "BucketStats",
    "Buckets",
    "CacheInfo",
    "CompileGuard",
    "DynamicAxes",
    "Event",
    "Explanation",
    "LearntBucket",
    "Loaded",
    "MapExplanation",
    "MaskedEquation",
    "ProgramStats",
    "Report",
    "Stats",
    "WarmupReport",
]
