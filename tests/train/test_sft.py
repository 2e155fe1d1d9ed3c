"""Supervised fine-tuning: the adapter learns, the base does not move, and the adapter that is saved is the one trained."""

import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from k3jax.config import ConfigError
from k3jax.lora import Adapters, LoRAConfig
from k3jax.lora.peft import load_peft
from k3jax.weights import load
from train.adapter import load_subject
from train.config import RunError, load_config
from train.data import DataFeed, Jsonl
from train.loss import loss_named
from train.objective import TokenObjective
from train.sft import SFTConfig, sft

CHAT = [{"role": "user", "content": "3 7"}, {"role": "assistant", "content": "10"}]


@pytest.fixture(scope="module")
def config(checkpoint, tmp_path_factory) -> SFTConfig:
    folder = tmp_path_factory.mktemp("sft")
    data = folder / "data.jsonl"
    data.write_text(json.dumps({"messages": CHAT}) + "\n")
    return SFTConfig(
        out=str(folder / "out"), checkpoint=checkpoint, adapter=LoRAConfig(rank=2, alpha=8, targets=("attention", "mlp")),
        data=Jsonl(path=str(data)), steps=8, lr=3e-2, rows=1, row_length=64, warmup=0.0, remat="none",
    )


@pytest.fixture(scope="module")
def trained(config):
    return sft(config)


def test_the_adapter_learns(trained, config):
    lines = [json.loads(line) for line in open(f"{config.out}/metrics.jsonl")]
    assert lines[-1]["loss"] < 0.8 * lines[0]["loss"]


def test_what_is_saved_is_what_was_trained_on_an_unchanged_base(trained, config):
    model = load(config.checkpoint, replace(trained.model.config), dtype="float32")
    adapters = Adapters(model, columns=2, targets=config.adapter.targets)
    id = load_peft(adapters, "again", f"{config.out}/adapter")
    ids = jnp.asarray(np.arange(12)[None] + 40)
    run = jax.jit(lambda m, adapter: m(ids, adapters=jnp.array([1]) * adapter).hidden)
    for adapter, mine in ((0, 0), (id, trained.adapter)):
        np.testing.assert_allclose(run(model, adapter), run(trained.model, mine), atol=1e-5)
    assert np.abs(run(trained.model, trained.adapter) - run(trained.model, 0)).max() > 1e-2


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"row_length": 5000}, "row_length=5000 exceeds the context"),
        ({"adapter": LoRAConfig(rank=2, alpha=4, targets=("attentoin",))}, "adapter: .*attentoin"),
    ],
)
def test_what_does_not_fit_the_checkpoint_is_refused(config, change, said):
    with pytest.raises(ConfigError, match=said):
        load_subject(replace(config, **change))


def test_a_missing_checkpoint_is_named(config):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        load_subject(replace(config, checkpoint="nowhere"))


SHIPPED = ("tiny", "sft_tiny", "dpo_tiny", "nano", "nano_solver", "nano_wide", "nano_countdown", "nano_frozen_lake")


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_configs_load(name):
    assert load_config(f"configs/{name}.py", object).steps > 0


def test_a_trainer_stops_when_its_adapter_is_gone(config):
    """The columns of a removed adapter go to the next one, which the momentum of the first must not move."""
    subject = load_subject(config)
    trainer = subject.trainer(lambda id: TokenObjective(loss_named("cross_entropy"), 64, adapter=id), config)
    feed = DataFeed(config.data.examples(subject.tokenizer), config, subject.model.config.vocab_size, False)
    trainer.step(feed.next(1)[0])
    subject.adapters.remove(subject.name)
    subject.adapters.add(subject.name, config.adapter, seed=1)
    with pytest.raises(RunError, match="'adapter' was removed or replaced while it was trained"):
        trainer.step(feed.next(2)[0])
