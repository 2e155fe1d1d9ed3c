"""LoRA pools: adapters of any rank share a batch and never touch each other, the base, or the compiled programs."""

from dataclasses import dataclass, replace
from functools import cached_property

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec
from safetensors.numpy import load_file

from k3jax.linear import Embedding, Linear, LoRAOwners, LoRAParam, LoRAPool, LoRAScale
from k3jax.lora import Adapters, LoRAConfig, Placed
from k3jax.lora.peft import WEIGHTS
from k3jax.lora.peft import save_peft as save
from k3jax.moe import ExpertLinear, PackedExpertLinear
from k3jax.packing import Packing
from k3jax.param import normal
from k3jax.sharding import TRAIN, make_mesh, shardings

B, T = 3, 20  # more than the 16 tokens that MLA absorbs
ALL = ("all",)


class Subject:
    """A model with adapters, and its programs, which compile once per shape of their arguments."""

    def __init__(self, programs, columns=24):
        self.bare = programs
        self.model = nnx.merge(programs.graphdef, programs.state)
        self.adapters = Adapters(self.model, columns=columns)
        self.traces = 0
        self.graphdef = nnx.graphdef(self.model)

    @property
    def state(self):
        return nnx.state(self.model)

    @property
    def base_arrays(self):
        flat = nnx.to_flat_state(self.state)
        return {path: v.get_value() for path, v in flat if not isinstance(v, LoRAParam | LoRAScale | LoRAOwners)}

    @property
    def variables(self):
        return [v.get_value() for _, v in nnx.to_flat_state(self.state)]

    def logits_of(self, state, ids, segments, adapters):
        model = nnx.merge(self.graphdef, state)
        return model.logits(model(ids, segments, adapters=adapters).hidden, model.packing(ids, segments, None, adapters))

    @cached_property
    def _forward(self):
        def forward(state, ids, segments, adapters):
            self.traces += 1
            return self.logits_of(state, ids, segments, adapters)

        return jax.jit(forward)

    def forward(self, ids, segments, adapters):
        return np.asarray(self._forward(self.state, ids, segments, jnp.asarray(adapters, jnp.int32)))

    @cached_property
    def _extend(self):
        def extend(state, ids, cache, adapters):
            model = nnx.merge(self.graphdef, state)
            out = model(ids, cache=cache, adapters=adapters)
            return model.logits(out.hidden, model.packing(ids, None, cache, adapters)), out.cache

        return jax.jit(extend)

    @cached_property
    def gradients(self):
        """(state, ids, segments, adapters) -> gradient of every LoRA weight, by path."""

        def loss(lora, rest, *inputs):
            logprobs = jax.nn.log_softmax(self.logits_of(nnx.merge_state(lora, rest), *inputs))
            return -jnp.mean(jnp.take_along_axis(logprobs[:, :-1], inputs[0][:, 1:, None], -1))

        def gradients(state, *inputs):
            lora, rest = nnx.split_state(state, LoRAParam, ...)
            return jax.grad(loss)(lora, rest, *inputs)

        jitted = jax.jit(gradients)
        return lambda *inputs: {path: np.asarray(v.get_value()) for path, v in nnx.to_flat_state(jitted(self.state, *inputs))}

    def random(self, name, seed, rank=4, targets=ALL, size=0.3, **config):
        """Installs an adapter that changes every targeted matrix."""
        rng = np.random.default_rng(seed)
        config = LoRAConfig(rank=rank, alpha=rank, targets=targets, **config)

        def part(p, scale):
            used = scale > 0
            a = size * rng.standard_normal((*p.stack, p.in_size, scale.shape[-1])) * p.in_size**-0.5
            b = size * rng.standard_normal((*scale.shape, p.out_size))
            return Placed(p, a * (p.in_size if p.is_embedding else 1) ** 0.5 * used[..., None, :], b * used[..., None], scale)

        return self.adapters.install(name, config, [part(*covered) for covered in self.adapters.covered(config)])

    def clear(self):
        for name in list(self.adapters):
            self.adapters.remove(name)


