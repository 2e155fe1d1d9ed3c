import json
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.rl.countdown import Countdown
from train.rl.env import call_message, heldout_tasks, is_heldout, single_call, text_of, training_task
from train.rl.frozen_lake import FrozenLake

ENVIRONMENTS = [Countdown(), FrozenLake(), FrozenLake(slip=0.3)]

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)
tool_calls = st.lists(
    json_values
    | st.fixed_dictionaries(
        {},
        optional={
            "id": json_values,
            "function": json_values
            | st.fixed_dictionaries(
                {},
                optional={
                    "name": st.just("move") | json_values,
                    "arguments": json_values | st.builds(json.dumps, json_values) | st.just('{"direction":'),
                },
            ),
        },
    ),
    max_size=2,
)
malformed = st.fixed_dictionaries(
    {"role": st.just("assistant")},
    optional={"content": json_values, "tool_calls": json_values | tool_calls},
)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
@given(assistant=malformed)
def test_no_assistant_message_whatever_makes_an_episode_raise(environment, assistant):
    result = environment.train(0, 0).step(assistant)
    assert result.reward in (0.0, 1.0) or isinstance(environment, Countdown)
    assert result.done or result.messages


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_equal_seed_and_index_give_equal_episodes_and_others_differ(environment):
    def first_messages(seed):
        return [environment.train(seed, index).messages() for index in range(20)]

    assert first_messages(0) == first_messages(0)
    assert first_messages(0) != first_messages(1)
    assert len({str(messages) for messages in first_messages(0)}) > 5


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_transcripts_are_reproducible_and_depend_on_skill(environment):
    def transcripts(skill):
        return [environment.transcript(3, index, skill) for index in range(20)]

    assert transcripts(0.5) == transcripts(0.5)
    assert transcripts(0.0) != transcripts(1.0)


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_metrics_keep_their_keys_over_an_episode(environment):
    episode = environment.train(0, 0)
    before = set(episode.metrics)
    episode.step({"role": "assistant", "content": "?"})
    assert set(episode.metrics) == before


@pytest.mark.parametrize("environment", ENVIRONMENTS, ids=repr)
def test_a_prefix_of_the_heldout_set_is_the_smaller_heldout_set(environment):
    def prompts(n):
        return [episode.messages() for episode in environment.heldout(n)]

    assert prompts(12)[:5] == prompts(5)
    assert len({str(messages) for messages in prompts(12)}) == 12


def test_training_never_draws_a_heldout_task_and_covers_all_others():
    def make(rng: random.Random) -> int:
        return rng.randrange(100)

    trained = {training_task(make, str, seed=0, index=index) for index in range(3000)}
    heldout = {n for n in range(100) if is_heldout(str(n))}
    assert heldout
    assert trained == set(range(100)) - heldout
    assert set(heldout_tasks(make, str, len(heldout))) == heldout


def test_more_heldout_tasks_than_exist_are_refused_with_their_number():
    with pytest.raises(ValueError, match=r"50 held-out tasks were asked for, but .* only about \d+\."):
        heldout_tasks(lambda rng: rng.randrange(100), str, 50)


def test_settings_without_a_training_task_are_refused():
    heldout = next(n for n in range(100) if is_heldout(str(n)))
    with pytest.raises(ValueError, match="No training task"):
        training_task(lambda rng: heldout, str, 0, 0)


def test_text_is_the_content_or_its_text_parts():
    assert text_of({"content": "3+4"}) == "3+4"
    assert text_of({"content": [{"type": "text", "text": "3+"}, {"type": "text", "text": "4"}]}) == "3+4"
    assert text_of({"content": None}) == text_of({}) == text_of({"content": 7}) == ""


def test_arguments_are_read_as_a_dict_and_as_json_text():
    as_text = call_message("move", {"direction": "up"}, id="c0")
    as_dict = {"tool_calls": [{"id": "c0", "function": {"name": "move", "arguments": {"direction": "up"}}}]}
    call = single_call(as_text)
    assert call == single_call(as_dict)
    assert call is not None and (call.name, call.arguments, call.id) == ("move", {"direction": "up"}, "c0")


def test_the_result_of_a_call_refers_to_it():
    call = single_call(call_message("move", {}, id="c0"))
    assert call is not None
    assert call.result("ok") == {"role": "tool", "name": "move", "tool_call_id": "c0", "content": "ok"}
