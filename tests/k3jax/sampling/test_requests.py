"""Requests that cannot be served: one error that says what was given and what is needed."""

import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.sampling import Sampler, SamplingParams
from tests.k3jax.sampling.lab import IDS, VOCAB, new_sampler, shared_model


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"temperature": -0.1}, "temperature"), ({"temperature": float("nan")}, "temperature"), ({"top_p": 0.0}, "top_p"),
        ({"top_p": 1.1}, "top_p"), ({"top_k": -1}, "top_k"), ({"min_p": 2.0}, "min_p"), ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": "a"}, "temperature must be a number, got 'a'"), ({"top_p": None}, "top_p must be a number, got None"),
        ({"stop": 3}, "stop must be a tuple of strings, got 3"), ({"stop_ids": 3}, "stop_ids must be a tuple of token ids"),
        ({"stop_ids": ("a",)}, "stop_ids must be token ids"), ({"max_tokens": "4"}, "max_tokens must be a whole number"),
        ({"n": 0}, "n must"), ({"seed": -1}, "seed"), ({"stop": ("",)}, "stop"), ({"top_logprobs": 21}, "top_logprobs"),
    ],
)  # fmt: skip
def test_settings_out_of_range_are_refused_by_name(setting, message):
    with pytest.raises(ValueError, match=message):
        SamplingParams(**({"max_tokens": 4} | setting))


def test_requests_that_cannot_be_served_are_refused_with_the_reason():
    sampler, params = new_sampler(capacity=32), SamplingParams(max_tokens=8)
    for prompts, p, adapters, message in (
        ([[]], params, 0, "Prompt 0 is empty"),
        ([[1], IDS[:25]], params, 0, "Prompt 1 has 25 tokens and max_tokens=8: together more than capacity=32"),
        ([[1, VOCAB]], params, 0, f"token id {VOCAB} is outside"),
        ([[1]], SamplingParams(max_tokens=1, stop_ids=(VOCAB,)), 0, "stop_ids: token id"),
        ([[1]], params, 9, r"adapter 9, which the model does not have; it has \[1, 2\]"),
        ([[1]], [params] * 2, 0, "params must be one for all or one per prompt: got 2 for 1"),
        ([[1]], params, [0, 1], "adapters must be"),
    ):
        with pytest.raises(ValueError, match=message):
            sampler.generate(prompts, p, adapters)
    with pytest.raises(ValueError, match="stop strings, which need a tokenizer"):
        Sampler(shared_model()).generate([[1]], SamplingParams(max_tokens=1, stop=("x",)))
    with pytest.raises(ValueError, match="capacity must lie in 2..64"):
        new_sampler(capacity=65)
    with pytest.raises(ValueError, match="max_batch must be a power of two"):
        new_sampler(max_batch=3)


@pytest.mark.parametrize(
    ("prompts", "more", "message"),
    [
        ("hello", {}, "one list of token ids per prompt, got 'hello'. Encode texts first, or use generate_text"),
        (["hello"], {}, "prompt 0 is the text 'hello'. Encode it first"),
        ([1, 2, 3], {}, r"prompt 0 is 1. One prompt is a list of one: \[\[1, 2, 3\]\]"),
        (5, {}, "one list of token ids per prompt, got 5"),
        ([[1], [2, None]], {}, r"prompt 1 holds something else than whole numbers: \[2, None\]"),
        ([[1.5]], {}, "prompt 0 holds something else than whole numbers"),
        ([[1]], {"adapters": "sft"}, r"adapters must be adapter ids \(Adapters.id\(name\) .* got 'sft'"),
        ([[1]], {"adapters": ["sft"]}, "adapters must be adapter ids .* got 'sft' among them"),
        ([[1]], {"adapters": None}, "adapters must be adapter ids .* got None"),
        ([[1]], {"params": 4}, "params must be SamplingParams, one for all or one per prompt: got 4"),
        ([[1]], {"params": [{"max_tokens": 4}]}, "params must be SamplingParams.* got {'max_tokens': 4} among them"),
    ],
)
def test_what_is_no_prompt_parameter_or_adapter_is_refused_with_what_is_needed(prompts, more, message):
    with pytest.raises(TypeError, match=message):
        new_sampler().generate(prompts, **{"params": SamplingParams(max_tokens=4), **more})


def test_arrays_are_as_good_as_lists():
    sampler, params = new_sampler(), SamplingParams(max_tokens=2, seed=0)
    lists = sampler.generate([IDS[:4], IDS[4:8], IDS[8:12], IDS[12:16]], params, [0, 1, 2, 0])
    for array in (np.array, jnp.array):
        arrays = sampler.generate(array(IDS[:16]).reshape(4, 4), params, array([0, 1, 2, 0]))
        assert [row[0].ids for row in arrays] == [row[0].ids for row in lists]


@pytest.mark.parametrize("prompts", ["hello", [[1, 2]], ["a", 1]])
def test_texts_in_anything_but_a_list_are_refused(prompts):
    with pytest.raises(TypeError, match="generate_text needs a list of texts, got .* One prompt is a list of one"):
        new_sampler().generate_text(prompts, SamplingParams(max_tokens=4))
    with pytest.raises(ValueError, match="generate_text needs a tokenizer"):
        Sampler(shared_model()).generate_text(["a"], SamplingParams(max_tokens=4))
