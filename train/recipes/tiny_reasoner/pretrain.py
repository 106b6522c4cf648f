"""Pretrains the tiny reasoner from scratch on generated chain-sum problems.

    python train/recipes/tiny_reasoner/pretrain.py --out runs/tiny-reasoner --minutes 45 --threads 1

A stock `Qwen3ForCausalLM` of 1.4 million parameters learns to reason in 2k-token contexts on a CPU. The number of
variables is drawn from the whole range up to a cap, and the cap grows by 1.3 whenever the accuracy on the longest
problems passes 90 %. Muon trains the matrices of the layers, AdamW the rest. The learning rate is held, then decays to
zero over the last 60 % of the time; the last 20 % run in full precision, which is what brings the last tenth of a
percent. Without AVX-512 all of it does: CPUs with AVX2 are slower in bfloat16 (others were not tried). PyTorch 2.9 or
newer has Muon.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from collections import deque
from pathlib import Path

import torch
from regularizers import AttentionFocus, KeySpread, Places
from tokenizer import build_tokenizer
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from seergate.eval.tasks.chain_sum import GIVENS, LAST, NAMES, ROLES, make_problem

HEAD_DIM = 128
"""That of the models that gates are made for. At 32, a block's pooled keys cannot tell the names apart."""
NAME_RANGE = 0.1
"""Standard deviation of the names' vectors in the beginning, five times the others': training moves them less."""
WARMUP_STEPS = 100
DECAY_FROM, FULL_PRECISION_FROM = 0.4, 0.8
START_CAP, PASS_ACCURACY, GROWTH = 12.0, 0.9, 1.3
DECISION_WEIGHT = 5.0
"""Loss weight of the tokens that decide whether to go on or to stop: the next variable, or the end and what follows
it. One wrong decision ruins an answer in which all sums are right, and the end comes once in a thousand tokens."""


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """A four-layer Qwen3 with two query heads per KV head.

    The RoPE base is large for its size: at 10,000 only a third of the head's dimensions turn slowly enough to match a
    name 2,000 tokens away. The tokens that stand for one variable in its different roles start with a common vector,
    so that recognising a name across roles is one linear map for all names instead of a fact to learn for each.
    """
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=HEAD_DIM,
            max_position_embeddings=4096,
            rope_parameters={"rope_type": "default", "rope_theta": 1e6},
            tie_word_embeddings=True,
            bos_token_id=None,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )
    embedding = model.get_input_embeddings().weight.data
    names = torch.randn(NAMES, embedding.shape[1]) * NAME_RANGE
    for role in ROLES:
        ids = tokenizer.convert_tokens_to_ids([role.format(n) for n in range(NAMES)])
        embedding[ids] = names + torch.randn(embedding.shape[1]) * NAME_RANGE
    return model


def draw_batch(
    tokenizer: PreTrainedTokenizerFast, variables: int, tokens: int, rng: random.Random
) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch of problems of one size: `input_ids` and `labels`, both `[B, L]`; the prompt's labels are -100."""
    rows, labels = [], []
    total = 0
    while not rows or total + len(rows[0]) <= tokens:
        problem = make_problem(variables, rng)
        prompt = tokenizer.apply_chat_template(problem.messages[:1], tokenize=False, add_generation_prompt=True)
        whole = tokenizer.apply_chat_template(problem.messages, tokenize=False)
        prompt_ids, ids = tokenizer(prompt).input_ids, tokenizer(whole).input_ids
        rows.append(ids)
        labels.append([-100] * len(prompt_ids) + ids[len(prompt_ids) :])
        total += len(ids)
    width = max(map(len, rows))  # problems of one size have one length
    assert all(len(row) == width for row in rows)
    return torch.tensor(rows), torch.tensor(labels)


