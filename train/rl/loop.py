"""Reinforcement learning of a LoRA adapter: rollouts in groups, standardised advantages, one optimizer step per batch.

    train_rl(config)            # or: python -m train.rl configs/nano_countdown.py
"""

import logging
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from k3jax.config import ConfigError
from k3jax.sampling import Sampler
from train.adapter import AdapterConfig, Subject, load_subject
from train.config import require_positive, require_whole
from train.loop import run
from train.loss import loss_named
from train.metrics import Figures, Table
from train.objective import TokenObjective, target_logprobs
from train.rl.env import Environment
from train.rl.objective import gap_grows, group_advantages
from train.rl.rollout import Player, Trajectory
from train.rl.rows import micro_batches
from train.step import MicroBatch

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True)
class RLConfig(AdapterConfig):
    """A step samples `group_size` episodes on each of `groups` tasks. An episode has at most row_length + 1 tokens.

    Groups whose rewards are all equal are left out; the loss is the mean over the tokens drawn in the others.
    """

    environment: Environment
    groups: int
    group_size: int
    max_turn_tokens: int
    max_turns: int = 1
    temperature: float = 1.0
    thinking: bool = False
    loss: str = "importance_sampling"  # a name of train.loss
    loss_config: Mapping[str, float] = field(default_factory=dict)
    kl: float = 0.0  # coefficient of the divergence from the checkpoint without adapter
    heldout: int = 64  # tasks, each played group_size times
    heldout_every: int = 10  # steps; also before the first and after the last

    def __post_init__(self) -> None:
        super().__post_init__()
        require_whole(self, 1, "groups", "max_turn_tokens", "max_turns", "heldout_every")
        require_whole(self, 2, "group_size")
        require_whole(self, 0, "heldout")
        require_positive(self, "temperature")
        if not (math.isfinite(self.kl) and self.kl >= 0):
            raise ConfigError(f"kl={self.kl!r}: a number of at least 0 is needed.")
        needs = set(loss_named(self.loss, self.loss_config).needs)
        if "advantages" not in needs:
            raise ConfigError(f"loss={self.loss!r} does not use advantages: choose importance_sampling, ppo, cispo or dro.")


