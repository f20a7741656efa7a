"""Strategies: policies that round a logical size up to a bucket.

==================  ==========================================  ===============================
strategy            buckets                                     choose it for
==================  ==========================================  ===============================
``Pow2``            powers of two                               sizes of unknown spread
``SizeClasses``     powers of two and equal steps between       the same with less padding
``Exponential``     powers of any base                          less padding than ``Pow2``
``BoundedWaste``    as few as a bound on padding allows         a share of padding to keep
``Linear``          multiples of a step                         a narrow range of sizes
``Boundaries``      the sizes you list                          a known distribution of sizes
``Optimal.fit``     fitted to the sizes seen                    the least padding
``Adaptive``        fitted while it runs                        sizes not known beforehand
``MultipleOf``      another's, rounded up                       meshes and tiles
``Exact``           every size                                  dimensions that hardly vary
==================  ==========================================  ===============================

`assess` returns how many executables a strategy needs for some sizes and how much it pads.
`buckets_of` lists the buckets of a strategy that has a largest one. `Joint` plans buckets of
several variables together. Your own strategy is any object with a ``bucket(n: int) -> int`` method
that keeps the contract of :class:`Strategy`.
"""

from bucketjit.strategies.adaptive import Adaptive, Replan
from bucketjit.strategies.assessment import Assessment, assess, assess_joint
from bucketjit.strategies.base import Strategy, checked_bucket
from bucketjit.strategies.boundaries import Boundaries
from bucketjit.strategies.bounded_waste import BoundedWaste
from bucketjit.strategies.exact import Exact
from bucketjit.strategies.exponential import Exponential
from bucketjit.strategies.joint import Joint
from bucketjit.strategies.linear import Linear
from bucketjit.strategies.listing import buckets_of
from bucketjit.strategies.multiple_of import MultipleOf
from bucketjit.strategies.optimal import Optimal
from bucketjit.strategies.pow2 import Pow2
from bucketjit.strategies.size_classes import SizeClasses

__all__ = [
    "Adaptive",
    "Assessment",
    "Boundaries",
    "BoundedWaste",
    "Exact",
    "Exponential",
    "Joint",
    "Linear",
    "MultipleOf",
    "Optimal",
    "Pow2",
    "Replan",
    "SizeClasses",
    "Strategy",
    "assess",
    "assess_joint",
    "buckets_of",
    "checked_bucket",
]
