"""Sequence models and decoding, in bare JAX as people write it by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ecosystem.model import Model, flags, floats, ints

STATES = 4
TIMES = ({"t": 6}, {"t": 8}, {"t": 1})
BLOCKS = ({"b": 3, "s": 8}, {"b": 4, "s": 16}, {"b": 1, "s": 12})
LOOPS = ({"b": 3, "s": 6}, {"b": 4, "s": 6}, {"b": 2, "s": 6}, {"b": 3, "s": 5})


def normal(*shape, seed=0, scale=1.0):
    return jnp.asarray(scale * np.random.default_rng(seed).standard_normal(shape), jnp.float32)


def of(fn, *fixed):
    return lambda: (fn, *fixed)


TRANSITIONS, START = normal(STATES, STATES), normal(STATES, seed=1)
EMBEDDING = normal(10, 8, seed=2)
WEIGHTS = normal(3, 8, 8, seed=3, scale=0.4)


def viterbi(transitions, start, scores):
    def forward(best, score):
        through = best[:, None] + transitions
        return through.max(0) + score, through.argmax(0)

    best, back = lax.scan(forward, start + scores[0], scores[1:])
    first, path = lax.scan(lambda s, b: (b[s], s), best.argmax(), back, reverse=True)
    return best.max(), jnp.append(first, path)


def crf_loss(transitions, scores, tags):
    """Negative log-likelihood of a linear chain."""
    path = jnp.take_along_axis(scores, tags[..., None], 2)[..., 0].sum(1)
    path += transitions[tags[:, :-1], tags[:, 1:]].sum(1)

    def forward(alpha, score):
        return jax.nn.logsumexp(alpha[:, :, None] + transitions, 1) + score, None

    alpha, _ = lax.scan(forward, scores[:, 0], scores[:, 1:].swapaxes(0, 1))
    return (jax.nn.logsumexp(alpha, -1) - path).mean()


def forward_backward(transitions, start, scores):
    logs = jax.nn.log_softmax(transitions)

    def ahead(alpha, score):
        alpha = jax.nn.logsumexp(alpha[:, None] + logs, 0) + score
        return alpha, alpha

    def behind(beta, score):
        beta = jax.nn.logsumexp(logs + (beta + score), 1)
        return beta, beta

    first = start + scores[0]
    _, alphas = lax.scan(ahead, first, scores[1:])
    _, betas = lax.scan(behind, jnp.zeros(STATES), scores[1:], reverse=True)
    both = jnp.vstack([first, alphas]) + jnp.vstack([betas, jnp.zeros(STATES)])
    return jax.nn.softmax(both)


def ctc_collapse(logits):
    tokens = logits.argmax(-1)
    before = jnp.pad(tokens[:, :-1], ((0, 0), (1, 0)), constant_values=-1)
    keep = (tokens != before) & (tokens != 0)
    place = jnp.where(keep, jnp.cumsum(keep, 1) - 1, tokens.shape[1])
    rows = jnp.arange(tokens.shape[0])[:, None]
    return jnp.full(tokens.shape, -1).at[rows, place].set(tokens, mode="drop"), keep.sum(1)


def beam_search(w, embedding, context):
    batch, beams, words = context.shape[0], 3, embedding.shape[0]
    hidden = jnp.repeat(context[:, None], beams, 1)
    scores = jnp.tile(jnp.array([0.0] + [-jnp.inf] * (beams - 1)), (batch, 1))
    token = jnp.zeros((batch, beams), jnp.int32)
    found = []
    for _ in range(3):
        hidden = jnp.tanh(hidden @ w + embedding[token])
        total = scores[..., None] + jax.nn.log_softmax(hidden @ embedding.T)
        scores, best = lax.top_k(total.reshape(batch, beams * words), beams)
        parent, token = best // words, best % words
        hidden = jnp.take_along_axis(hidden, parent[..., None], 1)
        found.append(token)
    return jnp.stack(found, -1), scores


def greedy_until_done(w, embedding, context):
    batch = context.shape[0]

    def going(state):
        return (state[0] < 5) & ~state[3].all()

    def step(state):
        i, hidden, token, done, out = state
        hidden = jnp.tanh(hidden @ w + embedding[token])
        token = jnp.where(done, 0, (hidden @ embedding.T).argmax(-1))
        return i + 1, hidden, token, done | (token == 3), out.at[:, i].set(token)

    done, out = jnp.zeros(batch, bool), jnp.zeros((batch, 5), int)
    return lax.while_loop(going, step, (0, context, jnp.zeros(batch, int), done, out))[-1]


def nucleus(logits):
    ordered = jnp.sort(logits, -1)[:, ::-1]
    count = (jnp.cumsum(jax.nn.softmax(ordered), -1) < 0.9).sum(-1, keepdims=True)
    kept = jnp.where(logits < jnp.take_along_axis(ordered, count, -1), -jnp.inf, logits)
    return jax.random.categorical(jax.random.key(0), kept)


def edit_distance(a, b):
    def row(before, x):
        i, symbol = x
        best = jnp.minimum(before[:-1] + (b != symbol), before[1:] + 1)
        _, rest = lax.scan(lambda left, v: (jnp.minimum(v, left + 1),) * 2, i, best)
        return jnp.append(i, rest), None

    numbered = (jnp.arange(1, a.shape[0] + 1), a)
    return lax.scan(row, jnp.arange(b.shape[0] + 1), numbered)[0][-1]


def chunked_attention(w, x):
    """Running maximum and sum over chunks of keys."""
    q, k, v = (x @ each for each in w)
    b, s, d = x.shape
    chunks = [z.reshape(b, s // 4, 4, d).swapaxes(0, 1) for z in (k, v)]

    def step(carry, chunk):
        top, total, out = carry
        scores = q @ chunk[0].mT
        new = jnp.maximum(top, scores.max(-1))
        weights, scale = jnp.exp(scores - new[..., None]), jnp.exp(top - new)
        out = out * scale[..., None] + weights @ chunk[1]
        return (new, total * scale + weights.sum(-1), out), None

    start = (jnp.full((b, s), -jnp.inf), jnp.zeros((b, s)), jnp.zeros_like(q))
    (_, total, out), _ = lax.scan(step, start, tuple(chunks))
    return out / total[..., None]


def blocks_with_own_padding(w, x):
    """Attention in blocks of 4, the sequence padded to a multiple by hand."""
    b, s, d = x.shape
    pad = -s % 4
    z = (jnp.pad(x, ((0, 0), (0, pad), (0, 0))) @ w[0]).reshape(b, (s + pad) // 4, 4, d)
    real = jnp.pad(jnp.ones((b, s), bool), ((0, 0), (0, pad))).reshape(b, -1, 1, 4)
    weights = jax.nn.softmax(jnp.where(real, z @ z.mT, -1e9))
    return (weights @ z).reshape(b, s + pad, d)[:, :s]


def relative_shift(w, x):
    """Transformer-XL's trick of padding and reshaping."""
    b, s, d = x.shape
    positions = jnp.tile(jnp.arange(-(s - 1), s)[:, None] / 10.0, (1, d))
    scores = (x @ w[0]) @ (positions @ w[2]).T
    scores = jnp.pad(scores, ((0, 0), (0, 0), (1, 0))).reshape(b, 2 * s, s)[:, 1:]
    scores = scores.reshape(b, s, 2 * s - 1)[..., :s]
    return jax.nn.softmax((x @ w[0]) @ (x @ w[1]).mT + scores) @ x


