"""The engine against a slow, simple decoder: random requests in random batches, with all that may happen to them, on
any storage.

Both compute in float64, and every logit is compared, so that one block chosen wrongly at one step shows.
"""

import itertools
import random
from contextlib import nullcontext

import pytest
import torch
from transformers import DynamicCache

import seergate
from seergate import Paging, methods
from seergate.cache.batching import join_rows
from seergate.cache.forward import VERIFIED_TOKENS
from seergate.cache.offload import Offload, Offloaded
from seergate.cache.storage import KVBackend
from tests.decode.test_decode import gates
from tests.support.models import VOCABULARY, left_padded, tiny_model
from tests.support.reference_decoder import ReferenceRow, Rule

REQUESTS = 24
MAX_ROWS = 6
"""Three that decode, and three that join."""
LAYERS, HEAD_DIM = 2, 16
COMBINATIONS = [*itertools.product(("gate", "quest", "oracle"), ("pages", "slow memory", "buffer"))]
"""Every part has each of them once, and the first ones twice."""
GROUPS = {1: {"num_key_value_heads": 4}, 2: {}, 4: {"num_key_value_heads": 1}}
"""Query heads per KV head -> fields of the model's configuration."""


def a_rule(draw: random.Random, selector: str) -> Rule:
    size = draw.choice((8, 8, 13, 16))
    sinks = draw.choice((0, 0, 1))
    kinds = {
        "token_budget": size * (2 + sinks + draw.randint(0, 3)) + draw.randrange(size),
        "threshold": draw.choice((0.02, 0.1, 0.3)),
        "top_p": draw.choice((0.3, 0.7, 0.95)),
    }
    kind = draw.choice(("token_budget", "token_budget", "threshold", "top_p"))
    dense = draw.choice(((), (), (0,), (1,)))
    anchors, below = () if dense else draw.choice(((), (0,))), draw.choice((0, 0, 30))
    options = {"dense_layers": dense, "anchors": anchors, "dense_below": below, kind: kinds[kind]}
    return Rule(selector=selector, block_size=size, sink_blocks=sinks, **options)


