"""Laws of the target: it follows the default device, a named one wins, and no program is taken for another's."""

import jax
import pytest

from pallas_kernels.target import Target, current, device_kind, target, why_not_on


def test_the_target_is_the_default_device():
    assert current() == Target("cpu", interpret=False)
    with jax.default_device(jax.devices("cpu")[1]):
        assert current().platform == "cpu" and device_kind() == "cpu"


def test_a_named_platform_wins_until_its_block_ends():
    with target("tpu", interpret=True):
        assert current() == Target("tpu", interpret=True) and device_kind() is None
        with target("gpu"):
            assert current() == Target("gpu", interpret=False)
        assert why_not_on("tpu") is None
    assert current().platform == "cpu"


def test_a_kernel_says_where_it_would_run():
    assert why_not_on("tpu") == "it is a kernel for tpu, and programs are compiled for cpu here"


def test_a_program_is_traced_again_for_another_target():
    traced = []
    f = jax.jit(lambda x: (traced.append(current().platform), x)[1])
    for _ in range(2):
        f(1.0)
        with target("tpu", interpret=True):
            f(1.0)
    assert traced == ["cpu", "tpu"]


def test_an_unknown_platform_is_refused():
    with pytest.raises(ValueError, match="unknown platform 'cuda'. Choose one of cpu, gpu, tpu"):
        target("cuda")


def test_a_kernel_refuses_operands_spread_over_a_mesh_and_runs_inside_a_shard_map():
    mesh = jax.make_mesh((4, 2), ("data", "tensor"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    inside = []

    def local(x):
        inside.append(why_not_on("tpu"))
        return x

    with target("tpu", interpret=True), jax.set_mesh(mesh):
        assert "data, tensor" in why_not_on("tpu") and "shard_map" in why_not_on("tpu")
        spec = jax.sharding.PartitionSpec("data", "tensor")
        jax.eval_shape(jax.shard_map(local, in_specs=spec, out_specs=spec), jax.ShapeDtypeStruct((8, 8), "float32"))
    assert inside == [None]
