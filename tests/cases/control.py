"""Calls, branches and loops; scans are in scan.py."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call
from jax.experimental import hijax

from tests.harness import cases, family

case, smooth = family(), family(grad=True)
loop, cond = family("while"), family("cond", grad=True)

MIXED = ("mixed",)


# --- calls --------------------------------------------------------------------------------


@jax.custom_jvp
def softplus(x):
    return jnp.log1p(jnp.exp(x))


softplus.defjvp(lambda p, t: (softplus(*p), t[0] * jax.nn.sigmoid(p[0])))


@jax.custom_vjp
def scaled(x):
    return x * x.sum()


scaled.defvjp(lambda x: (scaled(x), x), lambda x, t: (t * x.sum() + (t * x).sum(),))


@custom_vmap
def _row_mean(x):
    return x.mean()


@_row_mean.def_vmap
def _(axis_size, batched, x):
    return x.mean(axis=-1), batched[0]


def _layer(x, w):
    return jnp.tanh(x @ w + checkpoint_name(x.mean(), "mean"))


def _solve(x):
    return lax.custom_linear_solve(lambda v: v * 4.0, x, lambda _, y: y * 0.25, symmetric=True)


def _root(x):
    return lax.custom_root(
        lambda v: v**3 - x,
        jnp.ones_like(x),
        lambda f, y: jnp.cbrt(x),
        lambda g, y: y / g(jnp.ones_like(y)),
    )


def _conjugate_gradient(x):
    diagonal = 2.0 + jnp.abs(x)
    return jax.scipy.sparse.linalg.cg(lambda v: diagonal * v + v.mean(), x, maxiter=20)[0]


def _linear(x):
    return linear_call(lambda r, v: r * v, lambda r, v: r * v, x.sum(), x)


@functools.partial(lax.composite, name="tests.centred")
def _composite(x):
    return x - x.mean(-1, keepdims=True)


@jax.custom_vjp
def _optimised(x):
    return jnp.sin(x)


def _optimised_forward(x):
    return jnp.sin(x), jnp.cos(x) + x.mean()


_optimised.defvjp(_optimised_forward, lambda r, t: (t * r,), optimize_remat=True)


class _Tripled(getattr(hijax, "HiPrim", hijax.__dict__.get("VJPHiPrimitive"))):
    """A primitive of the user's own: what it computes is in `expand`."""

    def __init__(self, aval):
        self.in_avals, self.out_aval, self.params = (aval,), aval, {}
        super().__init__()

    def expand(self, x):
        return 3 * x - x.mean()


CALLS = {
    "jit": smooth(lambda x: jax.jit(lambda y: y - y.mean())(x), covers="jit"),
    "jit_twice": case(lambda x: jax.jit(jax.jit(jnp.cumsum))(x).sum(), covers="jit"),
    "jit_no_arguments": case(lambda x: jax.jit(lambda: x.sum())() + 1, covers="jit"),
    "jit_grad": case(lambda x: jax.jit(jax.grad(lambda y: (y**2).mean()))(x), covers="jit"),
    "named_call": case(lambda x: jax.named_call(jnp.sum, name="total")(x)),
    "named_scope": case(jax.named_scope("scope")(lambda x: x.mean())),
    "custom_jvp": smooth(softplus, covers="custom_jvp_call"),
    "custom_vjp": smooth(scaled, covers="custom_vjp_call", rtol=1e-4),
    "custom_jvp_forward": case(lambda x: jax.jvp(softplus, (x,), (x,))),
    "custom_vmap": case(lambda x: _row_mean(x), "s", covers="custom_vmap_call"),
    "custom_vmap_batched": case(lambda x: jax.vmap(_row_mean)(x)),
    "custom_vmap_rows": case(jax.custom_batching.sequential_vmap(lambda x: x.sum())),
    "sequential_vmap": case(
        jax.vmap(jax.custom_batching.sequential_vmap(lambda x: x / x.sum())),
        covers="scan",
        domains=("positive",),
    ),
    "custom_linear_solve": smooth(_solve, covers="custom_linear_solve"),
    "custom_root": smooth(_root, domains=("positive",)),
    "hi_primitive": case(lambda x: _Tripled(jax.typeof(x))(x), covers="call_hi_primitive"),
    "composite": case(_composite, covers="composite"),
    "optimize_remat": case(jax.grad(lambda x: jnp.sum(_optimised(x) ** 2)), covers="remat_opt"),
    "conjugate_gradient": loop(_conjugate_gradient, "s", rtol=1e-4, atol=1e-4),
    "linear_call": case(_linear, covers="linear_call"),
    "remat": smooth(lambda x: jax.checkpoint(softplus)(x), covers="remat2"),
    "remat_layers": smooth(
        lambda x, w: jax.checkpoint(_layer)(jax.checkpoint(_layer)(x, w), w),
        "b, 3; 3, 3",
        covers="remat2",
    ),
    "remat_policy": smooth(
        jax.checkpoint(_layer, policy=jax.checkpoint_policies.save_only_these_names("mean")),
        "b, 3; 3, s",
        covers="remat2 name",
    ),
    "remat_no_cse": smooth(
        lambda x: jax.checkpoint(lambda y: jnp.sin(y - y.mean()), prevent_cse=False)(x)
    ),
    "remat_scan": smooth(
        lambda x: lax.scan(
            jax.checkpoint(lambda c, y: (jnp.sin(c + y.sum()), c * y)), jnp.float32(0.5), x
        ),
        covers="scan remat2",
    ),
}


# --- branches -----------------------------------------------------------------------------


def _by_sign(x, y):
    return lax.cond(x.sum() > 0, lambda a: a - a.mean(), lambda a: a * 2, y)


