"""Plays episodes with a Sampler: several turns, the tokens of earlier turns kept exactly as they were sampled."""

import random
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np

from k3jax.chat import encode_chat, encode_chat_with_roles
from k3jax.chat.format import ChatError, stop_token_ids
from k3jax.chat.parser import parse_completion
from k3jax.config import ConfigError
from k3jax.sampling import Routes, Sample, Sampler, SamplingParams
from k3jax.tokenizer import Tokenizer
from train.rl.env import Episode, Message


@dataclass
class Trajectory:
    """One episode: its tokens, which of them the model drew, and what came of it."""

    episode: Episode
    group: int  # label of the prompt
    messages: list[Message]
    ids: list[int] = field(default_factory=list)
    sampled: list[bool] = field(default_factory=list)  # per token of ids, as are the next two
    logprobs: list[float] = field(default_factory=list)  # of the distribution drawn from; 0 where not sampled
    raw_logprobs: list[float] = field(default_factory=list)  # of the model at temperature 1
    routes: Routes | None = None  # experts of the tokens but the last, by position (k3jax.sampling.Sample); None: not known
    reward: float = 0.0  # sum over turns
    turns: int = 0
    done: bool = False
    prompt_tokens: int = 0  # summed over turns
    cached_tokens: int = 0  # of those, taken from the Sampler's cache

    def read(self, ids: Sequence[int]) -> None:
        """Tokens that the model is given."""
        self.ids += ids
        self.sampled += [False] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.raw_logprobs += [0.0] * len(ids)

    def draw(self, sample: Sample, most: int) -> list[int]:
        """Tokens that the model drew, at most that many."""
        ids = sample.ids[:most]
        self.ids += ids
        self.sampled += [True] * len(ids)
        self.logprobs += sample.logprobs[:most]
        self.raw_logprobs += sample.raw_logprobs[:most]
        self.routes = sample.routes  # those of earlier turns are in it
        self.prompt_tokens += sample.prompt_tokens
        self.cached_tokens += sample.cached_tokens
        return ids


@dataclass(frozen=True, kw_only=True)
class Player:
    """How episodes are played.

    capacity         most tokens of an episode, the Sampler's
    max_turn_tokens  most tokens of a turn. A turn that is cut off earns nothing and ends the episode, as does an episode
                     that would outgrow the capacity or max_turns
    """

    sampler: Sampler
    tokenizer: Tokenizer
    adapter: int
    capacity: int
    max_turn_tokens: int
    max_turns: int = 1
    temperature: float = 1.0
    thinking: bool = False

    def play(self, groups: Sequence[Sequence[Episode]], seed: str, *, rows: int | None = None) -> list[Trajectory]:
        """Plays groups of equally many episodes to their ends; those in a group have one prompt and share its prefill.

        Equal seeds and weights give equal trajectories.
        rows  compile for that many groups, though there are fewer
        """
        self.sampler.flush()  # states kept from earlier calls could change the last bits
        rows, size = rows or len(groups), len(groups[0])
        played = [[self._begin(number, episode) for episode in group] for number, group in enumerate(groups)]
        self._turn(played, rows, size, f"{seed}/0")
        trajectories = [trajectory for group in played for trajectory in group]
        for turn in range(1, self.max_turns):
            alive = [[t] for t in trajectories if not t.done]
            if not alive:
                break
            self._turn(alive, rows * size, 1, f"{seed}/{turn}")
        return trajectories

    def _begin(self, group: int, episode: Episode) -> Trajectory:
        trajectory = Trajectory(episode, group, episode.messages())
        trajectory.read(self._encode(trajectory))
        if len(trajectory.ids) >= self.capacity:
            raise ConfigError(
                f"A prompt has {len(trajectory.ids)} tokens, but an episode may have {self.capacity}. Use longer rows."
            )
        return trajectory

    def _encode(self, trajectory: Trajectory) -> list[int]:
        tools = trajectory.episode.tools
        return encode_chat(self.tokenizer, cast(Any, trajectory.messages), tools=tools, thinking=self.thinking)

    def _turn(self, requests: list[list[Trajectory]], rows: int, size: int, seed: str) -> None:
        """One turn of every trajectory; the `size` ones in a request have equal tokens so far.

        Two things keep the number of compiled shapes small. Requests that nobody needs fill up to `rows`, whatever the
        number of episodes still alive. And the first request may use the whole capacity, so that the caches of all turns
        are of one size; what it draws beyond max_turn_tokens is dropped.
        """
        stops = tuple(stop_token_ids(self.tokenizer))
        prompts, params = [], []
        for number, members in enumerate(requests):
            room = self.capacity - len(members[0].ids)
            most = room if number == 0 else min(room, self.max_turn_tokens)
            prompts.append(members[0].ids)
            params.append(self._params(most, len(members), stops, f"{seed}/{number}"))
        idle = rows - len(requests)
        prompts += [[stops[0]]] * idle
        params += [self._params(1, size, stops, seed)] * idle
        answers = self.sampler.generate(prompts, params, self.adapter, keep_sessions=self.max_turns > 1)
        for members, samples in zip(requests, answers, strict=False):
            for trajectory, sample in zip(members, samples, strict=True):
                self._take(trajectory, sample)

    def _params(self, most: int, n: int, stops: tuple[int, ...], seed: str) -> SamplingParams:
        number = random.Random(seed).getrandbits(62)
        return SamplingParams(max_tokens=most, temperature=self.temperature, n=n, stop_ids=stops, seed=number)

    def _take(self, trajectory: Trajectory, sample: Sample) -> None:
        """Adds the model's turn, plays it, and appends what the episode answers."""
        drawn = trajectory.draw(sample, self.max_turn_tokens)
        calls = sum(len(m.get("tool_calls") or ()) for m in trajectory.messages)
        parsed = parse_completion(self.tokenizer, drawn, thinking=self.thinking, first_call=calls)
        message = parsed.message() if parsed.ended else {"role": "assistant", "content": ""}
        result = trajectory.episode.step(message)
        trajectory.turns += 1
        trajectory.reward += result.reward
        trajectory.done = result.done or not parsed.ended or trajectory.turns == self.max_turns
        if trajectory.done:
            return
        trajectory.messages += [message, *result.messages]
        answer = self._answer(trajectory, len(result.messages))
        if answer is None or len(trajectory.ids) + len(answer) >= self.capacity:
            trajectory.done = True
        else:
            trajectory.read(answer)

    def _answer(self, trajectory: Trajectory, new: int) -> list[int] | None:
        """The tokens after the model's turn: the last `new` messages and the opener of its next turn. What it drew is never
        encoded again. None if the conversation cannot be written in the chat format."""
        try:
            chat = encode_chat_with_roles(
                self.tokenizer, cast(Any, trajectory.messages), tools=trajectory.episode.tools, thinking=self.thinking
            )
        except ChatError:
            return None
        last = len(trajectory.messages) - new - 1
        return chat.ids[int(np.flatnonzero(chat.message == last)[-1]) + 1 :].tolist()
