"""Weights: loading equals the file, saving equals what was loaded, and every fault is one clear error."""

import json
import os
import random
import resource
import shutil
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from itertools import groupby
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors import deserialize

from k3jax.config import K3Config
from k3jax.model import K3
from k3jax.weights import checkpoint as weights
from k3jax.weights import load, save
from k3jax.weights.__main__ import main
from k3jax.weights.names import Spelling, TensorNames
from k3jax.weights.reader import DTYPES, INDEX, CheckpointError, dtype_name, read_folder
from k3jax.weights.writer import Spec, write_folder

ROOT = Path(__file__).parents[2]
GOLDEN = ROOT / "tests" / "golden"
CASES = ["k3_text_tiny", "kimi_linear_tiny", "k3_mxfp4_tiny", "vision_tiny"]
Tensors = dict[str, np.ndarray]


def checkpoint(case: str) -> Path:
    return GOLDEN / case / "checkpoint"


def read(folder: Path) -> Tensors:
    """Every tensor, by the safetensors library, which gives no numpy array for E8M0."""
    found = {}
    for file in sorted(folder.glob("*.safetensors")):
        for name, t in deserialize(file.read_bytes()):
            found[name] = np.frombuffer(t["data"], DTYPES[t["dtype"]]).reshape(t["shape"]).copy()
    return found


