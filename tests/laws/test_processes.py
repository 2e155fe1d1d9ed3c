"""Two processes that share a model save and load what one process does: checkpoints, adapters, the merged model."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import load_file

from k3jax.lora import Adapters
from k3jax.lora.merge import merge
from k3jax.lora.peft import load_peft as load_adapter
from k3jax.weights import load, save
from k3jax.weights.reader import Reader, read_folder

ROOT = Path(__file__).parents[2]
CASE = ROOT / "tests" / "golden" / "k3_text_tiny"

TOGETHER = """
import sys
import jax
port, rank, case, out = sys.argv[1:]
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(f"127.0.0.1:{port}", 2, int(rank))
from flax import nnx
from k3jax.lora import Adapters
from k3jax.lora.merge import merge
from k3jax.lora.peft import load_peft as load_adapter, save_peft as save_adapter
from k3jax.sharding import make_mesh
from k3jax.weights import load, save

assert jax.process_count() == 2 and len(jax.devices()) == 4
model = load(f"{case}/checkpoint", mesh=make_mesh(fsdp=2, expert=2))
assert any(not a.is_fully_addressable for a in jax.tree.leaves(nnx.state(model))), "a weight lies in both processes"
save(model, f"{out}/model")
save(model, f"{out}/model", max_shard_bytes=100_000)
adapters = Adapters(model, columns=6)
load_adapter(adapters, "one", f"{case}/lora_peft")
for _ in range(2):
    save_adapter(adapters, "one", f"{out}/adapter")
adapters.remove("one")
load_adapter(adapters, "again", f"{out}/adapter")
merge(adapters, "again")
save(model, f"{out}/merged")
"""


def tensors(folder: Path) -> dict[str, np.ndarray]:
    with Reader() as reader:
        return {name: reader.read(tensor) for name, tensor in read_folder(folder).items()}


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def run_in_two_processes(script: str, *arguments: object) -> None:
    """Runs the script with (port, rank, *arguments) in two processes of two devices each."""
    env = {**os.environ, "JAX_PLATFORMS": "cpu", "XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    env["PYTHONPATH"] = f"{os.environ.get('PYTHONPATH', '')}:{ROOT}"
    port = free_port()
    kind = {"env": env, "cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
    command = [sys.executable, "-c", script, str(port)]
    processes = [subprocess.Popen([*command, str(rank), *map(str, arguments)], **kind) for rank in range(2)]
    try:
        said = [process.communicate(timeout=300)[0] for process in processes]
    finally:
        for process in processes:
            process.kill()
    assert [process.returncode for process in processes] == [0, 0], "\n".join(text[-3000:] for text in said)


@pytest.mark.slow
def test_two_processes_save_and_load_what_one_does(tmp_path: Path):
    run_in_two_processes(TOGETHER, CASE, tmp_path)
    official, saved = tensors(CASE / "checkpoint"), tensors(tmp_path / "model")
    assert len(list((tmp_path / "model").glob("*.safetensors"))) > 2
    assert official.keys() == saved.keys()
    assert all(official[name].tobytes() == value.tobytes() for name, value in saved.items())
    adapter = load_file(CASE / "lora_peft" / "adapter_model.safetensors")
    again = load_file(tmp_path / "adapter" / "adapter_model.safetensors")
    assert adapter.keys() == again.keys()
    assert all(adapter[name].tobytes() == value.tobytes() for name, value in again.items())

    adapters = Adapters(load(CASE / "checkpoint"), columns=6)
    load_adapter(adapters, "one", CASE / "lora_peft")
    merge(adapters, "one")
    save(adapters.model, tmp_path / "alone")
    alone, together = tensors(tmp_path / "alone"), tensors(tmp_path / "merged")
    assert alone.keys() == together.keys()
    changed = [name for name in alone if alone[name].tobytes() != official[name].tobytes()]
    assert len(changed) == len(adapter) // 2
    for name, value in alone.items():
        if name in changed:
            assert value.dtype == ml_dtypes.bfloat16
            np.testing.assert_allclose(together[name].astype(np.float32), value.astype(np.float32), rtol=2**-7, atol=1e-6)
        else:
            assert together[name].tobytes() == value.tobytes(), name