def a_storage(kind: str, rule: Rule, kv_heads: int) -> KVBackend | None:
    """One buffer, pages, or slow memory with room for few more blocks than a step reads in so many rows."""
    blocks = 1 + -(-(rule.token_budget or 0) // rule.block_size)
    room = LAYERS * MAX_ROWS * kv_heads * blocks * rule.block_size * 2 * HEAD_DIM * 8
    return {"buffer": None, "pages": Paging(), "slow memory": Offload(room)}[kind]


def check_pools(cache) -> None:
    """Occupied slots of a pool equal slow memory to the last bit; free slots are poisoned."""
    for layer in cache.layers:
        pool = layer.storage.pool
        stored = [x.flatten(0, 1).unflatten(1, (-1, layer.storage.block_size)) for x in (layer.keys, layer.values)]
        occupied_slots = 0
        for slot, (pair, block) in enumerate(pool._owner.tolist()):
            if pair < 0:
                pool.keys[slot], pool.values[slot] = torch.nan, torch.nan
                continue
            assert pool._slot_of[pair, block] == slot
            assert torch.equal(pool.keys[slot, 0], stored[0][pair, block])
            assert torch.equal(pool.values[slot, 0], stored[1][pair, block])
            occupied_slots += 1
        assert occupied_slots == int((pool._slot_of >= 0).sum())


class Request:
    """One batch of sequences, in the engine and in the reference at once.

    Args:
        model: in float64; a method is attached to it.
        reference: an empty row.
        draw: decides what happens.
    """

    def __init__(self, model, reference: ReferenceRow, draw: random.Random) -> None:
        self.model, self.draw, self.empty = model, draw, reference
        self.cache = DynamicCache()
        self.begin([draw.randint(1, 60) for _ in range(draw.choice((1, 1, 2, 3)))])

    def begin(self, lengths: list[int]) -> None:
        """Rows with prompts of these lengths."""
        self.rows, self.mask = [self.empty.twin() for _ in lengths], torch.zeros(len(lengths), 0, dtype=torch.long)
        self.prompt(lengths)

    def tokens(self, count: int) -> list[int]:
        return [self.draw.randrange(3, VOCABULARY) for _ in range(count)]

    def forward(self, ids: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        self.mask = torch.cat((self.mask, mask), 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
        mask = self.mask if bool((self.mask == 0).any()) else None
        return self.model(ids, attention_mask=mask, position_ids=positions, past_key_values=self.cache).logits

    def compare(self, actual_logits: torch.Tensor, expected: list[torch.Tensor], what: str) -> None:
        for row, (ours, theirs) in enumerate(zip(actual_logits, expected, strict=True)):
            gap = float((ours[-len(theirs) :] - theirs).abs().max())
            assert gap < 1e-4, f"{what}, row {row} of {len(expected)}: logits are {gap:.1e} off"
        if isinstance(self.cache.layers[0].storage, Offloaded):
            check_pools(self.cache)

    def prompt(self, lengths: list[int]) -> None:
        """A left-padded prompt, in one piece or in chunks, the first of which may hold padding alone in some rows."""
        texts = [self.tokens(length) for length in lengths]
        batch = left_padded([torch.tensor([text]) for text in texts])
        width = batch["input_ids"].shape[1]
        cuts = sorted(self.draw.sample(range(1, width), min(width - 1, self.draw.choice((0, 0, 0, 2)))))
        if any(b - a < 2 for a, b in zip([0, *cuts], [*cuts, width], strict=True)):
            cuts = []  # a chunk of one token would count as decoded
        for a, b in zip([0, *cuts], [*cuts, width], strict=True):
            logits = self.forward(batch["input_ids"][:, a:b], batch["attention_mask"][:, a:b])
        given = zip(self.rows, texts, strict=True)
        self.compare(logits, [(row.decode if width == 1 else row.read)(text)[-1:] for row, text in given], "prompt")

    def chunk(self, width: int, drafted: bool = False) -> None:
        """New tokens for all rows: a decoded token, drafted tokens to be verified, or a further turn."""
        texts = [self.tokens(width) for _ in self.rows]
        with seergate.handle_of(self.model).passes.forced("decode") if drafted else nullcontext():
            logits = self.forward(torch.tensor(texts), torch.ones(len(texts), width, dtype=torch.long))
        sparse = width == 1 or drafted
        expected = [(row.decode if sparse else row.read)(text) for row, text in zip(self.rows, texts, strict=True)]
        self.compare(logits, expected, f"chunk of {width}")

    def crop(self) -> None:
        most = min(row.length for row in self.rows) - 1
        count = min(most, self.draw.choice((1, 3, 9, 20, 40)))
        if count < 1:
            return
        self.cache.crop(-count)
        for row in self.rows:
            row.crop(count)
        self.mask = self.mask[:, :-count]

    def choose_rows(self) -> None:
        """Beams reorder, finished rows leave."""
        count = len(self.rows)
        if self.draw.random() < 0.5:
            index = [self.draw.randrange(count) for _ in range(count)]
            self.cache.reorder_cache(torch.tensor(index))
        else:
            index = sorted(self.draw.sample(range(count), self.draw.randint(1, count)))
            self.cache.batch_select_indices(torch.tensor(index))
        self.rows = [self.rows[i].twin() for i in index]
        self.mask = self.mask[index]

    def join(self) -> None:
        """Another request's rows join."""
        if len(self.rows) > 3:
            return
        other = Request(self.model, self.empty, self.draw)
        join_rows(self.cache, other.cache)
        self.rows += other.rows
        slots = max(row.length for row in self.rows)
        self.mask = torch.tensor([[0] * (slots - row.length) + [1] * row.length for row in self.rows])

    def start_anew(self) -> None:
        """The same cache serves another request."""
        self.cache.reset()
        self.begin([self.draw.randint(1, 40) for _ in range(self.draw.choice((1, 2)))])

    def live(self) -> None:
        """A few random events."""
        for _ in range(self.draw.randint(2, 6)):
            event = self.draw.choice(("decode", "decode", "decode", "verify", "turn", "crop", "rows", "join", "anew"))
            if event == "decode":
                for _ in range(self.draw.randint(1, 6)):
                    self.chunk(1)
            elif event in ("verify", "turn"):
                self.chunk(self.draw.randint(2, VERIFIED_TOKENS + 9), drafted=event == "verify")
            else:
                {"crop": self.crop, "rows": self.choose_rows, "join": self.join, "anew": self.start_anew}[event]()
        self.chunk(1)
        self.crop()
        self.chunk(1)
        self.compare_compressed_keys()

    def compare_compressed_keys(self) -> None:
        """What gates remember of each full block: an error there would show only where it changes a choice."""
        rule = self.empty.rule
        if rule.selector != "gate":
            return
        for index, layer in enumerate(self.cache.layers):
            if index > 0 and rule.anchors:
                assert not layer.state.rows, "a layer that reads its anchor's choice keeps nothing"
                continue
            for number, row in enumerate(self.rows):
                for block in range(row.length // rule.block_size):
                    ours = layer.state.rows["kg"][number, :, block]
                    theirs = torch.stack([row.compressed_key(index, head, block) for head in range(row.kv_heads)])
                    gap = float((ours - theirs).abs().max())
                    assert gap < 1e-4, f"compressed key of layer {index}, row {number}, block {block}: {gap:.1e} off"


def generates(model, reference: ReferenceRow, draw: random.Random) -> None:
    """Stock `generate`, dynamic or static cache, rows that end early; then a second turn on the same cache."""
    texts = [
        [draw.randrange(3, VOCABULARY) for _ in range(draw.randint(1, 50))] for _ in range(draw.choice((1, 2, 4)))
    ]
    batch, new, end = left_padded([torch.tensor([text]) for text in texts]), draw.randint(1, 9), draw.randrange(3, 60)
    width = batch["input_ids"].shape[1]
    options = {"max_new_tokens": new, "eos_token_id": [end, end + 30], "pad_token_id": 0}
    cache = DynamicCache()
    if draw.random() < 0.3:
        options["cache_implementation"] = "static"
    else:
        options["past_key_values"] = cache
    sequences = model.generate(**batch, **options)
    rows, ended = [reference.twin() for _ in texts], []
    for row, text, answer in zip(rows, texts, sequences[:, width:].tolist(), strict=True):
        logits = (row.decode if width == 1 else row.read)(text)[-1]
        for place, token in enumerate(answer):
            if ended_here := token in (end, end + 30):
                assert token == int(logits.argmax())
            elif token != int(logits.argmax()):
                top = logits.topk(2).values
                assert float(top[0] - logits[token]) < 1e-5, f"token {place} is {token}; {top}"
            if ended_here or place + 1 == len(answer):
                break
            logits = row.decode([token])[-1]
        ended.append(ended_here)
        assert all(token == 0 for token in answer[place + 1 :])
    if any(ended) or "past_key_values" not in options:
        return
    # a further turn, on the same cache
    more = [[draw.randrange(3, VOCABULARY) for _ in range(VERIFIED_TOKENS + 3)] for _ in rows]
    ids = torch.cat((sequences, torch.tensor(more)), 1)
    mask = torch.cat((batch["attention_mask"], torch.ones(len(rows), ids.shape[1] - width, dtype=torch.long)), 1)
    again = model.generate(ids, attention_mask=mask, max_new_tokens=1, past_key_values=cache, pad_token_id=0)
    for row, text, sequence, answer in zip(rows, more, sequences.tolist(), again.tolist(), strict=True):
        assert int(row.read([sequence[-1], *text])[-1].argmax()) == answer[-1]


@pytest.mark.slow
@pytest.mark.parametrize("part", [0, *(pytest.param(part, marks=pytest.mark.soak) for part in range(1, 11))])
def test_random_requests_against_the_slow_decoder(part):
    draw = random.Random(part)
    for number in range(REQUESTS):
        model = tiny_model("qwen3", seed=draw.randrange(3), dtype=torch.float64, **GROUPS[draw.choice((1, 2, 4))])
        stock, turn = number % 3 == 0, number - number // 3 - 1
        selector, kind = COMBINATIONS[(number // 3 if stock else turn) % len(COMBINATIONS)]
        rule = a_rule(draw, selector)
        options = {name: value for name, value in vars(rule).items() if name not in ("selector", "block_size")}
        bank = None
        if rule.selector == "gate":
            bank = gates(model, rule.block_size).double()
            method = methods.Gate(bank=bank, **options)
        else:
            method = methods.make_method(rule.selector, block_size=rule.block_size, **options)
        reference = ReferenceRow(model, rule, None if bank is None else {i: bank.gate(i) for i in range(2)})
        storage = None if stock else a_storage(kind, rule, reference.kv_heads)
        try:
            with torch.no_grad(), seergate.attached(model, method, storage=storage):
                if stock:
                    generates(model, reference, draw)
                else:
                    Request(model, reference, draw).live()
        except AssertionError as error:
            raise AssertionError(f"request {number} of part {part} under {rule} with {storage}: {error}") from error
