"""Official outputs of k3_text_tiny, kimi_linear_tiny and k3_mxfp4_tiny, within the tolerances of golden/README.md."""

import json
from functools import cache, partial
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file

from k3jax.layer import Residuals
from k3jax.packing import Packing
from k3jax.weights.checkpoint import abstract, gather, load, official_specs
from k3jax.weights.names import Spelling, TensorNames

TINY = ("k3_text_tiny", "kimi_linear_tiny")
LOGITS = {"k3_text_tiny": (3e-4, 2e-5), "kimi_linear_tiny": (5e-5, 5e-6), "k3_mxfp4_tiny": (3e-4, 2e-5)}
BF16 = {"k3_text_tiny": (4.8e-2, 3.1e-3), "kimi_linear_tiny": (1.7e-2, 2.7e-4)}  # mean abs, mean KL of the reference
each = pytest.mark.parametrize("name", TINY)


@pytest.fixture(scope="module")
def files(golden):
    """(model, file) -> tensors."""
    return cache(lambda name, file: load_file(golden / name / f"{file}.safetensors"))


def assert_logits(name, actual, expected):
    largest, mean = LOGITS[name]
    error = np.abs(np.asarray(actual) - expected)
    assert error.max() <= largest and error.mean() <= mean, f"max {error.max():.2g}, mean {error.mean():.2g}"


def padded(ids, size):
    """ids and segments, filled up with padding to rows of `size`."""
    ids = np.asarray(ids, np.int32)
    fill = ((0, 0), (0, size - ids.shape[1]))
    return np.pad(ids, fill), np.pad(np.ones_like(ids), fill)


@pytest.mark.parametrize("name", LOGITS)
def test_logits_are_the_official_ones(name, official, files):
    model, expected = official(name), files(name, "forward")
    ids = expected["input_ids"]
    assert_logits(name, model.forward(model.state, ids, np.ones_like(ids)), expected["logits"])


@each
def test_logits_of_a_prefix_are_the_prefix_of_the_logits(name, official, files):
    model, expected = official(name), files(name, "forward")
    prefix = expected["prefix_input_ids"]
    logits = model.forward(model.state, *padded(prefix, expected["input_ids"].shape[1]))
    assert_logits(name, logits[:, : prefix.shape[1]], expected["logits"][:, : prefix.shape[1]])


@each
def test_a_bf16_run_is_as_near_to_fp32_as_the_official_one(name, golden, official, files):
    model, expected = load(golden / name / "checkpoint", dtype="bfloat16"), files(name, "forward")
    graphdef, state = nnx.split(model)

    @jax.jit
    def forward(state, ids):
        model = nnx.merge(graphdef, state)
        return model.logits(model(ids).hidden)

    logits = np.asarray(forward(state, expected["input_ids"]))
    p, q = (jax.nn.log_softmax(x) for x in (expected["logits"], logits))
    mean, kl = BF16[name]
    assert np.abs(logits - expected["logits"]).mean() <= 2 * mean
    assert float(jnp.mean(jnp.sum(jnp.exp(p) * (p - q), -1))) <= 2 * kl


