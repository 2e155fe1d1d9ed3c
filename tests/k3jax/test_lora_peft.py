"""Adapters in PEFT's format: the official adapter gives the official numbers, and files load and save strictly."""

import json
import re
import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from k3jax.linear import LoRAParam
from k3jax.lora import Adapters, LoRAConfig, Placed
from k3jax.lora.peft import CONFIG, WEIGHTS, AdapterError
from k3jax.lora.peft import load_peft as load
from k3jax.lora.peft import save_peft as save
from k3jax.lora.targets import projections, shortest_targets

CASE = Path(__file__).parents[1] / "golden" / "k3_text_tiny"
PEFT = CASE / "lora_peft"
HEAD = "base_model.model.language_model."


def copy_of(programs):
    return nnx.merge(programs.graphdef, programs.state)


def target_rule(target_modules, name):
    """PEFT's rule for a list of target_modules."""
    return any(name == target or name.endswith("." + target) for target in target_modules)


def matrices(model):
    return [matrix for p in projections(model) for matrix, _ in p.matrices]


@pytest.fixture(scope="module")
def adapters(official):
    return Adapters(copy_of(official("k3_text_tiny")), columns=16)


@pytest.fixture(autouse=True)
def empty(request):
    yield
    if "adapters" in request.fixturenames:
        adapters = request.getfixturevalue("adapters")
        for name in list(adapters):
            adapters.remove(name)


def random_adapter(adapters, name, seed=0, **config):
    rng = np.random.default_rng(seed)
    config = LoRAConfig(**{"rank": 3, "alpha": 6, **config})
    parts = [
        Placed(
            p,
            (rng.standard_normal((*p.stack, p.in_size, scale.shape[-1])) * (scale > 0)[..., None, :]).astype(np.float32),
            (rng.standard_normal((*scale.shape, p.out_size)) * (scale > 0)[..., None]).astype(np.float32),
            scale,
        )
        for p, scale in adapters.covered(config)
    ]
    return adapters.install(name, config, parts)


def read(folder):
    return load_file(folder / WEIGHTS), json.loads((folder / CONFIG).read_text())


def write(folder, tensors, **config):
    folder.mkdir(parents=True, exist_ok=True)
    save_file(tensors, folder / WEIGHTS)
    (folder / CONFIG).write_text(json.dumps({"peft_type": "LORA", "r": 3, "lora_alpha": 6, **config}))
    return folder


def arrays(adapters):
    return [v.get_value() for _, v in nnx.to_flat_state(nnx.state(adapters.model))]


def test_the_official_adapter_gives_the_official_logits_loss_and_gradients(official):
    targets = ("q_proj", "k_proj", "v_proj", "o_proj", "kv_b_proj", "shared_experts")
    adapters = Adapters(copy_of(official("k3_text_tiny")), columns=4, targets=targets)
    expected = load_file(CASE / "lora_peft_expected.safetensors")
    ids = jnp.asarray(load_file(CASE / "forward.safetensors")["input_ids"])
    one = load(adapters, "official", PEFT)
    graphdef, lora, rest = nnx.split(adapters.model, LoRAParam, ...)

    @jax.jit
    def run(lora, rest, ids, rows):
        def loss(lora):
            model = nnx.merge(graphdef, lora, rest)
            logits = model.logits(model(ids, adapters=rows).hidden, model.packing(ids, None, None, rows))
            logprobs = jax.nn.log_softmax(logits[:, :-1])
            return -jnp.mean(jnp.take_along_axis(logprobs, ids[:, 1:, None], -1)), logits

        return jax.value_and_grad(loss, has_aux=True)(lora)

    (loss, logits), gradients = run(lora, rest, ids, jnp.full(len(ids), one))
    off = np.abs(np.asarray(logits) - expected["logits"])
    assert off.max() < 3e-4 and off.mean() < 2e-5
    assert abs(float(loss) - float(expected["loss"].reshape(()))) < 1e-5
    got = {}
    columns, flat = list(adapters["official"].columns), dict(nnx.to_flat_state(gradients))
    paths = {id(module): path for path, module in nnx.iter_modules(adapters.model)}
    for p in adapters.projections:
        d_a, d_b = (np.asarray(flat[*paths[id(p.module)], "lora", n].get_value()) for n in "ab")
        for matrix, index in p.matrices:
            got[f"{HEAD}{matrix}.lora_A.weight"] = d_a[index][:, columns].T
            got[f"{HEAD}{matrix}.lora_B.weight"] = d_b[index][columns].T
    for name, want in load_file(CASE / "lora_peft_grads.safetensors").items():
        assert np.linalg.norm(got[name] - want) <= 3e-4 * np.linalg.norm(want) + 1e-7, name


