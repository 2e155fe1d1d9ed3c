"""What the tests of training share: the smallest model that has every part, and a checkpoint of it with a tokenizer."""

from pathlib import Path

import pytest

from k3jax.tokenizer import Tokenizer
from k3jax.weights import save
from train.pretrain import new_model

TOKENIZER = Path(__file__).parents[1] / "golden" / "chat_encoding" / "tokenizer"


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    return Tokenizer(TOKENIZER)


@pytest.fixture(scope="session")
def two_layers(make_config, tokenizer):
    """A config of two layers, KDA (dense) and MLA (MoE), over the tokenizer's vocabulary."""
    return make_config(attention=("kda", "mla"), vocab_size=tokenizer.vocab_size, remat="none", init_std=0.1)


@pytest.fixture(scope="session")
def checkpoint(two_layers, tokenizer, tmp_path_factory) -> str:
    folder = tmp_path_factory.mktemp("two_layers")
    save(new_model(two_layers, 0), folder)
    tokenizer.save(folder)
    return str(folder)