class RolloutFeed:
    """Batches for train.loop from episodes that the model plays as it is now. The step decides tasks and seeds.

    The trainer replays the experts that the sampler chose: rounding moves some tokens to others, whose log-probabilities
    differ much more than rounding does.
    """

    def __init__(self, subject: Subject, config: RLConfig):
        assert subject.tokenizer is not None
        self.config, self.subject = config, subject
        most = config.groups * config.group_size
        capacity, context = config.row_length + 1, subject.model.config.context_length
        if capacity > context:
            raise ConfigError(
                f"row_length={config.row_length}: an episode has up to {capacity} tokens, but the context of {config.checkpoint} "
                f"is {context} tokens. Use row_length={context - 1} or less."
            )
        sampler = Sampler(
            subject.model, subject.tokenizer, capacity=capacity, max_batch=1 << (most - 1).bit_length(),
            routes=subject.model.config.moe is not None,
        )
        self.player = Player(
            sampler=sampler, tokenizer=subject.tokenizer, adapter=subject.adapter, capacity=capacity,
            max_turn_tokens=config.max_turn_tokens, max_turns=config.max_turns, temperature=config.temperature,
            thinking=config.thinking,
        )
        self.gaps: list[float] = []  # mean |trainer - sampler| logprob of each step, nats
        self.reference = jax.jit(partial(_reference_logprobs, config.logprob_chunk), static_argnums=0) if config.kl else None

    def next(self, step: int) -> tuple[Sequence[MicroBatch], Figures]:
        c = self.config
        tasks = range((step - 1) * c.groups, step * c.groups)
        episodes = [[c.environment.train(c.seed, task) for _ in range(c.group_size)] for task in tasks]
        played = self.player.play(episodes, f"train/{c.seed}/{step}")
        rewards = np.array([t.reward for t in played])
        advantages = group_advantages(rewards, np.array([t.group for t in played]))
        kept = np.flatnonzero(advantages.kept)
        batch = micro_batches([played[i] for i in kept], advantages.advantages[kept], c.rows, c.row_length)
        if self.reference is not None:
            graphdef, state = nnx.split(self.subject.model)
            batch = [micro | {"reference_logprobs": self.reference(graphdef, state, micro)} for micro in batch]
        figures = _summary(played) | {
            "groups_kept": float(advantages.groups_kept),
            "tokens_in": float(sum(len(t.ids) for t in played)),
        }
        return batch, figures

    def after(self, step: int, figures: Figures) -> Figures:
        """Watches the gap between sampler and trainer; every heldout_every steps plays the held-out tasks."""
        if "logprob_gap" in figures:
            before = gap_grows(self.gaps)
            self.gaps.append(figures["logprob_gap"])
            if gap_grows(self.gaps) and not before:
                logger.warning(
                    "Step %d: the log-probabilities of sampler and trainer drift apart (mean gap %.2g, at first %.2g nats). "
                    "The sampler may be using old weights or caches.", step, self.gaps[-1], self.gaps[0],
                )
        c = self.config
        if c.heldout and (step % c.heldout_every == 0 or step == c.steps):
            return {f"heldout_{name}": value for name, value in _summary(self._play_heldout()).items()}
        return {}

    def _play_heldout(self) -> list[Trajectory]:
        """In calls of the shapes that training compiles anyway."""
        c = self.config
        groups = list(zip(*(c.environment.heldout(c.heldout) for _ in range(c.group_size)), strict=True))
        played = []
        for first in range(0, len(groups), c.groups):
            played += self.player.play(groups[first : first + c.groups], f"heldout/{c.seed}/{first}", rows=c.groups)
        return played

    def state(self) -> dict[str, Any]:
        return {"gaps": self.gaps}

    def restore(self, state: dict[str, Any]) -> None:
        self.gaps = list(state["gaps"])


def train_rl(config: RLConfig, subject: Subject | None = None) -> Subject:
    """Runs the whole training, printing a table of the rewards. Returns the model with the adapter, which it also saves in
    out/adapter."""
    subject = subject or load_subject(config)
    if subject.tokenizer is None:
        raise ConfigError(f"{config.checkpoint} has no tokenizer, which RL needs: add tiktoken.model and tokenizer_config.json.")
    loss = loss_named(config.loss, config.loss_config)
    trainer = subject.trainer(lambda id: TokenObjective(loss, config.logprob_chunk, adapter=id, kl=config.kl), config)
    names = tuple(config.environment.train(config.seed, 0).metrics)
    shown = ("reward", *names, "heldout_reward", "groups_kept", "turns", "logprob_gap", "grad_norm", "seconds")
    run(trainer, RolloutFeed(subject, config), config, report=partial(Table, shown))
    print(f"Saved {subject.save(config)}.")
    return subject


def _summary(played: Sequence[Trajectory]) -> dict[str, float]:
    """Means over episodes, the environment's own metrics among them, and how many prompt tokens came from the cache."""
    means = {"reward": [t.reward for t in played], "turns": [t.turns for t in played],
             "drawn_tokens": [sum(t.sampled) for t in played]}
    means |= {name: [t.episode.metrics[name] for t in played] for name in played[0].episode.metrics}
    total = max(sum(t.prompt_tokens for t in played), 1)
    return {name: float(np.mean(values)) for name, values in means.items()} | {
        "cached_share": sum(t.cached_tokens for t in played) / total
    }


def _reference_logprobs(chunk: int, graphdef: Any, state: nnx.State, batch: MicroBatch) -> jax.Array:
    """Those of the model without adapter, which chooses its own experts."""
    batch = {k: jnp.asarray(v) for k, v in batch.items() if k != "picks"}
    return target_logprobs(nnx.merge(graphdef, state), batch, 0, chunk)[0]
