"""Merging: the merged base computes what base and adapter did, within the rounding that is reported."""

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from k3jax.lora import Adapters, LoRAConfig, Placed
from k3jax.lora.merge import _merge_dense, _over_matrices, merge
from k3jax.moe import PackedExpertLinear

B, T = 2, 8
E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
ALL = ("all",)


@cache
def forward_of(graphdef):
    @jax.jit
    def forward(state, ids, adapters):
        model = nnx.merge(graphdef, state)
        return model.logits(model(ids, adapters=adapters).hidden, model.packing(ids, None, None, adapters))

    return forward


def logits(model, *adapters):
    ids = jnp.asarray(np.random.default_rng(5).integers(0, 64, (B, T)), jnp.int32)
    return np.asarray(forward_of(nnx.graphdef(model))(nnx.state(model), ids, jnp.asarray(adapters, jnp.int32)))


def install(adapters, name, seed, size=0.3, rank=4, **config):
    rng = np.random.default_rng(seed)
    config = LoRAConfig(rank=rank, alpha=rank, **config)
    parts = []
    for p, scale in adapters.covered(config):
        a = rng.standard_normal((*p.stack, p.in_size, scale.shape[-1])) * p.in_size**-0.5 * (scale > 0)[..., None, :]
        b = size * rng.standard_normal((*scale.shape, p.out_size)) * (scale > 0)[..., None]
        parts.append(Placed(p, a.astype(np.float32), b.astype(np.float32), scale))
    return adapters.install(name, config, parts)


@pytest.fixture(scope="module")
def programs(make_small):
    """dtype -> a small model [KDA dense, MLA with experts] of that dtype, or of packed experts in fp32 for "mxfp4"."""

    @cache
    def get(kind, make_config):
        dtype = jnp.dtype("float32" if kind == "mxfp4" else kind)
        moe = replace(make_config().moe, latent_size=32, intermediate_size=32, mxfp4=kind == "mxfp4")
        small = make_small(attention=("kda", "mla"), moe=moe, dtype=jnp.dtype("float32"), param_dtype=dtype, remat="none")
        rng = np.random.default_rng(0)
        for _, module in nnx.iter_modules(small.model):
            if isinstance(module, PackedExpertLinear):
                module.packed[...] = jnp.asarray(rng.integers(0, 256, module.packed.shape), jnp.uint8)
                module.scale[...] = jnp.asarray(rng.integers(122, 126, module.scale.shape), jnp.uint8)
        return type(small)(small.model)

    return get


@pytest.fixture
def fresh(programs, make_config):
    def get(kind):
        source = programs(kind, make_config)
        return Adapters(nnx.merge(source.graphdef, source.state), columns=12)

    return get


def packed_of(adapters):
    return [(p, np.asarray(p.module.packed[...]), np.asarray(p.module.scale[...])) for p in adapters.projections if p.is_packed]


def dequantized(packed, scale):
    """MXFP4 in numpy: [*n, out, in] float64."""
    codes = np.stack([packed & 15, packed >> 4], -1).reshape(*packed.shape[:-1], -1)
    values = np.where(codes & 8, -1.0, 1.0) * np.asarray(E2M1)[codes & 7]
    return (values.reshape(*scale.shape, 32) * 2.0 ** (scale.astype(int) - 127)[..., None]).reshape(values.shape)


@pytest.mark.parametrize(("kind", "tolerance"), [("float32", 1e-4), ("bfloat16", 0.1)])
def test_the_merged_model_equals_base_and_adapter_and_other_adapters_work_on(fresh, kind, tolerance):
    adapters = fresh(kind)
    one, two = install(adapters, "one", 1, targets=ALL), install(adapters, "two", 2, targets=ALL)
    version, base = adapters.content_version("two"), logits(adapters.model, 0, 0)
    want = logits(adapters.model, one, one)
    errors = merge(adapters, "one")
    got = logits(adapters.model, 0, two)
    assert np.abs(got[0] - want[0]).max() < tolerance and np.abs(want[0] - base[0]).max() > 10 * tolerance
    assert np.abs(got[1] - want[1]).max() > 10 * tolerance  # merged one, and two on top of it
    assert adapters.content_version("two") == version
    assert "one" not in adapters and len(errors) == len(adapters.projections)
    worst = max(e.of_weight for e in errors)
    assert worst == 0 if kind == "float32" else 2**-11 < worst < 2**-9  # half of bf16's last bit, rms and at most


def test_merging_frees_the_columns(fresh):
    adapters = fresh("float32")
    install(adapters, "one", 1, targets=("o_proj",), rank=12)
    with pytest.raises(ValueError, match="only 0 of 12 are free"):
        install(adapters, "two", 2, targets=("o_proj",), rank=1)
    merge(adapters, "one")
    assert install(adapters, "two", 2, targets=("o_proj",), rank=12)


