"""Statistics, physics, signals and images, in bare JAX as people write it by hand."""

import math

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from tests.ecosystem.libraries.programs_sequences import normal, of
from tests.ecosystem.model import Array, Model, floats, ints, uniform

SIZES = ({"n": 6}, {"n": 8}, {"n": 1})
SEVERAL = ({"n": 6}, {"n": 8}, {"n": 5})
BOTH = ({"n": 6, "m": 5}, {"n": 8, "m": 8}, {"n": 1, "m": 9})


def definite(shape):
    def draw(rng, s):
        a = rng.standard_normal(s)
        return (a @ np.swapaxes(a, -1, -2) / s[-1] + 2 * np.eye(s[-1])).astype(np.float32)

    return Array(shape, draw)


def kalman(f, h, observed):
    def step(state, y):
        m, p = state
        m, p = f @ m, f @ p @ f.T + 0.1 * jnp.eye(4)
        s = h @ p @ h.T + 0.5 * jnp.eye(2)
        gain = jnp.linalg.solve(s, h @ p).T
        v = y - h @ m
        likelihood = -0.5 * (v @ jnp.linalg.solve(s, v) + jnp.linalg.slogdet(s)[1])
        return (m + gain @ v, p - gain @ s @ gain.T), (m, likelihood)

    _, (means, likelihoods) = lax.scan(step, (jnp.zeros(4), jnp.eye(4)), observed)
    return means, likelihoods.sum()


def parallel_kalman(f, h, observed):
    """The filter of `kalman` as an associative scan: means and covariances in logarithmic depth."""
    q, r = 0.1 * jnp.eye(4), 0.5 * jnp.eye(2)

    def later(y):
        gain = jnp.linalg.solve(h @ q @ h.T + r, h @ q).T
        kept, seen = jnp.eye(4) - gain @ h, f.T @ h.T @ jnp.linalg.inv(h @ q @ h.T + r)
        return kept @ f, gain @ y, kept @ q, seen @ h @ f, seen @ y

    def first(y):
        p = f @ f.T + q
        gain = jnp.linalg.solve(h @ p @ h.T + r, h @ p).T
        nothing = jnp.zeros((4, 4))
        return nothing, gain @ y, p - gain @ h @ p, nothing, jnp.zeros(4)

    def combine(left, right):
        (a, b, c, j, e), (a2, b2, c2, j2, e2) = left, right
        inverse = jnp.linalg.inv(jnp.eye(4) + c @ j2)
        ahead, back = a2 @ inverse, (inverse @ a).T
        return (
            ahead @ a,
            ahead @ (b + c @ e2) + b2,
            ahead @ c @ a2.T + c2,
            back @ j2 @ a + j,
            back @ (e2 - j2 @ b) + e,
        )

    steps = jax.tree.map(
        lambda x, x0: x.at[0].set(x0), jax.vmap(later)(observed), first(observed[0])
    )
    _, means, covariances, _, _ = lax.associative_scan(jax.vmap(combine), steps)
    return means, covariances


def parallel_kalman_loss(f, h, observed):
    """What one step after the next is off, weighed by how sure the filter is of it."""
    means, covariances = parallel_kalman(f, h, observed)

    def log_likelihood(m, p, y):
        s, v = h @ (f @ p @ f.T + 0.1 * jnp.eye(4)) @ h.T + 0.5 * jnp.eye(2), y - h @ f @ m
        return -0.5 * (v @ jnp.linalg.solve(s, v) + jnp.linalg.slogdet(s)[1])

    return -jax.vmap(log_likelihood)(means[:-1], covariances[:-1], observed[1:]).sum()


def gaussian_process(x, y, there):
    def kernel(a, b):
        return jnp.exp(-0.5 * ((a[:, None] - b) ** 2).sum(-1))

    factor = jnp.linalg.cholesky(kernel(x, x) + 0.1 * jnp.eye(len(x)))
    alpha = jax.scipy.linalg.cho_solve((factor, True), y)
    v = jax.scipy.linalg.solve_triangular(factor, kernel(x, there), lower=True)
    evidence = 0.5 * y @ alpha + jnp.log(jnp.diag(factor)).sum() + 0.5 * len(x) * math.log(6.28)
    return kernel(there, x) @ alpha, 1 - (v**2).sum(0), evidence


def resampled(log_weights):
    """Systematic resampling of particles."""
    n = log_weights.shape[0]
    places = (jnp.arange(n) + jax.random.uniform(jax.random.key(0))) / n
    found = jnp.searchsorted(jnp.cumsum(jax.nn.softmax(log_weights)), places)
    return jnp.clip(found, 0, n - 1)


