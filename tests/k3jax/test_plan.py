"""Plans: every layer once, in order, with few distinct bodies."""

from itertools import groupby

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from configs.k3 import config as k3_config
from k3jax.plan import Run, Segment, plan

kinds_of_layers = st.lists(st.sampled_from("abc"), min_size=1, max_size=24)
repeating = st.builds(
    lambda head, group, n, tail: head + group * n + tail,
    st.lists(st.sampled_from("abc"), max_size=4), st.lists(st.sampled_from("abc"), min_size=1, max_size=4),
    st.integers(1, 8), st.lists(st.sampled_from("abc"), max_size=4),
)


def bodies(segments):
    return sum(len(segment.runs) for segment in segments)


def in_order(segments):
    """Kinds in the order in which a program over the segments runs them."""
    return [
        run.kind for segment in segments for _ in range(segment.repeats) for run in segment.runs for _ in range(run.count)
    ]


@given(kinds_of_layers | repeating)
@settings(deadline=None)
def test_every_layer_is_run_once_in_order(kinds):
    segments = plan(kinds)
    assert in_order(segments) == kinds
    numbered = {}
    for segment in segments:
        for r, run in enumerate(segment.runs):
            layers = segment.layers(r)
            assert len(layers) == segment.repeats * run.count
            for layer in layers:
                assert layer not in numbered
                numbered[layer] = run.kind
    assert [numbered[i] for i in range(len(kinds))] == kinds


@given(kinds_of_layers | repeating)
@settings(deadline=None)
def test_a_plan_never_has_more_bodies_than_the_runs_of_equal_layers(kinds):
    assert bodies(plan(kinds)) <= len(list(groupby(kinds)))


@given(st.lists(st.sampled_from("abc"), min_size=1, max_size=4), st.integers(2, 30))
@settings(deadline=None)
def test_the_number_of_bodies_does_not_grow_with_the_repeats(group, n):
    assert bodies(plan(group * n)) <= len(group)


def test_k3_is_a_head_22_repeats_and_a_tail():
    config = k3_config()
    head, body, tail = plan([(kind, config.feed_forward(i)) for i, kind in enumerate(config.attention)])
    kda, mla = ("kda", "moe"), ("mla", "moe")
    assert head == Segment(0, 1, (Run(("kda", "dense"), 1), Run(kda, 2)))
    assert body == Segment(3, 22, (Run(mla, 1), Run(kda, 3)))
    assert tail == Segment(91, 1, (Run(mla, 2),))


@pytest.mark.parametrize("which", ["kda", "mla"])
def test_k3_has_the_layers_of_its_two_lists(which):
    """1-based: MLA at 4, 8, ..., 92 and 93, KDA elsewhere; layer 1 is KDA and dense."""
    config = k3_config()
    text = config.to_dict()["text_config"]
    lists = {"kda": text["linear_attn_config"]["kda_layers"], "mla": text["linear_attn_config"]["full_attn_layers"]}
    assert sorted(lists["kda"] + lists["mla"]) == list(range(1, 94))
    assert lists["mla"] == [*range(4, 93, 4), 93]
    assert [i + 1 for i, kind in enumerate(config.attention) if kind == which] == lists[which]
    assert [config.feed_forward(i) for i in range(93)] == ["dense"] + ["moe"] * 92
