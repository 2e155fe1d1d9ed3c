"""Chat encoder laws: official segments and ids, no injection, masks by role, prefixes of a conversation."""

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat import chat_segments, encode_chat, encode_chat_with_roles
from k3jax.chat.format import ChatError, parse_tag
from k3jax.chat.messages import ROLES
from k3jax.chat.parser import ChatParser
from k3jax.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "chat_encoding"
FILE = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
CASES = [pytest.param(case, id=case["name"]) for case in FILE["cases"]]
TOKENIZER = Tokenizer(GOLDEN / "tokenizer")
MARKERS = ["<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>"]
MARKER_IDS = [TOKENIZER.special_id(name) for name in MARKERS]
END = "<|close|>message<|sep|><|end_of_msg|>"


def options(case):
    """build_chat_segments has no default effort; apply_chat_template takes max, as we do."""
    default = {"thinking_effort": None} if case["api"] == "build_chat_segments" else {}
    return default | case["options"]


@pytest.mark.parametrize("case", CASES)
def test_segments_and_ids_are_the_official_ones(case):
    segments = chat_segments(case["messages"], **options(case))
    assert [[s.text, s.allow_special] for s in segments] == case["segments"]
    assert encode_chat(TOKENIZER, case["messages"], **options(case)) == case["token_ids"]


@pytest.mark.parametrize("case", [pytest.param(case, id=case["name"]) for case in FILE["error_cases"]])
def test_errors_are_of_the_official_type_and_explain_themselves(case):
    official = {"ValueError": ValueError, "TypeError": TypeError, "KeyError": KeyError}
    with pytest.raises(official.get(case["error"], AssertionError)) as caught:
        chat_segments(case["messages"], **case["options"])
    assert isinstance(caught.value, ChatError)
    assert len(str(caught.value)) > 40 and not str(caught.value).startswith(("'", '"'))


@pytest.mark.parametrize(
    ("messages", "given", "message"),
    [
        ([], {"tool_choice": "always"}, "auto, none, required"),
        ([], {"response_format": {"type": "yaml"}}, "text, json_object or json_schema"),
        ([], {"response_format": {"type": "json_schema"}}, "needs a json_schema"),
        ([], {"thinking_effort": "nonsense"}, "low, high, max"),
        ("hello", {}, "list of dicts"),
        ({"role": "user", "content": "hello"}, {}, "list of dicts"),
        ([{"role": "user", "content": 5}], {}, "a text, a list of parts or None"),
        ([{"role": "user", "content": ["hi"]}], {}, "part must be a dict"),
        ([{"role": "user", "content": [{"type": "text", "text": None}]}], {}, "must be a str"),
        ([{"role": "assistant", "reasoning": ["x"]}], {}, "reasoning_content must be a text"),
        ([{"role": "assistant", "tool_calls": ["x"]}], {}, "tool call must be a dict"),
        ([{"role": "assistant", "tool_calls": [{"function": {}}]}], {}, "needs a function name"),
        ([{"role": "assistant", "tool_calls": [{"name": "f", "arguments": {"k": {1}}}]}], {}, "JSON value"),
    ],
)
def test_what_the_format_cannot_express_is_refused(messages, given, message):
    with pytest.raises(ChatError, match=message):
        chat_segments(messages, **given)


def test_the_tokenizer_of_a_model_with_another_format_is_refused():
    ranks = {bytes([i]): i for i in range(256)}
    other = Tokenizer.from_ranks(ranks, {"<|open|>": 256, "<|sep|>": 257, "<|im_end|>": 258})
    messages = [{"role": "user", "content": "hi"}]
    for call in (encode_chat, encode_chat_with_roles, lambda tokenizer, _: ChatParser(tokenizer)):
        with pytest.raises(ChatError, match=r"no special tokens <\|close\|>, <\|end_of_msg\|>: its model knows another"):
            call(other, messages)


def test_what_the_reference_leaves_out_is_logged(caplog):
    chat_segments([{"role": "developer", "content": "x"}, "x", {"role": "user", "content": "x"}])
    assert "Message 0 has the role 'developer'" in caplog.text
    assert "Message 1 is a str" in caplog.text
    assert "Message 2" not in caplog.text