@pytest.fixture(scope="module")
def unrolled(official, files):
    """name -> what every layer saw and made, by the fixture's names, when the layers run one by one."""
    compiled = {}

    def run_layer(graphdef, state, stream, index, packing):
        layer, seen = nnx.merge(graphdef, state), {}

        def spy(module, before, after):
            def call(x, *args):
                y = module(x, *args)
                seen[before] = x
                seen[after] = y
                return y

            return call

        parts = {"self_attn": ("attn_in", "attn"), "feed_forward": ("ffn_in", "ffn")}
        if stream.blocks is None:
            parts |= {"input_layernorm": ("attn_mix", "attn_in"), "post_attention_layernorm": ("ffn_mix", "ffn_in")}
        for part, (before, after) in parts.items():
            object.__setattr__(layer, part, spy(getattr(layer, part), before, after))
        if stream.blocks is not None:
            for part, name in (("self_attention_res", "attn_mix"), ("mlp_res", "ffn_mix")):
                object.__setattr__(layer, part, spied_mix(getattr(layer, part), name, seen))
        if layer.is_moe:
            moe = layer.block_sparse_moe
            object.__setattr__(moe, "gate", spied_router(moe.gate, seen))
        stream, _, _ = type(layer).__call__(layer, stream, index, packing)
        seen["attn_out"], seen["state"] = seen.pop("attn")
        seen["ffn_out"], _ = seen.pop("ffn")
        return stream, {**seen, "hidden_out": stream.prefix}

    def spied_mix(residual, name, seen):
        def normed(prefix, blocks, count, norm):
            seen[name] = residual(prefix, blocks, count)
            return residual.normed(prefix, blocks, count, norm)

        return SimpleNamespace(normed=normed)

    def spied_router(gate, seen):
        class Spied:
            e_score_correction_bias = gate.e_score_correction_bias

            def __call__(self, *args):
                seen["topk_idx"], seen["topk_weight"], seen["scores"] = result = gate(*args)
                return result

        return Spied()

    @cache
    def run(name):
        model, ids = official(name).model, files(name, "forward")["input_ids"]
        packing = Packing.of(jnp.ones_like(ids))
        x = model.model.embed_tokens(ids)
        config = model.config
        blocks = None if config.attn_res_block is None else jnp.zeros((config.num_blocks, *x.shape))
        stream, seen = Residuals(x, blocks), []
        for i in range(config.num_layers):
            graphdef, state = nnx.split(model.model.layers[i])
            if graphdef not in compiled:
                compiled[graphdef] = jax.jit(partial(run_layer, graphdef))
            stream, values = compiled[graphdef](state, stream, i, packing)
            seen.append(values)
        mix = stream.prefix
        if stream.blocks is not None:
            mix = model.model.output_attn_res(mix, stream.blocks, config.num_blocks)
        final = model.model.norm(mix)
        return {"embed": x, "layers": seen, "blocks": stream.blocks, "final_mix": mix, "final_norm": final}

    return run


@each
def test_layers_one_by_one_give_the_official_values_and_the_logits_of_the_scan(name, unrolled, official, files):
    model, ran = official(name).model, unrolled(name)
    assert_logits(name, model.logits(ran["final_norm"]), files(name, "forward")["logits"])

    expected = files(name, "layers_row0_first16")
    actual = {key: ran[key][0] for key in ("embed", "final_mix", "final_norm")}
    if ran["blocks"] is not None:
        actual["block_residual"] = jnp.moveaxis(ran["blocks"][:, 0], 0, 1)
    for i, values in enumerate(ran["layers"]):
        for key in ("attn_mix", "attn_out", "ffn_mix", "ffn_out", "hidden_out"):
            actual[f"layers.{i}.{key}"] = values[key][0]
        if model.config.attention[i] == "mla":
            actual[f"layers.{i}.mla_latent"] = values["state"].latent[0, :, : model.config.mla.kv_lora_rank]
    if any(key.endswith("mla_k_rope") for key in expected):
        pytest.fail("the fixture grew: mla_k_rope is not compared here")
    missing = {key for key in expected if key not in actual}
    assert not missing
    for key, value in expected.items():
        error = np.abs(np.asarray(actual[key])[:16].reshape(value.shape) - value).max()
        assert error <= 1e-4, f"{key}: off by {error:.2g}"


@each
def test_the_router_picks_the_official_experts_with_the_official_weights(name, unrolled, files):
    expected, ran = files(name, "router"), unrolled(name)["layers"]
    layers = {int(key.split(".")[1]) for key in expected}
    assert layers == {i for i, values in enumerate(ran) if "scores" in values}
    for i in layers:
        picks, weights, scores = (expected[f"layers.{i}.{key}"] for key in ("topk_idx", "topk_weight", "scores"))
        got = np.asarray(ran[i]["topk_idx"]).reshape(picks.shape)
        np.testing.assert_array_equal(np.sort(got), np.sort(picks), err_msg=f"layer {i}")
        by_expert = lambda w, p: np.take_along_axis(w, np.argsort(p), -1)  # noqa: E731
        got_weights = by_expert(np.asarray(ran[i]["topk_weight"]).reshape(weights.shape), got)
        np.testing.assert_allclose(got_weights, by_expert(weights, picks), rtol=0, atol=1e-5)
        np.testing.assert_allclose(np.asarray(ran[i]["scores"]).reshape(scores.shape), scores, rtol=0, atol=1e-5)


def checkpoint_tensors(model, state):
    """Arrays of a model's structure (weights or their gradients) by checkpoint name, in checkpoint layout."""
    table = TensorNames(abstract(model.config), model.config)
    arrays = {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(state)}
    tensors = {}
    for at, spec in official_specs(table, Spelling.default(model.config)):
        value = gather({at.parameter.path: jnp.asarray(arrays[at.parameter.path])}, at)
        value = value.T if at.parameter.transpose else value
        tensors[spec.name] = value.reshape(spec.shape)
    return tensors


