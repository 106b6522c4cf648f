"""Dense decode attention against the reference, with poisoned caches."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.common import peak_bytes
from seergate import ops
from seergate.ops import reference
from tests.ops.test_sparse_decode import TOLERANCE
from tests.support.op_inputs import decode_inputs as cache
from tests.support.op_inputs import examples, poison, relative


def options_of(extras, heads):
    given = {"sinks": torch.randn(heads), "softcap": 2.0}
    return {name: given[name] for name in extras}


@examples(60)
@given(
    lengths=st.one_of(st.none(), st.lists(st.integers(1, 48), min_size=1, max_size=4)),
    group=st.sampled_from([1, 4, 5, 7, 8]),
    kv_heads=st.integers(1, 3),
    dtype=st.sampled_from(list(TOLERANCE)),
    extras=st.sampled_from([(), ("sinks",), ("softcap",), ("sinks", "softcap")]),
)
def test_against_the_reference(lengths, group, kv_heads, dtype, extras):
    q, k, v = cache(batch=len(lengths or [0]), kv_heads=kv_heads, group=group, value_dim=24, dtype=dtype)
    row_lengths = None if lengths is None else torch.tensor(lengths)
    if row_lengths is not None:
        k, v = (poison(x, row_lengths) for x in (k, v))
    options = options_of(extras, q.shape[1])
    output = ops.dense_decode(q, k, v, row_lengths, 0.3, **options)
    expected = reference.dense_decode(q.double(), k.double(), v.double(), row_lengths, 0.3, **options)
    assert output.dtype == dtype
    assert relative(output, expected) < TOLERANCE[dtype]


@pytest.mark.plain_empty
@pytest.mark.parametrize(("extras", "compiled"), [((), True), (("sinks",), False), (("sinks", "softcap"), True)])
def test_rows_of_different_lengths_are_not_copied(extras, compiled):
    """Neither cleared nor masked; also as one node of a compiled graph, in which nobody may look at the lengths."""
    q, k, v = cache(batch=3, kv_heads=2, group=4, value_dim=24, dtype=torch.float32)
    k, v = (torch.nn.functional.pad(x, (0, 0, 0, 2000), value=math.nan) for x in (k, v))
    lengths = torch.tensor([48, 5, 17])
    options = options_of(extras, q.shape[1])
    run = torch.compile(ops.dense_decode, fullgraph=True, backend="aot_eager") if compiled else ops.dense_decode
    expected = reference.dense_decode(q.double(), k.double(), v.double(), lengths, 0.3, **options)
    assert relative(run(q, k, v, lengths, 0.3, **options), expected) < TOLERANCE[torch.float32]
    assert peak_bytes(lambda: run(q, k, v, lengths, 0.3, **options)) < k.nbytes / 10


def test_the_node_of_a_compiled_graph_is_registered_rightly():
    q, k, v = cache(batch=2, kv_heads=2, group=4, value_dim=24, dtype=torch.float32)
    given = (q, k, v, 0.3, torch.randn(q.shape[1]), 2.0, None, torch.tensor([48, 5]))
    torch.library.opcheck(torch.ops.seergate.dense_decode_by_row.default, given)


def test_by_hand():
    k, v = torch.tensor([1.0, 3.0]).log().view(1, 1, 2, 1), torch.tensor([8.0, 16.0]).view(1, 1, 2, 1)
    q = torch.ones(1, 1, 1)
    assert ops.dense_decode(q, k, v).item() == pytest.approx((8 + 3 * 16) / 4)
    assert ops.dense_decode(q, k, v, torch.tensor([1])).item() == pytest.approx(8)
    sinks = torch.tensor([4.0]).log()
    assert ops.dense_decode(q, k, v, sinks=sinks).item() == pytest.approx((8 + 3 * 16) / 8)