def write(folder: Path, tensors: Tensors, case: str, shards: int = 1) -> Path:
    """A checkpoint of these tensors in this order, with the case's config.json."""
    specs = [Spec(name, dtype_name(value.dtype), value.shape) for name, value in tensors.items()]
    values = list(tensors.values())
    config = json.loads((checkpoint(case) / "config.json").read_text())
    limit = -(-sum(s.nbytes for s in specs) // shards)
    write_folder(folder, specs, values.__getitem__, config=config, max_shard_bytes=limit)
    return folder


def named(tensors: Tensors, part: str) -> str:
    return next(name for name in tensors if part in name)


def assert_same(a: Tensors, b: Tensors) -> None:
    assert a.keys() == b.keys()
    for name, value in a.items():
        assert value.dtype == b[name].dtype and value.shape == b[name].shape, name
        assert value.tobytes() == b[name].tobytes(), name


def assert_same_model(a: K3, b: K3) -> None:
    assert a.config == b.config
    for (path, x), (_, y) in zip(*(nnx.to_flat_state(nnx.state(model)) for model in (a, b)), strict=True):
        assert x[...].dtype == y[...].dtype and np.array_equal(x[...], y[...]), path


class ByName:
    """A weight of a model found by walking the attributes that its checkpoint name spells."""

    def __init__(self, model: K3):
        self.model = model

    def __getitem__(self, name: str) -> np.ndarray:
        name = name.removeprefix("language_model.").replace("_res_", "_res.")
        parts, at, position = name.split("."), self.model, []
        if parts[:2] == ["model", "layers"]:
            stack, layer = self.model.model.layers.layer(int(parts[2]))
            at, parts = self.model.model.layers.stacks[stack], parts[3:]
            position.append(layer)
        if "experts" in parts:
            position.append(int(parts.pop(parts.index("experts") + 1)))
        leaf = {"weight_packed": "packed", "weight_scale": "scale"}.get(parts[-1], parts[-1])
        for part in parts[:-1]:
            at = getattr(at, part)
        leaf = "kernel" if leaf == "weight" and hasattr(at, "kernel") else leaf
        value = np.asarray(getattr(at, leaf)[...])[tuple(position)]
        return value.T if leaf == "kernel" else value


@pytest.mark.parametrize("case", CASES[:3])
def test_every_loaded_weight_equals_the_file(case: str):
    tensors, model = read(checkpoint(case)), load(checkpoint(case))
    weight = ByName(model)
    for name, value in tensors.items():
        loaded = weight[name]
        assert loaded.dtype == value.dtype, name
        assert np.array_equal(loaded.reshape(-1), value.reshape(-1)), name


@pytest.mark.parametrize("shard_bytes", [5_000_000_000, 100_000])
@pytest.mark.parametrize("case", CASES)
def test_saving_what_was_loaded_gives_the_same_bytes(case: str, shard_bytes: int, tmp_path: Path):
    model = load(checkpoint(case))
    save(model, tmp_path, max_shard_bytes=shard_bytes)
    assert_same(read(checkpoint(case)), read(tmp_path))
    assert K3Config.load(tmp_path) == model.config
    files = sorted(file.name for file in tmp_path.glob("*.safetensors"))
    assert (files == ["model.safetensors"]) == (shard_bytes > 1_000_000) == (not (tmp_path / INDEX).exists())
    if len(files) > 1:
        index = json.loads((tmp_path / INDEX).read_text())
        assert set(index["weight_map"].values()) == set(files)
        assert index["metadata"]["total_size"] == sum(v.nbytes for v in read(tmp_path).values())


def test_loading_in_fp32_widens_every_weight_exactly():
    wide = ByName(load(checkpoint("k3_text_tiny"), dtype="float32"))
    for name, value in read(checkpoint("k3_text_tiny")).items():
        assert wide[name].dtype == np.float32
        assert np.array_equal(wide[name].reshape(-1), value.astype(np.float32).reshape(-1)), name
    assert wide.model.config.dtype == wide.model.config.param_dtype == jnp.float32


def test_a_model_in_fp32_is_saved_in_the_dtypes_of_the_release_on_request(tmp_path: Path):
    save(load(checkpoint("k3_text_tiny"), dtype="float32"), tmp_path, dtype="bfloat16")
    assert_same(read(checkpoint("k3_text_tiny")), read(tmp_path))


def test_a_router_bias_keeps_differences_that_bf16_would_lose(tmp_path: Path):
    tensors = read(checkpoint("k3_text_tiny"))
    name = named(tensors, "e_score_correction_bias")
    tensors[name] = np.full_like(tensors[name], 1.0)
    tensors[name][1] += 2.0**-12
    bias = ByName(load(write(tmp_path, tensors, "k3_text_tiny")))[name]
    assert bias.dtype == np.float32 and bias[1] > bias[0]


@pytest.mark.parametrize(("case", "shards"), [("k3_mxfp4_tiny", 1), ("k3_mxfp4_tiny", 7), ("vision_tiny", 3)])
def test_the_order_of_tensors_and_files_does_not_matter(case: str, shards: int, tmp_path: Path):
    """Not even if tensors of the vision tower lie between those of the text model."""
    tensors, first = read(checkpoint(case)), load(checkpoint(case))
    for seed in range(5):
        names = list(tensors)
        random.Random(seed).shuffle(names)
        model = load(write(tmp_path / f"{seed}", {n: tensors[n] for n in names}, case, shards))
        assert_same_model(first, model)


def respelled(
    tensors: Tensors, name_of: Callable[[str], str], value_of: Callable[[str, np.ndarray], np.ndarray]
) -> Tensors:
    return {name_of(name): value_of(name, value) for name, value in tensors.items()}


def a_log(shape: Callable[[int], tuple[int, ...]]) -> Callable[[str, np.ndarray], np.ndarray]:
    def change(name: str, value: np.ndarray) -> np.ndarray:
        if not name.endswith("A_log"):
            return value
        out = np.zeros(shape(value.size), np.float32)
        out.reshape(-1)[: value.size] = value.reshape(-1)
        return out

    return change


def older(name: str) -> str:
    return name.replace("_res_proj.weight", "_res.proj_weight").replace(
        "_res_norm.weight", "_res.norm_weight"
    )


def e8m0(name: str, value: np.ndarray) -> np.ndarray:
    return value.view(ml_dtypes.float8_e8m0fnu) if name.endswith("weight_scale") else value


SAME: Callable[[str, np.ndarray], np.ndarray] = lambda _, value: value  # noqa: E731


@pytest.mark.parametrize(
    ("name_of", "value_of"),
    [
        (lambda name: name.removeprefix("language_model."), SAME),
        (older, SAME),
        (older, lambda name, value: value.reshape(-1) if "_res_proj" in name else value),
        (str, a_log(lambda heads: (1, 1, heads, 1))),
        (str, a_log(lambda heads: (16,))),  # zero-padded to head_dim
        (str, e8m0),
    ],
    ids=["no prefix", "older names", "older shape", "A_log 4d", "A_log padded", "E8M0"],
)
def test_every_spelling_loads_to_the_same_model_and_is_saved_as_it_was(
    name_of: Any, value_of: Any, tmp_path: Path
):
    tensors = respelled(read(checkpoint("k3_mxfp4_tiny")), name_of, value_of)
    model = load(write(tmp_path / "in", tensors, "k3_mxfp4_tiny"))
    assert_same_model(load(checkpoint("k3_mxfp4_tiny")), model)
    save(model, tmp_path / "out")
    found = {n: (t.dtype, t.shape) for n, t in read_folder(tmp_path / "out").items()}
    assert found == {n: (dtype_name(v.dtype), v.shape) for n, v in tensors.items()}
    assert_same_model(model, load(tmp_path / "out"))


def test_a_prefix_before_a_flat_checkpoint_is_accepted(tmp_path: Path):
    tensors = respelled(read(checkpoint("kimi_linear_tiny")), lambda name: f"language_model.{name}", SAME)
    model = load(write(tmp_path / "in", tensors, "kimi_linear_tiny"))
    assert_same_model(load(checkpoint("kimi_linear_tiny")), model)


@pytest.mark.parametrize("size", [5, 64, 12_288])
def test_another_size_of_a_log_is_refused_by_name(size: int, tmp_path: Path):
    tensors = respelled(read(checkpoint("k3_mxfp4_tiny")), str, a_log(lambda heads: (size,)))
    with pytest.raises(CheckpointError, match=rf"layers.0.self_attn.A_log: shape \[{size}\]"):
        load(write(tmp_path, tensors, "k3_mxfp4_tiny"))


def test_a_log_whose_padding_is_not_zero_is_refused_by_name(tmp_path: Path):
    tensors = respelled(read(checkpoint("k3_mxfp4_tiny")), str, a_log(lambda heads: (16,)))
    tensors["language_model.model.layers.2.self_attn.A_log"][-1] = 1e-3
    with pytest.raises(CheckpointError, match="layers.2.self_attn.A_log has 16 numbers for 4 heads"):
        load(write(tmp_path, tensors, "k3_mxfp4_tiny"))


def test_scales_of_bias_125_are_four_times_larger_and_only_on_request(tmp_path: Path):
    name = "language_model.model.layers.1.block_sparse_moe.experts.0.w1.weight_scale"
    stored = read(checkpoint("k3_mxfp4_tiny"))[name].astype(int)
    assert np.array_equal(ByName(load(checkpoint("k3_mxfp4_tiny")))[name], stored)
    assert np.array_equal(ByName(load(checkpoint("k3_mxfp4_tiny"), scale_bias=125))[name], stored + 2)


def test_scales_that_bias_125_takes_out_of_range_are_refused(tmp_path: Path):
    tensors = read(checkpoint("k3_mxfp4_tiny"))
    tensors[named(tensors, "weight_scale")][0, 0] = 253
    with pytest.raises(CheckpointError, match="253.*125"):
        load(write(tmp_path, tensors, "k3_mxfp4_tiny"), scale_bias=125)


@pytest.mark.parametrize("declared", [True, False])
def test_tensors_decide_what_is_packed_whatever_the_config_says(declared: bool, tmp_path: Path):
    packed = read(checkpoint("k3_mxfp4_tiny"))
    folder = write(tmp_path, packed, "k3_mxfp4_tiny")
    config = json.loads((folder / "config.json").read_text())
    if declared:
        config["text_config"]["quantization_config"]["ignore"] = ["re:.*experts.*"]
    else:
        del config["text_config"]["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    model = load(folder)
    assert model.config.moe is not None and model.config.moe.mxfp4
    assert_same_model(load(checkpoint("k3_mxfp4_tiny")), model)


# Faults: (what is done to the tensors, what the error says)
def renamed(tensors: Tensors) -> None:
    name = named(tensors, "layers.3.self_attn.q_a_proj.weight")
    tensors[name.replace("q_a_proj", "q_down_proj")] = tensors.pop(name)


def missing(tensors: Tensors) -> None:
    del tensors[named(tensors, "layers.2.block_sparse_moe.routed_expert_norm.weight")]


def one_expert_missing(tensors: Tensors) -> None:
    del tensors[named(tensors, "layers.3.block_sparse_moe.experts.5.w2.weight_packed")]


def misshaped(tensors: Tensors) -> None:
    name = named(tensors, "layers.3.self_attn.q_a_proj.weight")
    tensors[name] = tensors[name].T


def unpacked(tensors: Tensors) -> None:
    name = named(tensors, "layers.3.block_sparse_moe.experts.5.w2.weight_packed")
    tensors[name] = tensors[name].astype(np.float32)


def twice(tensors: Tensors) -> None:
    name = named(tensors, "model.norm.weight")
    tensors[name.removeprefix("language_model.")] = tensors[name]


def extra(tensors: Tensors) -> None:
    tensors["language_model.model.layers.1.self_attn.q_proj.bias"] = np.zeros(3, np.float32)


def wrong_prefix(tensors: Tensors) -> None:
    for name in list(tensors):
        tensors[name.replace("language_model.", "text_model.")] = tensors.pop(name)


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        (
            renamed,
            [
                "1 tensors missing, 1 unexpected",
                "q_down_proj.weight   (nearest: ",
                "q_a_proj.weight   (nearest: ",
            ],
        ),
        (missing, ["1 tensors missing, 0 unexpected", "layers.2.block_sparse_moe.routed_expert_norm.weight"]),
        (one_expert_missing, ["1 tensors missing", "layers.3.block_sparse_moe.experts.5.w2.weight_packed"]),
        (misshaped, ["1 unusable", "layers.3.self_attn.q_a_proj.weight: shape [64, 24]", "needs [24, 64]"]),
        (unpacked, ["1 unusable", "experts.5.w2.weight_packed: dtype F32"]),
        (twice, ["model.norm.weight", "twice"]),
        (extra, ["1 unexpected", "layers.1.self_attn.q_proj.bias"]),
        (wrong_prefix, ["320 tensors missing, 320 unexpected", "… and 310 more", "nearest: "]),
    ],
)
def test_tensors_that_do_not_fit_are_listed(fault: Any, words: list[str], tmp_path: Path):
    tensors = read(checkpoint("k3_mxfp4_tiny"))
    fault(tensors)
    with pytest.raises(CheckpointError) as error:
        load(write(tmp_path, tensors, "k3_mxfp4_tiny"))
    assert all(word in str(error.value) for word in words), error.value
    assert len(str(error.value).splitlines()) < 30