def sinusoidal(w, x):
    """Position encodings made by NumPy."""
    s, d = x.shape[1:]
    angle = np.arange(s)[:, None] * np.exp(np.arange(0, d, 2) * -(math.log(10000.0) / d))
    table = np.zeros((s, d), np.float32)
    table[:, 0::2], table[:, 1::2] = np.sin(angle), np.cos(angle)
    return (x + table) @ w[0]


def experts_with_capacity(router, experts, x):
    """Each expert takes as many tokens as a share of their number."""
    tokens = x.reshape(-1, x.shape[-1])
    capacity = max(1, int(1.25 * tokens.shape[0] / 4))
    weights = jax.nn.softmax(tokens @ router)
    expert = weights.argmax(-1)
    one_hot = jax.nn.one_hot(expert, 4, dtype=jnp.int32)
    place = ((jnp.cumsum(one_hot, 0) - 1) * one_hot).sum(-1)
    keep = place < capacity
    room = jnp.zeros((4, capacity, 8)).at[expert, jnp.where(keep, place, capacity)]
    done = jnp.einsum("ecd,edf->ecf", room.set(tokens, mode="drop"), experts)
    out = jnp.where(keep[:, None], done[expert, jnp.minimum(place, capacity - 1)], 0)
    return (out * weights.max(-1)[:, None]).reshape(x.shape)


