"""Training data: every token where it belongs, the same order again, and clear words about what is wrong."""

import json
from collections import Counter

import numpy as np
import pytest

from k3jax.chat import encode_chat_with_roles
from train.config import TrainConfig
from train.data import DataError, DataFeed, Jsonl, Pairs, Rows, Transcripts, chat_example
from train.rl.countdown import Countdown

CHAT = [{"role": "user", "content": "3 7 -> 10"}, {"role": "assistant", "content": "3+7"}]


def write(path, *entries):
    path.write_text("".join((e if isinstance(e, str) else json.dumps(e)) + "\n" for e in entries))
    return str(path)


@pytest.fixture
def numbered(tmp_path):
    """50 examples of 3 to 12 tokens; example i is i, i, i, …"""
    return write(tmp_path / "ids.jsonl", *({"ids": [i] * (3 + i % 10)} for i in range(1, 51)))


def rows_of(path, *, seed=0, vocab_size=1000, row_length=32, cut=False):
    return Rows(Jsonl(path=path).examples(None), rows=4, row_length=row_length, seed=seed, vocab_size=vocab_size, cut=cut)


def segments(batch):
    """(first id, length) of every packed example, in order."""
    found = []
    for row, marks in zip(batch["ids"], batch["segments"], strict=True):
        found += [(int(row[marks == s][0]), int((marks == s).sum())) for s in range(1, marks.max() + 1)]
    return found


def test_every_example_comes_whole_and_as_often_as_the_others(numbered):
    batches = rows_of(numbered).next(8)
    seen = Counter(example for batch in batches for example in segments(batch))
    assert set(seen) == {(i, 2 + i % 10) for i in range(1, 51)}
    assert seen.total() > 100
    assert max(seen.values()) - min(seen.values()) <= 1
    assert segments(batches[0]) != segments(batches[4])


