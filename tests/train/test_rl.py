"""Reinforcement learning: rollouts whose tokens are never rendered again, exact rows, rewards that rise, exact resume."""

import json
import random
import shutil
from dataclasses import dataclass, replace

import jax
import numpy as np
import pytest
from flax import nnx

from k3jax.chat import encode_chat, encode_chat_with_roles
from k3jax.config import ConfigError
from k3jax.lora import LoRAConfig
from k3jax.sampling import Sample, Sampler
from train.adapter import load_subject
from train.data import Transcripts
from train.objective import target_logprobs
from train.pretrain import PretrainConfig, pretrain
from train.rl.env import StepResult
from train.rl.frozen_lake import FrozenLake
from train.rl.loop import RLConfig, RolloutFeed, train_rl
from train.rl.rollout import Player, Trajectory
from train.rl.rows import micro_batches


@dataclass(frozen=True)
class Letters:
    """Reward: the share of capital letters in an answer, summed over `turns` turns."""

    name: str = "letters"
    turns: int = 1

    def train(self, seed, index):
        return Letter(self, index)

    def heldout(self, n):
        return [Letter(self, 100 + i) for i in range(n)]

    def transcript(self, seed, index, skill):
        rng = random.Random(index)
        answer = {"role": "assistant", "content": rng.choice("abAB") + rng.choice("abAB")}
        return [*Letter(self, rng.randrange(200)).messages(), answer]


class Letter:
    tools = None

    def __init__(self, environment, number):
        self.environment, self.number, self.metrics, self.taken = environment, number, {"length": 0.0}, 0

    def messages(self):
        return [{"role": "user", "content": f"letter {self.number}"}]

    def step(self, assistant):
        text = assistant["content"]
        self.metrics = {"length": float(len(text))}
        self.taken += 1
        reward = sum(c.isupper() for c in text) / max(len(text), 1)
        done = self.taken == self.environment.turns
        return StepResult(reward=reward, done=done, messages=[] if done else [{"role": "user", "content": "more"}])


@pytest.fixture(scope="module")
def talker(two_layers, tokenizer, tmp_path_factory) -> str:
    """A checkpoint that answers with two letters of either case and ends its turn."""
    folder = tmp_path_factory.mktemp("talker")
    tokenizer.save(folder)
    pretrain(PretrainConfig(
        out=str(folder), model=two_layers, tokenizer=str(folder), data=Transcripts(tasks=((Letters(), 0.0),), count=1000),
        steps=60, lr=2e-2, rows=8, row_length=63, save_every=1000, remat="none",
    ))
    return str(folder / "model")


@pytest.fixture(scope="module")
def config(talker, tmp_path_factory) -> RLConfig:
    return RLConfig(
        out=str(tmp_path_factory.mktemp("rl")), checkpoint=talker,
        adapter=LoRAConfig(rank=2, alpha=8, targets=("attention", "mlp")), environment=Letters(turns=2), groups=4,
        group_size=8, max_turn_tokens=24, max_turns=2, steps=6, lr=1e-2, rows=8, row_length=95, heldout=4, heldout_every=3,
        save_every=2, warmup=0.0, remat="none",
    )


