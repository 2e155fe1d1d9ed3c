from collections import Counter
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from train.rl.arithmetic import MAX_DEPTH, MAX_LENGTH, evaluate, solve
from train.rl.countdown import Countdown, CountdownEpisode, Task

TASK = Task((3, 7, 2), 12)


def reward(text, task=TASK, **settings):
    return CountdownEpisode(Countdown(**settings), task).step({"role": "assistant", "content": text}).reward


@pytest.mark.parametrize(
    "text, expected",
    [
        ("3+7+2", 1.0),
        (" 2 + (7+3) ", 1.0),
        ("3+7-2", 1 / 5),  # 8, 4 away
        ("7-3-2", 1 / 11),  # 2, 10 away
        ("2-3-7", 1 / 21),  # -8, 20 away
        ("3+7", 0.0),
        ("3+7+2+2", 0.0),
        ("5+7", 0.0),
        ("12", 0.0),
        ("3*7-2", 0.0),  # * is not among the operators
        ("3+7+2=12", 0.0),
        ("", 0.0),
        ("I do not know", 0.0),
    ],
)
def test_distance_reward_by_hand(text, expected):
    assert reward(text) == pytest.approx(expected)


@pytest.mark.parametrize(
    "text, expected",
    [("3+7+2", 1.0), ("3+7-2", 0.3), ("5+7", 0.1), ("3*7-2", 0.1), ("3+", 0.0), ("2/(7-7)", 0.0)],
)
def test_composite_reward_by_hand(text, expected):
    assert reward(text, reward="composite") == pytest.approx(expected)


def test_distance_reward_falls_with_the_distance_and_a_fraction_away_is_no_hit():
    task = Task((8, 3), 3)
    assert reward("8/3", task, operators="+-*/") == 0.5  # 2.67
    assert reward("8-3", task) == pytest.approx(1 / 3)
    assert reward("8+3", task) == pytest.approx(1 / 9)


def test_numbers_may_be_left_out_only_if_the_settings_say_so():
    task = Task((3, 7, 2), 10)
    assert reward("3+7", task) == 0.0
    assert reward("3+7", task, use_all=False) == 1.0
    assert reward("3+3+3+3-2", task, use_all=False) == 0.0


def test_a_huge_value_earns_almost_nothing_and_does_not_overflow():
    nines = "*".join(["999999999"] * 18)
    assert 0 <= reward(nines, Task((999999999,) * 18, 1), operators="*") < 1e-100


def test_metrics_tell_what_was_right():
    def metrics(text):
        episode = CountdownEpisode(Countdown(), TASK)
        episode.step({"role": "assistant", "content": text})
        return tuple(episode.metrics[key] for key in ("parsed", "proper", "hit"))

    assert metrics("?") == (0, 0, 0)
    assert metrics("3+7") == (1, 0, 0)
    assert metrics("3+7-2") == (1, 1, 0)
    assert metrics("3+7+2") == (1, 1, 1)


@pytest.mark.parametrize(
    "settings", [{}, {"counts": (4,), "operators": "+-*/", "highest_target": 99}], ids=str
)
def test_gold_transcripts_get_full_reward(settings):
    environment = Countdown(**settings)
    for index in range(40):
        *prompt, answer = environment.transcript(0, index, skill=1.0)
        episode = environment.train(0, index)
        assert episode.messages() == prompt
        result = episode.step(answer)
        assert (result.reward, result.done, result.messages) == (1.0, True, [])


def test_answers_by_chance_are_proper_and_mostly_miss():
    environment = Countdown(counts=(3,))
    rewards = []
    for index in range(100):
        episode = environment.train(0, index)
        rewards.append(episode.step(environment.transcript(0, index, skill=0.0)[-1]).reward)
        assert episode.metrics["proper"] == 1
    assert 0.05 < rewards.count(1.0) / 100 < 0.5


def test_no_training_task_is_a_reordered_heldout_task():
    environment = Countdown()
    heldout = {episode.task.key for episode in environment.heldout(60)}
    assert not heldout & {environment.task(seed, index).key for seed in range(3) for index in range(500)}
    assert Task((2, 3), 5).key == Task((3, 2), 5).key


def test_tasks_stay_in_their_ranges():
    environment = Countdown(counts=(2, 4), lowest=3, highest=5, lowest_target=4, highest_target=9)
    tasks = [environment.task(0, index) for index in range(200)]
    assert {len(task.numbers) for task in tasks} == {2, 4}
    assert {number for task in tasks for number in task.numbers} == {3, 4, 5}
    assert all(4 <= task.target <= 9 for task in tasks)


def test_the_prompt_is_short_and_rules_come_only_on_request():
    assert CountdownEpisode(Countdown(), TASK).messages() == [{"role": "user", "content": "3 7 2 -> 12"}]
    system, user = CountdownEpisode(Countdown(instruct=True, use_all=False), TASK).messages()
    assert "at most once" in system["content"] and "+ -" in system["content"]
    assert user["content"] == "3 7 2 -> 12"


