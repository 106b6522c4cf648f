"""Pretrains a small language model on Python's standard library.

    python train/python_text/pretrain.py --out checkpoints/python-text --minutes 70 --threads 1

A stock `Qwen3ForCausalLM` of 3.6 million parameters with grouped queries, in contexts of 2,048 tokens, on a CPU.
Unlike the tiny reasoner's problems, its text has locality. Rows are short in the beginning and grow to the full
context; the learning rate decays to zero by the clock.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import random
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from torch.nn import functional as F
from transformers import PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

from seergate.python_text import modules

VOCABULARY, CONTEXT = 2048, 2048
END = "<|endoftext|>"
WARMUP_STEPS = 100
LENGTHS = ((0.0, 256), (0.3, 512), (0.6, 1024), (0.8, CONTEXT))
"""From which share of the time on, how many tokens a row has."""
DECAY_FROM = 0.3


def build_tokenizer(texts: list[str]) -> PreTrainedTokenizerFast:
    """Byte-level BPE, so that every text can be written."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=[END], initial_alphabet=alphabet)
    tokenizer.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, eos_token=END, bos_token=END, pad_token=END, model_max_length=CONTEXT
    )


def build_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Six layers, four query heads to each of two KV heads."""
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=192,
            intermediate_size=512,
            num_hidden_layers=6,
            num_attention_heads=8,
            num_key_value_heads=2,
            head_dim=64,
            max_position_embeddings=CONTEXT,
            rope_parameters={"rope_type": "default", "rope_theta": 1e4},
            tie_word_embeddings=True,
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def stream(tokenizer: PreTrainedTokenizerFast, texts: list[str]) -> list[int]:
    """The tokens of all texts, each begun with END."""
    ids: list[int] = []
    for text in texts:
        ids += [tokenizer.bos_token_id, *tokenizer(text).input_ids]
    return ids


def draw(ids: Tensor, tokens: int, length: int, rng: random.Random) -> Tensor:
    """Rows ``[tokens // length, length + 1]`` from anywhere in the stream."""
    starts = [rng.randrange(len(ids) - length - 1) for _ in range(tokens // length)]
    return torch.stack([ids[start : start + length + 1] for start in starts])


@torch.no_grad()
def held_out_loss(model: Qwen3ForCausalLM, ids: Tensor, rows: int = 16) -> float:
    """Nats per token over rows of the full context, spread evenly over the held-out stream."""
    starts = torch.linspace(0, len(ids) - CONTEXT - 1, rows).long().tolist()
    losses = []
    for start in starts:
        row = ids[None, start : start + CONTEXT + 1]
        losses.append(F.cross_entropy(model(input_ids=row[:, :-1], use_cache=False).logits[0], row[0, 1:]).item())
    return sum(losses) / len(losses)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="directory for the finished model")
    parser.add_argument("--minutes", type=float, default=60.0)
    parser.add_argument("--tokens", type=int, default=8192, help="tokens per batch")
    parser.add_argument("--peak-lr", type=float, default=3e-3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()

    torch.manual_seed(args.seed)
    torch.set_num_threads(args.threads)
    rng = random.Random(f"pretrain/{args.seed}")
    texts = list(modules(held_out=False).values())
    tokenizer = build_tokenizer(texts)
    model = build_model(tokenizer)
    ids = torch.tensor(stream(tokenizer, texts))
    held_out = torch.tensor(stream(tokenizer, list(modules(held_out=True).values())))
    parameters = sum(p.numel() for p in model.parameters())
    print(f"{parameters:,} parameters, {len(ids):,} tokens to train on, {len(held_out):,} held out", flush=True)
    decayed = [p for p in model.parameters() if p.ndim > 1]
    plain = [p for p in model.parameters() if p.ndim == 1]
    optimizer = torch.optim.AdamW(
        [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}], betas=(0.9, 0.95)
    )
    half = torch.backends.cpu.get_cpu_capability() == "AVX512"  # with AVX2, float32 is faster
    history = []
    started, step, seen = time.monotonic(), 0, 0
    while (progress := (time.monotonic() - started) / (60 * args.minutes)) < 1:
        length = next(tokens for begin, tokens in reversed(LENGTHS) if progress >= begin)
        rows = draw(ids, args.tokens, length, rng)
        decay = min(1.0, (1 - progress) / (1 - DECAY_FROM))
        for group in optimizer.param_groups:
            group["lr"] = args.peak_lr * min(1.0, (step + 1) / WARMUP_STEPS) * decay
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=half):
            logits = model(input_ids=rows[:, :-1], use_cache=False).logits
        loss = F.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten())
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step, seen = step + 1, seen + rows[:, 1:].numel()
        if not math.isfinite(loss.item()):
            raise RuntimeError(f"the loss is {loss.item()} at step {step}")
        if step % 50 == 0:
            row = {
                "minutes": round((time.monotonic() - started) / 60, 2),
                "step": step,
                "tokens": seen,
                "length": length,
                "loss": round(loss.item(), 4),
            }
            if step % 500 == 0:
                row["held_out"] = round(held_out_loss(model, held_out), 4)
            history.append(row)
            print(json.dumps(row), flush=True)
    history.append({"step": step, "tokens": seen, "held_out": round(held_out_loss(model, held_out), 4)})
    print(json.dumps(history[-1]))
    model.generation_config.update(do_sample=False, eos_token_id=tokenizer.eos_token_id, pad_token_id=0)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    (args.out / "pretraining.jsonl").write_text("".join(json.dumps(row) + "\n" for row in history))


if __name__ == "__main__":
    main()
