"""The demo behind `make demo`: nano learns two tasks by RL on this machine, then base and adapters answer side by side.

    python -m train.demo
"""

import argparse
import dataclasses
import json
import logging
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax

from k3jax.chat import encode_chat
from k3jax.chat.format import stop_token_ids
from k3jax.chat.parser import parse_completion
from k3jax.lora import Adapters
from k3jax.sampling import Sampler, SamplingParams
from k3jax.tokenizer import Tokenizer
from k3jax.weights import load
from train.adapter import Subject
from train.cli import guarded
from train.config import load_config
from train.metrics import duration
from train.rl.env import Episode
from train.rl.loop import RLConfig, train_rl

CONFIGS = {"countdown": "configs/nano_countdown.py", "frozen_lake": "configs/nano_frozen_lake.py"}


def demo(out: Path, seed: int, steps: int | None) -> None:
    """Trains both adapters on one model, prints and draws their curves, and compares the answers."""
    began = time.monotonic()
    jax.config.update("jax_compilation_cache_dir", str(Path(".jax_cache").absolute()))
    configs = {name: load_config(path, RLConfig) for name, path in CONFIGS.items()}
    configs = {
        name: dataclasses.replace(c, seed=seed, out=str(out / name), steps=c.steps if steps is None else steps)
        for name, c in configs.items()
    }
    checkpoint = next(iter(configs.values())).checkpoint
    model, tokenizer = load(checkpoint, dtype="float32"), Tokenizer(checkpoint)
    adapters = Adapters(model, columns=sum(c.adapter.max_rank for c in configs.values()))
    curves: dict[str, list[dict[str, Any]]] = {}
    for name, config in configs.items():
        adapters.add(name, config.adapter, seed=seed)
        print(f"\n{name}: LoRA of rank {config.adapter.rank}, {adapters.trainable_parameters(name):,} parameters, "
              f"{config.groups} x {config.group_size} episodes a step; the first step compiles", flush=True)
        train_rl(config, Subject(model, tokenizer, adapters, name))
        lines = (Path(config.out) / "metrics.jsonl").read_text().splitlines()
        curves[name] = [json.loads(line) for line in lines]
        draw(name, curves[name], out / f"{name}.png")
    compare(Sampler(model, tokenizer, capacity=512), tokenizer, adapters, configs)
    for name, curve in curves.items():
        heldout = [entry["heldout_reward"] for entry in curve if "heldout_reward" in entry]
        print(f"{name}: held-out reward {heldout[0]:.3f} -> {heldout[-1]:.3f}; picture {out / f'{name}.png'}")
    print(f"Done in {duration(time.monotonic() - began)}.")


def draw(name: str, curve: Sequence[dict[str, Any]], path: Path) -> None:
    """The reward per step; for Frozen Lake how many episodes reached the goal and how many failed."""
    from matplotlib.figure import Figure  # takes half a second to import

    figure = Figure(figsize=(7, 3.2), layout="constrained")
    axes = figure.subplots()
    played = [entry for entry in curve if "reward" in entry]
    steps = [entry["step"] for entry in played]
    if "reached" in played[0]:
        reached = [entry["reached"] for entry in played]
        axes.bar(steps, reached, color="tab:green", label="reached the goal")
        axes.bar(steps, [1 - share for share in reached], bottom=reached, color="tab:red", label="failed")
        axes.set_ylabel("share of episodes")
    else:
        axes.plot(steps, [entry["reward"] for entry in played], marker=".", label="training tasks")
        heldout = [(entry["step"], entry["heldout_reward"]) for entry in curve if "heldout_reward" in entry]
        axes.plot(*zip(*heldout, strict=True), marker="o", label="held-out tasks")
        axes.set_ylabel("reward")
    axes.set_ylim(0, 1)
    axes.set_xlabel("step")
    axes.set_title(name.replace("_", " "))
    axes.legend(loc="lower right")
    figure.savefig(path, dpi=110)


def compare(sampler: Sampler, tokenizer: Tokenizer, adapters: Adapters, configs: dict[str, RLConfig]) -> None:
    """One batch: held-out prompts of both tasks, each answered by the base and by both adapters, the prompt cached once."""
    choices = {"base": 0} | {name: adapters.id(name) for name in configs}
    episodes = [(name, episode) for name, config in configs.items() for episode in config.environment.heldout(6)]
    params = SamplingParams(max_tokens=64, seed=0, stop_ids=tuple(stop_token_ids(tokenizer)))
    prompts = [encode_chat(tokenizer, episode.messages(), tools=episode.tools, thinking=False) for _, episode in episodes]
    for adapter in choices.values():
        for prompt in prompts:
            sampler.prefix(prompt[:-1], adapter)
    rows = [(prompt, adapter) for prompt in prompts for adapter in choices.values()]
    answers = [row[0] for row in sampler.generate([p for p, _ in rows], params, [a for _, a in rows])]
    print("\nThe same held-out prompts in one batch, drawn at temperature 1:\n")
    print(f"{'prompt':24}" + "".join(f"{choice:>16}" for choice in choices))
    for n, (_, episode) in enumerate(episodes):
        texts = [shown(tokenizer, answer.ids) for answer in answers[n * len(choices) : (n + 1) * len(choices)]]
        print(f"{prompt_text(episode):24}" + "".join(f"{text:>16}" for text in texts))
    total, cached = (sum(getattr(a, field) for a in answers) for field in ("prompt_tokens", "cached_tokens"))
    print(f"\n{cached} of {total} prompt tokens came from the cache.\n")


def prompt_text(episode: Episode) -> str:
    return str(episode.messages()[-1]["content"]).replace("\n", "/")


def shown(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """An answer's text, or the arguments of its tool call."""
    message = parse_completion(tokenizer, ids, thinking=False).message()
    calls: Sequence[dict[str, Any]] = message.get("tool_calls") or ()
    pick: Callable[[dict[str, Any]], str] = lambda call: ",".join(  # noqa: E731
        map(str, json.loads(call["function"]["arguments"]).values())
    )
    return " ".join(map(pick, calls)) or str(message.get("content") or "-")


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m train.demo", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="examples:\n  python -m train.demo\n  python -m train.demo --seed 1 --steps 4 --out runs/quick",
    )
    parser.add_argument("--out", type=Path, default=Path("runs/demo"), help="folder for metrics, pictures and adapters")
    parser.add_argument("--seed", type=int, default=0, help="of tasks, adapters and samples")
    parser.add_argument("--steps", type=int, help="RL steps per task instead of the configs'")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING, format="%(message)s")
    return guarded(lambda: demo(arguments.out, arguments.seed, arguments.steps))


if __name__ == "__main__":
    sys.exit(main())
