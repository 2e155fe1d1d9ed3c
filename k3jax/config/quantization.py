"""The one quantization that K3 is released in, MXFP4 of the routed experts, as config.json describes it."""

from typing import Any

from k3jax.config.fields import ConfigError, Fields

FORMAT = "mxfp4-pack-quantized"
# E2M1 codes, two per byte, and an E8M0 scale per 32 inputs.
_WEIGHTS = {
    "num_bits": 4, "type": "float", "strategy": "group", "group_size": 32, "symmetric": True, "dynamic": False,
    "scale_dtype": "torch.uint8",
}  # fmt: skip
MXFP4 = {
    "quant_method": "compressed-tensors", "format": FORMAT, "quantization_status": "compressed",
    "ignore": ["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", "re:.*mlp.*", "re:.*gate$",
               "re:.*routed_expert_.*_proj", "re:.*_res_proj"],
    "config_groups": {"group_0": {
        "targets": ["Linear"], "format": FORMAT, "input_activations": None, "output_activations": None, "weights": _WEIGHTS,
    }},
}  # fmt: skip


def check_mxfp4(raw: Any) -> None:
    """Raises ConfigError, naming the field, unless `quantization_config` describes MXFP4 as K3 is released in.

    `ignore` may list any modules: which experts are packed, the tensors of the checkpoint decide.
    """
    f = Fields(raw, "quantization_config")
    f.expect("quant_method", "compressed-tensors", required=True)
    f.expect("format", FORMAT, required=True)
    f.expect("quantization_status", "compressed")
    for name in ("kv_cache_scheme", "sparsity_config", "transform_config"):
        f.expect(name, None, {})
    f.ignore("ignore", "global_compression_ratio", "version")
    groups = f.take("config_groups")
    f.finish()
    if not isinstance(groups, dict) or len(groups) != 1:
        raise ConfigError(f"quantization_config: config_groups must hold one group, as MXFP4 has, got {groups!r}")
    (name, group), = groups.items()
    _check_group(Fields(group, f"quantization_config.config_groups.{name}"))


def _check_group(f: Fields) -> None:
    f.expect("targets", ["Linear"])
    f.expect("format", FORMAT)
    f.expect("input_activations", None)
    f.expect("output_activations", None)
    weights = Fields(f.take("weights"), f"{f.where}.weights")
    f.finish()
    for name, value in _WEIGHTS.items():
        weights.expect(name, value, required=name in ("num_bits", "type", "group_size"))
    for name in ("actorder", "block_structure", "zp_dtype"):
        weights.expect(name, None)
    weights.ignore("observer", "observer_kwargs")
    weights.finish()
