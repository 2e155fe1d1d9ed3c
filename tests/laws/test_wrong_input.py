"""Wrong input, as a user meets it: one clear error on the command line, no traceback, and what was there before intact."""

import errno
import json
import os
import random
import re
import resource
import shutil
import sys
from contextlib import contextmanager
from pathlib import Path

import jax
import pytest

from k3jax.config import K3Config
from k3jax.lora import Adapters, LoRAConfig
from k3jax.lora.peft import AdapterError, load_peft
from k3jax.weights import load
from k3jax.weights.__main__ import main as weights
from train.cli import command_line
from train.dpo import main as dpo
from train.pretrain import main as pretrain
from train.rl.loop import RLConfig, train_rl
from train.sft import main as sft

TOKENIZER = Path(__file__).parents[1] / "golden" / "chat_encoding" / "tokenizer"

PRETRAIN = """
import jax.numpy as jnp
from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from train.data import Jsonl
from train.pretrain import PretrainConfig

def config():
    model = K3Config(
        vocab_size=932, hidden_size=16, intermediate_size=16, attention=("mla",), attn_res_block=1, context_length=64,
        kda=KDAConfig(num_heads=2, head_dim=16),
        mla=MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=16, nope_dim=8, rope_dim=8, value_dim=8),
        moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16, first_layer=0),
        dtype=jnp.dtype("float32"), param_dtype=jnp.dtype("bfloat16"),
    )
    return PretrainConfig(
        out="{here}/pretrain", model=model, tokenizer="{tokenizer}", data=Jsonl(path="{here}/data.jsonl"), steps=4, lr=1e-2,
        rows=2, row_length=32, save_every=2, remat="none",
    )
"""
ADAPTER = 'out="{here}/sft", checkpoint="{here}/pretrain/model", adapter=LoRAConfig(rank=2, alpha=4, targets=("attention",)), '
ADAPTER += "steps=4, lr=1e-2, rows=2, row_length=32, save_every=2, remat='none'"
CONFIGS = {
    "pretrain.py": PRETRAIN,
    "sft.py": f"""
from k3jax.lora import LoRAConfig
from train.data import Jsonl
from train.sft import SFTConfig

def config():
    return SFTConfig({ADAPTER}, data=Jsonl(path="{{here}}/data.jsonl"))
""",
    "dpo.py": f"""
from k3jax.lora import LoRAConfig
from train.data import Pairs
from train.dpo import DPOConfig

def config():
    return DPOConfig({ADAPTER}, data=Pairs(path="{{here}}/pairs.jsonl"))
""",
    "rl.py": f"""
from k3jax.lora import LoRAConfig
from train.rl.countdown import Countdown
from train.rl.loop import RLConfig

def config():
    return RLConfig({ADAPTER}, environment=Countdown(), groups=1, group_size=2, max_turn_tokens=4)
""",
}


def rl() -> int:
    return command_line(RLConfig, train_rl, ("python -m train.rl configs/rl_tiny.py",))


def inspect() -> int:
    return weights(sys.argv[1:])


PROGRAMS = {"pretrain": pretrain, "sft": sft, "dpo": dpo, "rl": rl}


def run(program, *arguments) -> int:
    """The exit status of a program called with these arguments."""
    hook, sys.argv = sys.unraisablehook, ["x", *map(str, arguments)]
    try:
        return program()
    finally:
        sys.unraisablehook = hook