def test_tensors_of_a_prediction_layer_are_reported_and_the_rest_loads(tmp_path: Path, caplog: Any):
    tensors = read(checkpoint("k3_mxfp4_tiny"))
    tensors["language_model.model.layers.5.eh_proj.weight"] = np.zeros((4, 4), np.float32)
    model = load(write(tmp_path, tensors, "k3_mxfp4_tiny"))
    assert "1 tensors" in caplog.text and "layers.5.eh_proj.weight" in caplog.text
    assert_same_model(load(checkpoint("k3_mxfp4_tiny")), model)


def made(folder: Path, config: K3Config, shards: int = 1) -> Path:
    """A checkpoint of a config, with arbitrary values."""
    table = TensorNames(weights.abstract(config), config)
    specs = [spec for _, spec in weights.official_specs(table, Spelling())]
    values = np.random.default_rng(0).integers(0, 256, 1 << 20, np.uint8)

    def value(i: int) -> np.ndarray:
        return np.resize(values[i % 1000 :], specs[i].shape).astype(DTYPES[specs[i].dtype])

    limit = -(-sum(s.nbytes for s in specs) // shards)
    write_folder(folder, specs, value, config=config.to_dict(), max_shard_bytes=limit)
    return folder


def with_prediction_layer(folder: Path) -> Path:
    return made(folder, replace(K3Config.load(checkpoint("k3_mxfp4_tiny")), num_mtp_layers=1))


def test_a_prediction_layer_that_the_config_announces_is_loaded_and_saved(tmp_path: Path):
    tensors = read(with_prediction_layer(tmp_path / "in"))
    model = load(tmp_path / "in")
    assert np.array_equal(
        model.mtp.eh_proj.kernel[...].T, tensors["language_model.model.layers.5.eh_proj.weight"]
    )
    save(model, tmp_path / "out")
    assert_same(tensors, read(tmp_path / "out"))


def test_a_prediction_layer_that_the_config_does_not_announce_is_reported(tmp_path: Path, caplog: Any):
    folder = with_prediction_layer(tmp_path)
    model = load(folder, replace(K3Config.load(folder), num_mtp_layers=0))
    assert not hasattr(model, "mtp") and "prediction layer are not loaded" in caplog.text


def test_a_prediction_layer_that_a_checkpoint_lacks_is_left_out_and_reported(tmp_path: Path, caplog: Any):
    folder = write(tmp_path, read(checkpoint("k3_mxfp4_tiny")), "k3_mxfp4_tiny")
    config = replace(K3Config.load(folder), num_mtp_layers=1)
    assert load(folder, config).config.num_mtp_layers == 0
    assert "no multi-token-prediction layer" in caplog.text


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return write(tmp_path / "sharded", read(checkpoint("kimi_linear_tiny")), "kimi_linear_tiny", shards=4)


def shard(folder: Path, number: int = 1) -> Path:
    return sorted(folder.glob("*.safetensors"))[number]


def delete_shard(folder: Path) -> None:
    shard(folder).unlink()


def truncate(folder: Path) -> None:
    os.truncate(shard(folder), shard(folder).stat().st_size - 1)


def lengthen(folder: Path) -> None:
    with open(shard(folder), "ab") as file:
        file.write(b"\0")


def empty(folder: Path) -> None:
    shard(folder).write_bytes(b"")


def break_header(folder: Path) -> None:
    data = bytearray(shard(folder).read_bytes())
    data[8:20] = b"x" * 12
    shard(folder).write_bytes(data)


def overlap(folder: Path) -> None:
    data = shard(folder).read_bytes()
    size = struct.unpack("<Q", data[:8])[0]
    header = json.loads(data[8 : 8 + size])
    first, second = list(header)[1:3]
    header[second]["data_offsets"] = header[first]["data_offsets"]
    text = json.dumps(header, separators=(",", ":")).encode().ljust(size)
    shard(folder).write_bytes(struct.pack("<Q", len(text)) + text + data[8 + size :])


def edit_index(change: Callable[[dict[str, str]], None]) -> Callable[[Path], None]:
    def edit(folder: Path) -> None:
        index = json.loads((folder / INDEX).read_text())
        change(index["weight_map"])
        (folder / INDEX).write_text(json.dumps(index))

    return edit


def swap_file(weight_map: dict[str, str]) -> None:
    name = next(iter(weight_map))
    weight_map[name] = next(file for file in weight_map.values() if file != weight_map[name])


def break_index(folder: Path) -> None:
    (folder / INDEX).write_text("{")


def add_single(folder: Path) -> None:
    shutil.copyfile(checkpoint("kimi_linear_tiny") / "model.safetensors", folder / "model.safetensors")


@pytest.mark.parametrize(
    ("damage", "kind", "words"),
    [
        (delete_shard, FileNotFoundError, ["lacks 1 of the", "model-00002-of-"]),
        (truncate, CheckpointError, ["model-00002-of-", "truncated"]),
        (lengthen, CheckpointError, ["model-00002-of-", "damaged"]),
        (empty, CheckpointError, ["model-00002-of-", "not a complete safetensors file"]),
        (break_header, CheckpointError, ["model-00002-of-", "damaged header"]),
        (overlap, CheckpointError, ["model-00002-of-", "offsets"]),
        (edit_index(swap_file), CheckpointError, [INDEX, "lists it in"]),
        (
            edit_index(lambda m: m.pop("lm_head.weight")),
            CheckpointError,
            ["lm_head.weight", "does not list it"],
        ),
        (
            edit_index(lambda m: m.update(other=m["lm_head.weight"])),
            CheckpointError,
            ["lists 1 tensors", "other"],
        ),
        (edit_index(lambda m: m.update(other="../x")), CheckpointError, [INDEX, "same folder"]),
        (break_index, CheckpointError, [INDEX, "not a safetensors index"]),
        (add_single, CheckpointError, ["both model.safetensors and an index"]),
        (lambda folder: (folder / INDEX).unlink(), FileNotFoundError, ["holds no weights", INDEX]),
        (lambda folder: (folder / "config.json").unlink(), FileNotFoundError, ["config.json"]),
    ],
)
def test_a_damaged_folder_is_one_clear_error(damage: Any, kind: type, words: list[str], sharded: Path):
    damage(sharded)
    with pytest.raises(kind) as error:
        load(sharded)
    assert all(word in str(error.value) for word in words), error.value


def files(folder: Path) -> dict[str, bytes]:
    return {str(file.relative_to(folder)): file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_a_full_disk_leaves_the_earlier_checkpoint_as_it_was(sharded: Path):
    model, before = load(checkpoint("k3_text_tiny")), files(sharded)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300_000, hard))
    try:
        with pytest.raises(OSError, match="while saving.*is unchanged"):
            save(model, sharded)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert files(sharded) == before


