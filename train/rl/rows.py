"""Trajectories to micro-batches: one segment each, packed into rows; only drawn tokens have a weight."""

from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32

from train.rl.rollout import Trajectory

FIELDS = {"ids": np.int32, "targets": np.int32, "segments": np.int32, "weights": np.float32, "advantages": np.float32,
          "sampling_logprobs": np.float32, "raw_logprobs": np.float32}


def micro_batches(
    trajectories: Sequence[Trajectory], advantages: Float32[np.ndarray, "N"], rows: int, row_length: int
) -> list[dict[str, np.ndarray]]:
    """Arrays [rows, row_length] as the losses take them; position t is about the token after ids[t].

    Each trajectory goes into the first row with room for it; the last micro-batch is filled with empty rows. Tokens that
    the model was given have weight, advantage and log-probabilities 0.
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
        batch = {name: np.zeros((rows, row_length), dtype) for name, dtype in FIELDS.items()}
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
                start = at[1].stop
        batches.append(batch)
    return batches
