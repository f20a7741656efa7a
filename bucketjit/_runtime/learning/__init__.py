"""Learns buckets from calls. The door is `learning`: others import from it.

`learner` is the algorithm. It gets sizes and seconds, and does not import JAX.
"""
