"""Tokenizer laws: the official ids, text in equals text out, streaming equals decoding at once."""

import hashlib
import json
import pickle
import re
import shutil
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.tokenizer import StreamDecoder, Tokenizer
from k3jax.tokenizer_training import train_bpe

GOLDEN = Path(__file__).parent.parent / "golden" / "chat_encoding"
CASES = json.loads((GOLDEN / "tokenizer_cases.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer(GOLDEN / "tokenizer")
UNITS = ["a", " ", "👩", "\n", "!", "界", "0", "aA", " a"]
CORPUS = ["def add(a, b):\n    return a + b\n", "The the THE cat's 1234 世界你好"] + [u * 97 for u in UNITS]
RUN_MERGES = train_bpe(CORPUS, 580)  # its merges cover runs of every unit


@pytest.mark.parametrize("case", CASES["texts"], ids=lambda case: repr(case["text"])[:30])
def test_texts_get_the_official_ids(case):
    assert TOKENIZER.encode(case["text"]) == case["ids_ordinary"]
    assert TOKENIZER.encode(case["text"], allow_special=True) == case["ids_special_allowed"]


@pytest.mark.parametrize("case", CASES["long_texts"], ids=lambda case: repr(case["unit"]))
def test_long_texts_are_cut_where_the_reference_cuts_them(case):
    ids = TOKENIZER.encode(case["unit"] * case["repeat"])
    assert len(ids) == case["num_ids"]
    assert hashlib.sha256(np.asarray(ids, "<i4").tobytes()).hexdigest() == case["sha256_of_int32_le"]


@pytest.mark.parametrize("before", ["", "a run of its own: "])
def test_a_run_is_cut_after_every_25_000_characters_even_inside_a_token(before):
    run = "the" * 20_000
    cut = [run[start : start + 25_000] for start in range(0, len(run), 25_000)]
    ids = TOKENIZER.encode(before + run)
    assert ids == TOKENIZER.encode(before + cut[0]) + TOKENIZER.encode(cut[1]) + TOKENIZER.encode(cut[2])
    assert len(ids) > len(TOKENIZER.encode(before)) + 20_000  # "the" is a token, but not where it was cut


@pytest.mark.parametrize("case", CASES["decode"], ids=lambda case: str(case["ids"][:4]))
def test_ids_decode_to_the_official_text(case):
    assert TOKENIZER.decode(case["ids"]) == case["text"]
    assert TOKENIZER.decode(np.asarray(case["ids"], np.int32)) == case["text"]


def test_special_tokens_have_the_official_ids_and_sizes():
    assert TOKENIZER.vocab_size == CASES["vocab_size"]
    assert TOKENIZER.num_base_tokens == CASES["num_base_tokens"]
    ids = CASES["special_token_ids"]
    assert {name: TOKENIZER.special_id(name) for name in ids} == ids
    assert TOKENIZER.special_id("<|reserved_token_684|>") == 684
    roles = (TOKENIZER.bos_id, TOKENIZER.eos_id, TOKENIZER.pad_id, TOKENIZER.unk_id)
    assert roles == (ids["[BOS]"], ids["[EOS]"], ids["[PAD]"], ids["[UNK]"])
    for part in ("begin", "content", "end", "pad"):
        assert getattr(TOKENIZER, f"media_{part}_id") == ids[f"<|media_{part}|>"]
    assert TOKENIZER.is_special(676) and not TOKENIZER.is_special(675)


@settings(deadline=None)
@given(st.text())
def test_decode_undoes_encode(text):
    assert TOKENIZER.decode(TOKENIZER.encode(text)) == text
    assert TOKENIZER.decode(TOKENIZER.encode(text, allow_special=True)) == text


@settings(deadline=None)
@given(st.lists(st.sampled_from([*TOKENIZER.special_tokens][:24] + ["a", " ", "<|", "|>"])).map("".join))
def test_no_text_becomes_a_special_token_unless_allowed(text):
    assert not any(map(TOKENIZER.is_special, TOKENIZER.encode(text)))


@settings(deadline=None)
@given(st.lists(st.integers(0, TOKENIZER.vocab_size - 1)), st.integers(1, 5))
def test_streamed_text_equals_text_decoded_at_once(ids, step):
    decoder = StreamDecoder(TOKENIZER)
    for _ in range(2):  # a finished decoder starts anew
        parts = [decoder.feed(ids[start : start + step]) for start in range(0, len(ids), step)]
        assert "".join(parts) + decoder.finish() == TOKENIZER.decode(ids)


def test_a_stream_never_shows_half_a_character():
    decoder = StreamDecoder(TOKENIZER)
    shown = [decoder.feed([token]) for token in TOKENIZER.encode("👩‍🚀é世")]
    assert "�" not in "".join(shown) and decoder.finish() == ""


@pytest.mark.parametrize("unit", UNITS)
def test_a_megabyte_of_one_kind_takes_under_two_seconds(unit):
    text = unit * (1_000_000 // len(unit.encode()))
    for tokenizer in (TOKENIZER, RUN_MERGES):
        start = time.perf_counter()
        ids = tokenizer.encode(text)
        assert time.perf_counter() - start < 2
        assert tokenizer.decode(ids) == text


def test_saving_and_loading_changes_nothing(tmp_path):
    TOKENIZER.save(tmp_path / "a")
    again = Tokenizer(tmp_path / "a")
    for case in CASES["texts"]:
        assert again.encode(case["text"], allow_special=True) == case["ids_special_allowed"]
    for name in ("tiktoken.model", "tokenizer_config.json"):
        ours, theirs = ((folder / name).read_text() for folder in (tmp_path / "a", GOLDEN / "tokenizer"))
        assert ours.split() == theirs.split()
    assert {path.name for path in (tmp_path / "a").iterdir()} == {"tiktoken.model", "tokenizer_config.json"}


def test_role_tokens_may_be_written_as_objects(tmp_path):
    TOKENIZER.save(tmp_path)
    path = tmp_path / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"eos_token": "[EOS]"', '"eos_token": {"content": "[EOS]"}'))
    assert Tokenizer(tmp_path).eos_id == TOKENIZER.eos_id


def test_a_tokenizer_survives_pickling():
    again = pickle.loads(pickle.dumps(TOKENIZER))
    assert again.encode("Hello [EOS]", True) == TOKENIZER.encode("Hello [EOS]", True)


def test_missing_files_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="no folder .*nowhere"):
        Tokenizer(tmp_path / "nowhere")
    shutil.copy(GOLDEN / "tokenizer" / "tiktoken.model", tmp_path)
    with pytest.raises(FileNotFoundError, match=r"tokenizer_config\.json"):
        Tokenizer(tmp_path)


def drop_last_line(folder):
    lines = (folder / "tiktoken.model").read_text().splitlines(keepends=True)
    (folder / "tiktoken.model").write_text("".join(lines[:-1]))


def cut_a_line(folder):
    text = (folder / "tiktoken.model").read_text()
    (folder / "tiktoken.model").write_text(text[:700])


def drop_a_middle_line(folder):
    lines = (folder / "tiktoken.model").read_text().splitlines(keepends=True)
    (folder / "tiktoken.model").write_text("".join(lines[:300] + lines[301:]))


def write_rubbish(folder):
    (folder / "tiktoken.model").write_bytes(b"\x80\x02 not a rank\n")


def cut_config(folder):
    (folder / "tokenizer_config.json").write_text('{"added_tokens_decoder": {')


def config_without_names(folder):
    (folder / "tokenizer_config.json").write_text('{"bos_token": "[BOS]"}')


def config_with_unknown_role(folder):
    path = folder / "tokenizer_config.json"
    path.write_text(path.read_text().replace('"bos_token": "[BOS]"', '"bos_token": "<s>"'))


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (drop_last_line, "two models"),
        (cut_a_line, "corrupt or cut short"),
        (drop_a_middle_line, "each once"),
        (write_rubbish, "line 1 is not"),
        (cut_config, "JSON object"),
        (config_without_names, "added_tokens_decoder"),
        (config_with_unknown_role, "bos_token is '<s>'"),
    ],
)
def test_a_corrupt_folder_is_refused_with_the_reason(tmp_path, damage, message):
    shutil.copytree(GOLDEN / "tokenizer", tmp_path / "t", copy_function=shutil.copyfile)
    (tmp_path / "t").chmod(0o755)
    if damage is drop_last_line:  # one base token fewer: the special id 931 + 1 is then outside
        path = tmp_path / "t" / "tokenizer_config.json"
        path.write_text(path.read_text().replace('"707"', '"931"'))
    damage(tmp_path / "t")
    with pytest.raises(ValueError, match=message):
        Tokenizer(tmp_path / "t")


