"""User code that type checkers read and nothing runs: `make types` checks it.

Lines that must be refused say so by an ``ignore`` comment. Where a checker does not refuse one, it
reports the comment.
"""
