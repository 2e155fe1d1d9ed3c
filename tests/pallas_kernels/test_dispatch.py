"""Laws of dispatch: which implementation of an op runs, and what is said when none can."""

import logging
from types import ModuleType

import pytest

from pallas_kernels import dispatch
from pallas_kernels.dispatch import run


@pytest.fixture(autouse=True)
def nothing_announced(monkeypatch):
    monkeypatch.setattr(dispatch, "_announced", set())


def implementation(name, largest):
    """An implementation of `double` that takes numbers up to `largest`."""

    def why_not(x, *, factor=2):
        return None if x <= largest else f"{x} is more than {largest}"

    module = ModuleType(name)
    vars(module).update(why_not=why_not, double=lambda x, *, factor=2: (name, factor * x))
    return module


IMPLS = {"fast": implementation("fast", 10), "slow": implementation("slow", 100)}


def test_the_first_implementation_that_can_runs():
    assert run("double", IMPLS, None, 7) == ("fast", 14)
    assert run("double", IMPLS, None, 70) == ("slow", 140)


def test_keywords_reach_both_the_question_and_the_implementation():
    assert run("double", IMPLS, None, 7, factor=3) == ("fast", 21)


def test_a_requested_implementation_runs_even_if_another_is_preferred():
    assert run("double", IMPLS, "slow", 7) == ("slow", 14)


def test_a_requested_implementation_that_cannot_run_is_never_replaced():
    with pytest.raises(ValueError, match="double: .*not fast: 70 is more than 10"):
        run("double", IMPLS, "fast", 70)


def test_an_unknown_implementation_is_answered_with_the_known_ones():
    with pytest.raises(ValueError, match="double: unknown implementation 'gpu'. Choose one of fast, slow."):
        run("double", IMPLS, "gpu", 7)


def test_when_none_can_run_every_reason_is_given():
    with pytest.raises(ValueError, match="not fast: 700 is more than 10; not slow: 700 is more than 100"):
        run("double", IMPLS, None, 700)


def test_one_line_per_op_and_implementation_says_what_was_taken_and_why(caplog):
    caplog.set_level(logging.INFO, logger="pallas_kernels")
    for x in (7, 8, 70, 71):
        run("double", IMPLS, None, x)
    assert caplog.messages == ["double: fast", "double: slow (not fast: 70 is more than 10)"]
