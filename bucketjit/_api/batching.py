"""The method of a bucketed function that runs it for many examples of different sizes."""

from __future__ import annotations

from typing import Any

from bucketjit._jax.config import jit_disabled
from bucketjit._jax.tracebacks import boundary
from bucketjit._jax.transformations import NO_TRACE, THREAD_TRACE
from bucketjit._runtime.engine import Engine
from bucketjit._runtime.rows.examples import examples_of
from bucketjit._runtime.rows.explained import MapExplanation, explain_map
from bucketjit._runtime.rows.map import map_examples, options_of
from bucketjit.errors import SpecError


class Batching:
    """The methods of `BucketedExec` for many examples."""

    _engine: Engine
    _in_places: Any  # the method that puts arguments by name into the places where they are known
    _inside: Any  # a method of `BucketedExec`
    _plain: Any

    @boundary
    def map(
        self,
        *args: Any,
        in_axes: Any = None,
        reduce: str | None = None,
        token_budget: int | None = None,
        out: str | None = None,
        **kwargs: Any,
    ) -> Any:
        """Run the function for many examples, in batches; each result is that of a call alone.

        The function is that of **one** example. Arguments that differ between examples are lists of
        them, in their places; all other arguments are given once. Examples of like sizes run
        together, in one executable for each program, bucket and number of rows, in which each row
        has its own sizes. These executables are in the cache of the bucketed function like all
        others.

        Examples that cannot be batched run one by one, and a `FallbackWarning` says why: programs
        with effects, and those that no rule can mask.

        Args:
            *args: The positional arguments. A mapped one is a list of examples (arrays or trees of
                arrays), any other sequence or iterator of them, or an array with the examples along
                axis 0. What an iterator gives is copied.
            in_axes: Which arguments are lists: a tuple with 0 (a list of examples) or None (shared)
                for each positional argument, as in ``jax.vmap``, or a dict by name. By default the
                arguments with open axes in ``dynamic_axes`` are lists; without ``dynamic_axes``,
                those that are lists, tuples or iterators. Another argument that is an array or a
                list of numbers, and as long as the lists, may be labels: it is an error not to say
                what it is.
            reduce: ``"sum"`` or ``"mean"`` for that of all results, in place of a list of them. It
                is summed while the batches run, so gradients need the memory of one.
            token_budget: The most padded tokens of a batch, where the tokens of an example are the
                positions along the open axes of its largest argument. By default 2048 to 8192, by
                the sizes of the call.
            out: The form of results: that of the bucketed function, or ``"jax"``, ``"numpy"``,
                ``"padded"``, or ``"stacked"`` for a `Ragged`.
            **kwargs: The keyword arguments, likewise.

        Returns:
            A list of the results in the order of the examples, a `Ragged`, or one reduced result.

        Raises:
            ArgumentError: An example is not like the others, or does not fit its declaration; the
                message names it. Lists are not equally long, or a mapped argument is no list, or an
                argument is as long as the lists and nothing says whether it is shared.
            SpecError: An option is malformed, or no argument is mapped.
            BucketOverflowError: A size of an example is beyond the largest bucket, and its policy
                is to raise. Of lists nothing has run then; an iterator is read in parts.
            FallbackError: Examples cannot be batched, and ``fallback`` is to raise.
            Exception: What a call of one example would raise.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> def score(weights, x):
            ...     return jnp.tanh(x @ weights).mean()
            >>> scores = BucketedExec(score, dynamic_axes=(None, "n, _")).with_pow2()
            >>> examples = [np.full((n, 2), n, np.float32) for n in (3, 4, 7, 3)]
            >>> [round(float(x), 3) for x in scores.map(np.ones(2, np.float32), examples)]
            [1.0, 1.0, 1.0, 1.0]
            >>> scores.stats().rows, scores.stats().compiles
            (4, 2)
        """
        engine = self._engine
        if engine.together is not None and engine.together.is_active:
            raise SpecError(
                f"{engine.name}.map: processes do not agree on the batches of a map; call the "
                "function itself, or map a bucketed function without with_agreement or "
                "with_processes"
            )
        args, kwargs = self._in_places(args, kwargs)
        options = options_of(engine.config.out, reduce, token_budget, out)
        examples = examples_of(engine.signer, args, kwargs, in_axes)
        inside = THREAD_TRACE.value not in NO_TRACE or jit_disabled() or self._plain is not None
        return map_examples(engine, examples, options, self._inside if inside else None)

    @boundary
    def explain_map(
        self,
        *args: Any,
        in_axes: Any = None,
        reduce: str | None = None,
        token_budget: int | None = None,
        out: str | None = None,
        **kwargs: Any,
    ) -> MapExplanation:
        """Explain what `map` would do with these arguments, without compiling or running it.

        Args:
            *args: The positional arguments of the call of `map`. An iterator is used up.
            in_axes: See `map`.
            reduce: See `map`.
            token_budget: See `map`.
            out: See `map`.
            **kwargs: The keyword arguments.

        Returns:
            Which arguments are lists, the batches with their buckets and padding, and which
            examples would run one by one, and why. ``print`` it.

        Raises:
            ArgumentError, SpecError, BucketOverflowError: What `map` would raise.

        Examples:
            >>> import jax.numpy as jnp, numpy as np
            >>> from bucketjit import BucketedExec
            >>> total = BucketedExec(jnp.sum, dynamic_axes="n").with_pow2(min=8)
            >>> print(total.explain_map([np.ones(n, np.float32) for n in (3, 7, 12, 5)]))
            4 examples; lists: a; shared: none
              n=8: 3 examples in 1 x 4 rows, 53% padding, to compile: 4 rows
              n=16: 1 example in 1 x 1 row, 25% padding, to compile: 1 rows
              padding: 44% of what is computed
        """
        engine = self._engine
        args, kwargs = self._in_places(args, kwargs)
        options = options_of(engine.config.out, reduce, token_budget, out)
        return explain_map(engine, examples_of(engine.signer, args, kwargs, in_axes), options)
