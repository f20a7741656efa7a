"""Strategies: policies that round a logical size up to a bucket.

==================  ==========================================  ===============================
strategy            buckets                                     choose it for
==================  ==========================================  ===============================
``Pow2``            powers of two                               sizes of unknown spread
``Exponential``     powers of any base                          less padding than ``Pow2``
``Linear``          multiples of a step                         a narrow range of sizes
``Boundaries``      the sizes you list                          a known distribution of sizes
``Exact``           every size                                  dimensions that hardly vary
==================  ==========================================  ===============================

Your own strategy is any object with a ``bucket(n: int) -> int`` method that keeps the contract
of :class:`Strategy`.
"""

from bucketjit.strategies.base import Strategy as Strategy
from bucketjit.strategies.base import checked_bucket as checked_bucket
from bucketjit.strategies.boundaries import Boundaries as Boundaries
from bucketjit.strategies.exact import Exact as Exact
from bucketjit.strategies.exponential import Exponential as Exponential
from bucketjit.strategies.linear import Linear as Linear
from bucketjit.strategies.pow2 import Pow2 as Pow2
