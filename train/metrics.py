"""What a run reports: metrics.jsonl, a picture of the curves, and a line of progress."""

import json
import math
import os
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

Figures = Mapping[str, float]
PLOTTED = ("loss", "reward", "heldout_reward", "correct", "reached", "grad_norm", "logprob_gap")


class MetricsFile:
    """metrics.jsonl: an object per step. Numbers that are not finite become null, as JSON has none."""

    def __init__(self, folder: str | Path):
        self.path = Path(folder) / "metrics.jsonl"
        self.path.parent.mkdir(parents=True, exist_ok=True)

    def add(self, step: int, figures: Figures) -> None:
        entry = {"step": step} | {k: v if math.isfinite(v) else None for k, v in figures.items()}
        with self._writing(), self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(entry) + "\n")

    def read(self) -> list[dict[str, Any]]:
        """All entries up to the first that is damaged: a run that was killed may have cut off the last line."""
        if not self.path.exists():
            return []
        entries = []
        for line in self.path.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                entry = json.loads(line)
            except ValueError:
                break
            if not isinstance(entry, dict) or not isinstance(entry.get("step"), int):
                break
            entries.append(entry)
        return entries

    def keep_until(self, step: int) -> None:
        """Drops the entries of later steps: the run does them again."""
        if not self.path.exists():
            return
        kept = [entry for entry in self.read() if entry["step"] <= step]
        partial = self.path.with_suffix(".partial")
        with self._writing():
            partial.write_text("".join(json.dumps(entry) + "\n" for entry in kept), encoding="utf-8")
            os.replace(partial, self.path)

    @contextmanager
    def _writing(self) -> Iterator[None]:
        """Names the file in errors of writing, which come without it."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error


def plot(entries: Sequence[Mapping[str, Any]], path: str | Path, names: Sequence[str] = PLOTTED) -> None:
    """One panel per metric that occurs, over steps, as a PNG."""
    from matplotlib.figure import Figure  # takes half a second to import

    present = [name for name in names if any(entry.get(name) is not None for entry in entries)]
    if not present:
        return
    figure = Figure(figsize=(6, 2.2 * len(present)), layout="constrained")
    for axes, name in zip(figure.subplots(len(present), 1, sharex=True, squeeze=False)[:, 0], present, strict=True):
        points = [(entry["step"], entry[name]) for entry in entries if entry.get(name) is not None]
        axes.plot(*zip(*points, strict=True), marker="." if len(points) < 60 else None, linewidth=1)
        axes.set_ylabel(name)
        axes.grid(alpha=0.3)
    axes.set_xlabel("step")
    figure.savefig(path, dpi=110)


class Pace:
    """Speed and time left, counted from the end of the first step, which compiles."""

    def __init__(self, steps: int, start: int):
        self.steps, self.first = steps, start + 1
        self.begin = time.monotonic()
        self.tokens = self.timed_steps = 0.0

    def after(self, step: int, figures: Figures) -> tuple[float, float] | None:
        """Tokens/s (from tokens_in) and seconds left after a step; None while no step was timed."""
        now = time.monotonic()
        if step <= self.first:
            self.begin = now
            return None
        self.tokens, self.timed_steps = self.tokens + figures.get("tokens_in", 0.0), self.timed_steps + 1
        seconds = max(now - self.begin, 1e-9)
        return self.tokens / seconds, seconds / self.timed_steps * (self.steps - step)


class ProgressLine:
    """step 40/300  loss 1.234  12.3k tokens/s  2m10s left

    On a terminal the line is rewritten in place; elsewhere one is printed every `interval` seconds.
    """

    def __init__(self, steps: int, start: int = 0, *, interval: float = 5.0, out: TextIO | None = None):
        self.steps, self.interval, self.out = steps, interval, out or sys.stderr
        self.pace, self.last = Pace(steps, start), time.monotonic()

    def show(self, step: int, figures: Figures) -> None:
        pace, now = self.pace.after(step, figures), time.monotonic()
        if now - self.last < (0.2 if self.out.isatty() else self.interval) and 1 < step < self.steps:
            return
        self.last = now
        shown = "  ".join(f"{k} {figures[k]:.4g}" for k in ("loss", "reward", "grad_norm") if k in figures)
        speed = f"  {pace[0]:,.0f} tokens/s  {duration(pace[1])} left" if pace else ""
        line = f"step {step}/{self.steps}  {shown}{speed}"
        self.out.write(f"\r\x1b[K{line}" if self.out.isatty() else f"{line}\n")
        if self.out.isatty() and step == self.steps:
            self.out.write("\n")
        self.out.flush()


class Table:
    """A line per step with the named figures, tokens/s and time left, under a heading that is repeated every `again` lines."""

    def __init__(self, names: Sequence[str], steps: int, start: int = 0, *, again: int = 20, out: TextIO | None = None):
        self.names, self.again, self.out, self.lines = names, again, out or sys.stdout, 0
        self.pace = Pace(steps, start)

    def show(self, step: int, figures: Figures) -> None:
        widths = [max(len(name), 7) for name in self.names]
        if self.lines % self.again == 0:
            heading = "  ".join(f"{name:>{width}}" for name, width in zip(self.names, widths, strict=True))
            self.out.write(f" step  {heading}  tokens/s     left\n")
        cells = (f"{figures[n]:>{w}.4g}" if n in figures else " " * w for n, w in zip(self.names, widths, strict=True))
        pace = self.pace.after(step, figures)
        speed = f"  {pace[0]:>8,.0f}  {duration(pace[1]):>7}" if pace else ""
        self.out.write(f"{step:5}  {'  '.join(cells)}{speed}\n")
        self.out.flush()
        self.lines += 1


def duration(seconds: float) -> str:
    """85 -> 1m25s"""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02}m" if hours else f"{minutes}m{seconds:02}s" if minutes else f"{seconds}s"
