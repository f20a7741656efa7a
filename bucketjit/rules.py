"""Masking rules of your own: what a function that `BucketedExec.with_rules` takes is made of.

A rule evaluates one primitive on padded operands: ``rule(ctx, *operands)``, where ``ctx`` is a
`RuleContext`.
"""

from bucketjit._masking.rule_context import Rule, RuleContext

__all__ = ["Rule", "RuleContext"]
