"""Keys and values of a sealed block stay what they are until it is freed, whatever becomes of its rows."""

from collections import Counter

import torch
from transformers import DynamicCache

import seergate
from seergate.cache.block_store import BlockStore
from tests.cache.test_sharing import READS, looping, reason
from tests.support.models import prompt


class SealedBlocks:
    """What sealed blocks held when they were first seen after an allocation: a sealed block is never written again."""

    def __init__(self, monkeypatch):
        self.held, self.allocations, self.compared = {}, Counter(), 0
        original = BlockStore._allocate

        def allocate(store):
            block = original(store)
            self.allocations[block] += 1
            return block

        monkeypatch.setattr(BlockStore, "_allocate", allocate)

    def look(self, cache):
        store, kept = cache.layers[0].storage.pages, [layer.storage for layer in cache.layers]
        for block in [i for i, sealed in enumerate(store.sealed) if sealed]:
            serial = block, self.allocations[block]
            now = torch.cat([pages[block].flatten() for x in kept for pages in (x.key_pages, x.value_pages)])
            if serial in self.held:
                self.compared += 1
                assert torch.equal(now, self.held[serial]), f"block {block} was written after it had been sealed"
            else:
                self.held[serial] = now.clone()


@READS
def test_sealed_blocks_are_never_written(model, monkeypatch, reads):
    """To the last bit, while rows share blocks, are forked as beams are, dropped, cropped and go on otherwise."""
    seen, length, text, shared = SealedBlocks(monkeypatch), 0, looping(), []
    with seergate.attached(model, reason(reads=reads, warm_up=0, percentile=100)) as handle, torch.inference_mode():
        cache = DynamicCache()

        def say(ids):
            nonlocal length
            at = torch.arange(length, length + ids.shape[1]).expand(ids.shape)
            model(input_ids=ids, position_ids=at, past_key_values=cache)
            length += ids.shape[1]
            seen.look(cache)

        say(torch.cat((prompt(11, 1), prompt(11, 2))))
        for i in range(41):
            say(text[:, i : i + 1])
        for rows, cropped in (([0, 0, 1], 0), ([0, 1, 2], 7), ([1, 1, 0, 2], 0), ([2, 0], 18)):
            cache.reorder_cache(torch.tensor(rows))
            store = cache.layers[0].storage.pages
            shared.append(max(store.references) > 1)
            if cropped:
                cache.crop(torch.tensor(-cropped))  # as assisted decoding with transformers 5.17
                length -= cropped
            for i in range(14):  # every row its own words
                say(torch.cat([text[:1, (i + 5 * row) % 84][:, None] for row in range(len(rows))]))
        counts = handle.stats()["sharing"]
    assert counts["error"] is None and counts["shared_blocks"] >= 4 and all(shared)
    assert seen.compared > 1000
    assert len({block for block, _ in seen.held}) < len(seen.held), "blocks were freed and taken again"
