"""Frozen Lake: walk a grid with holes by calling a tool, one move per turn. Reward 1 at the goal, else 0."""

import random
from collections import deque
from dataclasses import dataclass
from typing import Any, ClassVar

from k3jax.config import ConfigError
from train.rl.env import Message, StepResult, call_message, heldout_tasks, single_call, training_task

Cell = tuple[int, int]  # row from the top, column from the left

MOVES: dict[str, Cell] = {"left": (0, -1), "right": (0, 1), "up": (-1, 0), "down": (1, 0)}

MOVE_TOOL: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "move",
        "description": "Move one cell.",
        "parameters": {
            "type": "object",
            "properties": {"direction": {"type": "string", "enum": list(MOVES)}},
            "required": ["direction"],
        },
    },
}

INSTRUCTION = "You are P on a frozen lake. Reach G and keep off the holes H. Call move once per turn."


@dataclass(frozen=True)
class Lake:
    """A square grid. A move against its edge leaves the player where it is."""

    size: int
    start: Cell
    goal: Cell
    holes: frozenset[Cell]

    def board(self, player: Cell) -> str:
        """Rows of P (player), G (goal), H (hole) and . (ice), parted by line breaks."""
        letters = dict.fromkeys(self.holes, "H") | {self.goal: "G", player: "P"}
        columns = range(self.size)
        return "\n".join("".join(letters.get((row, column), ".") for column in columns) for row in columns)

    @property
    def key(self) -> str:
        return self.board(self.start)

    def after(self, cell: Cell, direction: str) -> Cell:
        row, column = MOVES[direction]
        limit = self.size - 1
        return min(max(cell[0] + row, 0), limit), min(max(cell[1] + column, 0), limit)

    def distances(self) -> dict[Cell, int]:
        """Moves to the goal, around the holes, from each cell that can reach it."""
        distance, queue = {self.goal: 0}, deque([self.goal])
        while queue:
            cell = queue.popleft()
            for direction in MOVES:
                neighbour = self.after(cell, direction)
                if neighbour not in distance and neighbour not in self.holes:
                    distance[neighbour] = distance[cell] + 1
                    queue.append(neighbour)
        return distance

    def best_move(self, player: Cell) -> str:
        """The expert: the first of MOVES that starts a shortest way from `player` to the goal.

        ValueError if the player cannot reach the goal.
        """
        distance = self.distances()
        if player not in distance:
            raise ValueError(f"There is no way from {player} to the goal on\n{self.board(player)}")
        return min(MOVES, key=lambda direction: distance.get(self.after(player, direction), self.size**2))


@dataclass(frozen=True, kw_only=True)
class FrozenLake:
    """The environment. Start, goal and holes are random; a way to the goal within max_moves always exists."""

    name: ClassVar[str] = "frozen_lake"

    size: int = 4  # cells per side
    holes: int = 3
    shortest_way: int = 2  # moves that the best player needs, at least
    max_moves: int = 10  # then the episode ends
    slip: float = 0.0  # probability that a move goes to one of its two sides instead
    instruct: bool = False  # state the rules and declare the tool, for models that do not know the task

    def __post_init__(self) -> None:
        if self.size < 2 or not 0 <= self.holes <= self.size**2 - 2:
            raise ValueError(
                f"size={self.size}, holes={self.holes}: "
                f"size >= 2 and 0 <= holes <= size * size - 2 are needed."
            )
        if not 1 <= self.shortest_way <= self.max_moves:
            raise ValueError(
                f"shortest_way={self.shortest_way}, max_moves={self.max_moves}: "
                f"1 <= shortest_way <= max_moves is needed."
            )
        if not 0 <= self.slip <= 1:
            raise ValueError(f"slip={self.slip}: a probability from 0 to 1 is needed.")

    def train(self, seed: int, index: int) -> "FrozenLakeEpisode":
        """Slips follow from (seed, index), too: the same moves give the same episode."""
        lake = training_task(self._make, lambda lake: lake.key, seed, index)
        return FrozenLakeEpisode(self, lake, random.Random(f"slip/{seed}/{index}"))

    def heldout(self, n: int) -> "list[FrozenLakeEpisode]":
        lakes = heldout_tasks(self._make, lambda lake: lake.key, n)
        return [FrozenLakeEpisode(self, lake, random.Random(f"slip/{lake.key}")) for lake in lakes]

    def transcript(self, seed: int, index: int, skill: float) -> list[Message]:
        """A whole conversation on training task `index`; each move is the expert's with probability `skill`,
        else any of the four."""
        rng = random.Random(f"transcript/{seed}/{index}")
        episode = self.train(seed, index)
        messages, done = episode.messages(), False
        while not done:
            expert = rng.random() < skill
            direction = episode.lake.best_move(episode.player) if expert else rng.choice(list(MOVES))
            call = call_message("move", {"direction": direction}, id=f"call_{episode.moves}")
            result = episode.step(call)
            messages += [call, *result.messages]
            done = result.done
        return messages

    def _make(self, rng: random.Random) -> Lake:
        cells = [(row, column) for row in range(self.size) for column in range(self.size)]
        for _ in range(1000):
            start, goal, *holes = rng.sample(cells, self.holes + 2)
            lake = Lake(self.size, start, goal, frozenset(holes))
            if self.shortest_way <= lake.distances().get(start, 0) <= self.max_moves:
                return lake
        raise ConfigError(
            f"Lakes of size {self.size} with {self.holes} holes almost never have a way of "
            f"{self.shortest_way} to {self.max_moves} moves. Use fewer holes, or a smaller shortest_way."
        )


class FrozenLakeEpisode:
    """A walk over one lake, until the goal, a hole, max_moves, or a turn that is not one valid move."""

    def __init__(self, environment: FrozenLake, lake: Lake, rng: random.Random):
        self.environment = environment
        self.lake = lake
        self.player = lake.start
        self.moves = 0
        self.invalid = False
        self.rng = rng

    @property
    def tools(self) -> list[dict[str, Any]] | None:
        return [MOVE_TOOL] if self.environment.instruct else None

    @property
    def metrics(self) -> dict[str, float]:
        return {
            "reached": float(self.player == self.lake.goal),
            "fell": float(self.player in self.lake.holes),
            "invalid": float(self.invalid),
            "moves": float(self.moves),
        }

    def messages(self) -> list[Message]:
        board: list[Message] = [{"role": "user", "content": self.lake.board(self.lake.start)}]
        return [{"role": "system", "content": INSTRUCTION}, *board] if self.environment.instruct else board

    def step(self, assistant: Message) -> StepResult:
        call = single_call(assistant)
        direction = call.arguments.get("direction") if call and call.name == "move" else None
        if call is None or not isinstance(direction, str) or direction not in MOVES:
            self.invalid = True
            return StepResult(reward=0.0, done=True)
        self.moves += 1
        self.player = self.lake.after(self.player, self._slipped(direction))
        if self.player == self.lake.goal:
            return StepResult(reward=1.0, done=True)
        if self.player in self.lake.holes or self.moves == self.environment.max_moves:
            return StepResult(reward=0.0, done=True)
        return StepResult(reward=0.0, done=False, messages=[call.result(self.lake.board(self.player))])

    def _slipped(self, direction: str) -> str:
        if self.rng.random() >= self.environment.slip:
            return direction
        return self.rng.choice(("up", "down") if direction in ("left", "right") else ("left", "right"))
