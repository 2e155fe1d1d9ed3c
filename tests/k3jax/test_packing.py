"""Positions, resets and gates that follow from segments."""

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.packing import Packing

T = 16


@st.composite
def rows(draw):
    """A row of T segment ids: sequences 1, 2, ... with padding before, between or after."""
    row, segment = [], 0
    while len(row) < T:
        size = draw(st.integers(1, 6))
        pad = draw(st.booleans())
        segment += not pad
        row += [0 if pad else segment] * size
    return row[:T]


@given(st.lists(rows(), min_size=2, max_size=2), st.lists(st.integers(0, 9), min_size=2, max_size=2))
@settings(deadline=None, max_examples=50)
def test_positions_count_from_each_sequence_and_only_the_first_continues(segments, start):
    segments = np.array(segments, np.int32)
    packing = Packing.of(jnp.asarray(segments), jnp.array(start, jnp.int32))
    valid, resets = np.asarray(packing.valid), np.asarray(packing.resets)
    np.testing.assert_array_equal(valid, segments > 0)
    np.testing.assert_array_equal(packing.lengths, (segments > 0).sum(1))
    for r, row in enumerate(segments):
        first = next((s for s in row if s), None)
        for s in set(row[row > 0]):
            where = np.flatnonzero(row == s)
            offset = start[r] if s == first else 0
            np.testing.assert_array_equal(packing.positions[r, where], offset + np.arange(len(where)))
            assert resets[r, where[0]] and not resets[r, where[1:]].any()
        assert not resets[r, row == 0].any()


@pytest.mark.parametrize("adapters", [None, [[0, 1, 2, 2]]])
def test_a_rank_column_is_open_to_the_tokens_of_its_adapter_only(adapters):
    packing = Packing.of(jnp.ones((1, 4), jnp.int32), adapters=None if adapters is None else jnp.array(adapters),
                         owners=jnp.array([1, 2, 2, 0]))
    if adapters is None:
        assert packing.rank_gate is None
    else:
        expected = [[[0, 0, 0, 0], [1, 0, 0, 0], [0, 1, 1, 0], [0, 1, 1, 0]]]
        np.testing.assert_array_equal(packing.rank_gate, np.array(expected, bool))
