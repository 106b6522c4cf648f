"""AttnGate against hand-computed numbers and an independent float64 implementation."""

import math

import pytest
import torch

from seergate import GateConfig, ops
from seergate.gates.gate import AttnGate
from tests.gates.test_scorers import rms, rotated
from tests.support.models import geometry


def test_score_by_hand():
    """q = [2, 1], keys [1, -2] and [3, 0], max pooling only, identity maps."""
    keys = torch.tensor([[[[1.0, -2.0], [3.0, 0.0]]]])
    pooled = ops.pool_keys(keys, 2, ("max", "min", "avg"))
    assert pooled[0, 0, 0].tolist() == [3, 0, 1, -2, 2, -1]
    for rope, q_at, k_at, expected in (
        (False, 5, 2, 4.242641),
        (True, 5, 2, -4.499543),
        (True, 5, 3, -3.694473),
        (True, 105, 102, -4.499543),
    ):
        config = GateConfig(block_size=8, gate_dim=2, qk_norm=False, rope=rope)
        gate = AttnGate(config, geometry(1, 1, 2, inv_freq=torch.tensor([1.0])))
        gate.q_proj.weight.data = torch.eye(2)[None, None]
        gate.k_proj.weight.data = torch.cat((torch.eye(2), torch.zeros(4, 2)))[None]
        q = torch.tensor([2.0, 1.0]).view(1, 1, 1, 2)
        qg = gate.queries(q, torch.tensor([q_at]))
        kg = gate.keys(pooled, torch.tensor([k_at]))
        assert gate.scores(qg, kg).item() == pytest.approx(expected, abs=2e-5)


def naive(gate: AttnGate, q, k, block_size):
    """Scores ``[H_kv, S, N]`` straight from equations 1a-1c, head by head, in float64."""
    config, length = gate.config, q.shape[1]
    kv_heads, group, width = gate.num_kv_heads, gate.group_size, config.gate_dim
    blocks = length // block_size
    scores = torch.zeros(kv_heads, length, blocks, dtype=torch.float64)
    for g in range(kv_heads):
        kg = []
        for n in range(blocks):
            chunk = k[g, n * block_size : (n + 1) * block_size]
            pooled = {"max": chunk.amax(0), "min": chunk.amin(0), "avg": chunk.mean(0)}
            x = torch.cat([pooled[kind] for kind in config.k_pooling]) @ gate.k_proj.weight[g]
            kg.append(rotated(rms(x, gate.k_norm.weight) if config.qk_norm else x, n * block_size, gate))
        for t in range(length):
            members = [q[g * group + i, t] for i in range(group)]
            if config.q_pooling in ("proj", "none"):
                mapped = [member @ gate.q_proj.weight[g, i] for i, member in enumerate(members)]
                queries = mapped if config.q_pooling == "none" else [sum(mapped)]
            else:
                x = sum(members) / group
                queries = [x @ gate.q_proj.weight[g] if config.q_pooling == "avgproj" else x]
            queries = [rotated(rms(x, gate.q_norm.weight) if config.qk_norm else x, t, gate) for x in queries]
            for n in range(blocks):
                scores[g, t, n] = max(x @ kg[n] for x in queries) / math.sqrt(width)
    return scores


@pytest.mark.parametrize("group", [1, 4, 5, 7, 8])
@pytest.mark.parametrize(
    ("q_pooling", "k_pooling", "gate_dim", "qk_norm", "rope"),
    [
        ("proj", ("max", "min", "avg"), 6, True, True),
        ("proj", ("avg",), 4, False, True),
        ("avgproj", ("min", "max"), 8, True, False),
        ("avg", ("avg", "max"), 6, True, True),
        ("none", ("max", "min", "avg"), 6, True, True),
    ],
)
def test_against_naive(group, q_pooling, k_pooling, gate_dim, qk_norm, rope):
    config = GateConfig(8, gate_dim, k_pooling, q_pooling, qk_norm, rope)
    inv_freq = 1.0 / 100.0 ** (torch.arange(0, gate_dim, 2) / gate_dim)
    gate = AttnGate(config, geometry(2 * group, 2, 6, inv_freq=inv_freq))
    for parameter in gate.parameters():
        parameter.data.normal_()
    q, k = torch.randn(1, 2 * group, 27, 6), torch.randn(1, 2, 27, 6)
    pooled = ops.pool_keys(k[:, :, :24], 8, k_pooling)
    scores = gate.scores(gate.queries(q, torch.arange(27)), gate.keys(pooled, torch.arange(3) * 8))[0]
    expected = naive(gate.double(), q[0].double(), k[0].double(), 8)
    torch.testing.assert_close(scores.double(), expected, rtol=1e-5, atol=1e-5)


def test_initialisation():
    gate = AttnGate(GateConfig(64, 128, rope=False), geometry(32, 8, 128))
    for linear in (gate.q_proj, gate.k_proj):
        assert linear.weight.std().item() == pytest.approx(0.02, rel=0.01)
        assert linear.weight.mean().item() == pytest.approx(0, abs=1e-4)
    assert gate.q_norm.weight.eq(1).all() and gate.k_norm.weight.eq(1).all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"block_size": size}, f"block_size is {size}") for size in (0, 257, True)),
        ({"gate_dim": 0}, "gate_dim is 0"),
        ({"gate_dim": 7}, "gate_dim is 7; it must be even"),
        ({"k_pooling": ()}, "k_pooling is ()"),
        ({"k_pooling": ("max", "max")}, "at most once"),
        ({"k_pooling": "max"}, "must be a sequence such as ('max',)"),
        ({"k_pooling": ("mean",)}, "k_pooling is"),
        ({"q_pooling": "sum"}, "q_pooling is 'sum'"),
        ({"qk_norm": "yes"}, "qk_norm is 'yes'"),
        ({"rope": 3}, "rope is 3"),
        *(({"sink_blocks": x}, f"sink_blocks is {x}; it must be a whole number") for x in (-1, True, 1.0, None)),
        ({"scorer": "quest"}, "scorer is 'quest'; it must be one of"),
        *(({"scorer": name, "k_pooling": ("max",)}, "it must be left out") for name in ("msa", "fast_kvzip")),
        ({"scorer": "indexer", "q_pooling": "avg"}, "q_pooling is 'avg'; with scorer 'indexer' it must be left out"),
        ({"scorer": "fast_kvzip", "qk_norm": False}, "qk_norm is False; with scorer 'fast_kvzip' it must be left out"),
        ({"scorer": "trim_kv", "sink_blocks": 1}, "sink_blocks is 1; with scorer 'trim_kv' it must be left out"),
    ],
)
def test_bad_configurations(options, message):
    with pytest.raises(ValueError, match=message.replace("(", r"\(").replace(")", r"\)")):
        GateConfig(**options)


def test_wrong_heads():
    with pytest.raises(ValueError, match="num_heads is 6; it must be a positive multiple of num_kv_heads"):
        AttnGate(GateConfig(rope=False), geometry(6, 4, 8))
    with pytest.raises(ValueError, match='q_pooling="avg" it must equal the head dimension'):
        AttnGate(GateConfig(gate_dim=4, q_pooling="avg", rope=False), geometry(4, 4, 8))
