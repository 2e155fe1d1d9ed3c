import pytest

from train.rl.env import call_message
from train.rl.frozen_lake import MOVE_TOOL, MOVES, FrozenLake, FrozenLakeEpisode, Lake

#  P . .
#  . H .
#  . . G
LAKE = Lake(3, (0, 0), (2, 2), frozenset({(1, 1)}))


class Straight:
    def random(self):
        return 0.5


def walk(directions, lake=LAKE, **settings):
    episode = FrozenLakeEpisode(FrozenLake(**settings), lake, Straight())
    results = [episode.step(call_message("move", {"direction": d}, id="c")) for d in directions]
    return episode, results


def test_the_goal_alone_earns_a_reward():
    episode, results = walk(["right", "right", "down", "down"])
    assert [result.reward for result in results] == [0, 0, 0, 1]
    assert [result.done for result in results] == [False, False, False, True]
    assert episode.metrics == {"reached": 1, "fell": 0, "invalid": 0, "moves": 4}


def test_a_hole_ends_the_episode_without_reward():
    episode, results = walk(["right", "down"])
    assert [(result.reward, result.done) for result in results] == [(0, False), (0, True)]
    assert episode.metrics["fell"] == 1


def test_the_edge_stops_a_move_which_counts():
    episode, results = walk(["left", "up"])
    assert episode.player == (0, 0) and episode.moves == 2
    assert results[-1].messages[0]["content"] == LAKE.board((0, 0))


def test_the_episode_ends_after_max_moves():
    _, results = walk(["left"] * 5, max_moves=5)
    assert [result.done for result in results] == [False] * 4 + [True]
    assert results[-1].reward == 0


def test_the_goal_on_the_last_move_counts():
    _, results = walk(["down", "down", "right", "right"], max_moves=4)
    assert (results[-1].reward, results[-1].done) == (1, True)


def test_a_result_shows_the_new_board_and_answers_the_call():
    _, [result] = walk(["right"])
    assert result.messages == [
        {"role": "tool", "name": "move", "tool_call_id": "c", "content": ".P.\n.H.\n..G"}
    ]


def call(function, **fields):
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "function": function, **fields}]}


MALFORMED = {
    "no tool call": {"role": "assistant", "content": "right"},
    "empty list": {"role": "assistant", "tool_calls": []},
    "tool_calls null": {"role": "assistant", "tool_calls": None},
    "wrong tool": call({"name": "jump", "arguments": '{"direction": "right"}'}),
    "no name": call({"arguments": '{"direction": "right"}'}),
    "bad direction": call({"name": "move", "arguments": '{"direction": "north"}'}),
    "direction of another case": call({"name": "move", "arguments": '{"direction": "Right"}'}),
    "direction a list": call({"name": "move", "arguments": {"direction": ["right"]}}),
    "no direction": call({"name": "move", "arguments": "{}"}),
    "non-JSON arguments": call({"name": "move", "arguments": "direction=right"}),
    "truncated arguments": call({"name": "move", "arguments": '{"direction": "rig'}),
    "arguments a list": call({"name": "move", "arguments": '["right"]'}),
    "arguments nested without end": call({"name": "move", "arguments": "[" * 100_000}),
    "arguments absent": call({"name": "move"}),
    "function absent": call(None),
    "two calls": {
        "role": "assistant",
        "tool_calls": [{"function": {"name": "move", "arguments": {"direction": "right"}}}] * 2,
    },
}


@pytest.mark.parametrize("assistant", MALFORMED.values(), ids=MALFORMED.keys())
def test_a_turn_without_one_valid_move_ends_the_episode_with_reward_0(assistant):
    episode = FrozenLakeEpisode(FrozenLake(), LAKE, Straight())
    result = episode.step(assistant)
    assert (result.reward, result.done, result.messages) == (0, True, [])
    assert episode.metrics == {"reached": 0, "fell": 0, "invalid": 1, "moves": 0}


