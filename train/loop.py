"""The loop that all training shares: feed, step, report, save; and to go on exactly where a killed run stopped."""

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import jax

from k3jax.weights.writer import locked
from train.checkpoint import Checkpoints
from train.config import RunError, TrainConfig
from train.metrics import Figures, MetricsFile, ProgressLine, plot
from train.settings import settings
from train.step import MicroBatch, Trainer, TrainingError

logger = logging.getLogger(__name__)


@runtime_checkable
class Feed(Protocol):
    """Where batches come from: a data set, or rollouts of the model that is being trained."""

    def next(self, step: int) -> tuple[Sequence[MicroBatch], Figures]:
        """Micro-batches for step 1, 2, … and figures to report. No micro-batch: nothing is trained in this step."""
        ...

    def after(self, step: int, figures: Figures) -> Figures:
        """More figures, measured with the weights after a step (0: before the first)."""
        ...

    def state(self) -> dict[str, Any]:
        """The position, as JSON: `restore` of it gives the same batches again."""
        ...

    def restore(self, state: dict[str, Any]) -> None: ...


@runtime_checkable
class Report(Protocol):
    """What tells the user how it goes."""

    def show(self, step: int, figures: Figures) -> None: ...


def run(
    trainer: Trainer, feed: Feed, config: TrainConfig, *, report: Callable[[int, int], Report] = ProgressLine
) -> list[dict[str, Any]]:
    """Trains up to config.steps, from the last checkpoint in config.out if there is one. Returns all metrics.

    Two runs with the same config have the same losses, bit for bit, however often one of them is killed and started
    again. Checkpoints are written every `save_every` steps and at the end. `report` is called with the number of steps
    and the step that is gone on from.

    Raises RunError if the folder belongs to a run with other settings or one that is still going, and if the run learned
    nothing because every step was refused.
    """
    folder = Path(config.out)
    with _only_run_in(folder), Checkpoints(folder / "checkpoints", keep=config.keep, settings=settings(config)) as checkpoints:
        metrics = MetricsFile(folder)
        start = _resume(trainer, feed, checkpoints)
        if start == 0:
            _require_new(metrics, config)
        metrics.keep_until(start or -1)
        if start >= config.steps:
            logger.info("All %d steps are done. More: steps=…; a new run: another folder (out=…).", config.steps)
        else:
            logger.info("The first step takes the longest: it compiles.")
        shown = report(config.steps, start)
        if start == 0 and (figures := feed.after(0, {})):
            metrics.add(0, figures)
            shown.show(0, figures)
        for step in range(start + 1, config.steps + 1):
            began = time.monotonic()
            batch, extra = feed.next(step)
            figures = {**(trainer.step(batch) if batch else {}), **extra}
            figures |= feed.after(step, figures)
            figures["seconds"] = round(time.monotonic() - began, 3)
            metrics.add(step, figures)
            shown.show(step, figures)
            if step % config.save_every == 0 or step == config.steps:
                checkpoints.save(step, trainer.state, feed.state())
    entries = metrics.read()
    plot(entries, folder / "metrics.png")
    _require_learned(entries)
    return entries


@contextmanager
def _only_run_in(folder: Path) -> Iterator[None]:
    """Holds `folder` against other runs, whose checkpoints and metrics would mix with this one's; the processes of one run
    share it. Raises RunError if another has it."""
    folder.mkdir(parents=True, exist_ok=True)
    if jax.process_index() > 0:
        yield
        return
    with locked(folder, wait=False) as held:
        if held is False:
            raise RunError(f"Another run writes to {folder}: wait for its end, or name another folder (out=…).")
        yield


def _require_new(metrics: MetricsFile, config: TrainConfig) -> None:
    """Raises RunError if checkpoints must have been there: the first is complete when the second is begun."""
    done = max((entry["step"] for entry in metrics.read()), default=0)
    if done > 2 * config.save_every:
        raise RunError(
            f"{metrics.path} tells of {done} steps, but there is no checkpoint beside it to go on from. Put the checkpoints "
            f"back. To begin anew, remove {config.out} or name another folder (out=…)."
        )


def _require_learned(entries: Sequence[dict[str, Any]]) -> None:
    """Warns of refused steps. Raises TrainingError if there were no others."""
    refused = [entry["step"] for entry in entries if entry.get("refused")]
    trained = sum("refused" in entry for entry in entries)
    if not refused:
        return
    text = f"{len(refused)} of {trained} steps were refused, step {refused[0]} first: loss, gradient or update not finite"
    if len(refused) == trained:
        raise TrainingError(f"{text}. Nothing was learned. Try a smaller lr, and look for broken rows in the data.")
    logger.warning("%s.", text)


def _resume(trainer: Trainer, feed: Feed, checkpoints: Checkpoints) -> int:
    """Restores the latest checkpoint and returns its step; 0 without one."""
    found = checkpoints.restore(trainer.state)
    if found is None:
        return 0
    step, state, position = found
    trainer.restore(state)
    try:
        feed.restore(position)
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{checkpoints.folder} belongs to a run with other data or of another kind: its position in the data is none of this "
            "run's. Give the settings of that run, or name another folder (out=…)."
        ) from error
    checkpoints.set_aside_after(step)
    logger.info("Going on from step %d (%s).", step, checkpoints.folder)
    return step
