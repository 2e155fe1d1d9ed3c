"""Checkpoints of a run, through orbax: written in the background, whole or not at all, the last few kept.

A checkpoint holds all that a run needs to go on exactly: trained weights, router biases, optimizer state, step, and the
position in the data.
"""

import errno
import logging
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from train.config import RunError
from train.step import State

logger = logging.getLogger(__name__)


class CheckpointError(RunError):
    """A checkpoint could not be written or read; the message says what is left."""


class Checkpoints:
    """The checkpoints in a folder, one per step that was saved. Use as a context manager: leaving waits for the last."""

    def __init__(self, folder: str | Path, *, keep: int):
        self.folder = Path(folder).absolute()
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, enable_async_checkpointing=True)
        try:
            self.manager = ocp.CheckpointManager(self.folder, options=options)
        except OSError as error:
            raise CheckpointError(f"{self.folder} cannot hold checkpoints: {error}") from error

    def __enter__(self) -> "Checkpoints":
        return self

    def __exit__(self, kind: Any, error: Any, trace: Any) -> None:
        try:
            if kind is None:
                self.wait()
        finally:
            self.manager.close()

    @property
    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def save(self, step: int, state: State, position: dict[str, Any]) -> None:
        """Starts to write; the state may be donated as soon as this returns. Raises CheckpointError if the disk is full,
        here or at the next call: earlier checkpoints stay whole."""
        self.wait()
        if jax.default_backend() == "cpu":
            state = jax.tree.map(lambda x: x.copy(), state)  # orbax writes from CPU arrays in place
        tree = ocp.args.StandardSave(_as_dict(state))  # type: ignore[call-arg]
        data = ocp.args.JsonSave(position)  # type: ignore[call-arg]
        try:
            self.manager.save(step, args=ocp.args.Composite(state=tree, data=data))
        except Exception as error:
            raise self._write_error(step, error) from error

    def wait(self) -> None:
        """Until the last save is complete. Raises CheckpointError if it failed."""
        try:
            self.manager.wait_until_finished()
        except Exception as error:
            raise self._write_error(None, error) from error

    def restore(self, like: State) -> tuple[int, State, dict[str, Any]] | None:
        """The latest readable checkpoint, or None if there is no checkpoint at all.

        One that is damaged is passed over with a warning. Raises CheckpointError if all are, or if the checkpoint is of
        another model or optimizer than `like`.
        """
        wanted = _as_dict(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        faults = []
        for step in reversed(self.steps):
            try:
                args = ocp.args.Composite(
                    state=ocp.args.StandardRestore(wanted), data=ocp.args.JsonRestore()  # type: ignore[call-arg]
                )
                read = self.manager.restore(step, args=args)
            except Exception as error:
                faults.append(f"step {step}: {_first_line(error)}")
                logger.warning("%s: the checkpoint of step %d cannot be read (%s).", self.folder, step, _first_line(error))
                continue
            if faults:
                logger.warning("%s: going on from step %d instead.", self.folder, step)
            return step, _as_state(read["state"], like), read["data"]
        if faults:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read:\n  " + "\n  ".join(faults) + "\nEither they are damaged, or they "
                "belong to a run with another model, adapter or optimizer. Name another folder (out=…), or remove this one."
            )
        return None

    def discard_after(self, step: int) -> None:
        """Removes later checkpoints, which could not be read: the run will write them again."""
        for later in [s for s in self.steps if s > step]:
            self.manager.delete(later)

    def _write_error(self, step: int | None, error: BaseException) -> CheckpointError:
        full = any(getattr(e, "errno", None) == errno.ENOSPC for e in _causes(error)) or "No space left" in str(error)
        what = "the disk is full" if full else _first_line(error)
        where = "A checkpoint" if step is None else f"The checkpoint of step {step}"
        kept = ", ".join(map(str, self.steps)) or "none"
        return CheckpointError(
            f"{where} could not be written to {self.folder}: {what}. Complete checkpoints: {kept}. "
            f"{'Free some space' if full else 'Mend the cause'} and start the same command again; it goes on from the last."
        )


def _as_dict(state: State) -> dict[str, Any]:
    """Leaves by their number: optimizer states hold tuples and names that a checkpoint need not know."""
    return {
        "weights": dict(state.weights), "biases": dict(state.biases), "step": state.step,
        "optimizer": {str(i): leaf for i, leaf in enumerate(jax.tree.leaves(state.optimizer))},
    }


def _as_state(tree: dict[str, Any], like: State) -> State:
    leaves = [tree["optimizer"][str(i)] for i in range(len(tree["optimizer"]))]
    return State(tree["weights"], tree["biases"], jax.tree.structure(like.optimizer).unflatten(leaves), tree["step"])


def _causes(error: BaseException | None) -> list[BaseException]:
    found: list[BaseException] = []
    while error is not None and error not in found:
        found.append(error)
        error = error.__cause__ or error.__context__
    return found


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:300]}" if text else type(error).__name__