def test_the_official_adapter_is_saved_as_it_was(adapters, tmp_path):
    load(adapters, "official", PEFT)
    save(adapters, "official", tmp_path)
    (got, config), (want, original) = read(tmp_path), read(PEFT)
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert got[name].dtype == value.dtype and got[name].shape == value.shape, name
        assert got[name].tobytes() == value.tobytes(), name
    assert config["target_modules"] == original["target_modules"]
    assert all(config[key] == original[key] for key in config if key not in ("target_modules", "task_type"))


@pytest.mark.parametrize("targets", [
    ("all",), ("experts", "embedding", "head"), ("mlp",), ("shared_experts",), ("mlp", "shared_experts"),
    ("self_attn.g_proj",), ("layers.0.self_attn.g_proj", "layers.12.self_attn.g_proj"), ("b_proj", "layers.3.self_attn"
    ".kv_b_proj"), ("experts.7.w1", "layers.2.block_sparse_moe.experts.w3"), ("latent", "layers.1.self_attn.o_proj"),
])  # fmt: skip
def test_what_was_saved_targets_by_pefts_rule_what_it_covers_and_loads_as_the_same(adapters, tmp_path, targets):
    random_adapter(adapters, "one", targets=targets)
    save(adapters, "one", tmp_path)
    tensors, config = read(tmp_path)
    covered = {name.removeprefix(HEAD).split(".lora_")[0] for name in tensors}
    names = matrices(adapters.model)
    assert {n for n in names if target_rule(config["target_modules"], f"language_model.{n}")} == covered
    load(adapters, "two", tmp_path)
    assert adapters.content_version("two") == adapters.content_version("one")
    assert adapters.trainable_parameters("two") == adapters.trainable_parameters("one")
    assert sum(t.size for t in tensors.values()) == adapters.trainable_parameters("one")
    save(adapters, "two", tmp_path / "again")
    assert (tmp_path / "again" / WEIGHTS).read_bytes() == (tmp_path / WEIGHTS).read_bytes()


def test_targets_are_the_shortest_names_that_hit_nothing_else():
    every = ["a.x.q", "a.y.q", "b.0.k", "b.1.k", "b.1.v"]
    assert shortest_targets(["a.x.q", "a.y.q"], every) == ("q",)
    assert shortest_targets(["a.x.q"], every) == ("x.q",)
    assert shortest_targets(["b.1.k"], every) == ("b.1.k",)
    assert shortest_targets(every, every) == ("k", "q", "v")


def test_rslora_and_patterns_are_honoured_in_both_directions(adapters, tmp_path):
    patterns = {"rank_pattern": {r"experts\.[0-3]\.w1": 5, "layers.3.self_attn.o_proj": 1}, "alpha_pattern": {"o_proj": 10}}
    random_adapter(adapters, "one", targets=("experts", "o_proj", "q_proj"), rslora=True, **patterns)
    save(adapters, "one", tmp_path)
    tensors, config = read(tmp_path)
    assert config["use_rslora"] and config["r"] == 3 and config["lora_alpha"] == 6
    assert config["rank_pattern"] == patterns["rank_pattern"] and config["alpha_pattern"] == patterns["alpha_pattern"]
    for name, tensor in tensors.items():
        rank = 5 if re.search(r"experts\.[0-3]\.w1", name) else 1 if "layers.3.self_attn.o_proj" in name else 3
        assert tensor.shape[0 if "lora_A" in name else 1] == rank, name
    load(adapters, "two", tmp_path)
    assert adapters.content_version("two") == adapters.content_version("one")
    scales = {m: scale for m, _, _, _, scale in adapters.read_matrices("two")}
    assert scales["model.layers.3.self_attn.o_proj"] == 10
    assert scales["model.layers.0.self_attn.o_proj"] == pytest.approx(10 / 3**0.5)
    assert scales["model.layers.1.block_sparse_moe.experts.2.w1"] == pytest.approx(6 / 5**0.5)
    assert scales["model.layers.1.block_sparse_moe.experts.4.w1"] == pytest.approx(6 / 3**0.5)