@pytest.fixture(scope="module")
def subject(make_small):
    """KDA with a dense MLP, then two MLA layers with experts, which are stacked."""
    return Subject(make_small(attention=("kda", "mla", "mla"), remat="none"))


@pytest.fixture(autouse=True)
def empty(request):
    yield
    if "subject" in request.fixturenames:
        request.getfixturevalue("subject").clear()


@dataclass
class Inputs:
    ids: jax.Array
    segments: jax.Array


@pytest.fixture(scope="module")
def inputs(make_config):
    ids = np.random.default_rng(0).integers(0, make_config().vocab_size, (B, T))
    return Inputs(jnp.asarray(ids, jnp.int32), jnp.ones((B, T), jnp.int32))


def rows(*ids):
    return np.repeat(np.asarray(ids, np.int32)[:, None], T, 1)


def assert_close(a, b, tolerance=2e-5):
    np.testing.assert_allclose(a, b, rtol=0, atol=tolerance)


@pytest.mark.parametrize("case", ["k3", "mxfp4 in bf16", "kimi linear"])
def test_adapter_zero_and_an_adapter_whose_b_is_zero_equal_the_base_bitwise(case, subject, make_small, make_config, inputs):
    """The base: the same program with all adapters removed. Another program may be rounded otherwise by the compiler."""
    if case != "k3":
        subject = Subject(make_small(**variant(case, make_config())))
        shake_packed(subject.model)
    base = subject.forward(inputs.ids, inputs.segments, rows(1, 2, 3))
    zero = subject.adapters.add("zero", LoRAConfig(rank=4, alpha=8, targets=ALL), seed=1)
    other = subject.random("other", 2)
    assert len(subject.adapters.projections) == len(subject.adapters.covered(subject.adapters["zero"].config))
    with_adapters = subject.forward(inputs.ids, inputs.segments, rows(0, zero, other))
    np.testing.assert_array_equal(with_adapters[:2], base[:2])
    assert np.abs(with_adapters[2] - base[2]).max() > 0.1


def test_rank_columns_beside_every_projection_leave_what_the_bare_model_computes(subject, inputs):
    """Gates, norms and activations around the projections included: nothing is skipped because a pool is there."""
    zero = subject.adapters.add("zero", LoRAConfig(rank=4, alpha=8, targets=ALL), seed=1)
    bare = subject.bare.forward(subject.bare.state, inputs.ids, inputs.segments)
    assert_close(subject.forward(inputs.ids, inputs.segments, rows(0, zero, 0)), bare)


def variant(case, config):
    short = {"attention": ("kda", "mla"), "remat": "none"}
    if case == "kimi linear":
        kda = replace(config.kda, full_rank_gate=False, decay_floor=None)
        mla = replace(config.mla, q_lora_rank=None, output_gate=False)
        moe = replace(config.moe, latent_size=None, latent_norm=False)
        plain = {"attn_res_block": None, "hidden_act": "silu", "situ_linear_beta": None}
        return {"kda": kda, "mla": mla, "moe": moe, **plain, **short}
    bf16 = jnp.dtype(jnp.bfloat16)
    moe = replace(config.moe, latent_size=32, intermediate_size=32, mxfp4=True)
    return {"moe": moe, "dtype": bf16, "param_dtype": bf16, **short}


