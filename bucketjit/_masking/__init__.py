"""A traced program at padded sizes: the interpreter, what it gives to rules, and its passes.

The interpreter knows no primitive: the table of `bucketjit._masking.rules` is an argument. The
package may import `bucketjit._tracing` and what is below it, and knows no bucket and no call.
"""
