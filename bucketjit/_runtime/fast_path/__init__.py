"""The warm path: how calls with known shapes are served without signing them again.

Whoever changes a line here measures it: a warm call costs a few microseconds in all.
"""