def shake_packed(model):
    rng = np.random.default_rng(0)
    for _, module in nnx.iter_modules(model):
        if isinstance(module, PackedExpertLinear):
            module.packed[...] = jnp.asarray(rng.integers(0, 256, module.packed.shape), jnp.uint8)
            module.scale[...] = jnp.full(module.scale.shape, 124, jnp.uint8)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_projection_with_closed_gates_equals_one_without_a_pool_bitwise(dtype, small):
    rng = np.random.default_rng(0)
    packing = Packing.of(jnp.ones((1, 6), jnp.int32), adapters=jnp.zeros((1, 6), jnp.int32), owners=jnp.array([1, 2]))
    x, ids = jnp.asarray(rng.standard_normal((1, 6, 32)), dtype), jnp.arange(6)[None]
    sizes, gate = jnp.array([1, 2, 0, 1, 0, 0, 2, 0]), packing.rank_gate
    config = replace(small.config, dtype=jnp.dtype(dtype), param_dtype=jnp.dtype(dtype))
    rngs, axes = nnx.Rngs(0), (None, None)
    kind = {"init": normal(0.1), "dtype": dtype, "rngs": rngs}
    packed = PackedExpertLinear(8, 32, 16, axes, config=config, rngs=rngs)
    for module, call in (
        (Linear(32, 16, axes, **kind), lambda m: m(x, packing)),
        (Embedding(8, 16, compute_dtype=dtype, **kind), lambda m: m(ids, packing)),
        (ExpertLinear(8, 32, 16, axes, config=config, rngs=rngs), lambda m: m(x[0], sizes, gate[0])),
        (packed, lambda m: m(x[0], sizes, gate[0])),
    ):
        shake_packed(module)
        want = np.asarray(call(module))
        stack = (8,) if isinstance(module, ExpertLinear | PackedExpertLinear) else ()
        pool = LoRAPool(8 if isinstance(module, Embedding) else 32, 16, 2, (None,) * (2 + len(stack)), stack, rngs=rngs)
        for variable in (pool.a, pool.b, pool.scale):
            variable[...] = jnp.asarray(rng.standard_normal(variable.shape), jnp.float32)
        module.lora = pool
        assert np.any(want) and np.asarray(call(module)).tobytes() == want.tobytes(), type(module)


def test_ranks_4_and_16_in_one_batch_equal_each_alone(subject, inputs):
    four, sixteen = subject.random("four", 1, rank=4), subject.random("sixteen", 2, rank=16)
    mixed = subject.forward(inputs.ids, inputs.segments, rows(four, sixteen, 0))
    subject.adapters.remove("sixteen")
    np.testing.assert_array_equal(mixed[0], subject.forward(inputs.ids, inputs.segments, rows(four, 0, 0))[0])
    subject.clear()
    again = subject.random("sixteen", 2, rank=16)  # in other columns than before
    assert_close(mixed[1], subject.forward(inputs.ids, inputs.segments, rows(0, again, 0))[1])


def test_ranks_4_and_16_train_in_one_batch_as_alone_and_are_saved_with_their_own_rank(subject, inputs, tmp_path):
    ids = {"four": subject.random("four", 1, rank=4), "sixteen": subject.random("sixteen", 2, rank=16)}
    columns = {name: list(subject.adapters[name].columns) for name in ids}
    both = subject.gradients(inputs.ids, inputs.segments, jnp.asarray(rows(ids["four"], ids["sixteen"], 0)))
    for name, adapters in (("four", (ids["four"], 0, 0)), ("sixteen", (0, ids["sixteen"], 0))):
        alone = subject.gradients(inputs.ids, inputs.segments, jnp.asarray(rows(*adapters)))
        for path, gradient in alone.items():
            axis = -1 if path[-1] == "a" else -2
            mine = np.take(both[path], columns[name], axis)
            assert mine.any() and np.take(gradient, columns[name], axis).any(), path
            assert_close(mine, np.take(gradient, columns[name], axis), 1e-5 * max(1, np.abs(mine).max()))
            assert not np.delete(gradient, columns[name], axis).any(), path
        save(subject.adapters, name, tmp_path / name)
        tensors = load_file(tmp_path / name / WEIGHTS)
        ranks = {t.shape[0 if "A" in key.rsplit("lora_", 1)[1] else 1] for key, t in tensors.items()}
        assert ranks == {4 if name == "four" else 16}