class Script(Sampler):
    """Answers with given texts: one per turn, the same for every row."""

    def __init__(self, tokenizer, *texts, end=True):
        self.tokenizer, self.texts, self.end, self.prompts = tokenizer, list(texts), end, []

    def flush(self):
        pass

    def generate(self, prompts, params, adapters, *, keep_sessions):
        self.prompts.append(prompts)
        ids = self.tokenizer.encode(self.texts.pop(0), allow_special=True)
        logprobs = [-0.5] * len(ids)
        kind = {"text": None, "logprobs": logprobs, "raw_logprobs": logprobs, "finish_reason": "stop"}
        return [
            [Sample(ids=ids, prompt_tokens=len(p), cached_tokens=len(p) // 2, **kind) for _ in range(q.n)]
            for p, q in zip(prompts, params, strict=True)
        ]


END = "<|close|>response<|sep|><|close|>message<|sep|><|end_of_msg|>"


def player(sampler, tokenizer, **changes):
    return Player(
        sampler=sampler, tokenizer=tokenizer, adapter=0, **{"capacity": 400, "max_turn_tokens": 60, "max_turns": 3, **changes}
    )


def test_a_conversation_is_that_of_the_chat_format_and_is_never_rendered_again(tokenizer):
    sampler = Script(tokenizer, "AB" + END, "c" + END, "D" + END)
    (t,) = player(sampler, tokenizer).play([[Letter(Letters(turns=3), 1)]], "seed")
    messages = [{"role": "user", "content": "letter 1"}]
    for text in ("AB", "c", "D"):
        messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "more"}]
    assert t.ids == encode_chat(tokenizer, messages[:-1], thinking=False, add_generation_prompt=False)
    assert (t.reward, t.turns, t.done) == (2.0, 3, True)
    for before, after in zip(sampler.prompts, sampler.prompts[1:], strict=False):
        assert after[0][: len(before[0])] == before[0]
    drawn = tokenizer.decode([i for i, s in zip(t.ids, t.sampled, strict=True) if s])
    assert drawn == "AB" + END + "c" + END + "D" + END
    assert {p for p, s in zip(t.logprobs, t.sampled, strict=True) if s} == {-0.5}
    assert {p for p, s in zip(t.logprobs, t.sampled, strict=True) if not s} == {0.0}


def test_tool_calls_reach_the_environment(tokenizer):
    """The expert's transcript, played again turn by turn, walks the same way over the same tokens."""
    lake = FrozenLake(size=3, holes=2)
    messages = lake.transcript(0, 5, 1.0)
    chat = encode_chat_with_roles(tokenizer, messages, thinking=False, add_generation_prompt=False)
    numbers = [i for i, message in enumerate(messages) if message["role"] == "assistant"]
    turns = [tokenizer.decode(chat.ids[(chat.message == i) & chat.generated]) for i in numbers]
    episode = lake.train(0, 5)
    long = player(Script(tokenizer, *turns), tokenizer, capacity=2000, max_turn_tokens=200, max_turns=10)
    (t,) = long.play([[episode]], "seed")
    assert (t.reward, episode.metrics["reached"], t.turns) == (1.0, 1.0, len(turns))
    assert t.turns >= 2
    assert t.ids == chat.ids.tolist()
    assert t.sampled == chat.generated.tolist()


def test_a_turn_that_is_cut_off_earns_nothing_and_ends_the_episode(tokenizer):
    (t,) = player(Script(tokenizer, "ABCD", "x"), tokenizer).play([[Letter(Letters(turns=3), 1)]], "seed")
    assert (t.reward, t.turns, t.done) == (0.0, 1, True)
    (t,) = player(Script(tokenizer, "A" * 100 + END), tokenizer, max_turn_tokens=5).play([[Letter(Letters(), 1)]], "seed")
    assert (t.reward, sum(t.sampled)) == (0.0, 5)


def test_an_episode_ends_before_it_outgrows_the_row(tokenizer):
    sampler = Script(tokenizer, *["A" + END] * 9)
    (t,) = player(sampler, tokenizer, capacity=60, max_turns=9).play([[Letter(Letters(turns=9), 1)]], "seed")
    assert t.done and t.turns < 9 and len(t.ids) <= 60


def test_the_number_of_requests_does_not_shrink(tokenizer):
    long, short = Letters(turns=3), Letters(turns=1)
    sampler = Script(tokenizer, "A" + END, "B" + END, "C" + END)
    groups = [[Letter(long, 1), Letter(short, 1)], [Letter(short, 2), Letter(short, 2)]]
    played = player(sampler, tokenizer).play(groups, "seed", rows=4)
    assert [len(prompts) for prompts in sampler.prompts] == [4, 8, 8]
    assert [t.turns for t in played] == [3, 1, 1, 1]
    assert [t.group for t in played] == [0, 0, 1, 1]