def test_a_new_checkpoint_replaces_all_of_the_earlier_one_and_nothing_else(sharded: Path, tmp_path: Path):
    (sharded / "tokenizer_config.json").write_text("{}")
    model = load(checkpoint("k3_text_tiny"))
    save(model, sharded)
    assert {*files(sharded)} == {"config.json", "model.safetensors", "tokenizer_config.json"}
    save(model, sharded, max_shard_bytes=500_000)
    assert "model.safetensors" not in files(sharded)
    assert_same_model(load(sharded), model)


def test_what_a_killed_saver_left_is_removed_and_never_loaded(sharded: Path, tmp_path: Path):
    left = sharded / ".saving-killed"
    left.mkdir()
    (left / "model.safetensors").write_bytes(b"half")
    model = load(sharded)
    save(model, sharded)
    assert not left.exists()
    assert_same_model(load(sharded), model)


def test_savers_to_one_folder_at_once_take_turns(tmp_path: Path, monkeypatch: Any):
    model, move, movers = load(checkpoint("kimi_linear_tiny")), os.replace, []

    def slow_move(source: Path, target: Path) -> None:
        movers.append(threading.get_ident())
        time.sleep(0.02)
        move(source, target)

    monkeypatch.setattr(os, "replace", slow_move)
    size = {"max_shard_bytes": 200_000}
    threads = [threading.Thread(target=save, args=(model, tmp_path), kwargs=size) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(movers) == 3 * 7  # five files, the index and the config
    assert len(list(groupby(movers))) == 3
    assert_same(read(tmp_path), read(checkpoint("kimi_linear_tiny")))
    assert not list(tmp_path.glob(".saving-*"))


def test_a_stack_put_together_piece_by_piece_is_the_same(monkeypatch: Any, tmp_path: Path):
    monkeypatch.setattr(weights, "_PIECE", 30_000)
    monkeypatch.setattr(weights, "_takes_over", lambda device: False)
    model = load(checkpoint("kimi_linear_tiny"))
    monkeypatch.undo()
    assert_same_model(load(checkpoint("kimi_linear_tiny")), model)


def test_converting_to_bf16_and_back_gives_the_same_bytes_and_config(tmp_path: Path):
    source = checkpoint("k3_mxfp4_tiny")
    assert (
        main(["convert", str(source), str(tmp_path / "bf16"), "--to", "bf16", "--shard-size", "200kB"]) == 0
    )
    assert len(list((tmp_path / "bf16").glob("*.safetensors"))) > 2
    assert not load(tmp_path / "bf16").config.moe.mxfp4
    assert main(["convert", str(tmp_path / "bf16"), str(tmp_path / "back"), "--to", "mxfp4"]) == 0
    assert_same(read(source), read(tmp_path / "back"))
    assert json.loads((source / "config.json").read_text()) == json.loads(
        (tmp_path / "back" / "config.json").read_text()
    )


def test_unpacked_experts_are_what_the_codes_and_scales_say(tmp_path: Path):
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    packed = read(checkpoint("k3_mxfp4_tiny"))
    assert main(["convert", str(checkpoint("k3_mxfp4_tiny")), str(tmp_path), "--to", "bf16"]) == 0
    name = "language_model.model.layers.2.block_sparse_moe.experts.3.w2.weight"
    codes = packed[f"{name}_packed"]
    both = np.stack([codes & 15, codes >> 4], -1).reshape(codes.shape[0], -1)
    scale = 2.0 ** (packed[f"{name}_scale"].astype(float) - 127)
    assert np.array_equal(read(tmp_path)[name].astype(float), values[both] * np.repeat(scale, 32, axis=1))


def test_converting_without_a_form_only_changes_files_and_keeps_what_lies_beside_them(tmp_path: Path):
    source = write(tmp_path / "in", read(checkpoint("kimi_linear_tiny")), "kimi_linear_tiny")
    (source / "tokenizer_config.json").write_text('{"a": 1}')
    assert main(["convert", str(source), str(tmp_path / "out"), "--shard-size", "0.2MB"]) == 0
    assert_same(read(source), read(tmp_path / "out"))
    assert (tmp_path / "out" / "tokenizer_config.json").read_text() == '{"a": 1}'


def test_an_fp32_checkpoint_becomes_bf16_but_for_what_the_release_has_in_fp32(tmp_path: Path):
    save(load(checkpoint("kimi_linear_tiny"), dtype="float32"), tmp_path / "in")
    assert main(["convert", str(tmp_path / "in"), str(tmp_path / "out"), "--to", "bf16"]) == 0
    assert_same(read(tmp_path / "out"), read(checkpoint("kimi_linear_tiny")))
    assert K3Config.load(tmp_path / "out").param_dtype == jnp.bfloat16


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["convert", "{case}", "{case}"], 1, "another folder"),
        (["convert", "{tmp}/nothing", "{tmp}/out"], 1, "holds no weights"),
        (
            ["convert", str(checkpoint("k3_text_tiny")), "{tmp}/out", "--to", "mxfp4"],
            1,
            "groups of 32 inputs",
        ),
        (["inspect", "{tmp}/nothing"], 1, "config.json"),
        (["convert", "{case}", "{tmp}/out", "--shard-size", "big"], 2, "not a size such as 500MB"),
        (["convert", "{case}", "{tmp}/out", "--to", "int4"], 2, "invalid choice"),
        ([], 2, "COMMAND"),
    ],
)
def test_the_command_line_says_what_is_wrong(
    arguments: list[str], status: int, words: str, tmp_path: Path, capsys: Any
):
    case = checkpoint("kimi_linear_tiny")
    filled = [a.format(case=case, tmp=tmp_path) for a in arguments]
    try:
        found = main(filled)
    except SystemExit as exit:
        found = exit.code
    assert found == status
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out" / "config.json").exists()