@pytest.mark.parametrize(
    "settings, message",
    [
        ({"counts": ()}, "counts"),
        ({"counts": (1,)}, "counts"),
        ({"lowest": 0}, "lowest"),
        ({"lowest": 5, "highest": 4}, "lowest"),
        ({"lowest_target": -1}, "lowest_target"),
        ({"operators": "+%"}, "operators"),
        ({"reward": "exact"}, "distance, composite"),
    ],
    ids=str,
)
def test_impossible_settings_are_refused_by_name(settings, message):
    with pytest.raises(ValueError, match=message):
        Countdown(**settings)


def test_targets_out_of_reach_are_refused():
    with pytest.raises(ValueError, match="almost never make a target"):
        Countdown(lowest_target=900, highest_target=999).train(0, 0)


def trees(depth):
    """Expressions as (text, value, numbers); the value is None after a division by zero."""
    leaf = st.integers(0, 999).map(lambda n: (str(n), Fraction(n), (n,)))
    if depth == 0:
        return leaf

    def join(parts):
        (a, x, m), operator, (b, y, n) = parts
        value = None
        if x is not None and y is not None and (operator != "/" or y):
            value = {"+": x.__add__, "-": x.__sub__, "*": x.__mul__, "/": x.__truediv__}[operator](y)
        return f"({a}){operator}({b})", value, m + n

    inner = trees(depth - 1)
    return leaf | st.tuples(inner, st.sampled_from("+-*/"), inner).map(join)


@given(tree=trees(4))
def test_parenthesised_expressions_have_the_value_of_their_tree(tree):
    text, value, numbers = tree
    if value is None:
        with pytest.raises(ValueError, match="Division by zero"):
            evaluate(text)
    else:
        expression = evaluate(text)
        assert (expression.value, expression.numbers) == (value, numbers)


@given(
    first=st.integers(0, 99),
    rest=st.lists(st.tuples(st.sampled_from("+-*/"), st.integers(1, 99), st.booleans()), max_size=8),
    spaces=st.booleans(),
)
def test_precedence_and_grouping_are_pythons(first, rest, spaces):
    text, python = str(first), f"Fraction({first})"
    for operator, number, close in rest:
        text, python = f"{text}{operator}{number}", f"{python}{operator}Fraction({number})"
        if close:
            text, python = f"({text})", f"({python})"
    spaced = text.replace("+", " + ").replace("*", "  *") if spaces else text
    assert evaluate(spaced).value == eval(python, {"Fraction": Fraction})


@pytest.mark.parametrize(
    "text",
    "|+|3+|+3|-3|3 4|3++4|(3|3)|()|(3)(4)|3(4)|3**4|3//4|3^4|3\n+4|007|1234567890".split("|")
    + "3.5|1e3|0x10|3,4|٣+٤|3²|3−2|a|__import__('os')".split("|"),
)
def test_anything_but_plain_arithmetic_is_refused(text):
    with pytest.raises(ValueError):
        evaluate(text)


def test_length_and_depth_are_limited():
    assert evaluate("1" + "+1" * 99).value == 100
    with pytest.raises(ValueError, match=str(MAX_LENGTH)):
        evaluate("1" + "+1" * 100)
    assert evaluate("(" * MAX_DEPTH + "1" + ")" * MAX_DEPTH).value == 1
    with pytest.raises(ValueError, match=str(MAX_DEPTH)):
        evaluate("(" * (MAX_DEPTH + 1) + "1" + ")" * (MAX_DEPTH + 1))


@given(
    numbers=st.lists(st.integers(1, 12), min_size=1, max_size=4),
    target=st.integers(0, 60),
    operators=st.sampled_from(["+-", "+-*", "+-*/", "-", "/", "-/"]),
    use_all=st.booleans(),
)
def test_a_solution_reaches_the_target_with_the_numbers_given(numbers, target, operators, use_all):
    text = solve(numbers, target, operators=operators, use_all=use_all)
    if text is not None:
        expression = evaluate(text)
        assert expression.value == target
        used = Counter(expression.numbers)
        assert used == Counter(numbers) if use_all else used <= Counter(numbers)
        assert set(expression.operators) <= set(operators)


@pytest.mark.parametrize(
    "numbers, target, text",
    [
        ((3, 7, 2), 12, "3+7+2"),
        ((3, 7, 2), 8, "3+7-2"),
        ((2, 7, 3), 2, "7-2-3"),
        ((1, 2, 3), 9, "(1+2)*3"),
        ((1, 5, 5, 5), 24, "(5-1/5)*5"),
        ((2, 2), 7, None),
    ],
)
def test_solutions_by_hand(numbers, target, text):
    assert solve(numbers, target) == text


def test_parentheses_stay_where_the_meaning_needs_them():
    assert solve((7, 3, 2), 6, operators="-") == "7-(3-2)"
    assert solve((8, 4, 2), 4, operators="/") == "8/(4/2)"


def test_solve_refuses_more_numbers_than_it_can_search():
    with pytest.raises(ValueError, match="1 to 6 numbers, got 7"):
        solve((1,) * 7, 7)
