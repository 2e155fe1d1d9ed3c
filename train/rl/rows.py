"""Trajectories to micro-batches: one segment each, packed into rows; only drawn tokens have a weight."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float32

from train.rl.rollout import Trajectory

FIELDS = {"ids": np.int32, "targets": np.int32, "segments": np.int32, "weights": np.float32, "advantages": np.float32,
          "sampling_logprobs": np.float32, "raw_logprobs": np.float32}


def micro_batches(
    trajectories: Sequence[Trajectory], advantages: Float32[np.ndarray, " N"], rows: int, row_length: int
) -> list[dict[str, Any]]:
    """Arrays [rows, row_length] as the losses take them; position t is about the token after ids[t].

    Each trajectory goes into the first row with room for it; the last micro-batch is filled with empty rows. Tokens that
    the model was given have weight, advantage and log-probabilities 0. If the trajectories know their routes, `picks` holds
    them as the model takes them: per stack of layers experts [layers, rows, row_length, k], or None.
    """
    packed: list[list[int]] = []
    room: list[int] = []
    for i, trajectory in enumerate(trajectories):
        length = len(trajectory.ids) - 1
        assert length <= row_length
        row = next((r for r, left in enumerate(room) if left >= length), len(room))
        if row == len(room):
            packed.append([])
            room.append(row_length)
        packed[row].append(i)
        room[row] -= length
    batches = []
    for first in range(0, len(packed), rows):
        batch: dict[str, Any] = {name: np.zeros((rows, row_length), dtype) for name, dtype in FIELDS.items()}
        routes = trajectories[packed[first][0]].routes
        if routes is not None:
            batch["picks"] = tuple(None if r is None else _any_experts(r, rows, row_length) for r in routes)
        for row, members in enumerate(packed[first : first + rows]):
            start = 0
            for segment, i in enumerate(members, 1):
                t = trajectories[i]
                at = (row, slice(start, start + len(t.ids) - 1))
                drawn = np.array(t.sampled[1:], np.float32)
                batch["ids"][at], batch["targets"][at] = t.ids[:-1], t.ids[1:]
                batch["segments"][at], batch["weights"][at] = segment, drawn
                batch["advantages"][at] = advantages[i] * drawn
                batch["sampling_logprobs"][at], batch["raw_logprobs"][at] = t.logprobs[1:], t.raw_logprobs[1:]
                for picks, experts in zip(batch.get("picks", ()), t.routes or (), strict=True):
                    if picks is not None and experts is not None:
                        picks[:, *at] = experts[:, : len(t.ids) - 1]
                start = at[1].stop
        batches.append(batch)
    return batches


def _any_experts(routes: np.ndarray, rows: int, row_length: int) -> np.ndarray:
    """Experts 0..k-1 everywhere: padding goes nowhere, whatever is picked for it."""
    layers, _, k = routes.shape
    return np.broadcast_to(np.arange(k, dtype=np.int32), (layers, rows, row_length, k)).copy()
