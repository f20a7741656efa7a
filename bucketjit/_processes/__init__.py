"""Calls that several processes of one job make together: the same bucket on all of them."""
