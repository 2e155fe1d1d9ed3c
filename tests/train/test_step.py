"""The optimizer step: exact accumulation, clipping, refusal of what is not finite, and nothing compiled twice."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig
from k3jax.lora.peft import load_peft as load
from k3jax.lora.peft import save_peft as save
from train.adapter import Subject
from train.config import TrainConfig
from train.loss import loss_named
from train.objective import TokenObjective
from train.optim import adamw, heads_of, muon
from train.pretrain import new_model
from train.step import Sums, Trainer, TrainingError

CONFIG = TrainConfig(out="x", steps=50, lr=1e-2, rows=2, row_length=12, weight_decay=0.0, warmup=0.0, max_refused=3)


class Toy(nnx.Module):
    """y = w x: small enough to check by hand."""

    def __init__(self, dtype=jnp.float32):
        self.config = type("Config", (), {"moe": None})
        self.w = nnx.Param(jnp.array([1.0, -2.0, 0.5], dtype))


def squares(model, batch):
    """sum of weights * (w x - y)^2"""
    error = batch["x"] @ model.w[...].astype(jnp.float32) - batch["y"]
    loss = jnp.sum(batch["weights"] * error**2)
    return Sums(loss, {"loss": loss, "tokens": jnp.sum(batch["weights"] != 0, dtype=jnp.float32)}, {})


def sgd(config, weights):
    return optax.sgd(config.lr)


def toy_batch(n, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_normal((n, 3)).astype(np.float32)
    return {"x": x, "y": x.sum(1), "weights": np.ones(n, np.float32)}


def cut(batch, *sizes):
    ends = np.cumsum(sizes)
    return [{k: v[end - size : end] for k, v in batch.items()} for size, end in zip(sizes, ends, strict=True)]


def test_micro_batches_of_any_weight_add_up_to_the_whole_batch():
    batch = toy_batch(12)
    batch["weights"][5:8] = 0
    results = []
    for parts in (cut(batch, 12), cut(batch, 6, 6), cut(batch, 4, 4, 4)):
        trainer = Trainer(Toy(), nnx.Param, squares, CONFIG, sgd)
        figures = trainer.step(parts)
        results.append((figures["loss"], figures["grad_norm"], figures["tokens"], *trainer.state.weights["w"].tolist()))
    assert results[0][2] == 9
    np.testing.assert_allclose(results[1:], [results[0]] * 2, rtol=1e-6)


def test_the_gradient_is_the_mean_over_tokens_and_clipped_as_a_whole():
    batch = toy_batch(8)
    w = np.array([1.0, -2.0, 0.5])
    gradient = 2 * (batch["x"] @ w - batch["y"]) @ batch["x"] / 8
    norm = np.linalg.norm(gradient)
    for clip in (100.0, norm / 4):
        trainer = Trainer(Toy(), nnx.Param, squares, replace(CONFIG, clip=float(clip)), sgd)
        assert trainer.step([batch])["grad_norm"] == pytest.approx(norm, rel=1e-5)
        moved = np.asarray(trainer.state.weights["w"]) - w
        np.testing.assert_allclose(moved, -CONFIG.lr * gradient * min(1, clip / norm), rtol=1e-4)


def test_weights_and_optimizer_are_fp32_and_small_steps_move_a_bf16_model():
    """50 steps of 1e-5 are lost in bf16, whose numbers near 1 are 8e-3 apart."""
    config = replace(CONFIG, lr=1e-5, final_lr=1.0)
    trainer = Trainer(Toy(jnp.bfloat16), nnx.Param, squares, config, adamw)
    before = np.asarray(trainer.state.weights["w"])
    for _ in range(50):
        trainer.step([toy_batch(8)])
    moved = np.abs(np.asarray(trainer.state.weights["w"]) - before)
    np.testing.assert_allclose(moved, 50e-5, rtol=0.1)
    floats = [x for x in jax.tree.leaves(trainer.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    assert trainer.model.w[...].dtype == jnp.bfloat16


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e30])
def test_a_step_that_is_not_finite_changes_nothing(bad):
    """1e30 squared overflows."""
    trainer = Trainer(Toy(), nnx.Param, squares, CONFIG, adamw)
    trainer.step([toy_batch(4)])
    before = jax.tree.map(jnp.copy, trainer.state)
    broken = toy_batch(4, 1)
    broken["y"][2] = bad
    figures = trainer.step([toy_batch(4, 2), broken])
    assert figures["refused"] == 1
    for a, b in zip(jax.tree.leaves(before.weights), jax.tree.leaves(trainer.state.weights), strict=True):
        np.testing.assert_array_equal(a, b)
    for a, b in zip(jax.tree.leaves(before.optimizer), jax.tree.leaves(trainer.state.optimizer), strict=True):
        np.testing.assert_array_equal(a, b)
    assert int(trainer.state.step) == 2
    assert trainer.step([toy_batch(4)])["refused"] == 0


def test_the_run_stops_after_too_many_refused_steps_in_a_row():
    trainer = Trainer(Toy(), nnx.Param, squares, CONFIG, sgd)
    broken = toy_batch(4)
    broken["y"][0] = np.nan
    for batch in (broken, broken, toy_batch(4), broken, broken):
        trainer.step([batch])
    with pytest.raises(TrainingError, match="not finite in 3 steps in a row.*The weights are those before"):
        trainer.step([broken])
    assert np.isfinite(trainer.state.weights["w"]).all()


def test_no_step_compiles_again():
    trainer = Trainer(Toy(), nnx.Param, squares, CONFIG, adamw)
    for count in (1, 3, 2, 1):
        trainer.step(cut(toy_batch(4 * count, count), *[4] * count))
    assert trainer._add._cache_size() == 1
    assert trainer._apply._cache_size() == 1


def token_batch(vocab, seed=0):
    rng = np.random.default_rng(seed)
    ids = rng.integers(0, vocab, (2, 13)).astype(np.int32)
    segments = np.array([[1] * 5 + [2] * 7, [1] * 9 + [0] * 3], np.int32)
    return {"ids": ids[:, :-1], "targets": ids[:, 1:], "segments": segments, "weights": (segments > 0).astype(np.float32)}


@pytest.fixture(scope="module")
def whole(two_layers):
    """A trainer of all weights with Quantile Balancing, as train.pretrain makes it, and the figures of three steps."""
    model = new_model(two_layers, 0)
    objective = TokenObjective(loss_named("cross_entropy"), 12, balance=True)
    trainer = Trainer(model, nnx.Param, objective, CONFIG, lambda c, w: muon(c, w, heads_of(model)), balance=True)
    start = jax.tree.map(jnp.copy, trainer.state)
    batch = token_batch(two_layers.vocab_size)
    return trainer, start, [trainer.step([batch]) for _ in range(3)], batch


def test_every_weight_learns_but_those_without_a_gradient(whole):
    """The mix before layer 0's attention is skipped."""
    trainer, start, figures, _ = whole
    assert figures[2]["loss"] < figures[0]["loss"]
    still = {p for p, w in trainer.state.weights.items() if np.array_equal(w, start.weights[p])}
    assert still == {f"model/layers/stacks/0/self_attention_res/{part}/weight" for part in ("norm", "proj")}


