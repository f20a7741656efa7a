"""Jraph: graphs, whose nodes and edges are open."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests.ecosystem.model import Model, floats, initialised, ints

jraph = pytest.importorskip("jraph", reason="jraph is not installed")
nn = pytest.importorskip("flax.linen", reason="flax is not installed")

GRAPHS = 3


def parts(total, count, rng):
    """Sizes that add up to the total."""
    return np.bincount(rng.integers(0, count, total), minlength=count).astype(np.int32)


def drawn(rng, sizes):
    """Nodes, edges, senders, receivers, globals, and how many of each a graph has."""
    n, e, g = sizes["n"], sizes["e"], sizes.get("g", GRAPHS)
    n_node = parts(n, g, rng)
    ends = np.repeat(np.arange(g), n_node)
    first = rng.integers(0, n, e)
    order = np.argsort(ends[first], kind="stable")
    senders = first[order].astype(np.int32)
    starts = np.cumsum(n_node) - n_node
    graph = ends[senders]
    receivers = (starts[graph] + rng.integers(0, n_node[graph])).astype(np.int32)
    return (
        rng.standard_normal((n, 4)).astype(np.float32),
        rng.standard_normal((e, 3)).astype(np.float32),
        senders,
        receivers,
        rng.standard_normal((g, 2)).astype(np.float32),
        n_node,
        np.bincount(graph, minlength=g).astype(np.int32),
    )


def graph_of(nodes, edges, senders, receivers, globals_, n_node, n_edge):
    return jraph.GraphsTuple(nodes, edges, receivers, senders, globals_, n_node, n_edge)


def example():
    return drawn(np.random.default_rng(0), {"n": 7, "e": 9})


class MLP(nn.Module):
    out: int

    @nn.compact
    def __call__(self, *inputs):
        x = jnp.concatenate(jax.tree_util.tree_leaves(inputs), axis=-1)
        return nn.Dense(self.out)(nn.relu(nn.Dense(8)(x)))


class GraphNetwork(nn.Module):
    @nn.compact
    def __call__(self, graph):
        net = jraph.GraphNetwork(
            update_node_fn=MLP(6), update_edge_fn=MLP(5), update_global_fn=MLP(2)
        )
        return net(net_once(self, graph))


def net_once(module, graph):
    return jraph.GraphMapFeatures(
        embed_edge_fn=nn.Dense(3), embed_node_fn=nn.Dense(4), embed_global_fn=nn.Dense(2)
    )(graph)


class GCN(nn.Module):
    @nn.compact
    def __call__(self, graph):
        graph = jraph.GraphConvolution(nn.Dense(6), add_self_edges=True)(graph)
        graph = graph._replace(nodes=nn.relu(graph.nodes))
        return jraph.GraphConvolution(nn.Dense(3))(graph)


class GAT(nn.Module):
    @nn.compact
    def __call__(self, graph):
        score = nn.Dense(1)
        return jraph.GAT(
            attention_query_fn=nn.Dense(6),
            attention_logit_fn=lambda s, r, e: nn.leaky_relu(
                score(jnp.concatenate([s, r, e], axis=-1))
            ),
            node_update_fn=nn.relu,
        )(graph)


class Interaction(nn.Module):
    @nn.compact
    def __call__(self, graph):
        return jraph.InteractionNetwork(update_edge_fn=MLP(5), update_node_fn=MLP(6))(graph)


class DeepSets(nn.Module):
    @nn.compact
    def __call__(self, graph):
        return jraph.DeepSets(update_node_fn=MLP(6), update_global_fn=MLP(2))(graph)


def forward(model):
    def build():
        params = initialised(model.init, graph_of(*example()))
        return lambda params, *parts: model.apply(params, graph_of(*parts)), params

    return build


def training(model):
    """Regression of graph properties from pooled nodes."""

    def build():
        params = initialised(model.init, graph_of(*example()))

        def loss(params, *parts):
            graph = graph_of(*parts)
            nodes = model.apply(params, graph).nodes
            n, g = nodes.shape[0], graph.n_node.shape[0]
            index = jnp.repeat(jnp.arange(g), graph.n_node, total_repeat_length=n)
            pooled = jraph.segment_mean(nodes, index, g)
            return jnp.mean((pooled.sum(-1) - graph.globals.sum(-1)) ** 2)

        return jax.value_and_grad(loss), params

    return build


def padded():
    """The last graph is padding of the user's own, which jraph's masks leave out."""

    def apply(*parts):
        graph = graph_of(*parts)
        nodes, edges = jraph.get_node_padding_mask(graph), jraph.get_edge_padding_mask(graph)
        mean = jnp.mean(graph.nodes, axis=0, where=nodes[:, None])
        return mean, jnp.max(graph.edges, axis=0, where=edges[:, None], initial=0.0), nodes

    return (apply,)


def pooled():
    def apply(nodes, segments):
        weights = jraph.segment_softmax(nodes[:, 0], segments, GRAPHS)
        variance = jraph.segment_variance(nodes, segments, GRAPHS)
        normal = jraph.segment_normalize(nodes, segments, GRAPHS)
        return weights, variance, normal, jraph.segment_max(nodes, segments, GRAPHS)

    return (apply,)


def inputs(graphs):
    return (
        floats("n, 4"),
        floats("e, 3"),
        ints("e", 1),
        ints("e", 1),
        floats(f"{graphs}, 2"),
        ints(graphs, 1),
        ints(graphs, 1),
    )


SIZES = ({"n": 6, "e": 9}, {"n": 8, "e": 16}, {"n": 5, "e": 1})
BATCHES = ({"n": 6, "e": 9, "g": 3}, {"n": 8, "e": 16, "g": 4}, {"n": 5, "e": 11, "g": 2})


def _model(name, build, sizes=SIZES):
    graphs = "g" if "g" in sizes[0] else str(GRAPHS)
    return Model(name, build, inputs(graphs), sizes, make=drawn)


MODELS = [
    _model("GraphNetwork", forward(GraphNetwork())),
    _model("GraphNetwork, gradient", training(GraphNetwork()), BATCHES),
    _model("GCN with self edges, gradient", training(GCN())),
    _model("GAT", forward(GAT())),
    _model("InteractionNetwork, gradient", training(Interaction())),
    _model("DeepSets", forward(DeepSets()), BATCHES),
    _model("masks of a padding graph", padded),
    Model(
        "segment softmax, variance, normalisation, maximum",
        pooled,
        (floats("n, 3"), ints("n", GRAPHS)),
        ({"n": 6}, {"n": 8}, {"n": 1}),
    ),
]
