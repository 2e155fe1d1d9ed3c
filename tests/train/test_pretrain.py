"""Pretraining from the command line: it learns, survives SIGKILL to the bit, and saves what can be loaded."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from k3jax.tokenizer import Tokenizer
from k3jax.weights import load

ROOT = Path(__file__).parents[2]

CONFIG = """
import jax.numpy as jnp
from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from train.data import Jsonl
from train.pretrain import PretrainConfig


def config():
    model = K3Config(
        vocab_size=932, hidden_size=16, intermediate_size=16, attention=("mla",), attn_res_block=1,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
        moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16, first_layer=0),
        dtype=jnp.dtype("float32"), param_dtype=jnp.dtype("bfloat16"),
    )
    return PretrainConfig(
        out="unset", model=model, tokenizer="{tokenizer}", data=Jsonl(path="{data}"), steps=40, lr=1e-2, rows=2,
        row_length=32, accumulate=2, save_every=3, remat="none",
    )
"""


@pytest.fixture(scope="module")
def command(tmp_path_factory):
    """(out, *arguments) -> the command line of a small run."""
    folder = tmp_path_factory.mktemp("pretrain")
    rng = random.Random(0)
    lines = ({"ids": [rng.randrange(10), *[rng.randrange(10, 13)] * rng.randrange(4, 20)]} for _ in range(60))
    data = folder / "data.jsonl"
    data.write_text("".join(json.dumps(line) + "\n" for line in lines))
    tokenizer = ROOT / "tests" / "golden" / "chat_encoding" / "tokenizer"
    (folder / "config.py").write_text(CONFIG.replace("{tokenizer}", str(tokenizer)).replace("{data}", str(data)))
    return lambda out, *more: [sys.executable, "-m", "train.pretrain", str(folder / "config.py"), f"out={out}", *more]


def start(command):
    cache = {"JAX_COMPILATION_CACHE_DIR": str(ROOT / ".jax_cache"), "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0.1"}
    return subprocess.Popen(command, cwd=ROOT, env=os.environ | cache, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def metrics(out):
    lines = (Path(out) / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k != "seconds"} for line in lines]


@pytest.fixture(scope="module")
def unbroken(command, tmp_path_factory):
    out = tmp_path_factory.mktemp("unbroken")
    run = start(command(out))
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    return out


def test_it_learns_and_balances(unbroken):
    entries = metrics(unbroken)
    assert [e["step"] for e in entries] == list(range(1, 41))
    assert entries[-1]["loss"] < 0.5 * entries[0]["loss"]
    model = load(unbroken / "model", dtype="float32")
    bias = model.model.layers.stacks[0].block_sparse_moe.gate.e_score_correction_bias[...]
    assert np.abs(bias).max() > 1e-3


def test_the_saved_model_is_an_official_checkpoint_with_its_tokenizer(unbroken):
    config = json.loads((unbroken / "model" / "config.json").read_text())
    assert config["dtype"] == "bfloat16"
    assert Tokenizer(unbroken / "model").vocab_size == 932
    model = load(unbroken / "model")
    logits = jax.jit(lambda ids: model.logits(model(ids).hidden))(np.array([[3, 11, 11, 11]]))
    assert int(logits[0, -1].argmax()) == 11


def test_a_run_killed_at_any_step_has_the_same_losses_bit_for_bit(command, unbroken, tmp_path):
    rng = random.Random(time.time_ns())
    kills = sorted(rng.sample(range(2, 38), 2))
    for step in kills:
        run = start(command(tmp_path))
        file = tmp_path / "metrics.jsonl"
        while run.poll() is None and not (file.exists() and len(file.read_text().splitlines()) >= step):
            time.sleep(0.001)
        run.send_signal(signal.SIGKILL)
        run.communicate()
        assert run.returncode == -signal.SIGKILL, f"killed too late: {kills}"
    run = start(command(tmp_path))
    _, errors = run.communicate(timeout=200)
    assert run.returncode == 0, errors
    assert "Going on from step" in errors or kills[-1] < 5, kills
    assert metrics(tmp_path) == metrics(unbroken), kills
    for file in ("model.safetensors", "config.json"):
        assert (tmp_path / "model" / file).read_bytes() == (unbroken / "model" / file).read_bytes()


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("lr=nan", "ConfigError: lr=nan: a positive, finite number is needed"),
        ("row_length=5000", "ConfigError: row_length=5000 exceeds the model's context of 4096 tokens"),
        ("model.vocab_size=50", "ConfigError: The tokenizer in"),
        ("data.path=nowhere.jsonl", "DataError: There is no data file nowhere.jsonl"),
        ("row_length=8", "has"),
    ],
)
def test_a_mistake_ends_with_one_line_before_anything_is_written(command, tmp_path, argument, said, monkeypatch, capsys):
    from train.pretrain import main

    monkeypatch.setattr(sys, "argv", command(tmp_path / "out", argument)[2:])
    assert main() == 2
    errors = capsys.readouterr().err
    assert said in errors and "Traceback" not in errors
    assert not (tmp_path / "out").exists()
