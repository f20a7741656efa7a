"""Serves calls of an unpacked function by its ``layout.json`` alone, with IREE or XLA.

Run as a program: ``serve_unpacked.py FOLDER CALLS.npz RESULTS.npz RUNTIME``. RUNTIME is
``iree``, and then neither JAX nor bucketjit is imported; or ``xla``, which takes XLA's CPU client
from JAX. ``CALLS.npz`` has ``CALL/ARGUMENT``. ``RESULTS.npz`` gets ``CALL/RESULT``, and
``full/CALL/RESULT`` with what comes out if the sizes are told to be those of the bucket.
"""

import json
import math
import operator
import sys
from pathlib import Path

import numpy as np

NAMES = {"floordiv": operator.floordiv, "mod": operator.mod, "max": max, "min": min}


def value(text, sizes):
    """The value of a size, or of a comparison."""
    return eval(str(text), {"__builtins__": {}}, {**NAMES, **sizes})


def solved(shapes, sizes_of_call, variables):
    """The sizes of the variables: those of which no other one is right for these arguments."""
    sizes = {}
    pairs = [
        (str(text), n)
        for shape, given in zip(shapes, sizes_of_call, strict=True)
        for text, n in zip(shape, given, strict=True)
    ]
    for _ in variables:
        for text, n in pairs:
            unknown = [v for v in variables if v not in sizes and v in text]
            if len(unknown) == 1:
                fits = [i for i in range(n + 1) if value(text, {**sizes, unknown[0]: i}) == n]
                if len(fits) == 1:
                    sizes[unknown[0]] = fits[0]
    return sizes if all(value(text, sizes) == n for text, n in pairs) else None


def padded(array, shape):
    made = np.zeros(shape, array.dtype)
    made[tuple(map(slice, array.shape))] = array
    return made


def compiled_by_iree(raw):
    import iree.compiler
    import iree.runtime

    binary = iree.compiler.compile_str(
        raw,
        target_backends=["llvm-cpu"],
        input_type="stablehlo",
        extra_args=["--iree-llvmcpu-target-cpu=host"],
    )
    context = iree.runtime.SystemContext(config=iree.runtime.Config("local-sync"))
    module = iree.runtime.VmModule.copy_buffer(context.instance, binary)
    context.add_vm_module(module)
    main = context.modules[module.name]["main"]

    def run(*inputs):
        results = main(*inputs)
        results = results if isinstance(results, list | tuple) else [results]
        return [np.array(result.to_host()) for result in results]  # IREE takes its memory back

    return run


def compiled_by_xla(raw):
    import jax
    from jax.interpreters import mlir
    from jaxlib import xla_client
    from jaxlib.mlir.dialects import stablehlo

    (device,) = jax.devices()[:1]
    module = stablehlo.deserialize_portable_artifact(mlir.make_ir_context(), raw)
    compiled = device.client.compile_and_load(
        str(module), xla_client.DeviceList((device,)), xla_client.CompileOptions()
    )

    def run(*inputs):
        given = [jax.device_put(x) for x in inputs]
        results = compiled.execute_sharded(given).disassemble_into_single_device_arrays()
        return [np.asarray(result) for (result,) in results]

    return run


