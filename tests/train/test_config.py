"""The command line of training programs: what it accepts, and what it says about what it does not."""

import math
import re
import sys
from dataclasses import dataclass

import pytest

from k3jax.config import ConfigError
from k3jax.lora import LoRAConfig
from train.cli import command_line, guarded, usage
from train.config import RunError, TrainConfig, load_config, override
from train.rl.countdown import Countdown
from train.rl.frozen_lake import FrozenLake
from train.rl.loop import RLConfig

BASE = {"out": "runs/x", "steps": 10, "lr": 1e-3, "rows": 2, "row_length": 8}


@dataclass(frozen=True, kw_only=True)
class Example(TrainConfig):
    adapter: LoRAConfig
    names: tuple[str, ...] = ()
    limit: int | None = 3
    fast: bool = False


@pytest.fixture
def example() -> Example:
    return Example(**BASE, adapter=LoRAConfig(rank=4, alpha=8))


def test_values_are_parsed_by_the_type_of_their_field(example):
    arguments = ["lr=2e-4", "steps=1e3", "adapter.rank=8", "names=a,b", "limit=None", "fast=true", "adapter.targets=attention"]
    changed = override(example, arguments)
    assert (changed.lr, changed.steps, changed.names, changed.limit, changed.fast) == (2e-4, 1000, ("a", "b"), None, True)
    assert changed.adapter == LoRAConfig(rank=8, alpha=8, targets=("attention",))
    assert (example.lr, example.adapter.rank) == (1e-3, 4)


@pytest.mark.parametrize(
    ("argument", "said"),
    [
        ("lrr=1", "no field lrr. Did you mean lr?"),
        ("adapter.rnk=1", "no field adapter.rnk. Did you mean adapter.rank?"),
        ("rank=1", "no field rank. Did you mean adapter.rank?"),
        ("lr.x=1", "has no fields"),
        ("lr=fast", "a value of type float is needed"),
        ("steps=1.5", "a value of type int is needed"),
        ("fast=maybe", "a value of type bool is needed"),
        ("lr", "not name=value"),
        ("lr=nan", "lr=nan: a positive, finite number"),
        ("lr=-1", "lr=-1.0: a positive"),
        ("clip=inf", "clip=inf"),
        ("steps=-5", "steps=-5: a whole number of at least 1"),
        ("rows=0", "rows=0"),
        ("warmup=2", "share from 0 to 1"),
        ("weight_decay=nan", "weight_decay=nan"),
        ("adapter.rank=0", "rank must be a whole number of at least 1, got 0"),
        ("adapter.alpha=nan", "alpha must be"),
    ],
)
def test_a_wrong_argument_is_refused_with_what_is_needed(example, argument, said):
    with pytest.raises(ConfigError) as error:
        override(example, [argument])
    assert said in str(error.value)


def test_a_config_file_must_return_the_right_kind(tmp_path, example):
    path = tmp_path / "c.py"
    path.write_text("def config():\n    return 3\n")
    with pytest.raises(ConfigError, match="returned a int, but this program needs a Example"):
        load_config(str(path), Example)
    path.write_text("x = 1\n")
    with pytest.raises(ConfigError, match=r"must define a function config\(\)"):
        load_config(str(path), Example)
    path.write_text("from k3jax.lora import LoRAConfig\ndef config():\n    return LoRAConfig(rank=0, alpha=1)\n")
    with pytest.raises(ConfigError, match="rank must be a whole number"):
        load_config(str(path), Example)
    with pytest.raises(ConfigError, match="There is no config file nowhere.py"):
        load_config("nowhere.py", Example)


def test_help_shows_examples_and_every_field():
    text = usage(Example, ("python -m train.x configs/x.py lr=1",), {})
    assert "python -m train.x configs/x.py lr=1" in text and "usage: python -m train.x CONFIG" in text
    for name in ("out", "lr", "adapter.rank", "limit", "seed"):
        assert f"  {name}" in text


@pytest.mark.parametrize("error", [ConfigError("wrong field"), RunError("disk full"), FileNotFoundError("no file")])
def test_mistakes_end_with_their_message_and_status_two(monkeypatch, tmp_path, capsys, error):
    path = tmp_path / "c.py"
    path.write_text(f"from train.config import TrainConfig\ndef config():\n    return TrainConfig(**{BASE})\n")
    monkeypatch.setattr(sys, "argv", ["x", str(path), "lr=0.5"])
    seen = []

    def fails(config):
        seen.append(config.lr)
        raise error

    assert command_line(TrainConfig, fails, ("python -m x configs/x.py",)) == 2
    assert seen == [0.5]
    assert str(error) in capsys.readouterr().err


def test_other_errors_keep_their_traceback(monkeypatch, tmp_path):
    path = tmp_path / "c.py"
    path.write_text(f"from train.config import TrainConfig\ndef config():\n    return TrainConfig(**{BASE})\n")
    monkeypatch.setattr(sys, "argv", ["x", str(path)])
    with pytest.raises(ZeroDivisionError):
        command_line(TrainConfig, lambda config: math.floor(1 / 0), ("python -m x configs/x.py",))


def test_ctrl_c_ends_with_one_line_that_says_how_to_go_on(capsys):
    def interrupted():
        raise KeyboardInterrupt

    assert guarded(interrupted) == 130
    assert capsys.readouterr().err == "\nInterrupted. The same command goes on from the last checkpoint.\n"


def test_help_shows_what_a_field_means_and_the_fields_of_what_it_may_hold():
    text = usage(RLConfig, ("python -m train.rl configs/x.py",), {"environment": (Countdown, FrozenLake)})
    assert re.search(r"  group_size +int\n", text) and re.search(r"  kl +float = 0.0  # coefficient of the divergence", text)
    assert "  with Countdown:\n  environment.counts" in text and re.search(r"  environment.size +int = 4  # cells per side", text)
    assert re.search(r"  out +str  # folder for checkpoints", text) and re.search(r"  adapter.rank +int", text)