@pytest.mark.parametrize("layout", ["stacked", "shared A", "shared B", "flat"])
def test_experts_in_one_tensor_equal_a_tensor_per_expert(adapters, tmp_path, layout):
    random_adapter(adapters, "random", targets=("experts", "o_proj"))
    save(adapters, "random", tmp_path / "each")
    adapters.remove("random")
    tensors, config = read(tmp_path / "each")
    names, together = matrices(adapters.model), {}
    for name, value in tensors.items():
        if ".experts." not in name:
            together[name] = value
    for name in {re.sub(r"\.experts\.\d+\.", ".experts.", n) for n in names if ".experts." in n}:
        each = [name.replace(".experts.", f".experts.{e}.") for e in range(16)]
        for half in "AB":
            keys = [f"{HEAD}{n}.lora_{half}.weight" for n in each]
            if layout == f"shared {half}":
                tensors |= dict.fromkeys(keys, tensors[keys[0]])
            together[f"{HEAD}{name}.lora_{half}.weight"] = np.stack([tensors[k] for k in keys[: 1 if layout[-1] == half else 16]])
        if layout == "flat":  # PEFT: einsum("o r e, e r i", B.reshape(out, r, E), A.reshape(E, r, in))
            a, b = (f"{HEAD}{name}.lora_{half}.weight" for half in "AB")
            together[a] = together[a].reshape(-1, together[a].shape[-1])
            together[b] = np.ascontiguousarray(together[b].transpose(1, 2, 0)).reshape(together[b].shape[1], -1)
    load(adapters, "one", write(tmp_path / "each", tensors, **config))
    targets = {"target_modules": ["o_proj"], "target_parameters": ["experts.w1", "experts.w2", "experts.w3"]}
    load(adapters, "two", write(tmp_path / layout, together, **targets))
    assert adapters.content_version("two") == adapters.content_version("one")
    norms = adapters.delta_norms("two")
    assert all(norm > 0 for norm in norms.values()) and sum(".experts." in name for name in norms) == 12 * 16 * 3


def test_layers_exclusions_and_patterns_choose_as_in_peft(adapters, tmp_path):
    random_adapter(adapters, "one", targets=("layers.1.self_attn.o_proj", "layers.3.self_attn.o_proj"))
    save(adapters, "one", tmp_path / "saved")
    tensors, _ = read(tmp_path / "saved")
    ways = [
        {"target_modules": ["o_proj"], "layers_to_transform": [1, 3]},
        {"target_modules": ["o_proj"], "layers_to_transform": [1, 3], "layers_pattern": "layers"},
        {"target_modules": r".*\.layers\.[13]\.self_attn\.o_proj"},
        {"target_modules": ["o_proj"], "exclude_modules": r".*layers\.([024-9]|1\d)\..*"},
        {"target_modules": ["1.self_attn.o_proj", "3.self_attn.o_proj", "model.layers.5.self_attn.o_proj"],
         "exclude_modules": ["5.self_attn.o_proj"]},
    ]  # fmt: skip
    for i, way in enumerate(ways):
        load(adapters, f"way {i}", write(tmp_path / str(i), tensors, **way))
        assert adapters.content_version(f"way {i}") == adapters.content_version("one")
        adapters.remove(f"way {i}")


def test_half_precision_files_and_names_without_the_prefix_load_too(adapters, tmp_path):
    tensors, config = read(PEFT)
    small = {k.replace("language_model.", ""): v.astype(ml_dtypes.bfloat16) for k, v in tensors.items()}
    load(adapters, "half", write(tmp_path, small, **{**config, "alpha_pattern": {}}))
    for matrix, _, a, _, scale in adapters.read_matrices("half"):
        want = small[f"base_model.model.{matrix}.lora_A.weight"].astype(np.float32)
        np.testing.assert_array_equal(a.T, want)
        assert scale == 2