def replay(environment, index, transcript):
    """Rewards of a transcript's assistant messages; a fresh episode must answer them as it says."""
    episode = environment.train(0, index)
    prompt = episode.messages()
    assert transcript[: len(prompt)] == prompt
    rest, rewards = transcript[len(prompt) :], []
    while rest:
        result = episode.step(rest[0])
        rewards.append(result.reward)
        assert rest[1 : 1 + len(result.messages)] == result.messages
        rest = rest[1 + len(result.messages) :]
        assert result.done == (not rest)
    return rewards


@pytest.mark.parametrize("settings", [{}, {"size": 3, "holes": 2}, {"instruct": True}], ids=str)
def test_gold_transcripts_get_full_reward_by_a_shortest_way(settings):
    environment = FrozenLake(**settings)
    for index in range(40):
        rewards = replay(environment, index, environment.transcript(0, index, skill=1.0))
        lake = environment.train(0, index).lake
        assert sum(rewards) == 1.0
        assert len(rewards) == lake.distances()[lake.start]


def test_noisy_transcripts_replay_on_slippery_ice_and_succeed_more_often_with_skill():
    environment = FrozenLake(slip=0.2)

    def successes(skill):
        return sum(sum(replay(environment, i, environment.transcript(0, i, skill))) for i in range(100))

    by_skill = [successes(skill) for skill in (0.0, 0.5, 1.0)]
    assert by_skill == sorted(by_skill)
    assert by_skill[0] < 30 and by_skill[2] > 70


def test_every_lake_has_a_way_of_at_least_the_shortest_length():
    environment = FrozenLake(size=4, holes=6, shortest_way=3)
    for index in range(100):
        lake = environment.train(1, index).lake
        assert len(lake.holes) == 6 and not lake.holes & {lake.start, lake.goal}
        assert lake.distances()[lake.start] >= 3


def test_distances_go_around_holes():
    #  P H G
    #  . H .
    #  . . .
    lake = Lake(3, (0, 0), (0, 2), frozenset({(0, 1), (1, 1)}))
    assert lake.distances()[(0, 0)] == 6
    assert lake.best_move((0, 0)) == "down"


def test_the_expert_refuses_a_player_who_cannot_reach_the_goal():
    lake = Lake(3, (0, 0), (2, 2), frozenset({(0, 1), (1, 0)}))
    with pytest.raises(ValueError, match="no way from"):
        lake.best_move((0, 0))


def test_slips_go_to_the_two_sides_as_often_as_set():
    lake = Lake(3, (1, 1), (0, 0), frozenset())
    environment = FrozenLake(slip=0.5)
    ends = []
    for index in range(400):
        episode = environment.train(0, index)
        episode.lake, episode.player = lake, lake.start
        episode.step(call_message("move", {"direction": "left"}, id="c"))
        ends.append(episode.player)
    assert set(ends) == {(1, 0), (0, 1), (2, 1)}
    assert 160 < ends.count((1, 0)) < 240


def test_no_training_lake_is_held_out():
    environment = FrozenLake(size=3, holes=2)
    heldout = {episode.lake.key for episode in environment.heldout(100)}
    assert not heldout & {environment.train(seed, i).lake.key for seed in range(3) for i in range(500)}


def test_the_tool_is_declared_and_the_rules_stated_only_on_request():
    assert FrozenLake().train(0, 0).tools is None
    assert [message["role"] for message in FrozenLake().train(0, 0).messages()] == ["user"]
    instructed = FrozenLake(instruct=True).train(0, 0)
    assert instructed.tools == [MOVE_TOOL]
    assert [message["role"] for message in instructed.messages()] == ["system", "user"]
    assert MOVE_TOOL["function"]["parameters"]["properties"]["direction"]["enum"] == list(MOVES)


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"size": 1}, "size"),
        ({"size": 3, "holes": 8}, "holes"),
        ({"shortest_way": 0}, "shortest_way"),
        ({"shortest_way": 5, "max_moves": 4}, "max_moves"),
        ({"slip": 1.5}, "slip"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        FrozenLake(**settings)


def test_settings_that_leave_no_way_are_refused():
    with pytest.raises(ValueError, match="almost never have a way"):
        FrozenLake(size=3, shortest_way=9).train(0, 0)
