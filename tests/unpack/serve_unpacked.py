"""Serves calls of an unpacked function by its ``layout.json`` alone, with IREE or XLA.

Run as a program: ``serve_unpacked.py FOLDER CALLS.npz RESULTS.npz NUMBER RUNTIME``. RUNTIME is
``iree``, and then neither JAX nor bucketjit is imported; or ``xla``, which takes XLA's CPU client
from JAX. ``CALLS.npz`` has ``CALL/ARGUMENT``. ``RESULTS.npz`` gets ``CALL/RESULT``, and
``full/CALL/RESULT`` with what comes out if the sizes are told to be those of the bucket. NUMBER is
that of the function: 0, or the order of a derivative.
"""

import json
import math
import operator
import sys
from pathlib import Path

import numpy as np

OPERATIONS = {
    "add": operator.add,
    "sub": operator.sub,
    "mul": operator.mul,
    "floordiv": operator.floordiv,
    "mod": operator.mod,
    "pow": operator.pow,
    "max": max,
    "min": min,
}
COMPARISONS = {"==": operator.eq, "!=": operator.ne, ">=": operator.ge, "<=": operator.le}


def value(tree, sizes):
    if isinstance(tree, dict):
        return OPERATIONS[tree["op"]](*(value(arg, sizes) for arg in tree["args"]))
    return sizes[tree] if isinstance(tree, str) else tree


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
    def __init__(self, folder, number, compile):
        self.compile = compile
        self.folder = Path(folder)
        self.layout = json.loads((self.folder / "layout.json").read_text())
        self.function = self.layout["functions"][number]
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
        sizes = {}
        for rule in program["sizes"]:
            given = arguments[rule["argument"]]
            size = int(given) if rule["axis"] is None else given.shape[rule["axis"]]
            rest = size - value(rule["minus"], sizes)
            sizes[rule["variable"]], left = divmod(rest, value(rule["divide_by"], sizes))
            if left:
                return None
        for guard in program["guards"]:
            sides = value(guard["left"], sizes), value(guard["right"], sizes)
            if not COMPARISONS[guard["op"]](*sides):
                return None
        table = program["size_constants"]
        if table is None:
            return sizes, None
        own = [sizes[v] for v in table["variables"]]
        row = next((row for row in table["rows"] if row["sizes"] == own), None)
        if row is None:
            return None
        return {**sizes, **dict(zip(table["more_variables"], row["more_sizes"], strict=True))}, row

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
            self.check(program, arguments, sizes)
            results = self.run(program, bucket, arguments, sizes, row)
            if results is not None:
                return results, self.run(program, bucket, arguments, bucket["sizes"], row) or []
        raise LookupError("no bucket serves these sizes")

    def check(self, program, arguments, sizes):
        for given, kind, shape in zip(
            arguments, self.function["arguments"], program["arguments"], strict=True
        ):
            if not kind["is_size"]:
                wanted = tuple(value(axis, sizes) for axis in shape)
                assert (given.dtype, given.shape) == (np.dtype(kind["dtype"]), wanted)

    def run(self, program, bucket, arguments, sizes, row):
        """The results; None if the program is not for the sizes that it has computed."""
        inputs = []
        for one in bucket["inputs"]:
            match one["kind"]:
                case "constant":
                    inputs.append(self.constants[one["constant"]])
                case "sizes":
                    inputs.append(np.array([sizes[v] for v in program["variables"]], np.int32))
                case "argument":
                    inputs.append(padded(arguments[one["argument"]], one["shape"]))
                case "size_constant":
                    number = one["size_constant"]
                    array = program["size_constants"]["arrays"][number]
                    shape = [value(axis, sizes) for axis in array["shape"]]
                    given = self.read(array["file"], array["dtype"], row["offsets"][number], shape)
                    inputs.append(padded(given, one["shape"]))
        hosts = self.main(bucket["modules"]["cpu"])(*inputs)
        assert [list(x.shape) for x in hosts] == [kind["shape"] for kind in bucket["outputs"]]
        for one in program["computed_sizes"]:
            rows = int(hosts[one["output"]])
            if one["is_checked"] and not 0 <= rows <= value(one["bound"], sizes):
                raise ValueError(f"{rows} rows")
            sizes = {**sizes, one["variable"]: rows + 1}
        for guard in program["presumed"]:
            sides = value(guard["left"], sizes), value(guard["right"], sizes)
            if not COMPARISONS[guard["op"]](*sides):
                return None
        return [
            host[tuple(slice(value(axis, sizes)) for axis in shape)]
            for host, shape in zip(hosts, program["results"], strict=False)
        ]


def main(folder, calls, results, number, runtime):
    compile = {"iree": compiled_by_iree, "xla": compiled_by_xla}[runtime]
    server = Server(folder, int(number), compile)
    given = np.load(calls)
    names = {}
    for name in given.files:
        names.setdefault(name.partition("/")[0], []).append(name)
    found = {}
    for call, keys in names.items():
        right, full = server([given[key] for key in sorted(keys)])
        found.update({f"{call}/{i}": value for i, value in enumerate(right)})
        found.update({f"full/{call}/{i}": value for i, value in enumerate(full)})
    np.savez(results, **found)
    print(json.dumps({"modules": sorted(sys.modules), "compiled": len(server.compiled)}))


if __name__ == "__main__":
    main(*sys.argv[1:])
