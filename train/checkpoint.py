"""Checkpoints of a run, through orbax: written in the background, whole or not at all, the last few kept.

A checkpoint holds all that a run needs to go on exactly: trained weights, router biases, optimizer state, step, and the
position in the data. It also holds the run's settings, and the dtype, shape and checksum of every array, because orbax
restores an array with flipped bits without a word.
"""

import errno
import logging
import shutil
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from jaxtyping import Array, UInt32

from k3jax.weights.writer import causes, disk_full
from train.config import RunError
from train.settings import differences
from train.step import State

logger = logging.getLogger(__name__)


class CheckpointError(RunError):
    """A checkpoint could not be written or read; the message says what is left."""


class Checkpoints:
    """The checkpoints in a folder, one per step that was saved. Use as a context manager: leaving waits for the last.

    settings  of the run (train.settings): only checkpoints of a run with the same ones are gone on from
    """

    def __init__(self, folder: str | Path, *, keep: int, settings: Mapping[str, str] | None = None):
        self.settings = dict(settings or {})
        self.folder = Path(folder).absolute()
        if self.folder.exists() and not self.folder.is_dir():
            raise CheckpointError(f"{self.folder} is a file, where a folder of checkpoints is needed: remove it or set out=….")
        options = ocp.CheckpointManagerOptions(max_to_keep=keep, create=True, cleanup_tmp_directories=True)
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
            with suppress(Exception):  # what went wrong has been raised
                self.manager.close()

    @property
    def steps(self) -> list[int]:
        return sorted(self.manager.all_steps())

    def _entries(self) -> list[int]:
        """The steps that the folder names, whatever is left of their checkpoints."""
        return sorted(int(entry.name) for entry in self.folder.iterdir() if entry.name.isdecimal())

    def save(self, step: int, state: State, position: dict[str, Any]) -> None:
        """Starts to write; the state may be donated as soon as this returns. Raises CheckpointError if the disk is full,
        here or at the next call: earlier checkpoints stay whole."""
        self.wait()
        if jax.default_backend() == "cpu":
            state = jax.tree.map(lambda x: x.copy(), state)  # orbax writes from CPU arrays in place
        tree = ocp.args.StandardSave(_as_dict(state))  # type: ignore[call-arg]
        data = ocp.args.JsonSave({"position": position, "arrays": _arrays(state), "settings": self.settings})  # type: ignore[call-arg]
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
        """The latest whole checkpoint, or None if there is no checkpoint at all.

        Damaged ones are passed over with one warning. Raises CheckpointError if all are, if the system fails to read one
        that may be whole, or if the checkpoint is of another model, adapter or optimizer than `like`, or of other settings.
        """
        faults = []
        for step in reversed(self._entries()):
            try:
                state, position = self._read(step, like)
            except CheckpointError:
                raise
            except Exception as error:
                if (passing := _passing(error)) is not None:
                    raise CheckpointError(
                        f"The checkpoint of step {step} in {self.folder} cannot be read now: {passing}. Mend that and start the "
                        "same command again."
                    ) from error
                faults.append(f"step {step} cannot be read ({_first_line(error)})")
                continue
            if faults:
                text = ", the checkpoint of ".join(faults)
                logger.warning("%s: the checkpoint of %s; going on from step %d instead.", self.folder, text, step)
            return step, state, position
        if faults:
            raise CheckpointError(
                f"No checkpoint in {self.folder} can be read:\n  " + "\n  ".join(faults) + "\nPut back a copy that is whole. To "
                f"begin anew, remove {self.folder.parent} or name another folder (out=…)."
            )
        return None

    def _read(self, step: int, like: State) -> tuple[State, dict[str, Any]]:
        """Raises CheckpointError if the checkpoint does not fit `like`, any other error if it is damaged."""
        data = self._items(step, data=ocp.args.JsonRestore())["data"]  # type: ignore[call-arg]
        arrays = data["arrays"]
        if other := differences(data.get("settings", {}), self.settings):
            raise CheckpointError(
                f"{self.folder} belongs to a run with other settings: {'; '.join(other[:8])}{'; …' * (len(other) > 8)}. "
                "Give the settings of that run to go on with it, or name another folder (out=…)."
            )
        self._require_same(step, arrays, like)
        wanted = _as_dict(jax.tree.map(ocp.utils.to_shape_dtype_struct, like))
        state = _as_state(self._items(step, state=ocp.args.StandardRestore(wanted))["state"], like)  # type: ignore[call-arg]
        if changed := [name for name, found in _arrays(state).items() if found != arrays[name]]:
            raise ValueError(f"{len(changed)} arrays are not as they were written, {changed[0]} first")
        return state, data["position"]

    def _items(self, step: int, **items: Any) -> Any:
        return self.manager.restore(step, args=ocp.args.Composite(**items))

    def _require_same(self, step: int, arrays: dict[str, Any], like: State) -> None:
        """Raises CheckpointError unless the arrays of a checkpoint have the names, dtypes and shapes of `like`."""
        stored = {name: kind for name, (kind, _) in arrays.items()}
        wanted = {name: _kind(leaf) for name, leaf in _leaves(like).items()}
        if stored == wanted:
            return
        differing = [name for name in {**stored, **wanted} if stored.get(name) != wanted.get(name)]
        name = max(differing, key=lambda name: name.startswith("weights/"))
        raise CheckpointError(
            f"{self.folder} belongs to a run with another model, adapter or optimizer: the checkpoint of step {step} has "
            f"{stored.get(name, 'nothing')} for {name}, this run needs {wanted.get(name, 'nothing')}. Give the settings of that "
            "run, or name another folder (out=…)."
        )

    def set_aside_after(self, step: int) -> None:
        """Moves later checkpoints, which could not be read, to the folder `damaged` beside this one: the run writes them
        again."""
        aside = self.folder.with_name("damaged")
        for later in [s for s in self._entries() if s > step]:
            aside.mkdir(exist_ok=True)
            shutil.rmtree(aside / str(later), ignore_errors=True)
            (self.folder / str(later)).rename(aside / str(later))
        self.manager.reload()

    def _write_error(self, step: int | None, error: BaseException) -> CheckpointError:
        """What to tell the user; what was written of the checkpoint is removed, for it takes space."""
        for unfinished in self.folder.glob("*.orbax-checkpoint-tmp"):
            shutil.rmtree(unfinished, ignore_errors=True)
        full = disk_full(error)
        what = "the disk is full" if full else _first_line(error)
        where = "A checkpoint" if step is None else f"The checkpoint of step {step}"
        kept = ", ".join(map(str, self._entries())) or "none"
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