def trajectory(ids, sampled):
    t = Trajectory(Letter(Letters(), 0), 0, [])
    t.ids, t.sampled = ids, sampled
    t.logprobs = [-float(i) if s else 0.0 for i, s in zip(ids, sampled, strict=True)]
    t.raw_logprobs = [2 * p for p in t.logprobs]
    t.routes = (None, 100 * np.array(ids[:-1])[None, :, None] + np.arange(2))  # of a dense stack, of one with two experts
    return t


def test_rows_hold_every_drawn_token_once_with_what_belongs_to_it():
    rng = np.random.default_rng(0)
    played = []
    for _ in range(7):
        n = int(rng.integers(3, 12))
        played.append(trajectory(rng.integers(1, 99, n).tolist(), [False, *(rng.random(n - 1) < 0.5).tolist()]))
    advantages = np.arange(1, 8, dtype=np.float32)
    batches = micro_batches(played, advantages, rows=2, row_length=16)
    found = []
    for batch in batches:
        assert batch["ids"].shape == (2, 16)
        drawn = batch["weights"] == 1
        assert not batch["advantages"][~drawn].any() and not batch["sampling_logprobs"][~drawn].any()
        np.testing.assert_array_equal(batch["raw_logprobs"], 2 * batch["sampling_logprobs"])
        np.testing.assert_array_equal(batch["sampling_logprobs"][drawn], -batch["targets"][drawn].astype(np.float32))
        dense, picks = batch["picks"]
        assert dense is None and picks.shape == (1, 2, 16, 2)
        np.testing.assert_array_equal(picks[0], 100 * batch["ids"][..., None] + np.arange(2))  # padding has id 0
        for row in range(2):
            for s in range(1, batch["segments"][row].max() + 1):
                at = batch["segments"][row] == s
                found.append((batch["ids"][row, at].tolist(), batch["targets"][row, at].tolist(), drawn[row, at].tolist(),
                              sorted(set(batch["advantages"][row, at].tolist()) - {0.0})))
    expected = [
        (t.ids[:-1], t.ids[1:], t.sampled[1:], [float(a)] if any(t.sampled) else [])
        for t, a in zip(played, advantages, strict=True)
    ]
    assert sorted(found) == sorted(expected)


@pytest.fixture(scope="module")
def whole(config):
    """Metrics of an unbroken run, and its model."""
    subject = train_rl(config)
    return [json.loads(line) for line in open(f"{config.out}/metrics.jsonl")], subject


def test_the_reward_rises_on_held_out_tasks(whole):
    lines, _ = whole
    heldout = [line["heldout_reward"] for line in lines if "heldout_reward" in line]
    assert [line["step"] for line in lines if "heldout_reward" in line] == [0, 3, 6]
    assert heldout[-1] > heldout[0] + 0.1


def test_sampler_and_trainer_agree_at_every_step(whole):
    assert all(line["logprob_gap"] < 1e-4 for line in whole[0][1:])
    assert all(line["ratio"] == pytest.approx(1, abs=1e-4) for line in whole[0][1:])


def test_the_second_turn_takes_the_first_from_the_cache(whole):
    assert all(line["turns"] > 1.5 and line["cached_share"] > 0.4 for line in whole[0][1:])


def test_a_run_killed_after_step_four_goes_on_with_the_same_rewards_and_losses(whole, config, tmp_path):
    """Steps 5 and 6 are played again, by a model loaded anew."""
    shutil.copytree(config.out, tmp_path / "out")
    shutil.rmtree(tmp_path / "out" / "checkpoints" / "6")
    train_rl(replace(config, out=str(tmp_path / "out")))
    lines = [json.loads(line) for line in open(tmp_path / "out" / "metrics.jsonl")]
    assert [{**line, "seconds": 0} for line in lines] == [{**line, "seconds": 0} for line in whole[0]]
    assert [line["seconds"] for line in lines[5:]] != [line["seconds"] for line in whole[0][5:]]