@pytest.fixture(scope="module")
def made(tmp_path_factory) -> Path:
    """Configs, data, and the finished runs `pretrain` and `sft`, with checkpoints of the steps 2 and 4."""
    here = tmp_path_factory.mktemp("wrong_input")
    for name, text in CONFIGS.items():
        (here / name).write_text(text.replace("{here}", str(here)).replace("{tokenizer}", str(TOKENIZER)))
    rng = random.Random(0)
    lines = ({"ids": [rng.randrange(10), *[rng.randrange(10, 13)] * rng.randrange(4, 20)]} for _ in range(20))
    (here / "data.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    (here / "empty.jsonl").write_text("\n")
    (here / "long.jsonl").write_text(json.dumps({"ids": list(range(40))}) + "\n")
    answer = {name: {"role": "assistant", "content": name * 40} for name in ("chosen", "rejected")}
    (here / "pairs.jsonl").write_text(json.dumps({"messages": [{"role": "user", "content": "?"}], **answer}) + "\n")
    assert run(pretrain, here / "pretrain.py") == 0
    assert run(sft, here / "sft.py") == 0
    return here


@pytest.fixture
def folder(made, tmp_path):
    """(name) -> a copy of a folder of `made` that a test may spoil."""
    return lambda name: Path(shutil.copytree(made / name, tmp_path / name))


@pytest.fixture
def told(capfd):
    """(program, *arguments) -> the error of a call that fails, all of it: a line or a short paragraph."""

    def told(program, *arguments) -> str:
        capfd.readouterr()
        status = run(program, *arguments)
        errors = capfd.readouterr().err
        assert status in (1, 2) and "Traceback" not in errors, errors
        lines = errors.splitlines()
        starts = [i for i, line in enumerate(lines) if re.match(r"(\w*Error|error): ", line)]
        assert len(starts) == 1 and len(lines) - starts[0] <= 6, errors
        return "\n".join(lines[starts[0] :])

    return told


def contents(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in sorted(folder.rglob("*")) if file.is_file()}


def steps(out: Path) -> list[int]:
    return [json.loads(line)["step"] for line in (out / "metrics.jsonl").read_text().splitlines()]


def truncate(file: Path) -> None:
    os.truncate(file, file.stat().st_size // 2)


@contextmanager
def files_of_at_most(size: int):
    """A disk without room: every write beyond `size` bytes of a file fails. JAX's cache of programs is left alone."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    slow_enough = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update("jax_persistent_cache_min_compile_time_secs", float("inf"))
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", slow_enough)


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        ("lr=", "lrr=", "PretrainConfig has no field lrr. Did you mean lr?"),
        ("head_dim=", "headdim=", "KDAConfig has no field headdim. Did you mean head_dim?"),
        (" lr=1e-2,", "", "missing 1 required keyword-only argument: 'lr'"),
        ("def config():", "def config(:", "line 7: invalid syntax"),
    ],
)
def test_an_unknown_field_in_a_config_file_is_named_with_its_line(made, tmp_path, told, old, new, words):
    bad = tmp_path / "bad.py"
    bad.write_text((made / "pretrain.py").read_text().replace(old, new))
    error = told(pretrain, bad, f"out={tmp_path / 'out'}")
    assert error.startswith(f"ConfigError: {bad} line ") and words in error
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"hiden_size": 3}, "unknown field 'hiden_size'; did you mean 'hidden_size'?"),
        ({"hidden_size": "16"}, "hidden_size must be a whole number of at least 1, got '16'"),
        ({"rms_norm_eps": None}, "rms_norm_eps must be a finite number, got None"),
    ],
)
def test_an_unknown_or_senseless_field_of_a_checkpoint_is_named(made, folder, told, change, words):
    path = folder("pretrain") / "model" / "config.json"
    raw = json.loads(path.read_text())
    raw["text_config"] |= change
    path.write_text(json.dumps(raw))
    assert words in told(sft, made / "sft.py", f"checkpoint={path.parent}")
    assert words in told(inspect, "inspect", path.parent)


def test_a_missing_shard_is_named_and_nothing_is_written(made, tmp_path, told):
    shards = tmp_path / "shards"
    assert run(inspect, "convert", made / "pretrain" / "model", shards, "--shard-size", "20kB") == 0
    next(shards.glob("model-00002-of-*")).unlink()
    before = contents(made / "pretrain" / "model")
    for call in (
        (sft, made / "sft.py", f"checkpoint={shards}", f"out={tmp_path / 'out'}"),
        (pretrain, made / "pretrain.py", f"checkpoint={shards}", f"out={tmp_path / 'out'}"),
        (inspect, "inspect", shards),
        (inspect, "convert", shards, made / "pretrain" / "model"),
    ):
        error = told(*call)
        assert "lacks 1 of the" in error and "model-00002-of-" in error and "Download them again" in error
    assert not (tmp_path / "out").exists()
    assert contents(made / "pretrain" / "model") == before


@pytest.mark.parametrize("change", ["adapter.rank=3", "adapter.targets=head"])
def test_a_run_is_not_resumed_with_another_adapter(made, folder, told, capfd, change):
    out = folder("sft")
    before = contents(out)
    error = told(sft, made / "sft.py", f"out={out}", change)
    assert f"belongs to a run with other settings: {change.split('=')[0]}=" in error and "name another folder (out=…)" in error
    assert contents(out) == before
    assert run(sft, made / "sft.py", f"out={out}") == 0
    assert "Going on from step 4" in capfd.readouterr().err


def test_an_adapter_of_another_base_is_refused_with_the_base_it_names_and_the_model_works_on(made, folder):
    adapter, model = folder("sft") / "adapter", load(made / "pretrain" / "model")
    path = adapter / "adapter_config.json"
    config = json.loads(path.read_text())
    path.write_text(json.dumps(config | {"base_model_name_or_path": "others/llama", "target_modules": ["q_proj", "up_proj"]}))
    adapters = Adapters(model, columns=2)
    with pytest.raises(AdapterError, match=r"does not fit this model\. It was made for others/llama\.\n"):
        load_peft(adapters, "one", adapter)
    path.write_text(json.dumps(config | {"r": 3}))
    with pytest.raises(AdapterError, match="another rank, another base model"):
        load_peft(adapters, "one", adapter)
    path.write_text(json.dumps(config | {"r": 0}))
    with pytest.raises(AdapterError, match="rank must be a whole number of at least 1, got 0"):
        load_peft(adapters, "one", adapter)
    path.write_text(json.dumps(config))
    assert list(adapters) == [] and load_peft(adapters, "one", adapter) == 1


@pytest.mark.parametrize(
    ("program", "argument", "words"),
    [
        ("sft", "adapter.rank=0", "adapter: rank must be a whole number of at least 1, got 0"),
        ("rl", "adapter.rank=0", "adapter: rank must be a whole number of at least 1, got 0"),
        ("pretrain", "lr=nan", "lr=nan: a positive, finite number is needed, such as lr=1e-3"),
        ("dpo", "lr=nan", "lr=nan: a positive, finite number is needed, such as lr=1e-3"),
        ("pretrain", "data.path={made}/empty.jsonl", "empty.jsonl has no examples: it is empty. Give it a JSON object per line."),
        ("sft", "data.path={made}/empty.jsonl", "empty.jsonl has no examples: it is empty"),
        ("dpo", "data.path={made}/empty.jsonl", "empty.jsonl has no examples: it is empty"),
        ("sft", "data.path={made}/pretrain/model/model.safetensors", "model.safetensors line 1 is not JSON"),
        ("pretrain", "row_length=65", "row_length=65 exceeds the model's context of 64 tokens. Use row_length=64 or less"),
        ("sft", "row_length=65", "exceeds the context of {made}/pretrain/model, 64 tokens. Use row_length=64 or less"),
        ("rl", "row_length=64", "an episode has up to 65 tokens, but the context of {made}/pretrain/model is 64 tokens"),
        ("rl", "row_length=8", "belongs to a run with other settings: row_length=8 (was 32)"),
        ("rl", "out={made}/rl", "tokens, but an episode may have 33. Use longer rows"),
        ("pretrain", "data.path={made}/long.jsonl", "long.jsonl line 1 has 40 tokens, but a row holds 33. Use longer rows"),
        ("sft", "data.path={made}/long.jsonl", "or cut the example (cut=true)"),
        ("dpo", "rows=1", "pairs.jsonl line 1 has"),
    ],
)
def test_a_setting_or_data_that_cannot_work_is_refused_and_the_last_run_stays(made, told, program, argument, words):
    before = contents(made)
    error = told(PROGRAMS[program], made / f"{program}.py", argument.format(made=made))
    assert words.format(made=made) in error
    assert contents(made) == before


@pytest.mark.parametrize(
    ("file", "words"),
    [
        ("model.safetensors", "is truncated: its header describes"),
        ("config.json", "is not valid JSON"),
        ("tiktoken.model", "The file is corrupt or cut short: fetch it again."),
        ("tokenizer_config.json", "The file is corrupt: fetch it again."),
    ],
)
def test_a_truncated_file_of_a_checkpoint_is_named(made, folder, told, tmp_path, file, words):
    checkpoint = folder("pretrain") / "model"
    truncate(checkpoint / file)
    error = told(sft, made / "sft.py", f"checkpoint={checkpoint}", f"out={tmp_path / 'out'}")
    assert str(checkpoint) in error and file in error and words in error
    assert not (tmp_path / "out").exists()
    if "token" not in file:
        assert words in told(inspect, "inspect", checkpoint)
        assert words in told(inspect, "convert", checkpoint, tmp_path / "converted")
        assert not (tmp_path / "converted").exists()


def largest(step: Path) -> Path:
    return max((step / "state" / "ocdbt.process_0" / "d").iterdir(), key=lambda file: file.stat().st_size)


def flip(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 0x40
    file.write_bytes(data)


@pytest.mark.parametrize("damage", [truncate, flip])
def test_from_a_damaged_training_checkpoint_the_run_falls_back_to_the_one_before_and_says_so_once(made, folder, capfd, damage):
    out = folder("pretrain")
    damage(largest(out / "checkpoints" / "4"))
    assert run(pretrain, made / "pretrain.py", f"out={out}") == 0
    errors = capfd.readouterr().err
    assert errors.count("the checkpoint of step 4 cannot be read") == errors.count("going on from step 2 instead") == 1
    assert "Going on from step 2" in errors and "Traceback" not in errors
    assert contents(out / "model") == contents(made / "pretrain" / "model")


def test_without_a_whole_checkpoint_a_run_refuses_to_begin_anew(made, folder, told):
    out = folder("sft")
    for step in ("2", "4"):
        for file in (out / "checkpoints" / step).rglob("*"):
            if file.is_file():
                truncate(file)
    before = contents(out)
    error = told(sft, made / "sft.py", f"out={out}")
    assert f"No checkpoint in {out / 'checkpoints'} can be read" in error and f"remove {out}" in error
    assert contents(out) == before
    shutil.rmtree(out / "checkpoints")
    error = told(sft, made / "sft.py", f"out={out}", "save_every=1")
    assert "tells of 4 steps, but there is no checkpoint beside it" in error and f"remove {out}" in error
    assert steps(out) == [1, 2, 3, 4]


def test_a_full_disk_at_a_training_checkpoint_leaves_the_last_ones_and_the_same_command_goes_on(made, folder, told):
    out = folder("pretrain")
    with files_of_at_most(60_000):
        error = told(pretrain, made / "pretrain.py", f"out={out}", "steps=8")
    assert "the disk is full. Complete checkpoints: 2, 4. Free some space and start the same command again" in error
    assert sorted(entry.name for entry in (out / "checkpoints").iterdir()) == ["2", "4"]
    assert contents(out / "model") == contents(made / "pretrain" / "model")
    assert run(pretrain, made / "pretrain.py", f"out={out}", "steps=8") == 0
    assert steps(out) == list(range(1, 9))


def test_a_full_disk_while_a_model_is_saved_or_converted_leaves_the_earlier_one(made, folder, told):
    out = folder("pretrain")
    before = contents(out / "model")
    with files_of_at_most(60_000):
        error = told(pretrain, made / "pretrain.py", f"out={out}")
        assert f"{out / 'model'} is unchanged" in error and "start the same command again" in error
        assert contents(out / "model") == before
        error = told(inspect, "convert", made / "pretrain" / "model", out / "model")
        assert f"{out / 'model'} is unchanged" in error and "Free some space" in error
    assert contents(out / "model") == before
    assert K3Config.load(out / "model") == load(out / "model").config


def test_a_full_disk_while_an_adapter_is_saved_leaves_the_earlier_one(made, folder, told, monkeypatch):
    out = folder("sft")
    before, write, written = contents(out / "adapter"), os.write, []

    def full(file, data):
        written.append(file)
        if len(written) > 3:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(file, data)

    monkeypatch.setattr(os, "write", full)
    error = told(sft, made / "sft.py", f"out={out}")
    monkeypatch.undo()
    assert f"{out / 'adapter'} is unchanged" in error and "start the same command again" in error
    assert contents(out / "adapter") == before
    adapters = Adapters(load(made / "pretrain" / "model"), columns=2)
    assert load_peft(adapters, "one", out / "adapter") == 1
    assert adapters["one"].config.rank_of("x") == LoRAConfig(rank=2, alpha=4).rank