def test_segments_of_a_packed_row_with_different_adapters_equal_separate_rows(subject, inputs):
    one, two = subject.random("one", 1), subject.random("two", 2, rank=7)
    bounds, ids = [(0, 6), (6, 13), (13, 20)], [one, two, 0]
    separate, segments, adapters = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32), rows(*ids)
    packed = np.asarray(inputs.ids)
    for row, (start, stop) in enumerate(bounds):
        separate[row, : stop - start] = packed[0, start:stop]
        segments[row, : stop - start] = 1
    want = subject.forward(jnp.asarray(separate), jnp.asarray(segments), adapters)
    packed_segments, packed_adapters = np.ones((B, T), np.int32), rows(0, 0, 0)
    for row, (start, stop) in enumerate(bounds):
        packed_segments[0, start:stop], packed_adapters[0, start:stop] = row + 1, ids[row]
    got = subject.forward(inputs.ids, jnp.asarray(packed_segments), packed_adapters)
    for row, (start, stop) in enumerate(bounds):
        assert_close(got[0, start:stop], want[row, : stop - start])


def test_cached_decoding_under_adapters_equals_the_full_forward(subject, inputs):
    """17 tokens are expanded to keys and values, 3 are absorbed, kv_b_proj's adapter with them."""
    adapters = jnp.asarray([subject.random("one", 1), subject.random("two", 2), 0], jnp.int32)
    want = subject.forward(inputs.ids, inputs.segments, rows(*adapters))
    cache = subject.model.empty_cache(B, T)
    first, cache = subject._extend(subject.state, inputs.ids[:, :17], cache, adapters)
    then, _ = subject._extend(subject.state, inputs.ids[:, 17:], cache, adapters)
    assert_close(np.concatenate([first, then], 1), want, 1e-4)


@pytest.mark.parametrize("target", ["embedding", "head", "experts", "latent", "shared_experts", "mlp", "kv_b_proj"])
def test_each_kind_of_target_has_an_effect_of_its_own(subject, inputs, target):
    adapter = subject.random("one", 1, targets=(target,))
    logits = subject.forward(inputs.ids, inputs.segments, rows(0, adapter, 0))
    base = subject.forward(inputs.ids, inputs.segments, rows(0, 0, 0))
    np.testing.assert_array_equal(logits[[0, 2]], base[[0, 2]])
    assert np.abs(logits[1] - base[1]).max() > 1e-3


def test_a_broken_adapter_harms_no_other_row_and_no_other_gradient(subject, inputs):
    one, broken = subject.random("one", 1), subject.random("broken", 2)
    adapters = jnp.asarray(rows(one, 0, one))
    before = subject.forward(inputs.ids, inputs.segments, adapters), subject.gradients(inputs.ids, inputs.segments, adapters)
    columns = jnp.array(subject.adapters["broken"].columns)
    for p in subject.adapters.projections:
        pool = p.module.lora
        pool.a[...] = pool.a[...].at[..., columns].set(jnp.nan)
        pool.b[...] = pool.b[...].at[..., columns, :].set(jnp.inf)
    after = subject.forward(inputs.ids, inputs.segments, adapters), subject.gradients(inputs.ids, inputs.segments, adapters)
    np.testing.assert_array_equal(after[0], before[0])
    for path, gradient in before[1].items():
        np.testing.assert_array_equal(after[1][path], gradient, str(path))
    mixed = subject.forward(inputs.ids, inputs.segments, rows(one, 0, broken))
    np.testing.assert_array_equal(mixed[:2], before[0][:2])


def test_gradients_reach_the_columns_of_the_adapters_in_the_batch_and_no_others(subject, inputs):
    """4 of 6 columns where rank_pattern lowers the rank; every A and B after two steps."""
    trained = subject.adapters.add(
        "trained", LoRAConfig(rank=6, alpha=12, targets=ALL, rank_pattern={r"o_proj|experts\.\d+\.w1": 4}), seed=3
    )
    subject.random("idle", 4, rank=5)
    mine = list(subject.adapters["trained"].columns)
    others = [c for c in range(24) if c not in mine]
    adapters, lr = jnp.asarray(rows(trained, trained, 0)), 0.1
    for step in range(3):
        gradients = subject.gradients(inputs.ids, inputs.segments, adapters)
        for p in subject.adapters.projections:
            pool, path = p.module.lora, path_of(subject.model, p)
            d_a, d_b = gradients[*path, "a"], gradients[*path, "b"]
            rank = 4 if p.name.endswith(("o_proj", "experts.w1")) else 6
            assert not d_a[..., others].any() and not d_b[..., others, :].any(), path
            assert not d_a[..., mine[rank:]].any() and not d_b[..., mine[rank:], :].any(), path
            if step == 2:
                used = np.ones(p.stack, bool) if len(p.stack) < 2 else np.abs(d_b).sum((-1, -2)) > 0
                assert used.mean() > 0.5, path  # an expert that no token chose has no gradient
                assert np.abs(d_a[..., mine[:rank]]).max((-1, -2))[used].min() > 0, path
                assert np.abs(d_b[..., mine[:rank], :]).max((-1, -2))[used].min() > 0, path
            pool.a[...] -= lr * d_a
            pool.b[...] -= lr * d_b


