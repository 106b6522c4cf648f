"""The decode ops as a compiler sees them: one node each, shapes known without running, nothing read by the host."""

import pytest
import torch

from seergate import ops
from seergate.ops.triton_impl import compression, decode, selection  # noqa: F401  (registers)

KINDS = ["max", "min", "avg"]


@pytest.fixture
def step(device):
    """Tensors of one decode step: 2 rows, 2 KV heads, 4 query heads, 5 blocks of 16."""

    def tensor(*shape):
        return torch.randn(shape, device=device)

    return {
        "q": tensor(2, 4, 32),
        "k": tensor(2, 2, 80, 32),
        "v": tensor(2, 2, 80, 24),
        "scores": tensor(2, 2, 5),
        "lengths": torch.tensor([80, 37], device=device),
        "indices": torch.tensor([[[0, 4, -1], [1, 2, 4]], [[0, 2, -1], [0, 1, 2]]], device=device).int(),
        "new": tensor(2, 2, 32),
        "recent": tensor(2, 2, 32, 32),
        "compressed": tensor(2, 2, 5, 12),
        "weight": tensor(2, 96, 12),
        "query_weight": tensor(2, 2, 32, 12),
        "norm": tensor(12),
        "freq": tensor(6),
    }


def arguments(step, op):
    q, k, v, lengths, indices = (step[name] for name in ("q", "k", "v", "lengths", "indices"))
    table = torch.tensor([[0, 1], [1, 0]], device=q.device)
    sinks = torch.randn(4, device=q.device)
    return {
        "select_blocks": [(step["scores"], lengths, 16, *rule, 1) for rule in ((48, None, None), (None, 0.1, None))],
        "decode_attention": [
            (q, k, v, 0.2, sinks, 3.0, None, indices, None, lengths, 16),
            (q, k[..., :48, :], v[..., :48, :], 0.2, None, None, table, indices, None, lengths, 16),
            (q, k, v, 0.2, None, None, None, None, None, None, 1),
        ],
        "score_blocks": [
            (q, lengths, step["compressed"], step["query_weight"], 16, *extras, 1.0)
            for extras in ((step["norm"], step["freq"]), (None, None))
        ],
        "update_compressed_keys": [
            (step["new"], lengths, step["recent"], step["compressed"], step["weight"], 16, KINDS, *extras, 1.0, 0)
            for extras in ((step["norm"], step["freq"]),)
        ],
    }[op]


@pytest.mark.parametrize("op", ["score_blocks", "select_blocks", "decode_attention", "update_compressed_keys"])
def test_the_registration_is_sound(op, step):
    for given in arguments(step, op):
        torch.library.opcheck(getattr(torch.ops.seergate, op).default, given)


def decode_step(step):
    """A whole step: remember the key, score, select, attend; also densely."""
    q, k, v, lengths, compressed = (step[name] for name in ("q", "k", "v", "lengths", "compressed"))
    gate = {"norm_weight": step["norm"], "inv_freq": step["freq"]}
    ops.update_compressed_keys(step["new"], lengths, step["recent"], compressed, step["weight"], 16, **gate)
    pooled = ops.pool_keys(k, 16, KINDS, lengths)
    scores = ops.score_blocks(q, lengths, compressed, step["query_weight"], 16, **gate)
    chosen = ops.select_blocks(scores + step["scores"], lengths, block_size=16, token_budget=48)
    sparse = ops.sparse_decode(2 * q, k, v, chosen.indices, lengths, 16, counts=chosen.counts)
    return chosen, sparse + ops.dense_decode(q, k, v, lengths), pooled.sum()


def test_the_compiler_keeps_a_step_whole(step):
    """``fullgraph``: a value that the host reads, or code that cannot be traced, would be an error."""
    twin = {name: x.clone() for name, x in step.items()}
    want, got = decode_step(step), torch.compile(decode_step, fullgraph=True, backend="aot_eager")(twin)
    for name, x in step.items():
        assert torch.equal(twin[name], x), f"{name} was not changed alike in place"
    for a, b in zip((*got[0], *got[1:]), (*want[0], *want[1:]), strict=True):
        torch.testing.assert_close(a, b)


def test_the_graph_has_one_node_per_op(step):
    seen = []

    def backend(graph, inputs):
        seen.extend(str(node.target) for node in graph.graph.nodes if "seergate" in str(node.target))
        return graph.forward

    torch.compile(decode_step, fullgraph=True, backend=backend)(step)
    names = ["score_blocks", "select_blocks", "update_compressed_keys", *["decode_attention"] * 2]  # sparse, dense
    assert sorted(seen) == sorted(f"seergate.{name}.default" for name in names)