def test_results_come_in_call_order_even_if_some_are_missing():
    calls = [{"id": f"c{i}", "function": {"name": f"f{i}", "arguments": "{}"}} for i in range(3)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": f"r{i}"} for i in (2, 0)]
    segments = chat_segments([{"role": "assistant", "tool_calls": calls}, *results])
    written = [(s.text, s.message) for s in segments if s.role == "tool" and s.text[1:].isdigit()]
    assert written == [("f0", 2), ("r0", 2), ("f2", 1), ("r2", 1)]


def test_a_named_tool_choice_and_text_format_add_nothing():
    messages = [{"role": "user", "content": "go"}]
    named = {"type": "function", "function": {"name": "f"}}
    for extra in ({"tool_choice": named}, {"response_format": {"type": "text"}}, {"response_format": "text"}):
        assert chat_segments(messages, **extra) == chat_segments(messages)


words = [*MARKERS, END, "message", "think", "&quot;", '"', "x", " ", "é"]
hostile = st.lists(st.sampled_from(words)).map("".join)


@settings(deadline=None)
@given(hostile, hostile.filter(bool), st.booleans())
def test_no_text_of_anyone_becomes_a_marker(text, name, thinking):
    def conversation(text, name):
        call = {"id": "1", "function": {"name": name, "arguments": {name: text, "o": {name: text}}}}
        broken = {"id": "2", "function": {"name": name, "arguments": "{" + text}}
        return chat_segments(
            [
                {"role": "system", "content": text, "name": name},
                {"role": "system", "tools": [{"function": {"name": name, "description": text}}]},
                {"role": "user", "content": [{"type": "text", "text": text}, {"type": "image", "alt": text}]},
                {"role": "assistant", "content": text, "reasoning": text + "x", "tool_calls": [call, broken]},
                {"role": "tool", "content": text, "tool_call_id": "1"},
                {"role": "tool", "content": text, "tool_call_id": "2"},
            ],
            tools=[{"function": {"name": name, "description": text}}],
            response_format={"type": "json_schema", "json_schema": {"schema": {"title": text}}},
            thinking=thinking,
            image_prompts=["<|media_begin|>image 1x1<|media_content|><|media_pad|><|media_end|>"],
        )

    def markers(segments):
        ids = [TOKENIZER.encode(s.text, s.allow_special) for s in segments]
        return [token for piece in ids for token in piece if TOKENIZER.is_special(token)]

    assert markers(conversation(text, name)) == markers(conversation("harmless", "name"))


def test_a_placeholder_in_text_without_image_prompts_stays_text():
    segments = chat_segments([{"role": "user", "content": "<|kimi_image_placeholder|>"}])
    assert [s.allow_special for s in segments if "placeholder" in s.text] == [False]


@pytest.mark.parametrize("case", CASES)
def test_ids_with_roles_are_those_without(case):
    encoded = encode_chat_with_roles(TOKENIZER, case["messages"], **options(case))
    assert encoded.ids.tolist() == case["token_ids"]
    assert len(encoded.ids) == len(encoded.role) == len(encoded.message) == len(encoded.generated)


@pytest.mark.parametrize("case", CASES)
def test_each_token_belongs_to_the_message_that_wrote_it(case):
    encoded = encode_chat_with_roles(TOKENIZER, case["messages"], **options(case))
    for index, message in enumerate(case["messages"]):
        mine = encoded.message == index
        if not isinstance(message, dict) or message["role"] not in ROLES:
            assert not mine.any()
            continue
        assert set(encoded.role[mine]) == {ROLES.index(message["role"])}
        opener = "<|open|>message role=" + f'"{message["role"]}"'
        written = TOKENIZER.decode(encoded.ids[mine])
        assert written.startswith(opener) and written.endswith(END) and written.count(END) >= 1
    options_end = np.flatnonzero(encoded.message == -1)
    assert not encoded.generated[options_end].any()


@pytest.mark.parametrize("case", CASES)
def test_the_model_generates_assistant_bodies_from_the_opener_to_the_end_marker(case):
    encoded = encode_chat_with_roles(TOKENIZER, case["messages"], **options(case))
    channel = "think" if options(case).get("thinking", True) else "response"
    for index, message in enumerate(case["messages"]):
        mine = encoded.message == index
        if not isinstance(message, dict) or message["role"] != "assistant":
            assert not encoded.generated[mine].any()
            continue
        head, body = encoded.ids[mine & ~encoded.generated], encoded.ids[mine & encoded.generated]
        name, attributes = parse_tag(TOKENIZER.decode(head).split("<|sep|>")[0].removeprefix("<|open|>"))
        assert (name, attributes["role"]) == ("message", "assistant")
        assert TOKENIZER.decode(head).endswith(f"<|sep|><|open|>{channel}<|sep|>")
        assert TOKENIZER.decode(body).endswith(END)
        assert body[-1] == TOKENIZER.special_id("<|end_of_msg|>")
        assert np.flatnonzero(mine & encoded.generated).tolist() == list(
            range(np.flatnonzero(mine)[len(head)], np.flatnonzero(mine)[-1] + 1)
        )


@pytest.mark.parametrize("case", CASES)
def test_a_prompt_is_a_prefix_of_the_conversation_that_answers_it(case):
    after = ("tool_choice", "response_format", "image_prompts")
    kept = {key: value for key, value in options(case).items() if key not in after}
    whole = encode_chat(TOKENIZER, case["messages"], **{**kept, "add_generation_prompt": False})
    for k, message in enumerate(case["messages"]):
        if isinstance(message, dict) and message["role"] == "assistant" and not message.get("name"):
            prompt = encode_chat(TOKENIZER, case["messages"][:k], **{**kept, "add_generation_prompt": True})
            assert whole[: len(prompt)] == prompt
            with_roles = encode_chat_with_roles(TOKENIZER, case["messages"], **kept)
            assert with_roles.generated[len(prompt)] and not with_roles.generated[len(prompt) - 1]


texts = st.text(max_size=20)
turns = st.lists(
    st.one_of(
        st.fixed_dictionaries({"role": st.sampled_from(["system", "user"]), "content": texts}),
        st.fixed_dictionaries({"role": st.just("assistant"), "content": texts, "reasoning_content": texts}),
    ),
    max_size=6,
)


@settings(max_examples=50, deadline=None)
@given(turns, st.booleans())
def test_any_conversation_has_its_prompts_as_prefixes(messages, thinking):
    whole = encode_chat_with_roles(TOKENIZER, messages, thinking=thinking, add_generation_prompt=False)
    for k, message in enumerate(messages):
        prompt = encode_chat(TOKENIZER, messages[:k], thinking=thinking)
        if message["role"] == "assistant":
            assert whole.ids[: len(prompt)].tolist() == prompt
    ends = whole.ids == TOKENIZER.special_id("<|end_of_msg|>")
    assert ends.sum() == len(messages) + thinking
    assert whole.generated[ends].sum() == sum(m["role"] == "assistant" for m in messages)
