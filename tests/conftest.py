"""What all tests share: a CPU seen as eight devices, programs kept between runs, golden models loaded and compiled once."""

import os
from dataclasses import replace
from functools import cached_property, partial
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
# Eight devices to shard over, and LLVM's optimisations left out: compiling is most of the suite's time. Flags given win.
FLAGS = {"xla_force_host_platform_device_count": 8, "xla_backend_optimization_level": 0}
given = os.environ.get("XLA_FLAGS", "")
os.environ["XLA_FLAGS"] = " ".join([given, *(f"--{name}={value}" for name, value in FLAGS.items() if name not in given)]).strip()

import jax  # noqa: E402
import jax.numpy as jnp  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402
from flax import nnx  # noqa: E402
from hypothesis import HealthCheck, settings  # noqa: E402

from k3jax.config import K3Config, KDAConfig, MLAConfig, MoEConfig  # noqa: E402
from k3jax.model import K3  # noqa: E402
from k3jax.weights import abstract, load  # noqa: E402

ROOT = Path(__file__).parents[1]
GOLDEN = ROOT / "tests" / "golden"

# A loaded machine is no fault of the code: examples have no deadline.
settings.register_profile("k3jax", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("k3jax")

jax.config.update("jax_compilation_cache_dir", str(ROOT / ".jax_cache"))
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.2)


MAPS = Path("/proc/self/maps")


@pytest.fixture(scope="module", autouse=True)
def few_memory_maps():
    """Every compiled program holds memory maps, of which Linux gives a process 65 530; beyond them XLA crashes. Programs that
    are still needed come back from the cache on disk."""
    yield
    if MAPS.exists() and len(MAPS.read_bytes().splitlines()) > 40_000:
        jax.clear_caches()


class Programs:
    """A model split into structure and weights, with the programs that tests run on it. Each compiles once per shape."""

    def __init__(self, model: K3):
        self.config = model.config
        self.model = model
        self.graphdef, self.state = nnx.split(model)

    def with_remat(self, remat: str) -> "Programs":
        """The same weights under another rematerialisation policy."""
        model = abstract(replace(self.config, remat=remat))
        nnx.update(model, self.state)
        return Programs(model)

    def empty_cache(self, batch: int, capacity: int):
        return self.model.empty_cache(batch, capacity)

    @cached_property
    def forward(self):
        """(state, ids, segments) -> logits."""

        def forward(state, ids, segments):
            model = nnx.merge(self.graphdef, state)
            return model.logits(model(ids, segments).hidden)

        return jax.jit(forward)

    @cached_property
    def extend(self):
        """(state, ids, segments, cache) -> logits of the new tokens, and the cache after them."""

        def extend(state, ids, segments, cache):
            model = nnx.merge(self.graphdef, state)
            out = model(ids, segments, cache=cache)
            return model.logits(out.hidden), out.cache

        return jax.jit(extend)

    @cached_property
    def gradients(self):
        """(state, ids, segments, weights) -> loss, gradient of every weight, logits. `weights` weigh the prediction of
        the next token; the last of a row has none."""

        def loss(state, ids, segments, weights):
            model = nnx.merge(self.graphdef, state)
            logits = model.logits(model(ids, segments).hidden)
            logprobs = jax.nn.log_softmax(logits[:, :-1])
            picked = jnp.take_along_axis(logprobs, ids[:, 1:, None], -1)[..., 0]
            return -jnp.sum(picked * weights[:, :-1]), logits

        def gradients(state, ids, segments, weights):
            (value, logits), grads = jax.value_and_grad(loss, has_aux=True)(state, ids, segments, weights)
            return value, grads, logits

        return jax.jit(gradients)


@pytest.fixture(scope="session")
def golden() -> Path:
    """The folder of official outputs."""
    return GOLDEN


_loaded: dict[str, Programs] = {}


@pytest.fixture(scope="session")
def official():
    """name of a golden checkpoint -> its Programs in fp32."""

    def get(name: str) -> Programs:
        if name not in _loaded:
            _loaded[name] = Programs(load(GOLDEN / name / "checkpoint", dtype="float32"))
        return _loaded[name]

    return get


def small_config(**changes) -> K3Config:
    """Every feature of K3 in five layers [KDA dense, (KDA, MLA) x 2 MoE], three Attention Residuals blocks."""
    config = K3Config(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        attention=("kda", "kda", "mla", "kda", "mla"),
        kda=KDAConfig(num_heads=2, head_dim=16, decay_floor=-5.0, full_rank_gate=True),
        mla=MLAConfig(
            num_heads=2, q_lora_rank=16, kv_lora_rank=16, nope_dim=8, rope_dim=8, value_dim=16, output_gate=True
        ),
        moe=MoEConfig(
            num_experts=8, experts_per_token=2, intermediate_size=16, num_shared_experts=1, latent_size=16, latent_norm=True
        ),
        attn_res_block=2,
        hidden_act="situ",
        situ_beta=4.0,
        situ_linear_beta=25.0,
        init_std=0.15,
        dtype=jnp.dtype(jnp.float32),
        param_dtype=jnp.dtype(jnp.float32),
    )
    return replace(config, **changes)


def build(config: K3Config, seed: int = 0) -> K3:
    """A random model whose norms, router biases and decay rates are random too."""

    @partial(jax.jit, out_shardings=None)
    def state():
        return nnx.state(K3(config, rngs=nnx.Rngs(seed)))

    model = abstract(config)
    rng = np.random.default_rng(seed)

    def shake(path, value):
        last, kind = path[-1], str(path[-2]) if len(path) > 1 else ""
        if last == "e_score_correction_bias":
            return jnp.asarray(0.1 * rng.standard_normal(value.shape), value.dtype)
        if last == "weight" and "norm" in kind:
            return value * jnp.asarray(1 + 0.2 * rng.standard_normal(value.shape), value.dtype)
        if last == "A_log":
            return jnp.asarray(0.5 * rng.standard_normal(value.shape), value.dtype)
        return value

    flat = [(path, v.replace(shake(path, v.get_value()))) for path, v in nnx.to_flat_state(state())]
    nnx.update(model, nnx.from_flat_state(flat))
    return model


@pytest.fixture(scope="session")
def small() -> Programs:
    """`small_config` in fp32 with random weights."""
    return Programs(build(small_config()))


@pytest.fixture(scope="session")
def make_small():
    """(**changes of small_config) -> Programs of a new random model."""
    return lambda **changes: Programs(build(small_config(**changes)))


@pytest.fixture(scope="session")
def make_config():
    """(**changes) -> small_config with them."""
    return small_config