def test_the_seed_alone_decides_the_order(numbered):
    a, b, c = (rows_of(numbered, seed=seed).next(3) for seed in (1, 1, 2))
    assert all(np.array_equal(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x)
    assert any(not np.array_equal(x["ids"], y["ids"]) for x, y in zip(a, c, strict=True))


@pytest.mark.parametrize("taken", [0, 1, 5])
def test_a_restored_position_goes_on_exactly(numbered, taken):
    rows = rows_of(numbered)
    rows.next(taken)
    position = json.loads(json.dumps(rows.state()))
    expected = rows.next(6)
    again = rows_of(numbered)
    again.restore(position)
    for x, y in zip(again.next(6), expected, strict=True):
        assert all(np.array_equal(x[name], y[name]) for name in y)


def test_padding_is_segment_zero_without_weight(numbered):
    batch = rows_of(numbered).next(1)[0]
    padding = batch["segments"] == 0
    assert padding.any()
    assert not batch["weights"][padding].any()
    assert batch["weights"][~padding].all()
    assert {name: (x.dtype, x.shape) for name, x in batch.items()} == {
        "ids": (np.int32, (4, 32)), "targets": (np.int32, (4, 32)), "weights": (np.float32, (4, 32)),
        "segments": (np.int32, (4, 32)),
    }


def test_targets_are_the_next_tokens_and_weights_are_theirs(tmp_path):
    path = write(tmp_path / "w.jsonl", {"ids": [5, 6, 7, 8], "weights": [9, 0, 0.5, -1]})
    example = Jsonl(path=path).examples(None)[0]
    assert example["ids"].tolist() == [5, 6, 7]
    assert example["targets"].tolist() == [6, 7, 8]
    assert example["weights"].tolist() == [0, 0.5, -1]


def test_only_what_the_assistant_generates_is_learned(tokenizer):
    example = chat_example(tokenizer, CHAT, None, ("assistant",), False)
    learned = tokenizer.decode(example["targets"][example["weights"] == 1])
    assert learned.startswith("3+7") and learned.endswith("<|end_of_msg|>")
    assert "assistant" not in learned and "3 7" not in learned


def test_the_roles_choose_whose_tokens_are_learned(tokenizer):
    both = chat_example(tokenizer, CHAT, None, ("user", "assistant"), False)
    chat = encode_chat_with_roles(tokenizer, CHAT, thinking=False, add_generation_prompt=False)
    user = chat_example(tokenizer, CHAT, None, ("user",), False)
    assert "3 7 -> 10" in tokenizer.decode(user["targets"][user["weights"] == 1])
    np.testing.assert_array_equal(both["weights"] != user["weights"], chat.generated[1:])


def test_a_row_longer_than_the_context_is_refused_by_name_or_cut_on_request(tmp_path):
    path = write(tmp_path / "long.jsonl", {"ids": [1, 2, 3]}, "", {"ids": list(range(40))})
    with pytest.raises(DataError, match=r"long.jsonl line 3 has 40 tokens, but a row holds 33.*row_length=39.*cut=true"):
        rows_of(path)
    batch = rows_of(path, cut=True).next(1)[0]
    assert sorted(set(segments(batch))) == [(0, 32), (1, 2)]


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        ([], "has no examples: it is empty"),
        (["", " "], "has no examples: it is empty"),
        ([{"ids": [1, 2]}, "{"], "line 2 is not JSON"),
        (["[1]"], "line 1: a JSON object is needed, got list"),
        ([{"text": "x"}], "line 1: messages or ids are needed, got the keys text"),
        ([{"ids": [1, "2"]}], "line 1: ids must be a list of whole numbers"),
        ([{"ids": [1, -2]}], "line 1: ids must be"),
        ([{"ids": [1, 2], "weights": [1]}], "line 1: there are 2 ids but 1 weights"),
        ([{"ids": [1, 2], "weights": [1, float("nan")]}], "line 1: weights must be a list of numbers that are finite"),
            ([{"ids": [1, 2], "weights": [1, 1e300]}], "line 1: weights must be a list of numbers that are finite"),
            ([{"ids": [1, 10**12]}], "line 1: ids must be"),
            ([{"messages": None}], "line 1: messages must be a list of objects"),
        ([{"ids": [1, 2, 3], "weights": [1, 0, 0]}], "line 1: no token of this example is learned"),
        ([{"ids": [1]}], "line 1: no token of this example is learned"),
        ([{"messages": CHAT}], "line 1: messages need a tokenizer"),
        ([{"ids": [1, 2000]}], "line 1 has the token id 2000, outside the model's 1000 ids"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_line(tmp_path, lines, said):
    with pytest.raises(DataError) as error:
        rows_of(write(tmp_path / "d.jsonl", *lines))
    assert "d.jsonl" in str(error.value) and said in str(error.value)


def test_broken_messages_are_said_with_their_line(tmp_path, tokenizer):
    path = write(tmp_path / "d.jsonl", {"messages": CHAT}, {"messages": [{"role": "assistant", "content": 5}]})
    with pytest.raises(DataError, match="d.jsonl line 2"):
        Jsonl(path=path).examples(tokenizer)


def test_a_missing_file_is_named():
    with pytest.raises(DataError, match="There is no data file nowhere.jsonl"):
        rows_of("nowhere.jsonl")


def test_pairs_are_two_segments_weighted_on_their_answers(tmp_path, tokenizer):
    entry = {"messages": CHAT[:1], "chosen": CHAT[1], "rejected": {"role": "assistant", "content": "3-7"}}
    examples = Pairs(path=write(tmp_path / "p.jsonl", entry)).examples(tokenizer)
    rows = Rows(examples, rows=2, row_length=200, seed=0, vocab_size=tokenizer.vocab_size, max_segments=2)
    batch = rows.next(1)[0]
    assert batch["segments"].max() == 4

    def answer(segment):
        row = (batch["segments"][0] == segment) & (batch["weights"][0] == 1)
        return tokenizer.decode(batch["targets"][0][row])

    assert answer(1).startswith("3+7") and answer(3).startswith("3+7")
    assert answer(2).startswith("3-7") and answer(4).startswith("3-7")


def test_pairs_without_an_answer_are_refused(tmp_path, tokenizer):
    path = write(tmp_path / "p.jsonl", {"messages": CHAT[:1], "chosen": CHAT[1]})
    with pytest.raises(DataError, match="line 1: a pair needs messages, chosen and rejected; rejected missing"):
        Pairs(path=path).examples(tokenizer)


def test_a_feed_counts_the_tokens_that_are_no_padding(tokenizer):
    config = TrainConfig(out="x", steps=1, lr=1, rows=2, row_length=128, accumulate=3)
    data = Transcripts(tasks=((Countdown(), 0.5),), count=100).examples(tokenizer)
    batch, figures = DataFeed(data, config, tokenizer.vocab_size, False).next(1)
    assert len(batch) == 3
    assert figures["tokens_in"] == sum((micro["segments"] > 0).sum() for micro in batch) > 300