def path_of(model, projection):
    return next((*path, "lora") for path, module in nnx.iter_modules(model) if module is projection.module)


def test_trainable_parameters_are_the_sum_of_rank_times_in_plus_out(subject):
    config = LoRAConfig(rank=3, alpha=3, targets=("q_proj", "experts", "lm_head"), rank_pattern={"layers.2.*w1": 5})
    subject.adapters.add("one", config)
    H, V, E, L = 32, 64, 8, 16
    q = 3 * (H + 32)  # of the KDA layer; MLA has none
    experts = (5 + 5 * 3) * E * (L + 16)
    assert subject.adapters.trainable_parameters("one") == q + experts + 3 * (H + V)


def test_adding_removing_and_loading_adapters_compiles_nothing_and_changes_no_other_weight(subject, inputs):
    one = subject.random("one", 1)
    base = subject.base_arrays
    before = subject.forward(inputs.ids, inputs.segments, rows(0, one, one))
    version, traces = subject.adapters.content_version("one"), subject.traces
    for n in range(10):
        two = subject.random("two", 2 + n % 2, rank=5 + n % 2)
        subject.forward(inputs.ids, inputs.segments, rows(0, one, two))
        subject.adapters.remove("two")
    np.testing.assert_array_equal(subject.forward(inputs.ids, inputs.segments, rows(0, one, one)), before)
    assert subject.traces == traces
    assert subject.adapters.content_version("one") == version
    assert all(value is base[path] for path, value in subject.base_arrays.items())


def test_an_adapter_loaded_again_after_others_is_the_same_and_its_old_id_means_the_base(subject, inputs):
    old = subject.random("a", 1)
    want = subject.forward(inputs.ids, inputs.segments, rows(old, 0, old))
    subject.adapters.remove("a")
    other = subject.random("b", 2, rank=3)
    new = subject.random("a", 1)
    assert len({0, old, other, new}) == 4
    got = subject.forward(inputs.ids, inputs.segments, rows(new, old, new))
    assert_close(got[0], want[0])
    np.testing.assert_array_equal(got[1], want[1])
    subject.clear()
    last = subject.random("a", 1)  # in the columns that it had first
    np.testing.assert_array_equal(subject.forward(inputs.ids, inputs.segments, rows(last, 0, last)), want)


def test_removing_leaves_nothing_behind(subject):
    subject.random("a", 1)
    subject.adapters.remove("a")
    for path, v in nnx.to_flat_state(subject.state):
        if isinstance(v, LoRAParam | LoRAScale | LoRAOwners):
            assert not np.asarray(v.get_value()).any(), path


def test_content_versions_name_the_content_and_nothing_else(subject):
    subject.random("one", 1)
    subject.random("between", 9, rank=2)
    subject.random("copy", 1)
    version = subject.adapters.content_version
    assert version("one") == version("copy") and len(version("one")) == 16
    subject.random("seed", 2)
    assert version("seed") != version("one")
    subject.adapters.remove("between")
    subject.random("fewer", 1, targets=("attention",))
    assert version("fewer") not in (version("one"), version("seed"))
    pool = subject.adapters.projections[-1].module.lora
    column = subject.adapters["copy"].columns[0]
    pool.b[...] = pool.b[...].at[..., column, 0].add(1e-6)
    assert version("copy") != version("one")


