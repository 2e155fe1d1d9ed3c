"""The kernels for NVIDIA GPUs of decode with Kimi Delta Attention: what is their own; test_kda_decode.py holds the op's laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kda_decode import Pool, kda_decode, kda_verify
from pallas_kernels.kda_decode.shapes import SHAPES, Shape, draw
from pallas_kernels.target import target

FORM = {"decay_floor": -5.0, "eps": 1e-5}
decode = partial(kda_decode, **FORM)


def arguments(shape, dtype=np.float32, *tokens):
    x, weights, pool = draw(shape, *tokens)
    x, windows = jax.tree.map(lambda a: jnp.asarray(a, dtype), (x, pool.windows))
    slots = np.random.default_rng(1).permutation(shape.slots)[: shape.N]
    return x, jax.tree.map(jnp.asarray, weights), Pool(jnp.asarray(pool.states), windows), jnp.asarray(slots, jnp.int32)


@pytest.mark.parametrize("K", [16, 64])
def test_smaller_heads_equal_the_reference(K):
    x, weights, pool, slots = arguments(Shape(N=3, H=2, slots=5, K=K))
    slots = slots.at[1].set(-1)
    with target("gpu", interpret=True):
        got = jax.jit(partial(decode, impl="gpu"))(x, weights, pool, slots)
    want = decode(x, weights, pool, slots, impl="reference")
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


@pytest.mark.parametrize(("K", "T"), [(32, 3), (128, 1)])
def test_a_drafted_window_equals_the_reference(K, T):
    """Rows of which none to all tokens were accepted, and an idle one."""
    x, weights, pool, slots = arguments(Shape(N=5, H=2, slots=7, K=K), np.float32, T)
    before = jax.tree.map(lambda a: a[::-1], arguments(Shape(N=5, H=2, slots=7, K=K), np.float32, 2)[0])
    given = x, before, jnp.asarray([0, 1, 2, 2, 1], jnp.int32), weights, pool, slots.at[3].set(-1)
    with target("gpu", interpret=True):
        got = jax.jit(partial(kda_verify, impl="gpu", **FORM))(*given)
    want = kda_verify(*given, impl="reference", **FORM)
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), got, want)


def lowered(op, *given):
    """The program as it goes to a card, without one; newer versions of jax look for a real card otherwise."""
    card = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=card)
    with target("gpu"), jax.sharding.use_abstract_mesh(mesh):
        return jax.jit(op).trace(*given).lower(lowering_platforms=("cuda",)).as_text()


@pytest.mark.parametrize("floor", [-5.0, None], ids=["k3", "kimi_linear"])
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_they_lower_for_cuda_at_the_real_sizes_and_update_the_pool_in_place(floor, dtype):
    x, weights, pool, slots = jax.eval_shape(lambda: arguments(SHAPES["h12_64"], dtype))
    text = lowered(partial(kda_decode, decay_floor=floor, eps=1e-5, impl="gpu"), x, weights, pool, slots)
    assert '"kda_decode"' in text and text.count("output_operand_alias<") == 2
    window = jax.eval_shape(lambda: arguments(SHAPES["h12_64"], dtype, 4))[0]
    text = lowered(
        partial(kda_verify, decay_floor=floor, eps=1e-5, impl="gpu"), window, window, slots, weights, pool, slots
    )
    assert '"kda_verify"' in text and text.count("output_operand_alias<") == 2


def test_sizes_that_the_kernel_cannot_take_are_named():
    x, weights, pool, slots = arguments(Shape(N=1, H=1, slots=1, K=48))
    with target("gpu"), pytest.raises(ValueError, match="16, 32, 64 or 128 channels, got 48"):
        decode(x, weights, pool, slots, impl="gpu")
    with target("cpu"), pytest.raises(ValueError, match="it is a kernel for gpu"):
        decode(x, weights, pool, slots, impl="gpu")