class Server:
    def __init__(self, folder, compile):
        self.compile = compile
        self.folder = Path(folder)
        self.layout = json.loads((self.folder / "layout.json").read_text())
        self.function = self.layout["functions"][0]
        self.leaves = self.function["leaves"]
        self.constants = [
            self.read(c["file"], c["dtype"], 0, c["shape"]) for c in self.layout["constants"]
        ]
        self.compiled = {}

    def read(self, file, dtype, offset, shape):
        count = math.prod(shape)
        return np.fromfile(self.folder / file, dtype, count, offset=offset).reshape(shape)

    def main(self, file):
        """The function ``main`` of a module."""
        if file not in self.compiled:
            self.compiled[file] = self.compile((self.folder / file).read_bytes())
        return self.compiled[file]

    def sizes_of(self, program, arguments):
        """The sizes of a call, and its row of the table; None if this program does not serve it."""
        table = program["table"]
        own = self.own(program)
        given = [
            (int(x),) if leaf["dtype"] is None else x.shape
            for x, leaf in zip(arguments, self.leaves, strict=True)
        ]
        sizes = solved([leaf["axes"] for leaf in self.leaves], given, own)
        if sizes is None or any(sizes[v] < program["lower"].get(v, 1) for v in own):
            return None
        if not all(value(guard, sizes) for guard in program["guards"]):
            return None
        for sides in program["reshapes"]:
            if len({math.prod(value(axis, sizes) for axis in side) for side in sides}) > 1:
                return None
        if table is None:
            return sizes, None
        at = [sizes[v] for v in own]
        number = next((i for i, row in enumerate(table["rows"]) if row == at), None)
        return None if number is None else (self.sizes_of_row(program, number), number)

    def own(self, program):
        """The variables that the shapes of the arguments decide."""
        more = program["table"]["unfitted"] if program["table"] else ()
        return [v for v in program["variables"] if v not in more]

    def sizes_of_row(self, program, number):
        table = program["table"]
        return {
            **dict(zip(self.own(program), table["rows"][number], strict=True)),
            **dict(zip(table["unfitted"], table["extra"][number], strict=True)),
        }

    def chosen(self, arguments):
        """The programs that may serve a call, each with a bucket, the sizes and the row."""
        for program in self.function["programs"]:
            if (found := self.sizes_of(program, arguments)) is None:
                continue
            for bucket in program["buckets"]:
                if all(size <= bucket["sizes"][v] for v, size in found[0].items()):
                    yield program, bucket, *found
                    break

    def __call__(self, arguments):
        """The results, and those of a call that says that all of the bucket is data."""
        for program, bucket, sizes, row in self.chosen(arguments):
            self.check(arguments, sizes)
            results = self.run(program, bucket, arguments, sizes, row)
            if results is not None:
                return results, self.run(program, bucket, arguments, bucket["sizes"], row) or []
        raise LookupError("no bucket serves these sizes")

    def check(self, arguments, sizes):
        for given, leaf in zip(arguments, self.leaves, strict=True):
            if leaf["dtype"] is not None:
                wanted = tuple(value(axis, sizes) for axis in leaf["axes"])
                assert (given.dtype, given.shape) == (np.dtype(leaf["dtype"]), wanted)

    def run(self, program, bucket, arguments, sizes, row):
        """The results; None if the program is not for the sizes that it has computed."""
        arrays = [self.constants[i] for i in program["constants"]]
        arrays.append(np.array([sizes[v] for v in program["variables"]], np.int32))
        if program["table"] is not None:
            arrays += self.table(program, row)
        pairs = zip(arguments, self.leaves, strict=True)
        arrays += [x for x, leaf in pairs if leaf["dtype"] is not None]
        types = bucket["inputs"]
        assert [str(x.dtype) for x in arrays] == [kind["dtype"] for kind in types]
        inputs = [padded(x, kind["shape"]) for x, kind in zip(arrays, types, strict=True)]
        hosts = self.main(bucket["modules"]["cpu"])(*inputs)
        assert [list(x.shape) for x in hosts] == [kind["shape"] for kind in bucket["outputs"]]
        computed = {one["variable"]: one for one in program["computed"]}
        for variable, host in zip(program["counts"], hosts[len(program["outputs"]) :], strict=True):
            rows, one = int(host), computed[variable]
            if one["is_checked"] and not 0 <= rows <= value(one["bound"][0], sizes):
                raise ValueError(f"{rows} rows")
            sizes = {**sizes, variable: rows + 1}
        if not all(value(guard, sizes) for guard in program["presumed"]):
            return None
        return [
            host[tuple(slice(value(axis, sizes)) for axis in out["axes"])]
            for host, out in zip(hosts, program["outputs"], strict=False)
        ]

    def table(self, program, row):
        """The arrays that depend on the sizes, for a row of the table."""
        table, arrays = program["table"], []
        for file, dtype, axes in zip(table["files"], table["dtypes"], table["axes"], strict=True):
            shapes = [
                [value(axis, self.sizes_of_row(program, i)) for axis in axes]
                for i in range(row + 1)
            ]
            offset = sum(map(math.prod, shapes[:-1])) * np.dtype(dtype).itemsize
            arrays.append(self.read(file, dtype, offset, shapes[-1]))
        return arrays


def main(folder, calls, results, runtime):
    compile = {"iree": compiled_by_iree, "xla": compiled_by_xla}[runtime]
    server = Server(folder, compile)
    arrays = np.load(calls)
    by_call = {}
    for name in sorted(arrays.files):
        by_call.setdefault(name.partition("/")[0], []).append(arrays[name])
    found = {}
    for call, arguments in by_call.items():
        right, full = server(arguments)
        found.update({f"{call}/{i}": value for i, value in enumerate(right)})
        found.update({f"full/{call}/{i}": value for i, value in enumerate(full)})
    np.savez(results, **found)
    print(json.dumps(sorted(sys.modules)))


if __name__ == "__main__":
    main(*sys.argv[1:])