def _platform(x):
    return lax.platform_dependent(
        x, cpu=lambda y: y.mean(0), tpu=lambda y: y.max(0), default=lambda y: y.mean(0)
    )


BRANCHES = {
    "cond": cond(_by_sign, "b, s; b, s"),
    "cond_of_sizes": cond(lambda x: lax.cond(jnp.asarray(x.shape[0]) > 2, jnp.sum, jnp.max, x)),
    "cond_weak": cond(
        lambda x, p: lax.cond(p > 0, lambda y: (y, 1.0), lambda y: (y + y.sum(), y[0, 0]), x),
        "b, s; int32[]",
        grad=False,
    ),
    "cond_closure": cond(
        lambda x, p: lax.cond(p > 0, lambda: x.sum(1), lambda: x.max(1)), "b, s; int32[]"
    ),
    "switch": cond(
        lambda x, i: lax.switch(
            i, [lambda y: y, lambda y: y - y.mean(1, keepdims=True), lambda y: jnp.ones_like(y)], x
        ),
        "b, s; int32[] -1:4",
    ),
    "switch_dtypes": cond(
        lambda x, y, i: lax.switch(
            i, [lambda a, b: (b > a.sum(), a.astype(jnp.bfloat16))] * 2, x, y
        ),
        "int32[s]; int32[b]; int32[] 0:2",
        grad=False,
    ),
    "cond_vmapped": smooth(
        jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda y: y - y.mean(), lambda y: y * 2, r))
    ),
    "cond_keys": cond(
        lambda k, p: lax.cond(p > 0, lambda k: k, jax.vmap(lambda k: jax.random.fold_in(k, 7)), k),
        "key[b]; int32[]",
        domains=MIXED,
        grad=False,
    ),
    "platform_dependent": cond(_platform),
    "cond_nested": cond(
        lambda x, p: lax.cond(
            p > 0, lambda y: lax.cond(y.sum() > 0, jnp.sum, jnp.max, y), lambda y: y.mean(), x
        ),
        "b, s; int32[]",
    ),
}


# --- while and fori -----------------------------------------------------------------------


def _halve(x):
    return lax.while_loop(lambda c: jnp.abs(c).max() > 0.1, lambda c: c * 0.5, x)


def _newton(x):
    """Square root by rows, each to its own convergence."""

    def root(a):
        return lax.while_loop(
            lambda c: jnp.abs(c[0] ** 2 - a).max() > 1e-3,
            lambda c: (0.5 * (c[0] + a / c[0]), c[1] + 1),
            (jnp.maximum(a, 1.0), 0),
        )

    return jax.vmap(root)(jnp.abs(x) + 0.5)


def _collatz_step(total, n):
    steps = lax.while_loop(
        lambda c: c[0] != 1,
        lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
        (n, 0),
    )[1]
    return total + steps, steps


_collatz = jax.vmap(lambda n: _collatz_step(0, n)[1])


def _power(x):
    def body(c):
        i, v = c
        v = x @ v
        return i + 1, v / jnp.linalg.norm(v)

    return lax.while_loop(lambda c: c[0] < 5, body, (0, jnp.ones(x.shape[0])))[1]


LOOPS = {
    "while": loop(_halve),
    "while_consts": loop(
        lambda x, y: lax.while_loop(
            lambda c: (c[0] < x.shape[0]) & (c[1].sum() < y.max() + 9.0),
            lambda c: (c[0] + 1, c[1] + jnp.abs(x).mean(0)),
            (0, y),
        ),
        "b, s; s",
    ),
    "while_power_iteration": loop(_power, "s, s", domains=("positive",)),
    "while_vmapped": loop(_newton, domains=MIXED),
    "while_vmapped_ints": loop(_collatz, "int32[b] 1:30"),
    "while_vmapped_twice": loop(jax.vmap(_collatz), "int32[b, s] 1:30"),
    "while_vmapped_shared_carry": loop(
        lambda x: jax.vmap(
            lambda n: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2.0), (0, jnp.float32(1))
            )
        )(x),
        "int32[b] 0:6",
    ),
    "while_keys": loop(
        lambda k, x: lax.while_loop(
            lambda c: c[1].max() < 3.0,
            lambda c: (jax.random.fold_in(c[0], 1), c[1] + jax.random.uniform(c[0], x.shape)),
            (k, x),
        )[1],
        "key[]; b, s",
        domains=("negative",),
    ),
    "fori": smooth(lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + c.mean() + i, x)),
    "fori_symbolic": loop(
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + x[i] * i, jnp.zeros(x.shape[1]))
    ),
    "fori_update": loop(
        lambda x: lax.fori_loop(1, x.shape[0], lambda i, c: c.at[i].set(c[i - 1] * 0.5 + x[i]), x),
        "s, 3",
    ),
    "fori_backwards": loop(
        lambda x: lax.fori_loop(
            0, x.shape[0], lambda i, c: c * 0.5 + x[x.shape[0] - 1 - i], jnp.float32(0)
        ),
        "s",
    ),
    "fori_in_fori": loop(
        lambda x: lax.fori_loop(
            0,
            x.shape[0],
            lambda i, c: lax.fori_loop(0, x.shape[1], lambda j, d: d + x[i, j] * (i + 1), c),
            jnp.float32(0),
        )
    ),
    "while_in_scan": case(
        lambda x: lax.scan(_collatz_step, 0, x), "int32[s] 1:30", covers="scan while"
    ),
    "while_in_scan_of_none": case(
        lambda x: lax.scan(_collatz_step, 0, x[1:], reverse=True),
        "int32[s] 1:30",
        covers="scan while",
    ),
}


CASES = cases(CALLS | BRANCHES | LOOPS)
