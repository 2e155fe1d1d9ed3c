"""Countdown: from "3 7 2 -> 12" to "3+7+2", an expression that uses the numbers and reaches the target."""

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from math import ceil
from typing import Any, ClassVar

from k3jax.config import ConfigError
from train.rl.arithmetic import MAX_NUMBERS, Expression, apply, evaluate, solve
from train.rl.env import Message, StepResult, heldout_tasks, text_of, training_task

INSTRUCTION = (
    "You get numbers and a target, written as: 3 7 2 -> 12. Answer only with an expression that equals the "
    "target and uses each number {times} once. Allowed: {operators} and parentheses."
)


@dataclass(frozen=True)
class Task:
    numbers: tuple[int, ...]
    target: int

    @property
    def prompt(self) -> str:
        return f"{' '.join(map(str, self.numbers))} -> {self.target}"

    @property
    def key(self) -> str:
        """The same for every order of the numbers, so that a reordered training task is never held out."""
        return f"{sorted(self.numbers)} -> {self.target}"


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What is right about an answer.

    expression  None if the text is no expression, or divides by zero
    proper      only allowed operators, and the numbers used as the task wants
    distance    |value - target|, None without an expression
    """

    expression: Expression | None
    proper: bool
    distance: Fraction | None

    @property
    def hit(self) -> bool:
        return self.proper and self.distance == 0


def distance_reward(answer: Judgement) -> float:
    """1 for a hit, 1 / (1 + distance) for a proper expression that misses, 0 for all else.

    The distance is rounded up to whole numbers: a near miss by a fraction earns 0.5, never almost 1.
    """
    if not answer.proper or answer.distance is None:
        return 0.0
    return 1 / (1 + ceil(answer.distance))


def composite_reward(answer: Judgement) -> float:
    """0.1 for an expression, 0.2 more if its numbers and operators are proper, 0.7 more if it also hits."""
    return (answer.expression is not None) * 0.1 + answer.proper * 0.2 + answer.hit * 0.7


REWARDS: dict[str, Callable[[Judgement], float]] = {
    "distance": distance_reward,
    "composite": composite_reward,
}


@dataclass(frozen=True, kw_only=True)
class Countdown:
    """The environment. The defaults suit a model of a few hundred thousand parameters.

    A task is made from a random expression over the numbers, so its target can always be reached.
    """

    name: ClassVar[str] = "countdown"

    counts: tuple[int, ...] = (2, 3)  # numbers per task, each equally often
    lowest: int = 1  # number
    highest: int = 9
    lowest_target: int = 1
    highest_target: int = 20
    operators: str = "+-"
    use_all: bool = True  # each number exactly once; False: at most once
    reward: str = "distance"
    instruct: bool = False  # put the rules into a system message, for models that do not know the task

    def __post_init__(self) -> None:
        if not self.counts or not all(2 <= count <= MAX_NUMBERS for count in self.counts):
            raise ValueError(f"counts={self.counts}: each must be 2 to {MAX_NUMBERS} numbers.")
        if not 1 <= self.lowest <= self.highest:
            raise ValueError(
                f"lowest={self.lowest}, highest={self.highest}: 1 <= lowest <= highest is needed."
            )
        if not 0 <= self.lowest_target <= self.highest_target:
            raise ValueError(
                f"lowest_target={self.lowest_target}, highest_target={self.highest_target}: "
                f"0 <= lowest_target <= highest_target is needed."
            )
        if not self.operators or set(self.operators) - set("+-*/"):
            raise ValueError(f"operators={self.operators!r}: give some of '+-*/'.")
        if self.reward not in REWARDS:
            raise ValueError(f"reward={self.reward!r}: choose one of {', '.join(REWARDS)}.")

    def train(self, seed: int, index: int) -> "CountdownEpisode":
        return CountdownEpisode(self, self.task(seed, index))

    def heldout(self, n: int) -> "list[CountdownEpisode]":
        return [CountdownEpisode(self, task) for task in heldout_tasks(self._make, lambda task: task.key, n)]

    def task(self, seed: int, index: int) -> Task:
        return training_task(self._make, lambda task: task.key, seed, index)

    def transcript(self, seed: int, index: int, skill: float) -> list[Message]:
        """A conversation on training task `index`: solved with probability `skill`, else answered by chance.

        An answer by chance uses every number once, with random order and operators; it may hit, too.
        """
        rng = random.Random(f"transcript/{seed}/{index}")
        task = self.task(seed, index)
        if rng.random() < skill:
            text = solve(task.numbers, task.target, operators=self.operators)
        else:
            text, _ = random_expression(task.numbers, self.operators, rng)
        return [*CountdownEpisode(self, task).messages(), {"role": "assistant", "content": text}]

    def judge(self, task: Task, text: str) -> Judgement:
        try:
            expression = evaluate(text)
        except ValueError:
            return Judgement(expression=None, proper=False, distance=None)
        used, given = Counter(expression.numbers), Counter(task.numbers)
        numbers_right = used == given if self.use_all else used <= given
        return Judgement(
            expression=expression,
            proper=numbers_right and set(expression.operators) <= set(self.operators),
            distance=abs(expression.value - task.target),
        )

    def _make(self, rng: random.Random) -> Task:
        for _ in range(1000):
            numbers = tuple(rng.randint(self.lowest, self.highest) for _ in range(rng.choice(self.counts)))
            value = random_expression(numbers, self.operators, rng)[1]
            if value.denominator == 1 and self.lowest_target <= value <= self.highest_target:
                return Task(numbers, int(value))
        raise ConfigError(
            f"Numbers {self.lowest} to {self.highest} with {self.operators!r} almost never make a target "
            f"from {self.lowest_target} to {self.highest_target}. Widen one of the ranges."
        )


def random_expression(numbers: tuple[int, ...], operators: str, rng: random.Random) -> tuple[str, Fraction]:
    """The numbers, none 0, in random order under random operators, grouped from the left: text and value."""
    first, *rest = rng.sample(numbers, len(numbers))
    text, value, last = str(first), Fraction(first), None
    for number in rest:
        operator = rng.choice(operators)
        if last in ("+", "-") and operator in "*/":
            text = f"({text})"
        text, value, last = f"{text}{operator}{number}", apply(operator, value, Fraction(number)), operator
    return text, value


class CountdownEpisode:
    """One task, one answer."""

    def __init__(self, environment: Countdown, task: Task):
        self.environment = environment
        self.task = task
        self.metrics = {"hit": 0.0, "proper": 0.0, "parsed": 0.0}

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return None

    def messages(self) -> list[Message]:
        prompt: list[Message] = [{"role": "user", "content": self.task.prompt}]
        if not self.environment.instruct:
            return prompt
        times = "exactly" if self.environment.use_all else "at most"
        rules = INSTRUCTION.format(times=times, operators=" ".join(self.environment.operators))
        return [{"role": "system", "content": rules}, *prompt]

    def step(self, assistant: Message) -> StepResult:
        answer = self.environment.judge(self.task, text_of(assistant))
        self.metrics = {
            "hit": float(answer.hit),
            "proper": float(answer.proper),
            "parsed": float(answer.expression is not None),
        }
        return StepResult(reward=REWARDS[self.environment.reward](answer), done=True)
