"""Reports of a run."""

import io
import json
import time

from train.metrics import MetricsFile, ProgressLine, Table, duration, plot


def test_metrics_are_json_even_where_a_number_is_not_finite(tmp_path):
    file = MetricsFile(tmp_path / "new")
    file.add(1, {"loss": float("nan"), "norm": float("inf"), "x": 0.5})
    assert json.loads(file.path.read_text()) == {"step": 1, "loss": None, "norm": None, "x": 0.5}


def test_later_steps_and_a_line_cut_off_are_dropped(tmp_path):
    file = MetricsFile(tmp_path)
    for step in range(1, 6):
        file.add(step, {"loss": 1 / step})
    with file.path.open("a") as f:
        f.write('{"step": 6, "lo')
    assert [entry["step"] for entry in file.read()] == [1, 2, 3, 4, 5]
    file.keep_until(3)
    file.add(4, {"loss": 9.0})
    assert [entry["loss"] for entry in file.read()] == [1, 1 / 2, 1 / 3, 9.0]


def test_the_picture_shows_what_there_is(tmp_path):
    plot([{"step": 1, "loss": 2.0, "reward": 0.5}, {"step": 2, "loss": None, "reward": 0.7}], tmp_path / "a.png")
    assert (tmp_path / "a.png").read_bytes().startswith(b"\x89PNG")
    plot([], tmp_path / "none.png")
    assert not (tmp_path / "none.png").exists()


def test_progress_tells_speed_and_time_left():
    out = io.StringIO()
    progress = ProgressLine(4, out=out, interval=0)
    progress.show(1, {"loss": 2.5, "tokens_in": 1000.0})
    time.sleep(0.05)
    progress.show(2, {"loss": 1.5, "tokens_in": 1000.0})
    first, second = out.getvalue().splitlines()
    assert first == "step 1/4  loss 2.5"
    assert "loss 1.5" in second and "tokens/s" in second and second.endswith("0s left")


def test_a_table_has_a_heading_and_blanks_for_what_is_missing():
    out = io.StringIO()
    table = Table(("reward", "heldout_reward"), 3, out=out)
    table.show(0, {"heldout_reward": 0.25})
    table.show(1, {"reward": 0.123456})
    time.sleep(0.01)
    table.show(2, {"reward": 0.5, "tokens_in": 100.0})
    heading, first, second, third = out.getvalue().splitlines()
    assert heading.split() == ["step", "reward", "heldout_reward", "tokens/s", "left"]
    assert first.split() == ["0", "0.25"]
    assert second.split() == ["1", "0.1235"]
    assert third.split()[1] == "0.5" and third.endswith("0s") and len(third) == len(heading)


def test_durations_are_short():
    assert [duration(s) for s in (5, 85, 3 * 3600 + 61)] == ["5s", "1m25s", "3h01m"]