def test_the_module_is_a_command_whose_help_has_examples():
    done = subprocess.run(
        [sys.executable, "-m", "k3jax.weights", "--help"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    assert "inspect" in done.stdout and "convert" in done.stdout and "examples:" in done.stdout


def test_inspecting_reads_headers_and_counts_by_part(tmp_path: Path, capsys: Any):
    assert main(["inspect", str(checkpoint("k3_mxfp4_tiny"))]) == 0
    text = capsys.readouterr().out
    assert "5 = 3 KDA + 2 MLA; 0 dense, 1-4 moe (8 experts, 3 per token)" in text and "KKKMM" in text
    rows = {line[:24].strip(): line[24:].split() for line in text.splitlines() if line[:1].islower()}
    # 4 layers x 8 experts x 3 matrices of 32 x 64, half a byte each and a scale byte per 32
    parameters = 4 * 8 * 3 * 32 * 64
    routed = rows["routed experts"]
    assert routed == [
        "192",
        f"{parameters:,}",
        f"{parameters * 3 // 8:,}",
        f"{parameters * 17 // 32:,}",
        "U8",
    ]
    assert rows["all"][0] == "320"
    assert int(rows["all"][3].replace(",", "")) == sum(
        v.nbytes for v in read(checkpoint("k3_mxfp4_tiny")).values()
    )
    shutil.copyfile(checkpoint("k3_mxfp4_tiny") / "config.json", tmp_path / "config.json")
    assert main(["inspect", str(tmp_path / "config.json")]) == 0
    alone = capsys.readouterr().out.splitlines()
    assert alone[1:] == text.splitlines()[1:]


SHARDED_LOAD = """
import jax, numpy as np, sys
from k3jax.weights import reader
from k3jax.weights.reader import read_folder
from k3jax.sharding import TRAIN, make_mesh
from k3jax.weights.names import Spelling, TensorNames
from k3jax.weights import load, save
from flax import nnx

read = {}
original = reader.Reader.read_into
def counting(self, out, tensor, *rest):
    n = original(self, out, tensor, *rest)
    read[tensor.file, tensor.start] = read.get((tensor.file, tensor.start), 0) + n
    return n
reader.Reader.read_into = counting

source, target, expert, tensor = sys.argv[1:]
model = load(source, mesh=make_mesh(fsdp=2, expert=int(expert), tensor=int(tensor)))
sizes = {(t.file, t.start): t.stop - t.start for t in read_folder(source).values()}
assert read == sizes, "bytes were read twice or not at all"
save(model, target)
w1 = model.model.layers.stacks[1].block_sparse_moe.experts.w1
shards = getattr(w1, "packed", getattr(w1, "kernel", None))[...].addressable_shards
assert len({str(shard.index) for shard in shards}) == 8, "each device holds its own part"
"""

MEMORY = """
import ctypes
import sys
from pathlib import Path
import jax
from flax import nnx
from k3jax.weights import load, save
from k3jax.weights.convert import convert

def status(key):
    lines = Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith(key)).split()[1])

def reset_peak():
    ctypes.CDLL(None).malloc_trim(0)  # what earlier calls left would hide what the next one takes
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")

source, small, target = map(Path, sys.argv[1:])
warm = load(small)
convert(small, target / "small", "mxfp4")
convert(source, target / "warm", "mxfp4", max_shard_bytes=1 << 23)  # compiles for these shapes
largest = max(file.stat().st_size for file in source.glob("*.safetensors"))
start = reset_peak()
convert(source, target / "packed", "mxfp4", max_shard_bytes=1 << 23)
held = status("VmHWM") - start
assert held < 2 * largest, f"convert held {held} bytes, the largest shard has {largest}"
print("convert", held / largest)
start = reset_peak()
model = load(source)
size = sum(a.nbytes for a in jax.tree.leaves(nnx.state(model)))
assert size > 15 * largest
held, left = status("VmHWM") - start - size, status("VmRSS") - start - size
assert held < 2 * largest, f"load held {held} bytes beyond the model, the largest shard has {largest}"
assert left < largest, f"load kept {left} bytes beyond the model"
print("load", held / largest, left / largest)
start = reset_peak()
save(model, target / "saved", max_shard_bytes=1 << 23)
held = status("VmHWM") - start
assert held < 2 * largest, f"save held {held} bytes beyond the model, the largest shard has {largest}"
print("save", held / largest)
del model
convert(target / "packed", target / "warm", "bf16", max_shard_bytes=1 << 23)
start = reset_peak()
convert(target / "packed", target / "unpacked", "bf16", max_shard_bytes=1 << 23)
held = status("VmHWM") - start
assert held < 2 * largest, f"unpacking held {held} bytes, the largest shard has {largest}"
print("unpack", held / largest)
"""


def run(script: str, *arguments: Path | int, devices: int = 1) -> str:
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "PYTHONPATH": f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"}
    env["XLA_FLAGS"] = f"--xla_force_host_platform_device_count={devices}"
    done = subprocess.run(
        [sys.executable, "-c", script, *map(str, arguments)],
        env=env,
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


@pytest.mark.parametrize(("case", "expert", "tensor"), [("k3_text_tiny", 2, 2), ("k3_mxfp4_tiny", 4, 1)])
def test_on_eight_devices_each_byte_is_read_once_and_saved_unchanged(
    case: str, expert: int, tensor: int, tmp_path: Path
):
    run(SHARDED_LOAD, checkpoint(case), tmp_path, expert, tensor, devices=8)
    assert_same(read(checkpoint(case)), read(tmp_path))


def many_shards(folder: Path) -> Path:
    """160 MB of routed experts in 20 files, in the layers of k3_mxfp4_tiny."""
    config = K3Config.load(checkpoint("k3_mxfp4_tiny"))
    assert config.moe is not None
    experts = {"num_experts": 96, "intermediate_size": 256, "latent_size": 256, "num_shared_experts": 1}
    made(folder, replace(config, moe=replace(config.moe, **experts, mxfp4=False)), shards=20)
    assert len(list(folder.glob("*.safetensors"))) >= 20
    return folder


def test_loading_saving_and_converting_hold_less_than_two_shards_beyond_the_model(tmp_path: Path):
    print(run(MEMORY, many_shards(tmp_path / "in"), checkpoint("k3_mxfp4_tiny"), tmp_path / "out", devices=8))
