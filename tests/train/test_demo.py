"""The demo's parts that need no training, on the weights that are shipped."""

import re

import pytest

from k3jax.lora import Adapters
from k3jax.sampling import Sampler
from k3jax.tokenizer import Tokenizer
from k3jax.weights import load
from train.config import load_config
from train.demo import CONFIGS, compare, draw
from train.rl.loop import RLConfig


@pytest.mark.slow
def test_nano_and_two_new_adapters_answer_side_by_side_in_its_words(capsys):
    """A new adapter changes nothing, so it draws what the base draws; nano's answers are expressions and moves."""
    configs = {name: load_config(path, RLConfig) for name, path in CONFIGS.items()}
    folder = next(iter(configs.values())).checkpoint
    model, tokenizer = load(folder, dtype="float32"), Tokenizer(folder)
    adapters = Adapters(model, columns=sum(c.adapter.max_rank for c in configs.values()))
    for name, config in configs.items():
        adapters.add(name, config.adapter)
    compare(Sampler(model, tokenizer, capacity=512), tokenizer, adapters, configs)
    out = capsys.readouterr().out
    rows = [line.split()[-3:] for line in out.splitlines() if re.search("->|/", line)]
    assert len(rows) == 12 and all(len(set(row)) == 1 for row in rows)
    assert sum(bool(re.fullmatch(r"[-+\d]+|up|down|left|right", row[0])) for row in rows) >= 10
    cached, total = map(int, re.search(r"(\d+) of (\d+) prompt tokens came from the cache", out).groups())  # type: ignore[union-attr]
    assert cached / total > 0.9


def test_both_pictures_are_drawn(tmp_path):
    curve = [{"step": 0, "heldout_reward": 0.2}, {"step": 1, "reward": 0.5, "reached": 0.5, "heldout_reward": 0.4}]
    draw("frozen_lake", curve, tmp_path / "a.png")
    draw("countdown", [{k: v for k, v in entry.items() if k != "reached"} for entry in curve], tmp_path / "b.png")
    assert all((tmp_path / name).read_bytes().startswith(b"\x89PNG") for name in ("a.png", "b.png"))
