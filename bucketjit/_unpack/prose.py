"""The parts of the README of an unpacked file that are the same for all files."""

HEAD = """\
# `{name}`, unpacked

This folder holds a function as plain StableHLO modules and raw arrays. Any program that can run
StableHLO can serve it: through a PJRT plugin (from C, C++, Rust, Go, ...) or with IREE. Neither
Python nor JAX is needed. `python -m bucketjit unpack` wrote it, from `{source}`.

The arrays of a call may differ in size from call to call, but a module has fixed sizes. So there
are several modules, one for each *bucket*: a set of padded sizes. To serve a call, pad its arrays
with zeros to the sizes of a bucket, tell the module the true sizes, run it, and cut the results.
The module masks the padding, so the results are those of the unpadded arrays: no mean, softmax or
sort sees it.
"""

PROGRAMS = """\
The Python code took several ways, depending on the sizes. So there are several *programs*, each
with guards and with buckets of its own. Take the first program whose guards hold.
"""

BUCKETS = """\
A bucket serves every call whose sizes are at most its own. Buckets are listed from small to large:
the first that serves a call costs least.
"""

CALL = """\
## A call

1. Find the sizes. `layout.json` says for each variable, under `sizes`, which axis of which argument
   to look at: its size, minus `minus`, divided by `divide_by`. (An argument with `is_size` is
   itself the size; `axis` is null.) The order is one in which each needs earlier variables alone.
   A division that leaves a rest means that the call is wrong, and so does an argument whose shape
   is not that of `arguments` at these sizes.
2. Take the first of `programs` whose `guards` hold, and in it the first of `buckets` whose `sizes`
   are all at least those of the call. If there is none, this file does not serve the call.
3. Pass to the bucket's `main` its `inputs`, in this order. Each has a `kind`:
   - `constant`: the array of that number in `constants`. Upload it once, for all buckets.
   - `sizes`: the true sizes, an int32 vector in the order of `variables`.
   - `argument`: the argument of that number, padded at the end of each axis to `shape`.
     **Pad with zeros.** The module relies on it.
   - `size_constant`: see the end of this page, if there is such a kind.
4. Cut each result: of every axis keep the first elements, as many as the shape under `results`
   says at the sizes of the call. What is behind them is 0.
"""

CODE = """\
## In code

    call(arguments):
        for program in layout.programs:
            sizes = {}
            for s in program.sizes:
                n = arguments[s.argument].shape[s.axis]     # the argument itself, if axis is null
                sizes[s.variable] = (n - value(s.minus, sizes)) / value(s.divide_by, sizes)
            if not all(compare(g.op, value(g.left, sizes), value(g.right, sizes))
                       for g in program.guards):
                continue
            for bucket in program.buckets:
                if all(sizes[v] <= bucket.sizes[v] for v in sizes):
                    return run(program, bucket, sizes, arguments)
        error("no module serves these sizes")

    run(program, bucket, sizes, arguments):
        inputs = []
        for x in bucket.inputs:
            if x.kind == "constant":  inputs.append(constants[x.constant])
            if x.kind == "sizes":     inputs.append(int32([sizes[v] for v in program.variables]))
            if x.kind == "argument":  inputs.append(pad_with_zeros(arguments[x.argument], x.shape))
        results = execute(bucket.modules[platform], inputs)
        return [result[[0 : value(d, sizes)] for d in shape]
                for result, shape in zip(results, program.results)]

`layout` is the first of `functions` in `layout.json`.
"""

EXPRESSIONS = """\
## Expressions of sizes

`value(tree, sizes)` is: a number itself; for a text, the size of the variable of that name; for an
object, its operation `op` on the two values of `args`. Operations are `add`, `sub`, `mul`, `max`,
`min`, `pow`, `floordiv` (rounded down, to minus infinity) and `mod` (what `floordiv` leaves). All
are of whole numbers of 64 bits. A guard in which something is divided by zero does not hold.
"""

RUNNING = """\
## Running the modules

Platforms: {platforms}. A `.mlirbc` file is a StableHLO portable artifact.

- PJRT: give the bytes of the file to `PJRT_Client_Compile`, as a `PJRT_Program` of format `"mlir"`,
  with one replica and one partition. Each result is a buffer of its own.
- IREE: the file is an input of `iree-compile`; call `main` of what it makes.

      iree-compile --iree-input-type=stablehlo --iree-hal-target-device=local \\
          --iree-hal-local-target-device-backends=llvm-cpu --iree-llvmcpu-target-cpu=host \\
          "{file}" -o out.vmfb
      iree-run-module --module=out.vmfb --device=local-task --function=main --input=...

  An input from a file is `--input=8x16xf32=@constants/0.bin`, the sizes are `--input=2xi32=3,5`.
  IREE 3.13 does not skip updates of a scatter whose index is out of bounds, as StableHLO wants, and
  may crash. Modules of functions that write to positions (`x.at[i].set`) or compute sizes need
  another runtime.
- StableHLO's tools: `stablehlo-translate --deserialize "{file}"` prints the module.

`element` in `layout.json` is MLIR's name of an element type: `i1` is a bool of one byte, `ui32` an
unsigned int, `bf16` a bfloat16, `complex<f32>` two floats, the real part first. Types of fewer than
8 bits, such as `i4`, take one byte an element in the files.
"""

CALLS_OUT = """\
These modules call {targets}, functions of JAX's own runtime (such as LAPACK's). A client has to
provide them; IREE refuses such modules.
"""

SIZE_CONSTANTS = """\
## Constants that depend on the sizes

Python computed some arrays from the sizes of each call, such as `math.sqrt(n)`. They are tabulated:
`size_constants` of a program has `rows`, each for the sizes of `variables`. Take the row of the
call's sizes; a call without a row is one that this file does not serve. `more_variables` are sizes
that only a row knows (`more_sizes`): they belong to the sizes of the call, too. An input of the
kind `size_constant` is the array of that number in `arrays`: in its `file`, from the row's offset
in `offsets` (in bytes) on, with the `shape` at the sizes of the call, padded with zeros to the
shape of the input.
"""

COMPUTED_SIZES = """\
## Sizes that the function computes

The function computes sizes, such as the number of rows that a mask selects. A module returns them
after the results: `computed_sizes` of a program has the number of the `output`, a scalar. The
value of the `variable` is that number plus 1. If `is_checked`, a number that is not from 0 to
`bound` means that the call is wrong. Then `presumed` is compared, like guards, with the sizes of
the call and the computed ones. Where one does not hold, the results are wrong: drop them, and run
the call by the next program whose `guards` hold. Cut the results of the first program whose
`presumed` holds; shapes under `results` name computed sizes too.
"""

DERIVATIVES = """\
## Derivatives

`functions` of `layout.json` has the function first, and then its pullback, the pullback of that,
and so on. A pullback takes the arguments of the function before it, followed by a cotangent for
each of its results of floats, and returns a cotangent for each of its arguments of floats. It is
called like the function.
"""