def test_the_same_weights_at_another_alpha_are_another_content(subject):
    subject.random("one", 1, targets=("o_proj",))
    parts = list(subject.adapters.read("one"))
    config = replace(subject.adapters["one"].config, alpha_pattern={"layers.2.self_attn.o_proj": 9})
    scales = {p.name: scale for p, scale in subject.adapters.covered(config)}
    subject.adapters.install("two", config, [part._replace(scale=scales[part.projection.name]) for part in parts])
    assert subject.adapters.content_version("one") != subject.adapters.content_version("two")


def test_scales_follow_rank_alpha_patterns_and_rslora(subject):
    def scale(matrix, **config):
        return LoRAConfig(**{"rank": 4, "alpha": 8, **config}).scale_of(matrix)

    matrix = "model.layers.3.self_attn.o_proj"
    assert scale(matrix) == 2
    assert scale(matrix, rslora=True) == 4
    assert scale(matrix, rank_pattern={"o_proj": 16}) == 0.5
    assert scale(matrix, rank_pattern={"o_proj": 16}, rslora=True) == 2
    assert scale(matrix, alpha_pattern={r"layers\.[2-4]\..*o_proj": 3}, rank_pattern={"q_proj": 16}) == 0.75
    assert scale(matrix, alpha_pattern={"proj": 3}) == 2  # a pattern is for whole parts of a name
    assert scale(matrix, alpha_pattern={"language_model.model.layers.3.self_attn.o_proj": 4}) == 1
    assert scale(matrix, alpha_pattern={"self_attn.o_proj": 4, "o_proj": 12}) == 1  # the first that matches


def test_targets_choose_modules_by_last_parts_of_their_names(subject):
    def covered(*targets):
        config = LoRAConfig(rank=2, alpha=2, targets=targets)
        return {
            name for p, scale in subject.adapters.covered(config) for name, index in p.matrices if scale[index].any()
        }

    assert covered("mlp.gate_proj") == {"model.layers.0.mlp.gate_proj"}
    assert len(covered("gate_proj")) == 3 and covered("gate_proj") > covered("shared_experts.gate_proj")
    assert covered("b_proj") == {"model.layers.0.self_attn.b_proj"}  # not kv_b_proj
    assert covered("layers.2.self_attn.o_proj") == {"model.layers.2.self_attn.o_proj"}
    assert len(covered("experts.w2")) == 2 * 8 and len(covered("experts.3.w2")) == 2
    assert covered("all") == {name for p in subject.adapters.projections for name, _ in p.matrices}


def test_mistakes_are_named_and_change_nothing(subject, make_config):
    subject.random("there", 1)
    before = subject.variables

    def refused(words, **config):
        with pytest.raises(ValueError, match=words):
            subject.adapters.add("new", LoRAConfig(**{"rank": 2, "alpha": 2, **config}))

    refused("rank must be a whole number of at least 1, got 0", rank=0)
    refused("rank must be a whole number", rank=True)
    refused("rank must be a whole number", rank=2.5)
    refused(r"rank_pattern\['o_proj'\] must be", rank_pattern={"o_proj": 0})
    refused("alpha must be a positive", alpha=0)
    refused("alpha must be a positive", alpha=float("nan"))
    refused("no regular expression", alpha_pattern={"(": 1})
    refused("targets is empty", targets=())
    refused("'o_porj' is no group .* and no module", targets=("attention", "o_porj"))
    refused("matches none of the modules", targets=("attention",), rank_pattern={"w1": 3})
    refused("needs 21 rank columns, but only 20 of 24 are free", rank=21)
    refused("needs 30 rank columns", rank_pattern={"o_proj": 30})
    with pytest.raises(ValueError, match="an adapter 'there' already"):
        subject.random("there", 1)
    with pytest.raises(KeyError, match="no adapter 'gone'. Present: there"):
        subject.adapters.remove("gone")
    with pytest.raises(ValueError, match="has adapters already"):
        Adapters(subject.model, columns=4)
    assert all(now is then for now, then in zip(subject.variables, before, strict=True))
    assert list(subject.adapters) == ["there"]