def python_loop(w, x):
    """A recurrence unrolled over the sequence."""
    hidden = jnp.zeros((x.shape[0], 8))
    for t in range(x.shape[1]):
        hidden = jnp.tanh(hidden @ w + x[:, t])
    return hidden


def masked_pooling(x, real):
    total = (x * real[..., None]).sum(1) / real.sum(1, keepdims=True)
    last = jnp.take_along_axis(x, (real.sum(1) - 1)[:, None, None], 1)[:, 0]
    return total, last, jnp.where(real[..., None], x, -jnp.inf).max(1)


ROUTER, EXPERTS = normal(8, 4), normal(4, 8, 8, seed=1)
HIDDEN = floats("b, s, 8")

MODELS = [
    Model("Viterbi", of(viterbi, TRANSITIONS, START), (floats("t, 4"),), TIMES),
    Model(
        "conditional random field, gradient",
        of(jax.value_and_grad(crf_loss), TRANSITIONS),
        (floats("b, s, 4"), ints("b, s", STATES)),
    ),
    Model("forward-backward", of(forward_backward, TRANSITIONS, START), (floats("t, 4"),), TIMES),
    Model("CTC collapse", of(ctc_collapse), (floats("b, s, 5"),)),
    Model("beam search", of(beam_search, WEIGHTS[0], EMBEDDING), (floats("b, 8"),)),
    Model("greedy decoding", of(greedy_until_done, WEIGHTS[0], EMBEDDING), (floats("b, 8"),)),
    Model(
        "nucleus sampling",
        of(nucleus),
        (floats("b, v"),),
        ({"b": 3, "v": 9}, {"b": 4, "v": 16}, {"b": 1, "v": 12}),
    ),
    Model(
        "edit distance",
        of(edit_distance),
        (ints("n", 5), ints("m", 5)),
        ({"n": 6, "m": 5}, {"n": 8, "m": 8}, {"n": 1, "m": 9}),
    ),
    Model("attention in chunks", of(chunked_attention, WEIGHTS), (HIDDEN,), BLOCKS),
    Model(
        "attention in padded blocks", of(blocks_with_own_padding, WEIGHTS), (HIDDEN,), way="paired"
    ),
    Model("relative shift", of(relative_shift, WEIGHTS), (HIDDEN,)),
    Model("sinusoidal positions of NumPy", of(sinusoidal, WEIGHTS), (HIDDEN,), way="paired"),
    Model(
        "experts with capacity", of(experts_with_capacity, ROUTER, EXPERTS), (HIDDEN,), way="paired"
    ),
    Model("recurrence in Python", of(python_loop, WEIGHTS[0]), (HIDDEN,), LOOPS, way="paired"),
    Model("masked pooling", of(masked_pooling), (HIDDEN, flags("b, s"))),
]