@pytest.mark.parametrize("token", [-1, CASES["vocab_size"]])
def test_an_unknown_id_is_refused(token):
    with pytest.raises(ValueError, match=f"Token id {token} is outside this vocabulary of 932"):
        TOKENIZER.decode([65, token])


def test_unknown_names_are_refused():
    with pytest.raises(ValueError, match=re.escape("no special token '<|nope|>'")):
        TOKENIZER.special_id("<|nope|>")


def test_training_is_deterministic_and_saves_what_it_learnt(tmp_path):
    one, two = train_bpe(CORPUS, 560), train_bpe(iter(CORPUS), 560)
    one.save(tmp_path / "one")
    two.save(tmp_path / "two")
    loaded = Tokenizer(tmp_path / "one")
    assert (tmp_path / "one/tiktoken.model").read_bytes() == (tmp_path / "two/tiktoken.model").read_bytes()
    text = "".join(CORPUS) + " never seen: ß"
    assert loaded.encode(text) == two.encode(text)
    assert loaded.decode(loaded.encode(text)) == text
    assert loaded.vocab_size == 560
    assert loaded.encode("<|open|>", allow_special=True) == [loaded.special_id("<|open|>")]


def test_training_shortens_its_corpus():
    lengths = [len(train_bpe(CORPUS, size).encode(CORPUS[0])) for size in (512, 530, 600)]
    assert lengths[0] == len(CORPUS[0].encode())
    assert lengths[0] > lengths[1] > lengths[2]


def test_the_first_merge_is_the_most_frequent_pair():
    tokenizer = train_bpe(["xyxyxy xy", "ab ab"], 513)
    assert tokenizer.token_bytes(256) == b"xy"


def test_merges_never_cross_the_split_pattern():
    tokenizer = train_bpe(["a1" * 500, "世a" * 500, "12345" * 100], 520)
    learnt = [tokenizer.token_bytes(token).decode("utf-8", "ignore") for token in range(256, 264)]
    assert not any("a1" in text or "1a" in text or "世a" in text for text in learnt)
    assert max(map(len, learnt)) <= 3


@pytest.mark.parametrize(("size", "message"), [(511, "512 ids"), (5000, "corpus yields only")])
def test_impossible_vocabulary_sizes_are_refused(size, message):
    with pytest.raises(ValueError, match=message):
        train_bpe(CORPUS, size)
