"""Optimizers: Muon per head, AdamW for the rest, decay where it belongs, the schedule."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from k3jax.weights import abstract
from train.config import TrainConfig
from train.optim import BETAS, MUON_MOMENTUM, MUON_RMS, adamw, decays_weight, heads_of, in_columns, is_matrix, muon, schedule

CONFIG = TrainConfig(out="x", steps=100, lr=0.1, rows=1, row_length=8, weight_decay=0.0, warmup=0.0, final_lr=1.0)
KDA = "model/layers/stacks/1/self_attn"
SHAPES = {
    f"{KDA}/q_proj/kernel": (3, 8, 12),
    f"{KDA}/o_proj/kernel": (3, 12, 8),
    f"{KDA}/b_proj/kernel": (3, 8, 2),
    "model/layers/stacks/1/block_sparse_moe/experts/w1/kernel": (3, 4, 6, 5),
    "model/layers/stacks/1/block_sparse_moe/gate/kernel": (3, 8, 4),
    "model/layers/stacks/1/input_layernorm/weight": (3, 8),
    "lm_head/kernel": (8, 16),
    "model/embed_tokens/weight": (16, 8),
}
HEADS = {f"{KDA}/q_proj/kernel": 2, f"{KDA}/o_proj/kernel": 2}


def arrays(seed):
    rng = np.random.default_rng(seed)
    return {path: jnp.asarray(rng.standard_normal(shape), jnp.float32) for path, shape in SHAPES.items()}


@pytest.fixture(scope="module")
def updates():
    """The first update by Muon on random gradients."""
    optimizer = muon(CONFIG, arrays(0), HEADS)
    return jax.jit(lambda g, w: optimizer.update(g, optimizer.init(w), w)[0])(arrays(1), arrays(0))


def orthogonalised(matrix):
    """What Muon makes of one matrix by itself."""
    one = optax.contrib.muon(CONFIG.lr, beta=MUON_MOMENTUM, consistent_rms=MUON_RMS)
    return one.update({"w": matrix}, one.init({"w": matrix}), {"w": matrix})[0]["w"]


def test_each_head_of_each_layer_is_a_matrix_of_its_own(updates):
    gradient = arrays(1)
    path = f"{KDA}/q_proj/kernel"
    for layer in range(3):
        for head in range(2):
            columns = slice(6 * head, 6 * head + 6)
            np.testing.assert_allclose(
                updates[path][layer, :, columns], orthogonalised(gradient[path][layer, :, columns]), atol=1e-5
            )


def test_o_proj_is_cut_into_heads_along_its_inputs(updates):
    path = f"{KDA}/o_proj/kernel"
    np.testing.assert_allclose(updates[path][1, 6:], orthogonalised(arrays(1)[path][1, 6:]), atol=1e-5)


def test_each_expert_is_a_matrix_of_its_own(updates):
    path = "model/layers/stacks/1/block_sparse_moe/experts/w1/kernel"
    np.testing.assert_allclose(updates[path][2, 3], orthogonalised(arrays(1)[path][2, 3]), atol=1e-5)


def test_what_is_no_matrix_of_features_goes_to_adamw(updates):
    rest = {path: w for path, w in arrays(0).items() if not is_matrix(path)}
    assert {path.split("/")[-2] for path in rest} == {"b_proj", "gate", "input_layernorm", "lm_head", "embed_tokens"}
    optimizer = adamw(CONFIG, rest)
    gradients = {path: arrays(1)[path] for path in rest}
    expected, _ = optimizer.update(gradients, optimizer.init(rest), rest)
    for path in rest:
        np.testing.assert_allclose(updates[path], expected[path], atol=1e-6)


def test_heads_are_found_in_a_real_model(two_layers):
    model = abstract(two_layers)
    heads = heads_of(model)
    shapes = {"/".join(map(str, p)): v.get_value().shape for p, v in nnx.to_flat_state(nnx.state(model, nnx.Param))}
    assert set(heads) <= {path for path in shapes if is_matrix(path)}
    names = {path.split("/")[-2] for path in heads}
    assert names == {"q_proj", "k_proj", "v_proj", "g_proj", "f_b_proj", "q_b_proj", "kv_b_proj", "o_proj"}


def test_weight_decay_spares_norms_biases_and_channels():
    config = TrainConfig(out="x", steps=100, lr=0.1, rows=1, row_length=8, weight_decay=0.5, warmup=0.0, final_lr=1.0)
    weights = arrays(0) | {f"{KDA}/A_log": jnp.ones((3, 2)), f"{KDA}/q_conv1d/weight": jnp.ones((3, 12, 4))}
    optimizer = muon(config, weights, HEADS)
    zero = jax.tree.map(jnp.zeros_like, weights)
    updates, _ = optimizer.update(zero, optimizer.init(weights), weights)
    for path, w in weights.items():
        decays = any(part in path for part in ("kernel", "embed_tokens"))
        assert decays_weight(path) == decays
        np.testing.assert_allclose(updates[path], -0.1 * 0.5 * w if decays else 0 * w, atol=1e-6)


def test_one_adapter_of_many_moves_its_own_columns_alone():
    config = TrainConfig(out="x", steps=100, lr=0.1, rows=1, row_length=8, weight_decay=0.5, warmup=0.0, final_lr=1.0)
    rng = np.random.default_rng(0)
    weights = {f"{KDA}/q_proj/lora/a": rng.standard_normal((3, 8, 5)), f"{KDA}/q_proj/lora/b": rng.standard_normal((3, 5, 12))}
    weights = {path: jnp.asarray(w, jnp.float32) for path, w in weights.items()}
    whole = adamw(config, weights)
    one = in_columns(whole, (1, 3))
    for gradients in (weights, jax.tree.map(jnp.zeros_like, weights)):
        got, _ = one.update(gradients, one.init(weights), weights)
        want, _ = whole.update(gradients, whole.init(weights), weights)
        a, b = f"{KDA}/q_proj/lora/a", f"{KDA}/q_proj/lora/b"
        np.testing.assert_array_equal(got[a][..., [1, 3]], want[a][..., [1, 3]])
        np.testing.assert_array_equal(got[b][..., [1, 3], :], want[b][..., [1, 3], :])
        assert not got[a][..., [0, 2, 4]].any() and not got[b][..., [0, 2, 4], :].any()


def test_optimizer_state_is_fp32():
    state = muon(CONFIG, arrays(0), HEADS).init(arrays(0))
    assert {x.dtype for x in jax.tree.leaves(state) if jnp.issubdtype(x.dtype, jnp.floating)} == {jnp.dtype("float32")}


def test_the_schedule_rises_and_ends_where_it_should():
    config = TrainConfig(out="x", steps=100, lr=0.1, rows=1, row_length=8, warmup=0.1, final_lr=0.2)
    rates = [float(schedule(config)(step)) for step in range(101)]
    assert 0 < rates[0] < rates[5] < rates[10] == pytest.approx(0.1)
    assert rates[100] == pytest.approx(0.02)
    assert all(a >= b for a, b in zip(rates[10:], rates[11:], strict=False))
    assert BETAS == (0.9, 0.95)
