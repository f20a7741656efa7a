"""From arguments to a `Program`: their signature, its open axes, and the trace of the function.

`signer` types the arguments of a call; `signature` guesses the open axes and keeps the programs. A
function is traced once with symbolic sizes (`symbolic`). If it refuses them, it is traced at
several concrete sizes, and the traces are compared (`concrete`). The package knows no padded size.
"""
