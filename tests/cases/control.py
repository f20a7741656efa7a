"""Calls, branches, loops and scans."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import custom_vmap
from jax.custom_derivatives import linear_call

from tests.harness import Arg, Case

BATCH = "b, s"
ROWS = "b, 3"
INT = Arg("", "int32")
MIXED = ("mixed",)


# --- calls --------------------------------------------------------------------------------


@jax.custom_jvp
def _softplus(x):
    return jnp.log1p(jnp.exp(x))


_softplus.defjvp(lambda p, t: (_softplus(*p), t[0] * jax.nn.sigmoid(p[0])))


@jax.custom_vjp
def _scaled(x):
    return x * x.sum()


_scaled.defvjp(lambda x: (_scaled(x), x), lambda x, t: (t * x.sum() + (t * x).sum(),))


@custom_vmap
def _row_mean(x):
    return x.mean()


@_row_mean.def_vmap
def _(axis_size, batched, x):
    return x.mean(axis=-1), batched[0]


def _layer(x, w):
    return jnp.tanh(x @ w + checkpoint_name(x.mean(), "mean"))


def _solve(x):
    return lax.custom_linear_solve(
        lambda v: v * 4.0, x, lambda _, y: y * 0.25, symmetric=True
    )


def _root(x):
    return lax.custom_root(
        lambda v: v**3 - x, jnp.ones_like(x), lambda f, y: jnp.cbrt(x), lambda g, y: y / g(jnp.ones_like(y))
    )


def _conjugate_gradient(x):
    diagonal = 2.0 + jnp.abs(x)
    return jax.scipy.sparse.linalg.cg(lambda v: diagonal * v + v.mean(), x, maxiter=20)[0]


def _linear(x):
    return linear_call(lambda r, v: r * v, lambda r, v: r * v, x.sum(), x)


CALLS = [
    Case("jit", lambda x: jax.jit(lambda y: y - y.mean())(x), (BATCH,), ("jit",), grad=True),
    Case("jit_twice", lambda x: jax.jit(jax.jit(jnp.cumsum))(x).sum(), (BATCH,), ("jit",)),
    Case("jit_no_arguments", lambda x: jax.jit(lambda: x.sum())() + 1, (BATCH,), ("jit",)),
    Case("jit_grad", lambda x: jax.jit(jax.grad(lambda y: (y**2).mean()))(x), (BATCH,), ("jit",)),
    Case("named_call", lambda x: jax.named_call(jnp.sum, name="total")(x), (BATCH,)),
    Case("named_scope", jax.named_scope("scope")(lambda x: x.mean()), (BATCH,)),
    Case("custom_jvp", _softplus, (BATCH,), ("custom_jvp_call",), grad=True),
    Case("custom_vjp", _scaled, (BATCH,), ("custom_vjp_call",), grad=True),
    Case(
        "custom_jvp_forward",
        lambda x: jax.jvp(_softplus, (x,), (x,)),
        (BATCH,),
    ),
    Case("custom_vmap", lambda x: _row_mean(x), ("s",), ("custom_vmap_call",)),
    Case("custom_vmap_batched", lambda x: jax.vmap(_row_mean)(x), (BATCH,)),
    Case("custom_vmap_rows", jax.custom_batching.sequential_vmap(lambda x: x.sum()), (BATCH,)),
    Case(
        "sequential_vmap",
        jax.vmap(jax.custom_batching.sequential_vmap(lambda x: x / x.sum())),
        (BATCH,),
        ("scan",),
        domains=("positive",),
    ),
    Case("custom_linear_solve", _solve, (BATCH,), ("custom_linear_solve",), grad=True),
    Case("custom_root", _root, (BATCH,), domains=("positive",), grad=True),
    Case("conjugate_gradient", _conjugate_gradient, ("s",), ("while",), rtol=1e-4, atol=1e-4),
    Case("linear_call", _linear, (BATCH,), ("linear_call",)),
    Case("checkpoint_name", lambda x: checkpoint_name(x, "x").sum(0), (BATCH,), ("name",)),
    Case("remat", lambda x: jax.checkpoint(_softplus)(x), (BATCH,), ("remat2",), grad=True),
    Case(
        "remat_layers",
        lambda x, w: jax.checkpoint(_layer)(jax.checkpoint(_layer)(x, w), w),
        (ROWS, "3, 3"),
        ("remat2",),
        grad=True,
    ),
    Case(
        "remat_policy",
        jax.checkpoint(_layer, policy=jax.checkpoint_policies.save_only_these_names("mean")),
        (ROWS, "3, s"),
        ("remat2", "name"),
        grad=True,
    ),
    Case(
        "remat_no_cse",
        lambda x: jax.checkpoint(lambda y: jnp.sin(y - y.mean()), prevent_cse=False)(x),
        (BATCH,),
        grad=True,
    ),
    Case(
        "remat_scan",
        lambda x: lax.scan(
            jax.checkpoint(lambda c, y: (jnp.sin(c + y.sum()), c * y)), jnp.float32(0.5), x
        ),
        (BATCH,),
        ("scan", "remat2"),
        grad=True,
    ),
]


# --- branches -----------------------------------------------------------------------------


def _by_sign(x, y):
    return lax.cond(x.sum() > 0, lambda a: a - a.mean(), lambda a: a * 2, y)


def _platform(x):
    return lax.platform_dependent(
        x, cpu=lambda y: y.mean(0), tpu=lambda y: y.max(0), default=lambda y: y.mean(0)
    )


BRANCHES = [
    Case("cond", _by_sign, (BATCH, BATCH), ("cond",), grad=True),
    Case(
        "cond_of_sizes",
        lambda x: lax.cond(jnp.asarray(x.shape[0]) > 2, jnp.sum, jnp.max, x),
        (BATCH,),
        ("cond",),
        grad=True,
    ),
    Case(
        "cond_weak",
        lambda x, p: lax.cond(p > 0, lambda y: (y, 1.0), lambda y: (y + y.sum(), y[0, 0]), x),
        (BATCH, INT),
        ("cond",),
    ),
    Case(
        "cond_closure",
        lambda x, p: lax.cond(p > 0, lambda: x.sum(1), lambda: x.max(1)),
        (BATCH, INT),
        ("cond",),
        grad=True,
    ),
    Case(
        "switch",
        lambda x, i: lax.switch(
            i,
            [lambda y: y, lambda y: y - y.mean(1, keepdims=True), lambda y: jnp.ones_like(y)],
            x,
        ),
        (BATCH, Arg("", "int32", low=-1, high=4)),
        ("cond",),
        grad=True,
    ),
    Case(
        "switch_dtypes",
        lambda x, y, i: lax.switch(i, [lambda a, b: (b > a.sum(), a.astype(jnp.bfloat16))] * 2, x, y),
        (Arg("s", "int32"), Arg("b", "int32"), Arg("", "int32", low=0, high=2)),
        ("cond",),
    ),
    Case(
        "cond_vmapped",
        jax.vmap(lambda r: lax.cond(r.sum() > 0, lambda y: y - y.mean(), lambda y: y * 2, r)),
        (BATCH,),
        grad=True,
    ),
    Case(
        "cond_keys",
        lambda k, p: lax.cond(
            p > 0, lambda k: k, jax.vmap(lambda k: jax.random.fold_in(k, 7)), k
        ),
        (Arg("b", "key"), INT),
        ("cond",),
        domains=MIXED,
    ),
    Case("platform_dependent", _platform, (BATCH,), ("cond",), grad=True),
    Case(
        "cond_nested",
        lambda x, p: lax.cond(
            p > 0, lambda y: lax.cond(y.sum() > 0, jnp.sum, jnp.max, y), lambda y: y.mean(), x
        ),
        (BATCH, INT),
        ("cond",),
        grad=True,
    ),
]


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


def _collatz(x):
    def steps(n):
        return lax.while_loop(
            lambda c: c[0] != 1,
            lambda c: (jnp.where(c[0] % 2 == 0, c[0] // 2, 3 * c[0] + 1), c[1] + 1),
            (n, 0),
        )[1]

    return jax.vmap(steps)(x)


def _power(x):
    def body(c):
        i, v = c
        v = x @ v
        return i + 1, v / jnp.linalg.norm(v)

    return lax.while_loop(lambda c: c[0] < 5, body, (0, jnp.ones(x.shape[0])))[1]


LOOPS = [
    Case("while", _halve, (BATCH,), ("while",)),
    Case(
        "while_consts",
        lambda x, y: lax.while_loop(
            lambda c: (c[0] < x.shape[0]) & (c[1].sum() < y.max() + 9.0),
            lambda c: (c[0] + 1, c[1] + jnp.abs(x).mean(0)),
            (0, y),
        ),
        (BATCH, "s"),
        ("while",),
    ),
    Case("while_power_iteration", _power, ("s, s",), ("while",), domains=("positive",)),
    Case("while_vmapped", _newton, (BATCH,), ("while",), domains=MIXED),
    Case("while_vmapped_ints", _collatz, (Arg("b", "int32", low=1, high=30),), ("while",)),
    Case(
        "while_vmapped_twice",
        jax.vmap(_collatz),
        (Arg("b, s", "int32", low=1, high=30),),
        ("while",),
    ),
    Case(
        "while_vmapped_shared_carry",
        lambda x: jax.vmap(
            lambda n: lax.while_loop(
                lambda c: c[0] < n, lambda c: (c[0] + 1, c[1] * 2.0), (0, jnp.float32(1))
            )
        )(x),
        (Arg("b", "int32", low=0, high=6),),
        ("while",),
    ),
    Case(
        "while_keys",
        lambda k, x: lax.while_loop(
            lambda c: c[1].max() < 3.0,
            lambda c: (jax.random.fold_in(c[0], 1), c[1] + jax.random.uniform(c[0], x.shape)),
            (k, x),
        )[1],
        (Arg("", "key"), BATCH),
        ("while",),
        domains=("negative",),
    ),
    Case(
        "fori",
        lambda x: lax.fori_loop(0, 3, lambda i, c: c * 0.5 + c.mean() + i, x),
        (BATCH,),
        grad=True,
    ),
    Case(
        "fori_symbolic",
        lambda x: lax.fori_loop(0, x.shape[0], lambda i, c: c + x[i] * i, jnp.zeros(x.shape[1])),
        (BATCH,),
        ("while",),
    ),
    Case(
        "fori_update",
        lambda x: lax.fori_loop(
            1, x.shape[0], lambda i, c: c.at[i].set(c[i - 1] * 0.5 + x[i]), x
        ),
        ("s, 3",),
        ("while",),
    ),
    Case(
        "fori_backwards",
        lambda x: lax.fori_loop(
            0, x.shape[0], lambda i, c: c * 0.5 + x[x.shape[0] - 1 - i], jnp.float32(0)
        ),
        ("s",),
        ("while",),
    ),
    Case(
        "fori_in_fori",
        lambda x: lax.fori_loop(
            0,
            x.shape[0],
            lambda i, c: lax.fori_loop(0, x.shape[1], lambda j, d: d + x[i, j] * (i + 1), c),
            jnp.float32(0),
        ),
        (BATCH,),
        ("while",),
    ),
    Case(
        "while_in_scan",
        lambda x: lax.scan(
            lambda c, n: (
                c + n,
                lax.while_loop(lambda k: k != 1, lambda k: jnp.where(k % 2 == 0, k // 2, 3 * k + 1), n),
            ),
            0,
            x,
        ),
        (Arg("s", "int32", low=1, high=30),),
        ("scan", "while"),
    ),
]


# --- scan ---------------------------------------------------------------------------------


def _step(carry, row):
    carry = 0.5 * carry + row
    return carry, carry - carry.mean()


def _scan(**options):
    return lambda c, x: lax.scan(_step, c, x, **options)


def _rnn(w, x):
    """One sequence per row, time in the middle: (b, s, 3)."""

    def step(h, x_t):
        h = jnp.tanh(x_t @ w + h)
        return h, h.sum(-1)

    h, out = lax.scan(step, jnp.zeros((x.shape[0], 3)), jnp.swapaxes(x, 0, 1))
    return h, out.T


def _viterbi(x, step):
    def forward(score, x_t):
        scores = score[:, None] + step
        return scores.max(0) + x_t, scores.argmax(0)

    score, back = lax.scan(forward, x[0], x[1:])
    last = score.argmax()
    _, path = lax.scan(lambda i, b: (b[i], b[i]), last, back, reverse=True)
    return score.max(), path, last


SCANS = [
    Case("scan_static_length", _scan(), ("s", "3, s"), ("scan",), grad=True),
    Case("scan_static_reverse", _scan(reverse=True, unroll=2), ("s", "4, s"), ("scan",), grad=True),
    Case("scan", _scan(), ("3", "s, 3"), ("scan",), grad=True),
    Case("scan_both", _scan(), ("s", BATCH), ("scan",), grad=True),
    Case("scan_reverse", _scan(reverse=True), ("s", BATCH), ("scan",), grad=True),
    Case("scan_unroll", _scan(unroll=3), ("3", "s, 3"), ("scan",), grad=True),
    Case("scan_same_size", _scan(), ("s", "s, s"), ("scan",)),
    Case(
        "scan_bfloat16",
        lambda c, x: lax.scan(lambda c, r: (c + r, c * r), c, x),
        (Arg("3", "bfloat16"), Arg("s, 3", "bfloat16")),
        ("scan",),
    ),
    Case(
        "scan_dtypes",
        lambda n, p, z: lax.scan(
            lambda c, r: ((c[0] + r[0], c[1] ^ r[1].any()), (c[0] % 3, r[2] * c[0], c[1])),
            (jnp.uint8(1), False),
            (n, p, z),
        ),
        (Arg("s", "uint8", low=0, high=200), Arg("s, b", "bool"), Arg("s, 2", "complex64")),
        ("scan",),
        domains=MIXED,
    ),
    Case(
        "scan_special",
        lambda x: lax.scan(lambda c, r: (jnp.maximum(c, r), c), jnp.float32(-jnp.inf), x),
        ("s",),
        ("scan",),
        domains=("mixed", "special"),
    ),
    Case(
        "scan_counter",
        lambda x: lax.scan(lambda c, i: (c * 0.5 + x.mean(), c[0] + i), x[0], jnp.arange(x.shape[0])),
        (BATCH,),
        ("scan",),
        grad=True,
    ),
    Case(
        "scan_length_expression",
        lambda x: lax.scan(_step, x.sum(), jnp.concatenate([x, x[1:]]), reverse=True),
        ("s",),
        ("scan",),
    ),
    Case(
        "scan_length_zero",
        lambda x: lax.scan(lambda c, r: (c + r, r * 2), jnp.float32(1), x[1:]),
        ("s",),
        ("scan",),
    ),
    Case(
        "scan_keys",
        lambda k: lax.scan(lambda c, k: (c + jax.random.uniform(k), k), jnp.float32(0), k),
        (Arg("b", "key"),),
        ("scan",),
        domains=MIXED,
    ),
    Case(
        "scan_key_carry",
        lambda k, x: lax.scan(
            lambda k, r: (jax.random.split(k)[0], r + jax.random.normal(k, r.shape)), k, x
        ),
        (Arg("", "key"), BATCH),
        ("scan",),
        domains=MIXED,
    ),
    Case("scan_rnn", _rnn, ("3, 3", "b, s, 3"), ("scan",), grad=True, rtol=1e-4, atol=1e-4),
    Case(
        "scan_viterbi",
        _viterbi,
        ("s, 3", "3, 3"),
        ("scan",),
        sizes=tuple({"s": n} for n in (2, 3, 7, 8)),
        constraints=("s >= 2",),
    ),
    Case(
        "scan_nested",
        lambda x: lax.scan(
            lambda c, r: (lax.scan(lambda d, v: (0.5 * d + v, d), c, r)[0], c), jnp.float32(0), x
        ),
        (BATCH,),
        ("scan",),
        grad=True,
    ),
    Case(
        "scan_vmapped",
        jax.vmap(lambda r: lax.scan(lambda c, v: (0.5 * c + v, c), jnp.float32(0), r)),
        (BATCH,),
        ("scan",),
        grad=True,
    ),
    Case(
        "scan_vmapped_init",
        jax.vmap(lambda c, r: lax.scan(_step, c, r), in_axes=(0, None)),
        ("b, 3", "s, 3"),
        ("scan",),
        grad=True,
    ),
    Case(
        "scan_cond",
        lambda x: lax.scan(
            lambda c, r: (lax.cond(r.sum() > 0, lambda: c + r.mean(), lambda: c * 0.5), c),
            jnp.float32(0),
            x,
        ),
        (BATCH,),
        ("scan", "cond"),
        grad=True,
    ),
    Case("map", lambda x: lax.map(lambda r: r - r.mean(), x), (BATCH,), ("scan",), grad=True),
    Case(
        "map_batch_size",
        lambda x: lax.map(lambda r: r - r.mean(), x, batch_size=2),
        (BATCH,),
        ("scan",),
        buckets={"b": 7},
    ),
    Case(
        "map_batch_size_over_bucket",
        lambda x: lax.map(lambda r: r * 2, x, batch_size=3),
        ("b",),
        buckets={"b": 8},
    ),
]


# --- derivatives --------------------------------------------------------------------------


def _loss(w, row):
    return jnp.mean(jnp.tanh(row * w) ** 2)


DERIVATIVES = [
    Case("jacfwd", jax.jacfwd(lambda x: jnp.sin(x) * x.mean()), ("s",)),
    Case("jacrev", jax.jacrev(lambda x: jnp.sin(x) * x.mean()), ("s",)),
    Case("hessian", jax.hessian(lambda x: jnp.mean(x**3) + x.max()), ("s",)),
    Case(
        "hvp",
        lambda x, v: jax.jvp(jax.grad(lambda y: jnp.sum(jnp.sin(y) * y.mean())), (x,), (v,)),
        (BATCH, BATCH),
    ),
    Case("linearize", lambda x, v: jax.linearize(_softplus, x)[1](v), (BATCH, BATCH)),
    Case("vjp", lambda x, t: jax.vjp(_scaled, x)[1](t), (BATCH, BATCH)),
    Case("per_example_gradients", jax.vmap(jax.grad(_loss), (None, 0)), ("s", BATCH)),
    Case(
        "clipped_gradients",
        lambda w, x: jax.tree.map(
            lambda g: (g / jnp.maximum(1.0, jnp.linalg.norm(g, axis=-1, keepdims=True))).mean(0),
            jax.vmap(jax.grad(_loss), (None, 0))(w, x),
        ),
        ("s", BATCH),
        domains=("mixed", "positive"),
    ),
    Case(
        "grad_of_scan_in_vmap",
        jax.vmap(jax.grad(lambda r: lax.scan(_step, r, jnp.outer(r, r))[1].sum())),
        (BATCH,),
        ("scan",),
        rtol=1e-4,
        atol=1e-4,
    ),
    Case(
        "grad_of_fori",
        jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) - c.mean(), x).sum()),
        (BATCH,),
        ("scan",),
    ),
    Case(
        "jacfwd_of_while",
        jax.jacfwd(lambda x: lax.while_loop(lambda c: c.max() > 0.1, lambda c: c * 0.5, x)),
        ("s",),
        ("while",),
    ),
    Case(
        "stop_gradient",
        lambda x: x * lax.stop_gradient(x.mean()),
        (BATCH,),
        grad=True,
    ),
    Case(
        "gradient_descent",
        lambda w, x: lax.fori_loop(
            0, 3, lambda i, w: w - 0.1 * jax.grad(functools.partial(_loss, row=x))(w), w
        ),
        ("s", BATCH),
    ),
]

CASES = CALLS + BRANCHES + LOOPS + SCANS + DERIVATIVES
