collect_ignore = ["bucketed.py"]  # type checkers read it, nothing runs it