def principal_components(x):
    centred = x - x.mean(0)
    values, vectors = jnp.linalg.eigh(centred.T @ centred / (x.shape[0] - 1))
    return values, jnp.abs(vectors), values / values.sum()


def pair_energy(x):
    i, j = np.triu_indices(x.shape[0], 1)
    sixth = 1 / (((x[i] - x[j]) ** 2).sum(-1) + 0.5) ** 3
    return (4 * (sixth**2 - sixth)).sum()


def fluid(u):
    def step(_, u):
        cross = u[:-2, 1:-1] + u[2:, 1:-1] + u[1:-1, :-2] + u[1:-1, 2:] - 4 * u[1:-1, 1:-1]
        return u.at[1:-1, 1:-1].add(0.2 * cross)

    return lax.fori_loop(0, 5, step, u)


def poisson(f):
    h, w = f.shape
    square = jnp.fft.fftfreq(h)[:, None] ** 2 + jnp.fft.fftfreq(w) ** 2
    square = square.at[0, 0].set(1.0)
    return jnp.fft.ifft2((jnp.fft.fft2(f) / -square).at[0, 0].set(0)).real


def analytic_signal(x):
    """The Hilbert transform: even and odd lengths have weights of their own."""
    n = x.shape[0]
    weights = np.zeros(n)
    weights[0] = 1
    if n % 2 == 0:
        weights[n // 2] = 1
    weights[1 : (n + 1) // 2] = 2
    return jnp.abs(jnp.fft.ifft(jnp.fft.fft(x) * weights))


def matrix_root(a):
    values, vectors = jnp.linalg.eigh(a)
    return (vectors * jnp.sqrt(values)) @ vectors.T


def fitted(x, y):
    slope = jnp.linalg.lstsq(jnp.column_stack([jnp.ones(len(x)), x]), y)[0]
    return slope, jnp.polyfit(x[:, 0], y, 2), jnp.linalg.pinv(x) @ y


def time_warping(a, b):
    cost = (a[:, None] - b) ** 2

    def row(before, costs):
        def cell(left, x):
            corner, above, c = x
            value = c + jnp.minimum(left, jnp.minimum(corner, above))
            return value, value

        corners = jnp.append(jnp.inf, before[:-1])
        return lax.scan(cell, jnp.inf, (corners, before, costs))[1], None

    return lax.scan(row, jnp.cumsum(cost[0]), cost[1:])[0][-1]


def rank_correlation(x, y):
    a, b = (jnp.argsort(jnp.argsort(v)).astype(jnp.float32) for v in (x, y))
    n = len(x)
    agree = jnp.sign(x[:, None] - x) * jnp.sign(y[:, None] - y)
    return 1 - 6 * ((a - b) ** 2).sum() / max(n**3 - n, 1), jnp.triu(agree, 1).sum()


def suppressed(boxes, scores):
    """Non-maximum suppression."""
    n = len(scores)
    order = jnp.argsort(-scores)
    low, high = boxes[order, :2], boxes[order, :2] + boxes[order, 2:]
    size = jnp.clip(jnp.minimum(high[:, None], high) - jnp.maximum(low[:, None], low), 0).prod(-1)
    area = (high - low).prod(-1)
    overlap = size / (area[:, None] + area - size + 1e-6)

    def step(i, keep):
        return keep & ~((overlap[i] > 0.3) & (jnp.arange(n) > i) & keep[i])

    keep = lax.fori_loop(0, n, step, jnp.ones(n, bool))
    return jnp.zeros(n, bool).at[order].set(keep)


def area_under_curve(scores, truth):
    ranks = jnp.zeros(len(scores)).at[jnp.argsort(scores)].set(jnp.arange(1, len(scores) + 1))
    positive = truth.sum()
    negative = len(truth) - positive
    area = (ranks * truth).sum() - positive * (positive + 1) / 2
    return area / jnp.maximum(positive * negative, 1)


def components(x):
    """Connected components of an image, by spreading labels."""
    h, w = x.shape
    start = jnp.where(x > 0, jnp.arange(1, h * w + 1).reshape(h, w), 0)

    def spread(state):
        labels, _ = state
        wide = jnp.pad(labels, 1)
        sides = (wide[:-2, 1:-1], wide[2:, 1:-1], wide[1:-1, :-2], wide[1:-1, 2:], labels)
        new = jnp.where(x > 0, jnp.stack(sides).max(0), 0)
        return new, (new != labels).any()

    return lax.while_loop(lambda state: state[1], spread, (start, True))[0]


def pyramid(x):
    """Halve as long as there is something to halve."""
    sums = []
    while min(x.shape) >= 4:
        h, w = x.shape[0] // 2, x.shape[1] // 2
        x = x[: 2 * h, : 2 * w].reshape(h, 2, w, 2).mean((1, 3))
        sums.append(x.sum())
    return sums


def page_rank(nodes, senders, receivers):
    n = nodes.shape[0]
    degree = jnp.bincount(senders, length=n)

    def step(_, rank):
        share = jnp.where(degree > 0, rank / jnp.maximum(degree, 1), 0)
        sunk = jnp.where(degree == 0, rank, 0).sum()
        return 0.15 / n + 0.85 * (jax.ops.segment_sum(share[senders], receivers, n) + sunk / n)

    return lax.fori_loop(0, 10, step, jnp.full(n, 1 / n))


def drawn_graph(rng, sizes):
    ends = rng.integers(0, sizes["n"], (2, sizes["e"])).astype(np.int32)
    return rng.standard_normal((sizes["n"], 4)).astype(np.float32), *ends


IMAGES = ({"h": 6, "w": 7}, {"h": 8, "w": 8}, {"h": 9, "w": 5})

MODELS = [
    Model(
        "Kalman filter",
        of(kalman, normal(4, 4, scale=0.3), normal(2, 4, seed=1)),
        (floats("n, 2"),),
        SIZES,
        tolerance=1e-3,
    ),
    Model(
        "parallel Kalman filter",
        of(parallel_kalman, normal(4, 4, scale=0.3), normal(2, 4, seed=1)),
        (floats("n, 2"),),
        SEVERAL,
        tolerance=1e-4,
    ),
    Model(
        "parallel Kalman filter, gradient",
        of(
            jax.value_and_grad(parallel_kalman_loss, argnums=(0, 1)),
            normal(4, 4, scale=0.3),
            normal(2, 4, seed=1),
        ),
        (floats("n, 2"),),
        ({"n": 6}, {"n": 8}),
        tolerance=1e-3,
    ),
    Model(
        "Gaussian process",
        of(gaussian_process),
        (floats("n, 2"), floats("n"), floats("m, 2")),
        BOTH,
        way="paired",
        tolerance=1e-3,
    ),
    Model("systematic resampling", of(resampled), (floats("n"),), SIZES),
    Model(
        "principal components", of(principal_components), (floats("n, 3"),), SEVERAL, tolerance=1e-3
    ),
    Model(
        "energy of pairs, gradient",
        of(jax.value_and_grad(pair_energy)),
        (floats("n, 3"),),
        SEVERAL,
        way="paired",
    ),
    Model("heat in two dimensions", of(fluid), (floats("h, w"),), IMAGES),
    Model("Poisson's equation by FFT", of(poisson), (floats("h, w"),), IMAGES, tolerance=1e-4),
    Model("analytic signal", of(analytic_signal), (floats("n"),), SIZES, way="paired"),
    Model("square root of a matrix", of(matrix_root), (definite("n, n"),), SIZES, tolerance=1e-3),
    Model(
        "log-determinant by eigenvalues, gradient",
        of(jax.value_and_grad(lambda a: jnp.log(jnp.linalg.eigvalsh(a)).sum())),
        (definite("n, n"),),
        SIZES,
        tolerance=1e-3,
    ),
    Model(
        "least squares",
        of(fitted),
        (floats("n, 3"), floats("n")),
        SEVERAL,
        way="paired",
        tolerance=1e-3,
    ),
    Model("dynamic time warping", of(time_warping), (floats("n"), floats("m")), BOTH),
    Model(
        "rank correlations", of(rank_correlation), (floats("n"), floats("n")), SIZES, way="paired"
    ),
    Model(
        "suppression of boxes", of(suppressed), (uniform("n, 4"), uniform("n")), SIZES, way="paired"
    ),
    Model(
        "area under the curve",
        of(area_under_curve),
        (uniform("n"), ints("n", 2)),
        SIZES,
        way="paired",
    ),
    Model("connected components", of(components), (floats("h, w"),), IMAGES),
    Model("image pyramid", of(pyramid), (floats("h, w"),), IMAGES),
    Model(
        "PageRank",
        of(page_rank),
        (floats("n, 4"), ints("e", 1), ints("e", 1)),
        ({"n": 6, "e": 9}, {"n": 8, "e": 16}, {"n": 5, "e": 1}),
        way="paired",  # ``0.15 / n`` is added to data, not multiplied
        make=drawn_graph,
    ),
]