def test_the_router_bias_moves_after_a_step_and_stays_centred(whole):
    trainer, start, _, _ = whole
    (path,) = trainer.state.biases
    assert not np.array_equal(trainer.state.biases[path], start.biases[path])
    assert abs(float(trainer.state.biases[path].mean())) < 1e-6
    router = trainer.model.model.layers.stacks[1].block_sparse_moe.gate
    np.testing.assert_array_equal(router.e_score_correction_bias[...], trainer.state.biases[path])


def test_the_loss_is_the_mean_over_tokens_with_weight(whole, two_layers):
    _, start, figures, batch = whole
    model = new_model(two_layers, 0)
    graphdef, state = nnx.split(model)

    @jax.jit
    def mean(state):
        model = nnx.merge(graphdef, state)
        logits = model.logits(model(batch["ids"], batch["segments"]).hidden)
        each = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
        return jnp.sum(each * batch["weights"]) / jnp.sum(batch["weights"])

    assert figures[0]["loss"] == pytest.approx(float(mean(state)), rel=1e-5)
    assert figures[0]["tokens"] == 21


@pytest.fixture
def two_adapters(two_layers):
    """A model with adapters `other` and `mine` and room for one more; a trainer of `mine` with weight decay."""
    model = new_model(two_layers, 0)
    adapters = Adapters(model, columns=6, targets=("attention", "mlp", "shared_experts"))
    lora = LoRAConfig(rank=2, alpha=4, targets=("attention", "mlp"))
    for seed, name in enumerate(("other", "mine"), 1):
        adapters.add(name, lora, seed=seed)
    config = replace(CONFIG, lr=1e-1, weight_decay=0.5)
    loss = loss_named("cross_entropy")
    trainer = Subject(model, None, adapters, "mine").trainer(lambda id: TokenObjective(loss, 12, adapter=id), config)
    return adapters, trainer


