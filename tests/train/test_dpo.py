"""DPO: the margin between chosen and rejected answers grows; the reference is the checkpoint without adapter."""

import json
import math

import numpy as np
import pytest

from k3jax.lora import LoRAConfig
from train.adapter import load_subject
from train.data import Pairs
from train.dpo import DPOConfig, PairFeed, dpo, segment_sums


def pair(i):
    answer = lambda text: {"role": "assistant", "content": text}  # noqa: E731
    return {"messages": [{"role": "user", "content": str(i)}], "chosen": answer("yes"), "rejected": answer("no no")}


@pytest.fixture(scope="module")
def config(checkpoint, tmp_path_factory) -> DPOConfig:
    folder = tmp_path_factory.mktemp("dpo")
    data = folder / "pairs.jsonl"
    data.write_text("".join(json.dumps(pair(i)) + "\n" for i in range(6)))
    return DPOConfig(
        out=str(folder / "out"), checkpoint=checkpoint, adapter=LoRAConfig(rank=2, alpha=8, targets=("attention", "mlp")),
        data=Pairs(path=str(data)), steps=6, lr=1e-2, rows=1, row_length=160, pairs_per_row=2, warmup=0.0, remat="none",
    )


@pytest.fixture(scope="module")
def lines(config):
    dpo(config)
    return [json.loads(line) for line in open(f"{config.out}/metrics.jsonl")]


def test_at_first_policy_and_reference_are_one(lines):
    assert lines[0]["loss"] == pytest.approx(math.log(2), abs=1e-5)
    assert lines[0]["margin"] == pytest.approx(0, abs=1e-5)


def test_the_chosen_answer_is_preferred_more_and_more(lines):
    assert lines[-1]["loss"] < 0.5
    assert lines[-1]["margin"] > lines[2]["margin"] > 0
    assert lines[-1]["correct"] == 1
    assert all(line["pairs"] == 2 for line in lines)


def test_the_reference_does_not_feel_the_adapter(config):
    subject = load_subject(config)
    first = PairFeed(subject, config).next(1)[0][0]["reference_logprobs"]
    pool = subject.adapters.projections[0].module.lora
    pool.b[...] = pool.b[...] + 1
    np.testing.assert_array_equal(first, PairFeed(subject, config).next(1)[0][0]["reference_logprobs"])
    assert (np.asarray(first) < 0).all()


def test_sums_are_those_of_the_weighted_tokens_of_each_segment():
    logprobs = np.array([[-1.0, -2.0, np.nan, -4.0, -8.0, -16.0]], np.float32)
    weights = np.array([[1, 0.5, 0, 1, 1, 0]], np.float32)
    segments = np.array([[1, 1, 1, 2, 2, 0]])
    np.testing.assert_allclose(segment_sums(logprobs, weights, segments, 4), [[-2, -12, 0, 0]])
