"""Compile in a process of its own, which stands back while this one is at work.

XLA compiles on CPU with threads of its own, as many as there are cores. Nothing makes them give
way to a call that runs at the same time, and the priority of whoever asks does not reach them. A
process can be made to: it gets only what time is left over, and is halted for some of that too.
"""