def test_targets_without_rank_columns_are_refused_and_asking_a_bare_model_too(small, inputs):
    bare = nnx.merge(small.graphdef, small.state)
    with pytest.raises(ValueError, match="attach them with"):
        bare(inputs.ids, adapters=jnp.zeros(B, jnp.int32))
    with pytest.raises(ValueError, match="columns must be at least 1"):
        Adapters(bare, columns=0)
    with pytest.raises(ValueError, match="'nowhere' is no group"):
        Adapters(bare, columns=2, targets=("nowhere",))
    assert bare.lora_owners is None
    adapters = Adapters(bare, columns=2, targets=("attention", "layers.1.block_sparse_moe.experts.3.w1"))
    assert [p.name for p in adapters.projections if "self_attn" not in p.name] == ["model.layers.1.block_sparse_moe.experts.w1"]
    with pytest.raises(ValueError, match=r"modules without rank columns: name them .*: lm_head"):
        adapters.add("one", LoRAConfig(rank=2, alpha=2, targets=("attention", "head")))


def spread_out(programs, order=(0, 1, 2, 3)):
    mesh = make_mesh(expert=2, tensor=2, devices=[jax.devices()[i] for i in order])
    nnx.update(programs.model, jax.tree.map(jax.device_put, programs.state, shardings(programs.state, mesh, TRAIN)))
    return type(programs)(programs.model)


def test_pools_of_packed_experts_lie_where_their_experts_lie(make_small, make_config):
    moe = replace(make_config().moe, latent_size=64, intermediate_size=64, mxfp4=True, first_layer=0)
    adapters = Adapters(spread_out(make_small(attention=("mla",), moe=moe)).model, columns=2, targets=("experts",))
    adapters.add("one", LoRAConfig(rank=2, alpha=2, targets=("experts",)))
    pools = {p.name.split(".")[-1]: p.module.lora for p in adapters.projections}
    found = {name: (pool.a[...].sharding.spec, pool.b[...].sharding.spec) for name, pool in pools.items()}
    inward = PartitionSpec(None, "expert", "fsdp", None), PartitionSpec(None, "expert", None, "tensor")
    outward = PartitionSpec(None, "expert", "tensor", None), PartitionSpec(None, "expert", None, "fsdp")
    assert found == {"w1": inward, "w3": inward, "w2": outward}


def test_pools_spread_over_devices_in_any_order_equal_one_device(make_small, make_config, inputs):
    """Of factors that devices share, gradients are summed; a device without a token's experts adds nothing."""
    moe = replace(make_config().moe, first_layer=0)
    programs = make_small(attention=("mla",), moe=moe, attn_res_block=None, remat="none")
    subject = Subject(programs, columns=8)
    adapters = jnp.asarray(rows(subject.random("one", 1), subject.random("two", 2, rank=3), 0))
    want = subject.gradients(inputs.ids, inputs.segments, adapters)
    for order in ((0, 1, 2, 3), (3, 1, 0, 2)):
        spread = Subject(spread_out(programs, order), columns=8)
        spread.random("one", 1), spread.random("two", 2, rank=3)
        pool = next(p for p in spread.adapters.projections if p.name.endswith("experts.w1")).module.lora
        assert [device.id for device in pool.a[...].sharding.mesh.devices.flat] == list(order)
        assert pool.a[...].sharding.spec == PartitionSpec(None, "expert", "fsdp", None)
        assert pool.b[...].sharding.spec == PartitionSpec(None, "expert", None, "tensor")
        for path, gradient in spread.gradients(inputs.ids, inputs.segments, adapters).items():
            assert_close(gradient, want[path], 1e-5 * max(1, np.abs(want[path]).max()))


def test_targets_in_one_string_are_refused():
    with pytest.raises(ValueError, match=r"targets='attention' is one string: a tuple is needed, such as \('attention',\)"):
        LoRAConfig(rank=2, alpha=2, targets="attention")  # type: ignore[arg-type]
