"""What the tests of generation share: a small model with two adapters, samplers of it, and what a trainer makes of a row."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig
from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig
from k3jax.model import K3
from k3jax.sampling import Sampler, replay
from k3jax.tokenizer import Tokenizer

VOCAB = 512
CONFIG = K3Config(
    vocab_size=VOCAB, hidden_size=32, intermediate_size=32, attention=("kda", "mla"), context_length=64,
    kda=KDAConfig(num_heads=2, head_dim=8, decay_floor=-5.0), init_std=0.3, dtype=jnp.float32, param_dtype=jnp.float32,
    mla=MLAConfig(num_heads=2, q_lora_rank=None, kv_lora_rank=8, nope_dim=8, rope_dim=4, value_dim=8),
    moe=MoEConfig(num_experts=4, experts_per_token=2, intermediate_size=16),
)  # fmt: skip
IDS = np.random.default_rng(0).integers(0, VOCAB, 64).tolist()

LORA = LoRAConfig(rank=2, alpha=4, targets=("attention", "head"))


def new_adapters() -> Adapters:
    """A small model with two adapters, 1 and 2, that change what it says. Made by numpy: nothing is compiled for it."""
    model = nnx.eval_shape(lambda: K3(CONFIG, rngs=nnx.Rngs(0)))
    graphdef, state = nnx.split(model)
    model = nnx.merge(graphdef, jax.tree.map_with_path(lambda path, a: random(a.shape, 0.3, "norm" in str(path)), state))
    adapters = Adapters(model, columns=4, targets=LORA.targets)
    for seed, name in enumerate(("one", "two")):
        adapters.add(name, LORA, seed=seed)
    randomise_adapters(model, 0.1)
    return adapters


def new_model() -> K3:
    return new_adapters().model


def randomise_adapters(model: K3, std: float) -> None:
    nnx.update(model, jax.tree.map(lambda a: random(a.shape, std), nnx.state(model, LoRAParam)))


def random(shape: tuple[int, ...], std: float, mean: float = 0) -> jax.Array:
    return jnp.asarray(np.random.default_rng(shape).normal(mean, std, shape).astype(np.float32))


@cache
def shared_model() -> K3:
    return new_model()


def new_sampler(model: K3 | None = None, **settings) -> Sampler:
    settings = {"capacity": 64, "max_batch": 4, "prefill_chunk": 16, "routes": True} | settings
    return Sampler(shared_model() if model is None else model, tokenizer(), **settings)


@cache
def tokenizer() -> Tokenizer:
    return Tokenizer.from_ranks({bytes([i]): i for i in range(256)}, {"[BOS]": 256}, bos_token="[BOS]")


@jax.jit
def _forward(graphdef, state, ids, segments, adapters, picks):
    model = nnx.merge(graphdef, state)
    hidden = model(ids, segments, adapters=adapters, picks=picks).hidden
    return model.logits(hidden, model.packing(ids, adapters=adapters))


def trainer_logits(model: K3, rows: list[list[int]], adapters: list[int], routes=None, length: int = 64) -> np.ndarray:
    """Logits [4, length, vocabulary] of one forward over 4 whole rows, without a cache, as a trainer computes them."""
    ids, segments = np.zeros((4, length), np.int32), np.zeros((4, length), np.int32)
    for b, row in enumerate(rows):
        ids[b, : len(row)], segments[b, : len(row)] = row, 1
    graphdef, state = nnx.split(model)
    picks = None if routes is None else replay(routes, length)
    return np.asarray(_forward(graphdef, state, ids, segments, np.array(adapters, np.int32), picks))


def raw_logprobs(logits: np.ndarray, prompt: list[int], ids: list[int]) -> np.ndarray:
    steps = logits[len(prompt) - 1 : len(prompt) - 1 + len(ids)]
    return log_softmax(steps)[np.arange(len(ids)), ids]


def log_softmax(x: np.ndarray) -> np.ndarray:
    x = x.astype(np.float64) - x.max(-1, keepdims=True)
    return x - np.log(np.exp(x).sum(-1, keepdims=True))


def assert_same(a, b, tolerance: float = 1e-5) -> None:
    assert a.ids == b.ids
    np.testing.assert_allclose(a.logprobs, b.logprobs, atol=tolerance)
    np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=tolerance)
    if a.prompt_logprobs is not None and b.prompt_logprobs is not None:
        np.testing.assert_allclose(a.prompt_logprobs, b.prompt_logprobs, atol=tolerance)
