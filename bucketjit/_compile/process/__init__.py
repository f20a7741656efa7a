"""Compile in another process, which yields the cores while this one is at work.

XLA compiles on CPU with its own threads, one per core. They compete with calls that run at the
same time, and the priority of the thread that requests the compile does not reach them. A separate
process can be held back: it gets only idle time, and is halted for part of that too. `pool` starts
the processes and sends them programs, `throttle` is the process that is started and halts the
compiler, `worker` is the compiler, and `messages` are what is sent.
"""
