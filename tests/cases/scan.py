"""Scans, and derivatives of programs with control flow."""

import functools

import jax
import jax.numpy as jnp
from jax import lax

from tests.cases.control import scaled, softplus
from tests.harness import cases, family

case, scan = family(), family("scan", grad=True)

BATCH = "b, s"
MIXED = ("mixed",)

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


def _over_parts(x, y):
    """Loops over parts that small buckets have nothing of."""

    def nested(c, r):
        inner, rows = lax.scan(lambda d, q: (d + q * c, d * r), r, x[1:])
        return c + inner, rows

    return (
        [lax.scan(lambda c, r: (c + r, c), 0.0, part) for part in (x[1:], x[:-1], x[4:])],
        lax.scan(_step, x[1:], y[1:, :1], reverse=True),
        lax.scan(nested, 1.0, x),
        lax.scan(nested, 1.0, x[: x.shape[0] // 2]),
        lax.map(jnp.sin, y[2:]),
        lax.scan(lambda c, r: (jnp.sin(c + r), None), jnp.ones(2), jnp.diff(y, axis=0))[0],
        jax.vmap(lambda c, r: lax.scan(lambda c, r: (c * r, c), c, r[1:]), (0, 1))(y[0], y),
        lax.associative_scan(jnp.add, x[1:], reverse=True),
    )


SCANS = {
    "scan_static_length": scan(_scan(), "s; 3, s"),
    "scan_static_reverse": scan(_scan(reverse=True, unroll=2), "s; 4, s"),
    "scan": scan(_scan(), "3; s, 3"),
    "scan_both": scan(_scan(), "s; b, s"),
    "scan_reverse": scan(_scan(reverse=True), "s; b, s"),
    "scan_unroll": scan(_scan(unroll=3), "3; s, 3"),
    "scan_of_a_length": scan(
        lambda x: lax.scan(
            lambda c, _: (c * 0.5 + x.sum(0), c), x[0], None, length=x.shape[0], reverse=True
        )
    ),
    "scan_of_an_array_and_its_length": scan(
        lambda x: lax.scan(lambda c, r: (c + r, c * r), x[0], x, x.shape[0]), grad=False
    ),
    "scan_same_size": scan(_scan(), "s; s, s", grad=False),
    "scan_bfloat16": scan(
        lambda c, x: lax.scan(lambda c, r: (c + r, c * r), c, x),
        "bfloat16[3]; bfloat16[s, 3]",
        grad=False,
    ),
    "scan_dtypes": scan(
        lambda n, p, z: lax.scan(
            lambda c, r: ((c[0] + r[0], c[1] ^ r[1].any()), (c[0] % 3, r[2] * c[0], c[1])),
            (jnp.uint8(1), False),
            (n, p, z),
        ),
        "uint8[s] 0:200; bool[s, b]; complex64[s, 2]",
        domains=MIXED,
        grad=False,
    ),
    "scan_special": scan(
        lambda x: lax.scan(lambda c, r: (jnp.maximum(c, r), c), jnp.float32(-jnp.inf), x),
        "s",
        domains=("mixed", "special"),
        grad=False,
    ),
    "scan_counter": scan(
        lambda x: lax.scan(
            lambda c, i: (c * 0.5 + x.mean(), c[0] + i), x[0], jnp.arange(x.shape[0])
        )
    ),
    "scan_length_expression": scan(
        lambda x: lax.scan(_step, x.sum(), jnp.concatenate([x, x[1:]]), reverse=True),
        "s",
        grad=False,
    ),
    "scan_length_zero": scan(
        lambda x: lax.scan(lambda c, r: (c + r, r * 2), jnp.float32(1), x[1:]), "s", grad=False
    ),
    **{
        f"scan_without_a_step_{size}": scan(
            _over_parts,
            "s; s, 2",
            sizes=({"s": size}, {"s": max(1, size - 1)}),
            buckets={"s": size},
            domains=MIXED,
        )
        for size in (1, 4)
    },
    "scan_keys": scan(
        lambda k: lax.scan(lambda c, k: (c + jax.random.uniform(k), k), jnp.float32(0), k),
        "key[b]",
        domains=MIXED,
        grad=False,
    ),
    "scan_key_carry": scan(
        lambda k, x: lax.scan(
            lambda k, r: (jax.random.split(k)[0], r + jax.random.normal(k, r.shape)), k, x
        ),
        "key[]; b, s",
        domains=MIXED,
        grad=False,
    ),
    "scan_rnn": scan(_rnn, "3, 3; b, s, 3", rtol=1e-4, atol=1e-4),
    "scan_viterbi": scan(
        _viterbi,
        "s, 3; 3, 3",
        sizes=tuple({"s": n} for n in (2, 3, 7, 8)),
        constraints=("s >= 2",),
        grad=False,
    ),
    "scan_nested": scan(
        lambda x: lax.scan(
            lambda c, r: (lax.scan(lambda d, v: (0.5 * d + v, d), c, r)[0], c), jnp.float32(0), x
        )
    ),
    "scan_vmapped": scan(
        jax.vmap(lambda r: lax.scan(lambda c, v: (0.5 * c + v, c), jnp.float32(0), r))
    ),
    "scan_vmapped_init": scan(
        jax.vmap(lambda c, r: lax.scan(_step, c, r), in_axes=(0, None)), "b, 3; s, 3"
    ),
    "scan_cond": case(
        lambda x: lax.scan(
            lambda c, r: (lax.cond(r.sum() > 0, lambda: c + r.mean(), lambda: c * 0.5), c),
            jnp.float32(0),
            x,
        ),
        covers="scan cond",
        grad=True,
    ),
    "map": scan(lambda x: lax.map(lambda r: r - r.mean(), x)),
    "map_batch_size": scan(
        lambda x: lax.map(lambda r: r - r.mean(), x, batch_size=2), buckets={"b": 7}, grad=False
    ),
    "map_batch_size_over_bucket": case(
        lambda x: lax.map(lambda r: r * 2, x, batch_size=3), "b", buckets={"b": 8}
    ),
}


# --- derivatives --------------------------------------------------------------------------


def _loss(w, row):
    return jnp.mean(jnp.tanh(row * w) ** 2)


DERIVATIVES = {
    "jacfwd": case(jax.jacfwd(lambda x: jnp.sin(x) * x.mean()), "s"),
    "jacrev": case(jax.jacrev(lambda x: jnp.sin(x) * x.mean()), "s"),
    "hessian": case(jax.hessian(lambda x: jnp.mean(x**3) + x.max()), "s"),
    "hvp": case(
        lambda x, v: jax.jvp(jax.grad(lambda y: jnp.sum(jnp.sin(y) * y.mean())), (x,), (v,)),
        "b, s; b, s",
    ),
    "linearize": case(lambda x, v: jax.linearize(softplus, x)[1](v), "b, s; b, s"),
    "vjp": case(lambda x, t: jax.vjp(scaled, x)[1](t), "b, s; b, s"),
    "per_example_gradients": case(jax.vmap(jax.grad(_loss), (None, 0)), "s; b, s"),
    "clipped_gradients": case(
        lambda w, x: jax.tree.map(
            lambda g: (g / jnp.maximum(1.0, jnp.linalg.norm(g, axis=-1, keepdims=True))).mean(0),
            jax.vmap(jax.grad(_loss), (None, 0))(w, x),
        ),
        "s; b, s",
        domains=("mixed", "positive"),
    ),
    "grad_of_scan_in_vmap": scan(
        jax.vmap(jax.grad(lambda r: lax.scan(_step, r, jnp.outer(r, r))[1].sum())),
        rtol=1e-4,
        atol=1e-4,
        grad=False,
    ),
    "grad_of_fori": scan(
        jax.grad(lambda x: lax.fori_loop(0, 3, lambda i, c: jnp.sin(c) - c.mean(), x).sum()),
        grad=False,
    ),
    "jacfwd_of_while": case(
        jax.jacfwd(lambda x: lax.while_loop(lambda c: c.max() > 0.1, lambda c: c * 0.5, x)),
        "s",
        covers="while",
    ),
    "stop_gradient": case(lambda x: x * lax.stop_gradient(x.mean()), grad=True),
    "gradient_descent": case(
        lambda w, x: lax.fori_loop(
            0, 3, lambda i, w: w - 0.1 * jax.grad(functools.partial(_loss, row=x))(w), w
        ),
        "s; b, s",
    ),
}

CASES = cases(SCANS | DERIVATIVES)