def test_merged_weights_are_w_plus_scale_a_b_and_no_other_weight_changes(fresh):
    adapters = fresh("float32")
    install(adapters, "one", 1, targets=("layers.1.self_attn.o_proj", "embed_tokens", "experts.3.w2"), rank=3, rslora=True)
    before = {p.name: np.asarray(p.weight[...]) for p in adapters.projections}
    parts = {part.projection.name: part for part in adapters.read("one")}
    merge(adapters, "one")
    for p in adapters.projections:
        weight, part = np.asarray(p.weight[...]), parts.get(p.name)
        if part is None:
            assert weight is not None and weight.tobytes() == before[p.name].tobytes(), p.name
        else:
            assert set(part.scale[part.scale > 0].tolist()) == {np.float32(3**0.5)}
            want = before[p.name] + part.a.astype(np.float64) * part.scale[..., None, :] @ part.b
            np.testing.assert_allclose(weight, want, rtol=0, atol=1e-6, err_msg=p.name)
            for index in np.ndindex(*p.stack):
                if not part.scale[index].any():
                    assert weight[index].tobytes() == before[p.name][index].tobytes(), (p.name, index)


def test_repacked_experts_are_the_nearest_and_their_error_is_told_as_it_is(fresh):
    adapters = fresh("mxfp4")
    install(adapters, "one", 1, targets=("experts",))
    before = packed_of(adapters)
    parts = {part.projection.name: part for part in adapters.read("one")}
    errors = {e.name: e for e in merge(adapters, "one")}
    for (p, packed, scale), (_, new_packed, new_scale) in zip(before, packed_of(adapters), strict=True):
        part = parts[p.name]
        delta = np.swapaxes(part.a.astype(np.float64) * part.scale[..., None, :] @ part.b, -1, -2)
        exact, stored = dequantized(packed, scale) + delta, dequantized(new_packed, new_scale)
        off = np.linalg.norm(stored - exact, axis=(-1, -2))
        assert errors[p.name].of_weight == pytest.approx((off / np.linalg.norm(exact, axis=(-1, -2))).max(), rel=1e-4)
        assert errors[p.name].of_delta == pytest.approx((off / np.linalg.norm(delta, axis=(-1, -2))).max(), rel=1e-4)
        assert 0.03 < errors[p.name].of_weight < 0.15  # of 4-bit numbers
        step = 2.0 ** (new_scale.astype(int) - 127)  # of a group: codes are at most 2 steps apart, the largest cuts off 2
        assert (np.abs(stored - exact).reshape(*step.shape, 32) <= 2 * step[..., None]).all()


def test_a_packed_model_merged_equals_base_and_adapter_within_the_error_told(fresh):
    adapters = fresh("mxfp4")
    one = install(adapters, "one", 1, targets=ALL, size=1.0)
    base, want = logits(adapters.model, 0, 0), logits(adapters.model, one, one)
    errors = merge(adapters, "one")
    got = logits(adapters.model, 0, 0)
    assert max(e.of_delta for e in errors if "experts.w" in e.name) < 0.5
    assert np.linalg.norm(got - want) < 0.3 * np.linalg.norm(want - base)


def test_packed_matrices_that_the_adapter_leaves_alone_keep_their_bytes(fresh):
    adapters = fresh("mxfp4")
    install(adapters, "one", 1, targets=("experts.3.w1",))
    before = packed_of(adapters)
    merge(adapters, "one")
    for (p, packed, scale), (_, new_packed, new_scale) in zip(before, packed_of(adapters), strict=True):
        same = (packed == new_packed).all((-1, -2)) & (scale == new_scale).all((-1, -2))
        others = np.arange(p.stack[1]) != 3
        assert same[:, others].all() and same[:, 3].all() != p.name.endswith("w1")


def test_an_adapter_too_small_to_survive_packing_is_seen_in_the_report(fresh):
    adapters = fresh("mxfp4")
    install(adapters, "one", 1, targets=("experts",), size=1e-4)
    errors = merge(adapters, "one")
    assert min(e.of_delta for e in errors) >= 1


def test_one_matrix_at_a_time_is_held_in_fp32():
    n, size, rank = 64, 128, 2
    shapes = jax.ShapeDtypeStruct((n, size, size), jnp.bfloat16), (
        jax.ShapeDtypeStruct((n, size, rank), jnp.float32), jax.ShapeDtypeStruct((n, rank, size), jnp.float32)
    )  # fmt: skip
    memory = _over_matrices.lower(_merge_dense, *shapes, (n,)).compile().memory_analysis()
    stored = n * size * size * 2
    assert memory.temp_size_in_bytes < stored + 8 * size * size * 4


def test_a_broken_adapter_is_not_merged(fresh):
    adapters = fresh("float32")
    install(adapters, "one", 1, targets=("lm_head",))
    pool = adapters.model.lm_head.lora
    pool.b[...] = pool.b[...].at[0, 0].set(jnp.inf)
    before = adapters.model.lm_head.kernel[...]
    with pytest.raises(ValueError, match="NaN or infinite numbers, in lm_head"):
        merge(adapters, "one")
    assert adapters.model.lm_head.kernel[...] is before and "one" in adapters


def test_merging_a_second_adapter_of_the_same_shapes_compiles_nothing(fresh):
    adapters = fresh("float32")
    compiled = []
    for seed in (1, 2):
        install(adapters, "one", seed, targets=("o_proj", "experts"))
        merge(adapters, "one")
        compiled.append(_over_matrices._cache_size())
    assert compiled[0] == compiled[1]
