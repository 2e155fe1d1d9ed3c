"""Rewrites a checkpoint folder, tensor by tensor: routed experts in bf16 or MXFP4, other shard sizes."""

import json
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from k3jax.config import K3Config
from k3jax.progress import Progress
from k3jax.weights.checkpoint import MAX_SHARD_BYTES, abstract, rebias, stored_config
from k3jax.weights.match import match
from k3jax.weights.names import TensorNames
from k3jax.weights.reader import DTYPES, INDEX, CheckpointError, Reader, Tensor, read_folder
from k3jax.weights.writer import Spec, write_folder
from pallas_kernels.mxfp4 import dequantize, quantize

Format = Literal["bf16", "mxfp4"]
_EXPERT = re.compile(r"\.experts\.\d+\.w[123]\.weight$")
_dequantize = jax.jit(dequantize, static_argnums=2)
_quantize = jax.jit(quantize)


class _Step(NamedTuple):
    """How one tensor of the new checkpoint is made."""

    kind: Literal["cast", "rescale", "unpack", "pack", "scale"]
    sources: tuple[Tensor, ...]


def convert(
    source: str | Path,
    target: str | Path,
    to: Format | None = None,
    *,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    scale_bias: int = 127,
) -> None:
    """Writes the checkpoint in `source` to the folder `target`.

    to          form of the routed experts, everything else then in the release's bf16 or fp32; None keeps all dtypes
    scale_bias  exponent bias of the MXFP4 scales read (k3jax.weights.checkpoint.load); those written have 127

    Other files of the folder (tokenizer, …) are copied. Raises CheckpointError if the source does not fit its
    config.
    """
    source, target = Path(source), Path(target)
    if target.exists() and source.samefile(target):
        raise ValueError(f"{target} is the source itself: choose another folder.")
    tensors = read_folder(source)
    config = stored_config(K3Config.load(source), tensors)
    table = TensorNames(abstract(config.in_dtype(jnp.bfloat16)), config)
    match(tensors, table, str(source))
    plan = _plan(tensors, table, to, scale_bias)
    progress = Progress("convert", sum(spec.nbytes for spec, _ in plan))
    with Reader() as reader:
        work = _Work(reader, scale_bias)

        def fetch(i: int) -> np.ndarray:
            value = work.run(*plan[i])
            progress.add(value.nbytes)
            return value

        specs = [spec for spec, _ in plan]
        files = [f for f in source.iterdir() if f.is_file() and f.suffix != ".safetensors"]
        others = [f for f in files if f.name not in (INDEX, "config.json")]
        write_folder(
            target, specs, fetch, config=_config(source, config, to), max_shard_bytes=max_shard_bytes, beside=others
        )


def _plan(
    tensors: dict[str, Tensor], table: TensorNames, to: Format | None, bias: int
) -> list[tuple[Spec, _Step]]:
    plan = []
    for name, t in tensors.items():
        scales = name.endswith(".weight_scale")
        if name.endswith(".weight_packed") and to == "bf16":
            base = name.removesuffix("_packed")
            shape = (t.shape[0], 2 * t.shape[1])
            plan.append((Spec(base, "BF16", shape), _Step("unpack", (t, tensors[f"{base}_scale"]))))
        elif scales and to == "bf16":
            continue
        elif _EXPERT.search(name) and to == "mxfp4":
            out, inputs = t.shape
            if inputs % 32:
                raise CheckpointError(
                    f"{name}: MXFP4 scales groups of 32 inputs, but this tensor has {inputs} inputs."
                )
            plan.append((Spec(f"{name}_packed", "U8", (out, inputs // 2)), _Step("pack", (t,))))
            plan.append((Spec(f"{name}_scale", "U8", (out, inputs // 32)), _Step("scale", (t,))))
        else:
            at = table.locate(name)
            narrow = to is not None and at is not None and at.parameter.dtype == jnp.bfloat16
            kind = "rescale" if scales and bias != 127 else "cast"
            plan.append((Spec(name, "BF16" if narrow else t.dtype, t.shape), _Step(kind, (t,))))
    return plan


class _Work:
    """Makes tensors. The last quantised one is kept: its codes are asked for, then its scales."""

    def __init__(self, reader: Reader, scale_bias: int):
        self.reader, self.scale_bias = reader, scale_bias
        self.last: tuple[Tensor, Sequence[Any]] | None = None

    def run(self, spec: Spec, step: _Step) -> np.ndarray:
        first = step.sources[0]
        if step.kind == "cast":
            return self.reader.read(first).astype(DTYPES[spec.dtype], copy=False)
        if step.kind == "rescale":
            return self._scales(first, spec.name).view(DTYPES[spec.dtype])
        if step.kind == "unpack":
            scale = self._scales(step.sources[1], spec.name)
            return np.asarray(_dequantize(self.reader.read(first), scale, jnp.bfloat16))
        if self.last is None or self.last[0] is not first:
            self.last = None  # freed before the next is made
            self.last = first, _quantize(self.reader.read(first))
        return np.asarray(self.last[1][step.kind == "scale"])

    def _scales(self, tensor: Tensor, name: str) -> np.ndarray:
        scale = self.reader.read(tensor).view(np.uint8)
        return scale if self.scale_bias == 127 else rebias(scale, self.scale_bias, name)


def _config(source: Path, config: K3Config, to: Format | None) -> dict[str, Any]:
    """The source's config.json with what changed."""
    raw = json.loads((source / "config.json").read_text())
    if to is None or config.moe is None:
        return raw
    text = raw.get("text_config", raw)
    new = replace(config.in_dtype(jnp.bfloat16), moe=replace(config.moe, mxfp4=to == "mxfp4")).to_dict()
    text.pop("quantization_config", None)
    new = new.get("text_config", new)
    text |= {key: new[key] for key in ("dtype", "quantization_config") if key in new}
    if "dtype" in raw:
        raw["dtype"] = text["dtype"]
    return raw