def learning_rate(peak: float, step: int, progress: float) -> float:
    """Warm-up by steps, a plateau, then a linear decay to zero by the clock."""
    warm = min(1.0, (step + 1) / WARMUP_STEPS)
    decay = min(1.0, max(0.0, (1 - progress) / (1 - DECAY_FROM)))
    return peak * warm * decay


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the finished model")
    parser.add_argument("--minutes", type=float, default=45.0)
    parser.add_argument("--variables", type=int, default=75, help="largest problem (about 27 tokens per variable)")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens per batch")
    parser.add_argument("--peak-lr", type=float, default=5e-3, help="of Muon; a fifth of it for the rest")
    parser.add_argument("--spread", type=float, default=0.3, help="weight of the rank of the keys")
    parser.add_argument("--focus", type=float, default=0.02, help="weight of the entropy of the attention")
    parser.add_argument("--teach", type=float, default=0.3, help="weight of what look-ups miss")
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(f"pretrain/{args.seed}")
    tokenizer = build_tokenizer()
    model = build_model(tokenizer)
    matrices = [p for p in model.model.layers.parameters() if p.ndim > 1]
    others = [model.get_input_embeddings().weight, *(p for p in model.parameters() if p.ndim == 1)]
    optimizers = {
        torch.optim.Muon(matrices, weight_decay=0.05, adjust_lr_fn="match_rms_adamw"): args.peak_lr,
        torch.optim.AdamW(others, betas=(0.9, 0.95), weight_decay=0.0): args.peak_lr / 5,
    }
    decisions = torch.zeros(len(tokenizer), dtype=torch.bool)  # tokens that continue or end the reasoning
    decisions[tokenizer.convert_tokens_to_ids(["<think>", LAST, "</think>", "\\boxed{", "}", tokenizer.eos_token])] = (
        True
    )
    decisions[tokenizer.convert_tokens_to_ids([f"a{n}:" for n in range(NAMES)])] = True
    places = Places(tokenizer)
    spread, focus = KeySpread(model, places), AttentionFocus(model, places)
    cap = min(START_CAP, float(args.variables))
    recent: deque[float] = deque(maxlen=12)  # token accuracy on problems near the cap
    exact: deque[float] = deque(maxlen=60)  # share of whole solutions right, same problems
    history = []
    started, step, seen = time.monotonic(), 0, 0
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        variables = rng.randint(GIVENS + 1, int(cap))
        ids, labels = draw_batch(tokenizer, variables, args.tokens, rng)
        for optimizer, peak in optimizers.items():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate(peak, step, progress)
        places.watch(ids)
        half = progress <= FULL_PRECISION_FROM and torch.backends.cpu.get_cpu_capability() == "AVX512"
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            hidden = model.model(input_ids=ids, use_cache=False).last_hidden_state[:, :-1]
            targets = labels[:, 1:]
            scored = targets != -100
            logits = model.lm_head(hidden[scored]).float()
        losses = F.cross_entropy(logits, targets[scored], reduction="none").view(len(ids), -1)
        weights = torch.where(decisions[targets[scored]].view(len(ids), -1), DECISION_WEIGHT, 1.0)
        entropy, missed = focus.entropy(), focus.missed()
        loss = (losses * weights).sum() / weights.sum()
        loss += args.focus * entropy + args.teach * missed - args.spread * spread.reward()
        model.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        step, seen = step + 1, seen + ids.numel()

        right = (logits.argmax(-1) == targets[scored]).view(len(ids), -1)
        if variables >= 0.75 * cap:
            recent.append(right.float().mean().item())
            exact.append(right.all(1).float().mean().item())
            if cap < args.variables and len(recent) == recent.maxlen and min(recent) > PASS_ACCURACY:
                cap = min(args.variables, max(cap + 1, cap * GROWTH))
                recent.clear(), exact.clear()
        if step % 50 == 0:
            row = {
                "minutes": round((time.monotonic() - started) / 60, 2),
                "step": step,
                "tokens": seen,
                "cap": int(cap),
                "loss": round(losses.mean().item(), 6),
                "key_rank": round(spread.rank, 1),
                "key_noise": round(spread.noise, 3),
                "entropy": round(entropy.item(), 3),
                "missed": round(missed.item(), 3),
                "token_accuracy": round(sum(recent) / max(1, len(recent)), 6),
                "exact": round(sum(exact) / max(1, len(exact)), 4),
            }
            if not math.isfinite(loss.item()):
                raise RuntimeError(f"the loss is {loss.item()} at step {step}")
            history.append(row)
            print(json.dumps(row), flush=True)
        if step % 200 == 0:
            save(model, tokenizer, history, args.out)
    save(model, tokenizer, history, args.out)


def save(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, history: list[dict], out: Path) -> None:
    """Write the model as an ordinary Hugging Face directory, with the training history beside it."""
    model.generation_config.update(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    (out / "pretraining.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history), encoding="utf-8")


if __name__ == "__main__":
    main()
