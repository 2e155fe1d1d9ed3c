"""The README: its recipes run as they are printed, and its tree names every file."""

import re
from pathlib import Path

import pytest

from train.config import load_config, override
from train.sft import SFTConfig, sft

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """A working directory like the repository's root, with what the recipes write kept out of it."""
    folder = tmp_path_factory.mktemp("root")
    (folder / "configs").symlink_to(ROOT / "configs")
    return folder


@pytest.mark.slow
def test_the_recipes_run_one_after_the_other(folder, monkeypatch, capsys):
    monkeypatch.chdir(folder)
    sft(override(load_config("configs/sft_tiny.py", SFTConfig), ["steps=1", "rows=1", "remat=none"]))
    capsys.readouterr()
    names: dict = {}
    for block in re.findall(r"```python\n(.*?)```", README, re.DOTALL):
        exec(compile(block, "README.md", "exec"), names)
    answers = capsys.readouterr().out.split()
    assert len(answers) == 4 and all(re.fullmatch(r"[-+=\d]+", answer) for answer in answers)
    assert names["y"].shape == (1, 128, names["config"].hidden_size)
    assert (folder / "runs" / "merged" / "tiktoken.model").exists()


def test_the_tree_names_every_file():
    tree = README[README.index("## Tree") : README.index("## Measured")]
    files = [file for package in ("k3jax", "train") for file in (ROOT / package).rglob("*.py")]
    missing = [str(f.relative_to(ROOT)) for f in files if not f.name.startswith("__") and not re.search(rf"\b{f.name}\b", tree)]
    assert not missing


def test_links_lead_somewhere():
    targets = re.findall(r"\]\(([^)#]+)\)", README)
    assert targets and all((ROOT / target).exists() for target in targets if "://" not in target)