def test_an_adapter_trains_alone(two_adapters, two_layers):
    """Base weights, router biases and the columns of other adapters keep their bits."""
    adapters, trainer = two_adapters
    everything_else = nnx.Not(nnx.OfType(LoRAParam))
    base, other = jax.tree.map(np.array, nnx.state(adapters.model, everything_else)), adapters.content_version("other")
    figures = [trainer.step([token_batch(two_layers.vocab_size)]) for _ in range(6)]
    assert figures[5]["loss"] < figures[0]["loss"]
    for a, b in zip(jax.tree.leaves(base), jax.tree.leaves(nnx.state(adapters.model, everything_else)), strict=True):
        np.testing.assert_array_equal(a, b)
    assert adapters.content_version("other") == other
    assert trainer.state.biases == {}


def test_two_adapters_on_one_model_train_in_turns_at_their_own_rates_as_each_alone(two_adapters, two_layers):
    adapters, fast = two_adapters
    config = replace(CONFIG, lr=1e-3, weight_decay=0.5)
    loss = loss_named("cross_entropy")
    slow = Subject(adapters.model, None, adapters, "other").trainer(lambda id: TokenObjective(loss, 12, adapter=id), config)
    batch, names, start = [token_batch(two_layers.vocab_size)], {fast: "mine", slow: "other"}, jax.tree.map(np.array, fast.state)

    def after(*turns):
        """What is in each adapter after steps of these trainers, from the start."""
        for trainer in names:
            trainer.restore(jax.tree.map(jnp.array, start))
        for trainer in turns:
            trainer.step(batch)
        return {trainer: adapters.content_version(name) for trainer, name in names.items()}

    untrained, mixed = after(), after(fast, slow, fast, fast, slow)
    assert after(fast, fast, fast) == {fast: mixed[fast], slow: untrained[slow]}
    assert after(slow, slow) == {fast: untrained[fast], slow: mixed[slow]}
    after(slow, fast)
    for name, rate in (("mine", 1e-1), ("other", 1e-3)):  # the first step of Adam is one rate long; B was zero
        longest = max(np.abs(part.b).max() for part in adapters.read(name))
        assert longest == pytest.approx(rate, rel=1e-2)


def test_adapters_that_are_loaded_while_another_trains_change_nothing_and_stay(two_adapters, two_layers, tmp_path):
    adapters, trainer = two_adapters
    batch = [token_batch(two_layers.vocab_size)]
    trainer.step(batch)
    save(adapters, "mine", tmp_path)
    before = adapters.content_version("mine")
    for n in range(10):
        load(adapters, f"copy {n}", tmp_path)
        if n < 9:
            adapters.remove(f"copy {n}")
    assert adapters.content_version("mine") == before
    trainer.step(batch)
    assert adapters.content_version("copy 9") == before != adapters.content_version("mine")


def test_fifty_small_steps_move_an_adapter_on_a_bf16_model(two_layers):
    """Were the adapter kept in bf16, whose numbers near 0.1 are 5e-4 apart, 1e-5 would never move it."""
    bf16 = jnp.dtype(jnp.bfloat16)
    model = new_model(replace(two_layers, dtype=bf16, param_dtype=bf16), 0)
    adapters = Adapters(model, columns=2, targets=("mlp",))
    adapters.add("one", LoRAConfig(rank=2, alpha=4, targets=("mlp",)))
    objective = TokenObjective(loss_named("cross_entropy"), 12, adapter=1)
    trainer = Subject(model, None, adapters, "one").trainer(lambda _: objective, replace(CONFIG, lr=1e-5, final_lr=1.0))
    before = jax.tree.map(np.array, trainer.state.weights)
    for _ in range(50):
        trainer.step([token_batch(two_layers.vocab_size)])
    floats = [x for x in jax.tree.leaves(trainer.state) if jnp.issubdtype(x.dtype, jnp.floating)]
    assert {x.dtype for x in floats} == {jnp.dtype("float32")}
    for path, weight in nnx.to_flat_state(nnx.state(model, LoRAParam)):
        name = "/".join(map(str, path))
        moved = np.abs(np.asarray(weight.get_value()) - before[name])
        assert weight.get_value().dtype == jnp.float32 and 2e-4 < np.median(moved) < 6e-4, name