def test_loading_again_and_again_gives_the_same_and_leaves_everything_else(adapters):
    random_adapter(adapters, "other", targets=("all",))
    base = [v for _, v in nnx.to_flat_state(nnx.state(adapters.model)) if not isinstance(v, LoRAParam)]
    held = [v.get_value() for v in base if type(v).__module__ != "k3jax.linear"]
    other, versions = adapters.content_version("other"), set()
    for _ in range(10):
        load(adapters, "official", PEFT)
        versions.add(adapters.content_version("official"))
        adapters.remove("official")
    assert len(versions) == 1 and adapters.content_version("other") == other
    now = [v.get_value() for _, v in nnx.to_flat_state(nnx.state(adapters.model)) if type(v).__module__ != "k3jax.linear"]
    assert all(a is b for a, b in zip(now, held, strict=True))
    assert all(norm > 0 for norm in adapters.delta_norms("other").values())


def change(tensors, part, new):
    name = next(n for n in tensors if part in n)
    value = tensors.pop(name)
    return tensors | new(name, value)


BAD_FILES = {
    "another rank or base": (lambda t: change(t, "0.self_attn.q_proj.lora_A", lambda n, v: {n: v[:, :-1].copy()}),
                             r"layers.0.self_attn.q_proj: A \(4, 63\) and B \(64, 4\), but .* need \(4, 64\) and \(64, 4\)"),
    "no partner": (lambda t: change(t, "0.self_attn.q_proj.lora_B", lambda n, v: {}),
                   "layers.0.self_attn.q_proj: lora_B.weight is missing"),
    "a module without weights": (lambda t: {n: v for n, v in t.items() if "0.self_attn.q_proj" not in n},
                                 "layers.0.self_attn.q_proj: target_modules names it, but it has no weights"),
    "an unknown module": (lambda t: change(t, "0.self_attn.q_proj.lora_B", lambda n, v: {n: v, n.replace(".0.", ".99."): v}),
                          r"model.layers.99.self_attn.q_proj.lora_B.weight \(64, 4\): no such module"),
    "a module that is not targeted": (
        lambda t: t | {HEAD + "lm_head.lora_A.weight": np.zeros((4, 64), np.float32),
                       HEAD + "lm_head.lora_B.weight": np.zeros((320, 4), np.float32)},
        "lm_head: has weights, but target_modules does not name it"),
    "NaN": (lambda t: change(t, "0.self_attn.q_proj.lora_A", lambda n, v: {n: v * np.nan}), "q_proj: holds NaN"),
    "added tokens": (lambda t: t | {HEAD + "model.embed_tokens.weight": np.zeros((330, 64), np.float32)},
                     r"model.embed_tokens.weight \(330, 64\): a whole weight \(modules_to_save, added tokens\)"),
    "DoRA": (lambda t: t | {HEAD + "model.layers.0.self_attn.q_proj.lora_magnitude_vector": np.zeros(64, np.float32)},
             "lora_magnitude_vector .*: no such module"),
    "integers": (lambda t: change(t, "0.self_attn.q_proj.lora_A", lambda n, v: {n: v.astype(np.int32)}), "dtype is I32"),
    "a name twice": (lambda t: t | {n.replace("language_model.", ""): v for n, v in t.items() if "0.self_attn.q_proj" in n},
                     "there twice"),
    "nothing": (lambda t: {}, "has no weights"),
}  # fmt: skip

BAD_CONFIGS = {
    "rank 0": ({"r": 0}, "rank must be a whole number of at least 1, got 0"),
    "no alpha": ({"lora_alpha": None}, "alpha must be a positive"),
    "DoRA": ({"use_dora": True}, "use_dora=True is not supported"),
    "bias": ({"bias": "all"}, "bias='all' is not supported"),
    "lora_bias": ({"lora_bias": True}, "lora_bias=True is not supported"),
    "modules_to_save": ({"modules_to_save": ["lm_head"]}, "modules_to_save"),
    "trained tokens": ({"trainable_token_indices": [320]}, "trainable_token_indices"),
    "an init that changes the base": ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa'"),
    "an option of a later version": ({"use_wonder": {"depth": 3}}, "use_wonder"),
    "another method": ({"peft_type": "IA3"}, "peft_type is 'IA3', only 'LORA'"),
    "a target that is nowhere": ({"target_modules": ["q_proj", "query_key_value"]}, "this model has no query_key_value"),
    "no targets": ({"target_modules": None}, "targets is empty"),
    "a pattern that is none": ({"target_modules": "("}, "adapter_config.json"),
    "a useless pattern": ({"rank_pattern": {"w1": 2}}, "'w1' of adapter 'bad' matches none"),
    "too many columns": ({"rank_pattern": {"lm_head": 99}}, "matches none|needs 99"),
}


