"""The loop: a run that was stopped, however rudely, goes on as if nothing had happened."""

import json
import logging

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from train.checkpoint import CheckpointError, Checkpoints
from train.config import RunError, TrainConfig
from train.loop import run
from train.step import Sums, Trainer, TrainingError


class Toy(nnx.Module):
    def __init__(self):
        self.config = type("Config", (), {"moe": None})
        self.w = nnx.Param(jnp.array([1.0, -2.0, 0.5]))


def squares(model, batch):
    loss = jnp.sum((batch["x"] @ model.w[...] - batch["y"]) ** 2)
    return Sums(loss, {"loss": loss, "tokens": jnp.float32(batch["y"].size)}, {})


class Numbers:
    """Batches from a generator with a position; `die_at` raises before that step, `bad` makes batches without sense."""

    def __init__(self, die_at=None, bad=(), empty=()):
        self.rng = np.random.default_rng(0)
        self.die_at, self.bad, self.empty = die_at, bad, empty

    def next(self, step):
        if step == self.die_at:
            raise KeyboardInterrupt
        x = self.rng.standard_normal((4, 3)).astype(np.float32)
        y = x.sum(1) * (np.nan if step in self.bad else 1)
        return ([] if step in self.empty else [{"x": x, "y": y.astype(np.float32)}]), {"tokens_in": 4.0}

    def after(self, step, figures):
        return {"heldout_reward": float(step)} if step % 5 == 0 else {}

    def state(self):
        return self.rng.bit_generator.state

    def restore(self, state):
        self.rng.bit_generator.state = state


def config(folder, **changes):
    return TrainConfig(**{"out": str(folder), "steps": 12, "lr": 0.05, "rows": 4, "row_length": 3, "save_every": 3, **changes})


def train(folder, feed=None, **changes):
    """Runs, and returns all metrics but the times."""
    c = config(folder, **changes)
    trainer = Trainer(Toy(), nnx.Param, squares, c, lambda c, w: optax.adam(c.lr))
    entries = run(trainer, feed or Numbers(), c)
    return [{k: v for k, v in entry.items() if k != "seconds"} for entry in entries]


def test_every_step_has_a_line_and_a_picture_is_drawn(tmp_path):
    entries = train(tmp_path)
    assert [entry["step"] for entry in entries] == list(range(13))
    assert entries[0] == {"step": 0, "heldout_reward": 0.0}
    assert all(entry["loss"] > 0 and entry["tokens"] == 4 for entry in entries[1:])
    assert [entry["step"] for entry in entries if "heldout_reward" in entry] == [0, 5, 10]
    assert (tmp_path / "metrics.png").exists()


@pytest.mark.parametrize("stops", [(1,), (5,), (3, 4, 11)])
def test_a_stopped_run_goes_on_with_the_same_losses_bit_for_bit(tmp_path, stops):
    expected = train(tmp_path / "whole")
    for stop in stops:
        with pytest.raises(KeyboardInterrupt):
            train(tmp_path / "broken", Numbers(die_at=stop))
    assert train(tmp_path / "broken") == expected


def test_a_finished_run_does_nothing_more(tmp_path):
    expected = train(tmp_path)
    assert train(tmp_path, Numbers(die_at=1)) == expected


def test_a_run_can_be_made_longer(tmp_path):
    """Adam's rate is constant here, so the first steps do not depend on their number."""
    train(tmp_path / "a", steps=6)
    assert train(tmp_path / "a", steps=12) == train(tmp_path / "b", steps=12)


def test_a_damaged_checkpoint_costs_a_few_steps_and_a_message(tmp_path, caplog):
    expected = train(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        train(tmp_path / "broken", Numbers(die_at=8))
    for file in (tmp_path / "broken" / "checkpoints" / "6").rglob("*"):
        if file.is_file():
            file.write_bytes(b"\0")
    with caplog.at_level(logging.WARNING):
        assert train(tmp_path / "broken") == expected
    assert "going on from step 3 instead" in caplog.text


def test_a_step_without_a_batch_trains_nothing(tmp_path):
    entries = train(tmp_path, Numbers(empty=(1, 2)))
    assert "loss" not in entries[1] and "loss" not in entries[2] and "loss" in entries[3]


def test_a_run_that_diverges_stops_with_its_checkpoints_whole(tmp_path):
    with pytest.raises(TrainingError, match="not finite in 2 steps in a row"):
        train(tmp_path, Numbers(bad=(7, 8)), max_refused=2)
    with Checkpoints(tmp_path / "checkpoints", keep=2) as checkpoints:
        assert checkpoints.steps == [3, 6]
    lines = [json.loads(line) for line in (tmp_path / "metrics.jsonl").read_text().splitlines()]
    assert lines[-1]["refused"] == 1 and lines[-1]["loss"] is None


def test_a_full_disk_stops_the_run_and_the_same_command_goes_on(tmp_path, monkeypatch):
    import orbax.checkpoint as ocp

    expected = train(tmp_path / "whole")
    save = ocp.CheckpointManager.save

    def full(self, step, **kwargs):
        if step == 9:
            raise OSError(28, "No space left on device")
        return save(self, step, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, "save", full)
    with pytest.raises(CheckpointError, match="step 9 could not be written.*the disk is full.*Complete checkpoints: 3, 6"):
        train(tmp_path / "full")
    monkeypatch.undo()
    assert train(tmp_path / "full") == expected


def test_another_run_does_not_go_on_in_the_folder_of_this_one(tmp_path):
    train(tmp_path, steps=6)
    with pytest.raises(CheckpointError, match=r"other settings: lr=0.1 \(was 0.05\)"):
        train(tmp_path, steps=12, lr=0.1)
    with pytest.raises(CheckpointError, match=r"seed=1 \(was 0\)"):
        train(tmp_path, seed=1)
    assert len(train(tmp_path, steps=12, save_every=4, keep=1)) == 13


def test_a_run_that_is_done_says_so(tmp_path, caplog):
    entries = train(tmp_path)
    with caplog.at_level(logging.INFO):
        assert train(tmp_path) == entries
    assert "All 12 steps are done" in caplog.text


def test_a_folder_belongs_to_one_run_at_a_time(tmp_path):
    class Intruder(Numbers):
        def after(self, step, figures):
            with pytest.raises(RunError, match="Another run writes to"):
                train(tmp_path)
            return {}

    assert len(train(tmp_path, Intruder(), steps=2)) == 2


def test_a_run_that_learned_nothing_ends_with_an_error_and_one_refused_step_with_a_warning(tmp_path, caplog):
    with pytest.raises(TrainingError, match="5 of 5 steps were refused, step 1 first.*Nothing was learned"):
        train(tmp_path / "nothing", Numbers(bad=range(1, 6)), steps=5)
    train(tmp_path / "most", Numbers(bad=(3,)), steps=5)
    assert "1 of 5 steps were refused, step 3 first" in caplog.text


def test_an_update_that_is_not_finite_is_refused(tmp_path):
    """Loss and gradient are fine; the weights would not be."""
    with pytest.raises(TrainingError, match="Nothing was learned"):
        train(tmp_path, steps=3, lr=1e38)
