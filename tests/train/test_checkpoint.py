"""Checkpoints: what comes back is what went in, and a fault costs one checkpoint, never all."""

import errno
import logging
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from train.checkpoint import CheckpointError, Checkpoints
from train.step import State

# orbax leaves the futures of reads that failed unread
pytestmark = pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")


def state(value: float, size: int = 3) -> State:
    weights = {"a/w": jnp.full((2, size), value, jnp.float32), "a/b": jnp.float32(value + 0.5)}
    biases = {"gate/bias": jnp.full((1, 4), -value, jnp.float32)}
    return State(weights, biases, optax.adamw(1e-3).init(weights), jnp.asarray(7, jnp.int32))


def same(a: State, b: State) -> bool:
    leaves = zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True)
    return jax.tree.structure(a) == jax.tree.structure(b) and all(np.array_equal(x, y) and x.dtype == y.dtype for x, y in leaves)


@pytest.fixture
def saved(tmp_path):
    """Checkpoints of steps 1, 2, 3, of which two are kept."""
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (1, 2, 3):
            checkpoints.save(step, state(step), {"next": step})
    return tmp_path / "c"


def damage(folder):
    """What a crash of the machine leaves: files that are there, but empty."""
    for file in folder.rglob("*"):
        if file.is_file():
            file.write_bytes(b"")


def test_the_latest_checkpoint_comes_back_whole(saved):
    with Checkpoints(saved, keep=2) as checkpoints:
        assert checkpoints.steps == [2, 3]
        step, restored, position = checkpoints.restore(state(0))
    assert (step, position) == (3, {"next": 3})
    assert same(restored, state(3))


def test_arrays_on_several_devices_come_back_on_them(tmp_path):
    mesh = jax.make_mesh((2, 4), ("a", "b"))
    weights = {"w": jnp.arange(64.0).reshape(8, 8), "h": jnp.ones(8, jnp.bfloat16)}
    spread = {name: jax.device_put(x, NamedSharding(mesh, PartitionSpec("b"))) for name, x in weights.items()}
    live, plain = (State(w, {}, optax.adamw(1e-3).init(w), jnp.int32(1)) for w in (spread, weights))
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        checkpoints.save(1, live, {})
        checkpoints.wait()
        for like in (live, plain):
            restored = checkpoints.restore(like)[1]
            assert same(restored, plain) and restored.weights["w"].sharding == like.weights["w"].sharding


def test_a_changed_bit_is_seen(tmp_path):
    """Orbax alone restores it: values have no checksum on disk."""
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        for step in (1, 2):
            noise = {"w": jax.random.normal(jax.random.key(step), (64, 64))}
            checkpoints.save(step, State(noise, {}, (), jnp.int32(step)), {})
    file = max((f for f in (tmp_path / "c" / "2").rglob("*") if f.is_file()), key=lambda f: f.stat().st_size)
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    with Checkpoints(tmp_path / "c", keep=2) as checkpoints:
        assert checkpoints.restore(State(noise, {}, (), jnp.int32(0)))[0] == 1


def test_a_new_folder_has_nothing_to_restore(tmp_path):
    with Checkpoints(tmp_path / "new", keep=2) as checkpoints:
        assert checkpoints.restore(state(0)) is None


def test_the_state_may_be_overwritten_while_it_is_saved(tmp_path):
    overwrite = jax.jit(lambda s: jax.tree.map(lambda x: x * 0, s), donate_argnums=0)
    with Checkpoints(tmp_path / "c", keep=1) as checkpoints:
        live = state(4.0, size=1_000_000)
        checkpoints.save(1, live, {})
        overwrite(live)
        checkpoints.wait()
        assert same(checkpoints.restore(state(0, size=1_000_000))[1], state(4.0, size=1_000_000))


def test_a_damaged_checkpoint_is_passed_over_with_a_warning(saved, caplog):
    damage(saved / "3")
    with Checkpoints(saved, keep=2) as checkpoints, caplog.at_level(logging.WARNING):
        step, restored, _ = checkpoints.restore(state(0))
    assert step == 2 and same(restored, state(2))
    assert "the checkpoint of step 3 cannot be read" in caplog.text
    assert "going on from step 2 instead" in caplog.text


def test_when_all_are_damaged_one_error_names_the_folder(saved):
    damage(saved / "2")
    damage(saved / "3")
    with Checkpoints(saved, keep=2) as checkpoints, pytest.raises(CheckpointError) as error:
        checkpoints.restore(state(0))
    assert f"No checkpoint in {saved} can be read" in str(error.value)
    assert "step 3" in str(error.value) and "step 2" in str(error.value)


def test_a_checkpoint_of_another_model_is_refused(saved):
    with Checkpoints(saved, keep=2) as checkpoints, pytest.raises(CheckpointError, match="another model, adapter or optimizer"):
        checkpoints.restore(state(0, size=5))


def test_a_checkpoint_that_was_being_written_does_not_count(saved):
    shutil.copytree(saved / "3", saved / "4.orbax-checkpoint-tmp")
    with Checkpoints(saved, keep=2) as checkpoints:
        assert checkpoints.restore(state(0))[0] == 3


def test_a_full_disk_is_said_and_leaves_the_previous_checkpoint(saved, monkeypatch):
    import orbax.checkpoint as ocp

    def full(*args, **kwargs):
        raise OSError(errno.ENOSPC, "No space left on device")

    checkpoints = Checkpoints(saved, keep=2)
    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(CheckpointError, match="step 4 could not be written.*the disk is full.*Complete checkpoints: 2, 3"):
        checkpoints.save(4, state(4), {})
    monkeypatch.undo()
    checkpoints.manager.close()
    with Checkpoints(saved, keep=2) as again:
        assert same(again.restore(state(0))[1], state(3))


def test_a_passing_error_of_the_system_costs_no_checkpoint(saved, monkeypatch):
    def fail(*_, **__):
        raise OSError(errno.EMFILE, "Too many open files")

    with Checkpoints(saved, keep=2) as checkpoints:
        monkeypatch.setattr(checkpoints.manager, "restore", fail)
        with pytest.raises(CheckpointError, match="step 3 .* cannot be read now"):
            checkpoints.restore(state(0))
    assert {"2", "3"} <= {entry.name for entry in saved.iterdir()}


def test_damaged_checkpoints_are_set_aside_not_removed(saved):
    damage(saved / "3")
    with Checkpoints(saved, keep=2) as checkpoints:
        step, _, _ = checkpoints.restore(state(0))
        checkpoints.set_aside_after(step)
        assert step == 2 and checkpoints.steps == [2] and (saved.parent / "damaged" / "3").is_dir()
        checkpoints.save(3, state(9), {"next": 9})
    with Checkpoints(saved, keep=2) as checkpoints:
        assert checkpoints.restore(state(0))[2] == {"next": 9}
