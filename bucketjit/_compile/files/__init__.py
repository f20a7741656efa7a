"""Executables in files: how a file is written, what is trusted, and which executable it holds.

`directory` reads and writes the files, `store` turns its errors into events, and `stored` makes the
key of an executable and turns bytes into one.
"""
