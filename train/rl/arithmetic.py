"""Expressions over + - * / and parentheses: exact evaluation, and a search for one that reaches a target."""

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

MAX_LENGTH = 200  # characters
MAX_DEPTH = 20  # nested parentheses
MAX_NUMBERS = 6  # for solve, whose work grows 25-fold per number: 0.4 s for 5, 10 s for 6, on one core

_TOKEN = re.compile(r" *(0|[1-9][0-9]{0,8}|[-+*/()])")
_PRECEDENCE = {"+": 1, "-": 1, "*": 2, "/": 2}
_ATOM = 3


@dataclass(frozen=True)
class Expression:
    """What an expression says: its exact value, its numbers and operators from left to right."""

    value: Fraction
    numbers: tuple[int, ...]
    operators: tuple[str, ...]


def evaluate(text: str) -> Expression:
    """Evaluates `text` exactly, with the usual precedence; operators of one rank group from the left.

    Numbers have 1 to 9 digits, no leading zero and no sign. Raises ValueError for anything else, division by
    zero, more than MAX_LENGTH characters or MAX_DEPTH nested parentheses.
    """
    if len(text) > MAX_LENGTH:
        raise ValueError(f"An expression may have {MAX_LENGTH} characters, got {len(text)}.")
    return _Parser(_tokens(text.strip(" \n"))).expression()


def _tokens(text: str) -> list[str]:
    tokens, at = [], 0
    while at < len(text):
        if (match := _TOKEN.match(text, at)) is None:
            raise ValueError(f"Not an expression from character {at + 1} on: {text[at : at + 20]!r}.")
        if tokens and tokens[-1][0].isdigit() and match[1][0].isdigit():
            raise ValueError(f"Two numbers without an operator between them: {tokens[-1]} {match[1]}.")
        tokens.append(match[1])
        at = match.end()
    return tokens


class _Parser:
    """Recursive descent: sum = product {+|- product}; product = atom {*|/ atom}; atom = number | ( sum )."""

    def __init__(self, tokens: list[str]):
        self.tokens = tokens
        self.at = 0
        self.depth = 0

    def expression(self) -> Expression:
        value = self._sum()
        if self.at < len(self.tokens):
            raise ValueError(f"Nothing may follow a complete expression, got {self.tokens[self.at]!r}.")
        numbers = tuple(int(token) for token in self.tokens if token.isdigit())
        return Expression(value, numbers, tuple(token for token in self.tokens if token in _PRECEDENCE))

    def _next(self) -> str | None:
        return self.tokens[self.at] if self.at < len(self.tokens) else None

    def _sum(self) -> Fraction:
        value = self._product()
        while (operator := self._next()) in ("+", "-"):
            self.at += 1
            value = apply(operator, value, self._product())
        return value

    def _product(self) -> Fraction:
        value = self._atom()
        while (operator := self._next()) in ("*", "/"):
            self.at += 1
            value = apply(operator, value, self._atom())
        return value

    def _atom(self) -> Fraction:
        token = self._next()
        self.at += 1
        if token is not None and token.isdigit():
            return Fraction(int(token))
        if token != "(":
            raise ValueError(f"A number or '(' is needed, got {'the end' if token is None else repr(token)}.")
        self.depth += 1
        if self.depth > MAX_DEPTH:
            raise ValueError(f"Parentheses are nested more than {MAX_DEPTH} deep.")
        value = self._sum()
        if self._next() != ")":
            raise ValueError("A '(' is never closed.")
        self.at += 1
        self.depth -= 1
        return value


def apply(operator: str, a: Fraction, b: Fraction) -> Fraction:
    """a operator b. Raises ValueError for division by zero."""
    match operator:
        case "+":
            return a + b
        case "-":
            return a - b
        case "*":
            return a * b
        case "/" if b:
            return a / b
    raise ValueError("Division by zero.")


def solve(
    numbers: Sequence[int], target: int, *, operators: str = "+-*/", use_all: bool = True
) -> str | None:
    """An expression that uses each number once (at most once unless use_all) and equals `target`, or None.

    Exhaustive: it tabulates, for every subset of the numbers, each value that the subset can make, with the
    text that is shortest, then binds tightest, then keeps the numbers' order. At most MAX_NUMBERS numbers.
    """
    if not 1 <= len(numbers) <= MAX_NUMBERS:
        raise ValueError(f"solve takes 1 to {MAX_NUMBERS} numbers, got {len(numbers)}.")
    everything = (1 << len(numbers)) - 1
    made: dict[int, dict[Fraction, _Text]] = {}
    for subset in range(1, everything + 1):  # every part of a subset is a smaller number than the subset
        made[subset] = _made_from(subset, numbers, operators, made)
    goal = Fraction(target)
    usable = [everything] if use_all else list(made)
    found = [made[subset][goal] for subset in usable if goal in made[subset]]
    return min(found, key=_Text.rank).text if found else None


@dataclass(frozen=True, slots=True)
class _Text:
    """An expression as text; `order` holds the positions of its numbers in the task."""

    text: str
    precedence: int
    order: tuple[int, ...]

    def rank(self) -> tuple[int, int, tuple[int, ...]]:
        return len(self.text), -self.precedence, self.order

    def join(self, operator: str, other: "_Text") -> "_Text":
        """`self operator other` with no more parentheses than its meaning needs."""
        precedence = _PRECEDENCE[operator]
        left = self.text if self.precedence >= precedence else f"({self.text})"
        bare = other.precedence > precedence or (other.precedence == precedence and operator in "+*")
        right = other.text if bare else f"({other.text})"
        return _Text(f"{left}{operator}{right}", precedence, self.order + other.order)


def _made_from(
    subset: int, numbers: Sequence[int], operators: str, made: dict[int, dict[Fraction, _Text]]
) -> dict[Fraction, _Text]:
    """The best text for each value that the numbers at the set bits of `subset` make, all of them used."""
    if subset & (subset - 1) == 0:
        position = subset.bit_length() - 1
        return {Fraction(numbers[position]): _Text(str(numbers[position]), _ATOM, (position,))}
    best: dict[Fraction, _Text] = {}
    left = (subset - 1) & subset
    while left:  # every way to part the subset in two operands
        for (a, text_a), (b, text_b) in itertools.product(made[left].items(), made[subset ^ left].items()):
            for operator in operators:
                if operator == "/" and not b:
                    continue
                value, text = apply(operator, a, b), text_a.join(operator, text_b)
                if value not in best or text.rank() < best[value].rank():
                    best[value] = text
        left = (left - 1) & subset
    return best