def _leaves(state: State) -> dict[str, Array]:
    """weights/…, biases/…, optimizer/0, …, step"""
    flat = jax.tree_util.tree_flatten_with_path(_as_dict(state))[0]
    return {jax.tree_util.keystr(path, simple=True, separator="/"): leaf for path, leaf in flat}


def _kind(leaf: Array) -> str:
    """float32[2,3]"""
    return f"{leaf.dtype}[{','.join(map(str, leaf.shape))}]"


def _arrays(state: State) -> dict[str, list[Any]]:
    """[dtype and shape, checksum] of every array."""
    leaves = _leaves(state)
    sums = jax.device_get({name: _checksum(leaf) for name, leaf in leaves.items()})
    return {name: [_kind(leaf), int(sums[name])] for name, leaf in leaves.items()}


@jax.jit
def _checksum(x: Array) -> UInt32[Array, ""]:
    """The bits of each number, read as unsigned, summed modulo 2^32. Arrays may lie on different devices: one call each."""
    bits = jax.lax.bitcast_convert_type(x, jnp.dtype(f"uint{8 * x.dtype.itemsize}"))
    return jnp.sum(bits.astype(jnp.uint32), dtype=jnp.uint32)


def _passing(error: BaseException) -> OSError | None:
    """The error of the system behind `error`, if it says nothing about the files themselves: no permission, too many open."""
    kinds = (errno.EMFILE, errno.ENFILE, errno.EIO, errno.ENOMEM, errno.EACCES, errno.EPERM, errno.ESTALE, errno.ETIMEDOUT)
    return next((e for e in causes(error) if isinstance(e, OSError) and e.errno in kinds), None)


def _first_line(error: BaseException) -> str:
    text = str(error).strip().splitlines()
    return f"{type(error).__name__}: {text[0][:200]}" if text else type(error).__name__