SLOW = pytest.mark.slow
POLICIES = [
    ("k3_text_tiny", "layer"), ("kimi_linear_tiny", "layer"), pytest.param("k3_text_tiny", "group", marks=SLOW),
    pytest.param("k3_text_tiny", "none", marks=SLOW), pytest.param("kimi_linear_tiny", "none", marks=SLOW),
    pytest.param("kimi_linear_tiny", "group", marks=SLOW),
]


@pytest.mark.parametrize(("name", "remat"), POLICIES)
def test_gradients_are_the_official_ones_under_every_remat_policy(name, remat, golden, official, files):
    model, ids = official(name), files(name, "forward")["input_ids"]
    program = model.with_remat(remat)
    weights = np.ones(ids.shape, np.float32) / (ids.shape[0] * (ids.shape[1] - 1))
    loss, grads, _ = program.gradients(model.state, ids, np.ones_like(ids), weights)
    expected = files(name, "grads")
    assert abs(float(loss) - expected["loss"].item()) <= 1e-5
    grads = checkpoint_tensors(model, grads)

    norms = json.loads((golden / name / "grad_norms.json").read_text())["l2_norm_per_parameter"]
    assert set(norms) == set(grads)
    for key, norm in norms.items():
        assert abs(np.linalg.norm(grads[key]) - norm) <= 3e-4 * norm + 1e-7, key
    for key, value in expected.items():
        if key != "loss":
            error = np.linalg.norm(grads[key].reshape(value.shape) - value)
            assert error <= 3e-4 * np.linalg.norm(value) + 1e-7, f"{key}: off by {error:.2g}"
    unused = [k for k in grads if k.endswith("e_score_correction_bias") or ".layers.0.self_attention_res" in k]
    assert unused and not any(grads[key].any() for key in unused)


CAPACITY = 96


@each
def test_the_cache_after_a_prefill_holds_the_official_states(name, official, files):
    model, ids = official(name), files(name, "forward")["input_ids"]
    logits, cache = model.extend(model.state, ids, np.ones_like(ids), model.empty_cache(2, CAPACITY))
    assert_logits(name, logits, files(name, "forward")["logits"])
    np.testing.assert_array_equal(cache.length, [ids.shape[1]] * 2)

    expected, layers, latent = files(name, "caches_after_row0"), model.model.model.layers, model.config.mla.kv_lora_rank
    actual = {}
    for i, kind in enumerate(model.config.attention):
        stack, position = layers.layer(i)
        entry = jax.tree.map(lambda a, position=position: np.asarray(a)[position, 0], cache.layers[stack])
        if kind == "kda":
            actual[f"layers.{i}.recurrent_state"] = np.swapaxes(entry.recurrent, 1, 2)
            for j, part in enumerate("qkv"):
                actual[f"layers.{i}.conv_state_{part}"] = entry.conv[j].T
        else:
            actual[f"layers.{i}.mla_latent"] = entry.latent[: ids.shape[1], :latent]
            actual[f"layers.{i}.mla_k_rope"] = entry.latent[: ids.shape[1], latent:]
    assert set(actual) == set(expected)
    for key, value in expected.items():
        value = value[:, 1:] if "conv_state" in key else value  # the official window keeps one input too many
        np.testing.assert_allclose(actual[key], value, rtol=0, atol=1e-4, err_msg=key)


@each
def test_greedy_tokens_are_the_official_ones_with_and_without_a_cache(name, golden, official, files):
    model, width = official(name), files(name, "forward")["input_ids"].shape[1]
    greedy = json.loads((golden / name / "greedy.json").read_text())
    prompt, expected = np.asarray(greedy["prompt_ids"]), np.asarray(greedy["continuation_ids"])
    step_logits = files(name, "greedy_logits")["step_logits"]
    size = prompt.shape[1]

    logits, cache = model.extend(model.state, *padded(prompt, width), model.empty_cache(2, CAPACITY))
    last, one = logits[:, size - 1], np.ones((2, 1), np.int32)
    for step in range(expected.shape[1]):
        assert_logits(name, last, step_logits[:, step])
        token = np.argmax(last, -1)
        np.testing.assert_array_equal(token, expected[:, step])
        logits, cache = model.extend(model.state, token[:, None].astype(np.int32), one, cache)
        last = logits[:, 0]

    ids = prompt
    for step in range(expected.shape[1]):
        last = model.forward(model.state, *padded(ids, width))[:, ids.shape[1] - 1]
        assert_logits(name, last, step_logits[:, step])
        ids = np.concatenate([ids, np.argmax(last, -1)[:, None]], 1)
    np.testing.assert_array_equal(ids[:, size:], expected)
