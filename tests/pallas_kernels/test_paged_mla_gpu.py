"""The kernel for NVIDIA GPUs of attention over paged latents: what is its own; test_paged_mla.py holds the op's laws."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.paged_mla import gpu, paged_latent_attention
from pallas_kernels.target import target

L, R, PAGE, PAGES = 32, 16, 16, 6
LENGTHS = np.array([0, 3, 40, 96], np.int32)


def draw(T, H):
    rng = np.random.default_rng(0)
    q, pool = rng.normal(size=(4, T, H, L + R)), rng.normal(size=(4 * PAGES, PAGE, L + R))
    table = jnp.asarray(rng.permutation(4 * PAGES).reshape(4, PAGES), jnp.int32)
    return jnp.asarray(q, jnp.float32), jnp.asarray(pool, jnp.float32), table, jnp.asarray(LENGTHS)


def formula(q, pool, table, lengths, scale):
    """Query by query, in float64."""
    q, pool = np.asarray(q, np.float64), np.asarray(pool, np.float64)
    out = np.zeros((*q.shape[:3], L))
    for b, t, h in np.ndindex(*out.shape[:3]):
        if (n := int(lengths[b]) - q.shape[1] + t + 1) > 0:
            latent = pool[np.asarray(table)[b]].reshape(-1, L + R)[:n]
            prob = np.exp(scale * latent @ q[b, t, h])
            out[b, t, h] = prob @ latent[:, :L] / prob.sum()
    return out


@pytest.mark.parametrize(("share", "shares"), [(96, 1), (48, 2), (16, 6)])
def test_any_split_of_the_sequences_and_of_the_rows_equals_the_formula(share, shares, monkeypatch):
    """24 rows are two programs of 16; a share may have no block of a sequence."""
    monkeypatch.setattr(gpu, "SHARE", share)
    given = draw(T=8, H=3)
    op = partial(paged_latent_attention, value_dim=L, scale=0.2, impl="gpu")
    with target("gpu", interpret=True):
        assert f"f32[{shares},4,32,{L}]" in str(jax.make_jaxpr(op)(*given))
        np.testing.assert_allclose(jax.jit(op)(*given), formula(*given, 0.2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize(("sequences", "T", "heads"), [(64, 1, 12), (256, 4, 24), (1, 1, 96)])
def test_it_lowers_for_cuda_at_the_real_sizes(sequences, T, heads, dtype):
    q, pool = jax.ShapeDtypeStruct((sequences, T, heads, 576), dtype), jax.ShapeDtypeStruct((4096, 64, 576), dtype)
    table, lengths = (jax.ShapeDtypeStruct(s, jnp.int32) for s in ((sequences, 128), (sequences,)))
    card = jax.sharding.AbstractDevice("NVIDIA H100", None, "gpu")  # without one, newer versions of jax look for a real card
    mesh = jax.sharding.AbstractMesh((1,), ("data",), (jax.sharding.AxisType.Auto,), abstract_device=card)
    op = jax.jit(partial(paged_latent_attention, value_dim=512, scale=0.07, impl="gpu"))
    with target("gpu"), jax.sharding.use_abstract_mesh(mesh):
        text = op.trace(q, pool, table, lengths).lower(lowering_platforms=("cuda",)).as_text()
    assert '"paged_mla"' in text and "stablehlo.gather" not in text


def test_sizes_that_the_kernel_cannot_take_are_named():
    q, pool, table, lengths = draw(T=1, H=3)
    with target("gpu"):
        with pytest.raises(ValueError, match="values must have a power of two of numbers, from 16 on, got 24"):
            paged_latent_attention(q, pool, table, lengths, value_dim=24, scale=1.0, impl="gpu")
        with pytest.raises(ValueError, match="pages must have a multiple of 16 tokens, got 8"):
            paged_latent_attention(q, pool[:, :8], table, lengths, value_dim=L, scale=1.0, impl="gpu")
    with pytest.raises(ValueError, match="it is a kernel for gpu"):
        paged_latent_attention(q, pool, table, lengths, value_dim=L, scale=1.0, impl="gpu")