def refused(adapters, folder, words):
    before = arrays(adapters)
    with pytest.raises((ValueError, FileNotFoundError), match=words):
        load(adapters, "bad", folder)
    assert "bad" not in adapters and all(a is b for a, b in zip(arrays(adapters), before, strict=True))


@pytest.mark.parametrize("case", BAD_FILES)
def test_weights_that_do_not_fit_are_refused_in_one_message_and_change_nothing(adapters, tmp_path, case):
    spoil, words = BAD_FILES[case]
    tensors, config = read(PEFT)
    refused(adapters, write(tmp_path, spoil(tensors), **config), f"(?s){words}")


@pytest.mark.parametrize("case", BAD_CONFIGS)
def test_configs_that_would_change_the_result_are_refused_and_change_nothing(adapters, tmp_path, case):
    changes, words = BAD_CONFIGS[case]
    tensors, config = read(PEFT)
    refused(adapters, write(tmp_path, tensors, **{**config, **changes}), words)


def test_damaged_and_missing_files_are_refused(adapters, tmp_path):
    shutil.copytree(PEFT, tmp_path / "whole")
    folder = tmp_path / "whole"
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[:-100])
    refused(adapters, folder, "truncated")
    (folder / WEIGHTS).write_bytes(data[:4])
    refused(adapters, folder, "not a complete safetensors file")
    (folder / WEIGHTS).unlink()
    refused(adapters, folder, f"{WEIGHTS} does not exist")
    (folder / CONFIG).write_text("{")
    refused(adapters, folder, "not valid JSON")
    (folder / CONFIG).write_text('{"peft_type": "LORA", "r": 4}')
    refused(adapters, folder, "lacks 'lora_alpha'")
    (folder / CONFIG).unlink()
    refused(adapters, folder, f"{CONFIG} does not exist")
    refused(adapters, tmp_path / "nowhere", f"{CONFIG} does not exist")


def test_an_adapter_of_more_modules_than_have_columns_is_refused(official):
    adapters = Adapters(copy_of(official("k3_text_tiny")), columns=4, targets=("o_proj",))
    refused(adapters, PEFT, "no rank columns beside it")


def test_an_adapter_of_another_model_is_refused(official):
    adapters = Adapters(copy_of(official("kimi_linear_tiny")), columns=4)
    with pytest.raises(AdapterError, match="does not fit this model") as error:
        load(adapters, "one", PEFT)
    assert len(str(error.value).splitlines()) <= 22


def test_a_broken_adapter_is_not_saved_and_a_saved_one_stays(adapters, tmp_path):
    random_adapter(adapters, "one", targets=("lm_head",))
    save(adapters, "one", tmp_path)
    before = {f.name: f.read_bytes() for f in tmp_path.iterdir()}
    pool = adapters.model.lm_head.lora
    pool.a[...] = pool.a[...].at[0].set(jnp.nan)
    with pytest.raises(ValueError, match="holds NaN or infinite numbers, in lm_head"):
        save(adapters, "one", tmp_path)
    assert {f.name: f.read_bytes() for f in tmp_path.iterdir()} == before


def test_an_adapter_that_changes_nothing_yet_loads_with_a_warning(adapters, tmp_path, caplog):
    adapters.add("new", LoRAConfig(rank=2, alpha=2, targets=("o_proj",)))
    save(adapters, "new", tmp_path)
    load(adapters, "again", tmp_path)
    assert "changes nothing" in caplog.text
    assert adapters.content_version("again") == adapters.content_version("new")
    assert set(adapters.delta_norms("again").values()) == {0.0}
