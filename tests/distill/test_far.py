"""What is reported beyond the first block and the newest one: against loops over rows and blocks."""

import math

import pytest
import torch

from seergate import GateBank, GateConfig, ops
from seergate.distill.callbacks import EvalLog, Far
from seergate.distill.config import load_train_config
from seergate.distill.losses.distill_loss import DistillSpec
from seergate.distill.losses.far import _compared
from seergate.distill.losses.teacher_forward import distill_steps
from seergate.distill.trainer import without_kernel
from tests.support.models import prompt, tiny_model

SIZE, BUDGETS = 8, (16, 32, 1024)
ENDS = torch.tensor([0, 70, 75, 190], dtype=torch.int32)


def naive(q, k, gate, qg, kg) -> list[float]:
    """The sums, by their definitions."""
    targets = ops.block_targets(q, k, ENDS, SIZE)
    sums, entry = [0.0] * (3 + 2 * len(BUDGETS)), 0
    for a, b in zip(ENDS.tolist(), ENDS.tolist()[1:], strict=False):
        blocks = -(-(b - a) // SIZE)
        scores = gate.scores(qg[a:b].transpose(0, 1)[None], kg[entry : entry + blocks].transpose(0, 1)[None])[0]
        entry += blocks
        for t in range((b - a) // 2, b - a):
            own = t // SIZE
            far = range(1, own - 1)
            for head in range(k.shape[1] if len(far) else 0):
                p, logits = targets[a + t, head].tolist(), scores[head, t, :own].tolist()
                mass, total = sum(p[n] for n in far), sum(math.exp(logits[n]) for n in far)
                sums[0] += 1
                sums[1] += sum(p[n] / mass * math.log(p[n] / mass / (math.exp(logits[n]) / total)) for n in far)
                sums[2] += mass
                for i, budget in enumerate(BUDGETS):
                    others = budget // SIZE - 1  # beside the row's own block
                    best = sorted(range(own), key=lambda n: -logits[n])[:others]
                    window = {0, *range(own - others + 1, own)}
                    sums[3 + i] += sum(p[n] for n in far if n in best)
                    sums[3 + len(BUDGETS) + i] += sum(p[n] for n in far if n in window)
    return sums


def test_the_sums_are_those_of_the_definition(monkeypatch):
    model = tiny_model("qwen3")
    bank = GateBank.for_model(model, GateConfig(SIZE, 16))
    for parameter in bank.parameters():
        parameter.data.normal_()
    given, real = [], ops.gate_kl

    def gate_kl(q, k, qg, kg, *args, **options):
        given.append((q, k, qg.detach(), kg.detach()))
        return real(q, k, qg, kg, *args, **options)

    monkeypatch.setattr(ops, "gate_kl", gate_kl)
    (out,) = distill_steps([DistillSpec(bank, recall_budgets=BUDGETS, far=True)], model, prompt(190), ENDS)
    assert out.far is not None and out.far.shape == (2, 9)
    for layer, (q, k, qg, kg) in enumerate(given):
        want = naive(q, k, bank.gate(layer), qg, kg)
        assert out.far[layer].tolist() == pytest.approx(want, rel=1e-4)
        assert 0 < want[3] < want[2] and 0 < want[6 + 1] < want[2] == pytest.approx(want[8])


@pytest.mark.parametrize(("scorer", "target"), [("msa", "max"), ("indexer", "sum"), ("attn_gate", "sum")])
def test_other_scorers_and_targets(scorer, target):
    """Nothing of the loss depends on whether it is looked at."""
    model = tiny_model("qwen3")
    bank = GateBank.for_model(model, GateConfig(SIZE, 16, scorer=scorer))
    specs = [DistillSpec(bank, recall_budgets=BUDGETS, target=target, far=far) for far in (False, True)]
    with torch.no_grad():
        plain, looked = (distill_steps([spec], model, prompt(190), ENDS)[0] for spec in specs)
    assert plain.far is None and torch.equal(plain.loss, looked.loss)
    _, _, mass, *shares = looked.far[0].tolist()
    assert shares[2] == pytest.approx(mass) and all(0 <= share <= mass * 1.0001 for share in shares)


def test_a_gate_that_reads_no_more_than_a_window_is_named():
    sums = [[10.0, 5.0, 4.0, 1.0, 4.0, 2.0, 4.0], [10.0, 20.0, 2.0, 1.5, 2.0, 1.0, 2.0]]
    log = EvalLog(7, [0.25, 0.5], {16: [[0.5], [0.5]]}, (3, 4), Far.of(sums, (16, 32)))
    line, warning = log.far_text()
    assert line == "beyond the first block and the newest: KL 1.2500  recall@16 0.500, of a window 0.500"
    assert warning.startswith("warning: in layers 3 the gate reads no more of what lies there than a window of 16")
    assert log.worst_layers(1) == {4: 0.5} and log.scalars()["held_out/far_recall_at_16"] == 0.5
    assert Far.of([[0.0] * 7], (16, 32)) is None  # samples too short to have such blocks


def test_what_has_no_kernel_for_gpus_is_named_with_its_work():
    model, common = tiny_model("qwen3"), {"recipe": "paper", "block_size": SIZE, "max_length": 1024}
    for options, named in (
        ({"sink_blocks": 1, "row_stride": 8}, None),
        ({"scorer": "msa"}, "'msa'"),
        ({"target": "sum"}, "'sum'"),
    ):
        config = load_train_config("someone/model", common | options)
        gates = GateConfig(SIZE, 16, scorer=config.scorer, sink_blocks=config.sink_blocks)
        said = without_kernel(GateBank.for_model(model, gates), config)
        assert (said is None) == (named is None)
        if said:
            # 1024 * 1025 / 2 - 512 * 513 / 2 scores of 4 heads of 16, in two layers
            assert named in said and f"{2 * 393_472 * 64 * 2 / 1e12:,.2g} TFLOP" in said


def test_rows_whose_past_blocks_are_all_sinks_or_newest_do_not_count():
    """With 4 sinks, blocks 4 and 5 of row 7 are far, block 4 of row 6, and none of rows 3 to 5."""
    own, blocks = torch.tensor([3, 4, 5, 6, 7]), 8
    u, logits = torch.randn(2, 5, blocks), torch.randn(2, 5, blocks)
    count, kl, *_ = _compared(u, logits, own, SIZE, 4, ()).tolist()
    p, q = (x[:, 4, 4:6].double().log_softmax(-1) for x in (u, logits))
    assert count == 4
    assert kl == pytest.approx(float((p.exp() * (p - q)).sum()), abs=1e-5), "a single far block has KL 0"