def test_the_trainer_replays_the_experts_that_the_sampler_chose(whole, config):
    """In both turns. Moving the router biases, which pick and never weigh, moves only a trainer that picks for itself."""
    subject = whole[1]
    micro = RolloutFeed(subject, config).next(1)[0][0]
    drawn = micro["weights"] == 1
    graphdef, state = nnx.split(subject.model)

    @jax.jit
    def logprobs(state, batch):
        return target_logprobs(nnx.merge(graphdef, state), batch, subject.adapter, 64)

    def gap(state, batch):
        return np.abs(np.asarray(logprobs(state, batch)[0]) - micro["raw_logprobs"])[drawn]

    own = {name: value for name, value in micro.items() if name != "picks"}
    dense, experts = (routing and np.asarray(routing.experts) for routing in logprobs(state, own)[1])
    valid = micro["segments"] > 0
    assert dense is None and micro["picks"][0] is None
    np.testing.assert_array_equal(np.sort(micro["picks"][1][:, valid]), np.sort(experts[:, valid]))
    assert len(np.unique(np.sort(experts[0, valid]), axis=0)) > 3

    noise = 0.3 * np.random.default_rng(0).standard_normal(subject.model.config.moe.num_experts)
    shaken = jax.tree.map_with_path(lambda path, a: a + noise if "correction_bias" in str(path) else a, state)
    assert gap(state, micro).max() < 1e-5 and gap(shaken, micro).max() < 1e-5
    assert gap(shaken, own).max() > 1e-4


def test_groups_without_spread_leave_the_model_alone(whole, config, tmp_path):
    @dataclass(frozen=True)
    class Same(Letters):
        def train(self, seed, index):
            episode = Letter(self, index)
            episode.step = lambda assistant: StepResult(reward=0.5, done=True)
            return episode

    feed = RolloutFeed(whole[1], replace(config, environment=Same()))
    batch, figures = feed.next(1)
    assert batch == [] and figures["groups_kept"] == 0 and figures["reward"] == 0.5


def test_with_kl_the_reference_is_the_base_model(whole, config):
    """A new adapter is the base, so there the sampler's log-probabilities are the reference's; later they differ."""
    config = replace(config, kl=0.1)
    for subject, equal in ((load_subject(config), True), (whole[1], False)):
        micro = RolloutFeed(subject, config).next(1)[0][0]
        drawn = micro["weights"] == 1
        gap = np.abs(np.asarray(micro["reference_logprobs"]) - micro["raw_logprobs"])[drawn]
        assert gap.max() < 1e-4 if equal else gap.max() > 1e-1


def test_a_growing_gap_is_warned_of_once(whole, config, caplog):
    feed = RolloutFeed(whole[1], replace(config, heldout=0))
    for step in range(1, 40):
        feed.after(step, {"logprob_gap": 1e-3 * step})
    assert caplog.text.count("drift apart") == 1
    assert feed.state() == {"gaps": [1e-3 * step for step in range(1, 40)]}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"group_size": 1}, "group_size=1: a whole number of at least 2"),
        ({"loss": "cross_entropy"}, "does not use advantages"),
        ({"loss": "pppo"}, "Did you mean ppo"),
        ({"kl": -1.0}, "kl=-1.0"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(config, change, said):
    with pytest.raises((ConfigError, ValueError), match=said):
        replace(config, **change)


def test_a_prompt_longer_than_a_row_is_refused(checkpoint, config):
    subject = load_subject(replace(config, row_length=20))
    with pytest.raises(ValueError, match="A prompt has .* tokens, but an episode may have 21"):
        RolloutFeed(subject, replace(config, row_length=20)).next(1)
