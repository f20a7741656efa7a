"""The function of all shards: the masked program of one, under ``shard_map`` with its own sizes.

    one shard      program(n, w:f32[d], x:f32[n, d])                masked for the bucket n <= 8
    all shards     shard_map(masked)(n:i32[shards], w, x:f32[shards * 8, d])

Arrays without open axes are whole on each device. All others, and the sizes, are cut along their
first axis, each shard's padded part after the other. `bucketjit._compile.build` lowers and compiles
the function, as that of a single call.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

import jax
import numpy as np
from jax.sharding import PartitionSpec

from bucketjit._compile.argument_types import Expected
from bucketjit._compile.build import Masked, evaluated
from bucketjit._compile.build_exact import Exact
from bucketjit._compile.executable import Executable, Origin, Pads
from bucketjit._compile.requests import (
    NO_OPTIONS,
    CompileRequest,
    Lowering,
    RequestFactory,
    StoredPlace,
)
from bucketjit._processes.shard_axis import LocalShards, local_shards
from bucketjit._processes.stored_shards import StoredShards
from bucketjit._signature.resolved_call import ResolvedCall
from bucketjit._signature.signer import SignedCall
from bucketjit._sizes.bucket_sizes import BucketSizes
from bucketjit._tracing.interface import Interface
from bucketjit._tracing.program import Program
from bucketjit._xla_defects.workarounds import hooks
from bucketjit.errors import SpecError

_SHARED_SEARCH = "xla_gpu_shard_autotuning"


class ShardRequests(RequestFactory):
    """Makes the compile requests of an engine whose executables run on all shards.

    A call is that of one shard.
    """

    own_options = RequestFactory.own_options | {_SHARED_SEARCH}

    @property
    def _shards(self) -> LocalShards:
        chosen = self._config.sharded
        assert chosen is not None
        return local_shards(chosen)

    def expect(self, signed: SignedCall) -> None:
        """Nothing: what is loaded ahead of the trace is for one device."""

    def _masked(
        self,
        known: SignedCall,
        call: ResolvedCall,
        bucket: Mapping[str, int],
        pads: Pads,
        options: Mapping[str, Any],
    ) -> Masked:
        assert call.program is not None
        needed = self.needed(call.program)
        given = (known, call, bucket, pads, self.rules)
        of_xla = self._options(needed.options(), options)
        return _function(self._shards, *given, of_xla, needed.after)

    def _builder(
        self,
        program: Interface,
        made: Callable[[], Masked],
        lowering: Lowering[Masked] | None = None,
        options: Mapping[str, Any] = NO_OPTIONS,
    ) -> Callable[[], Executable]:
        build = super()._builder(program, made, lowering, options)

        def placed() -> Executable:
            entry = build()
            entry.expect(made().args)  # its origin is the call of one shard
            return entry

        return placed

    def _place(
        self, known: SignedCall, bucket: Mapping[str, int], made: Callable[[], Masked]
    ) -> StoredPlace | None:
        return self.files.place(functools.partial(StoredShards, self._shards), known, bucket, made)

    def _options(self, ours: Mapping[str, Any], more: Mapping[str, Any]) -> Mapping[str, Any]:
        # XLA shares the search for the fastest kernels among the processes. One that reads a file
        # takes no part in it, and the others would wait for it.
        if self.files.store() is not None and jax.process_count() > 1:
            ours = {**ours, _SHARED_SEARCH: False}
        return super()._options(ours, more)

    def rows(self, *args: Any, **kwargs: Any) -> CompileRequest:
        """Refuse what has no form for shards: batches of examples."""
        _refuse("map")

    def lower_masked(self, *args: Any, **kwargs: Any) -> Lowering[Masked]:
        """Refuse what has no form for shards: stages and modules."""
        _refuse("lower, save and the like")

    def exact(self, *args: Any, **kwargs: Any) -> CompileRequest:
        """Refuse what has no form for shards: exact shapes."""
        _refuse("an exact shape")

    def lower_exact(self, *args: Any, **kwargs: Any) -> Lowering[Exact]:
        """Refuse what has no form for shards: exact shapes."""
        _refuse("an exact shape")


def _refuse(what: str) -> NoReturn:
    raise SpecError(
        f"with_processes: {what} is not there for a function that runs on shards; call it, or use "
        "a bucketed function without with_processes"
    )


def _function(
    shards: LocalShards,
    signed: SignedCall,
    call: ResolvedCall,
    bucket: Mapping[str, int],
    pads: Pads,
    rules: Any,
    options: Mapping[str, Any],
    after: Any,
) -> Masked:
    """The function, and the types to lower it for. Traces nothing."""
    program, padded = call.program, dict(pads)
    assert isinstance(program, Program)
    arrays = array_leaves(signed)
    expected = Expected({k for k, i in enumerate(arrays) if i in padded})
    one = _of_one(shards, call, bucket, rules, after)
    specs = [_spec(shards, i in padded) for i in arrays]
    out_specs = [_spec(shards, i in program.open_outs) for i in range(len(program.out_shapes))]
    sharded: dict[str, Any] = {"in_specs": (_spec(shards, True), *specs), "out_specs": out_specs}

    def every(sizes: Any, *given: Any) -> Any:
        expected.check(given, {})
        mapped = jax.shard_map(one, mesh=shards.whole.mesh, **sharded, check_vma=False)
        return program.out_tree.unflatten(mapped(sizes, *given))

    every.__name__ = getattr(signed.signature.fn, "__name__", "shards").replace(" ", "_")
    vectors = (shards.count, len(call.variables))
    donated = donated_arrays(signed, padded)
    return Masked(
        function=jax.jit(
            every, donate_argnums=[1 + k for k in donated], compiler_options=dict(options)
        ),
        sizes=jax.ShapeDtypeStruct(vectors, np.int32, sharding=shards.rows),
        args=tuple(_struct(shards, signed, i, padded.get(i)) for i in arrays),
        kwargs={},
        expected=expected,
        at=BucketSizes(program.padded_sizes(bucket), program.lower, {}),
        call=call,
        origin=Origin(signed, call.tokens, call.sizes),
        bucket=bucket,
        pads=pads,
        size_constant_shapes=(),
        donated=frozenset(donated),
        donated_leaves=frozenset(),
        options=options,
    )


def _of_one(
    shards: LocalShards, call: ResolvedCall, bucket: Mapping[str, int], rules: Any, after: Any
) -> Callable[..., list[Any]]:
    """The masked program of one shard, which takes its row of the sizes."""
    program = call.program
    assert isinstance(program, Program)
    consts = [_of_host(c) for c in program.consts]
    padded_sizes, uneven = program.padded_sizes(bucket), (shards.axis,)

    def one(sizes: Any, *given: Any) -> list[Any]:
        values = {v: sizes[0, i] for i, v in enumerate(call.variables)}
        at = BucketSizes(padded_sizes, program.lower, values, (), uneven)
        return evaluated(program, consts, given, at, rules(), hooks(None, after()), 0)

    return one


def _spec(shards: LocalShards, is_cut: bool) -> PartitionSpec:
    return PartitionSpec(shards.axis) if is_cut else PartitionSpec()


def array_leaves(signed: SignedCall) -> list[int]:
    """The leaves of a call that are arrays, not sizes.

    Args:
        signed: The call.
    """
    return [i for i, kind in enumerate(signed.signature.types) if kind.dtype is not None]


def donated_arrays(signed: SignedCall, padded: Mapping[int, Any]) -> list[int]:
    """The places, among the arrays of a call, of those that are donated.

    Only those without open axes are: of the others, the padded parts are, as they are made for the
    call and freed after it.

    Args:
        signed: The call.
        padded: The leaves with open axes.
    """
    if not signed.donate:
        return []
    args, _ = signed.tree.unflatten(range(len(signed.leaves)))
    given = {i for place in signed.donate for i in jax.tree_util.tree_leaves(args[place])}
    return [k for k, i in enumerate(array_leaves(signed)) if i in given and i not in padded]


def _struct(
    shards: LocalShards, signed: SignedCall, leaf: int, padded: Sequence[int] | None
) -> jax.ShapeDtypeStruct:
    kind = signed.signature.types[leaf]
    dtype, weak = kind.dtype, kind.weak_type
    if padded is None:
        shape, placed = signed.shapes[leaf], shards.whole
        return jax.ShapeDtypeStruct(shape, dtype, sharding=placed, weak_type=weak)
    whole = (shards.count * padded[0], *padded[1:])
    return jax.ShapeDtypeStruct(whole, dtype, sharding=shards.rows)


def _of_host(constant: Any) -> Any:
    """A constant of the program in host memory, as its own device may be none of the mesh."""
    if isinstance(constant, jax.Array) and not jax.dtypes.issubdtype(
        constant.dtype, jax.dtypes.prng_key
    ):
        return np.asarray(constant)
    return constant
