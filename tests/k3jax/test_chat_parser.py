"""Parser laws: it undoes the encoder, streams what it parses at once, and reads what models do wrong."""

import itertools
import json
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from k3jax.chat import encode_chat, encode_chat_with_roles
from k3jax.chat.format import stop_token_ids
from k3jax.chat.parser import (
    ArgumentsDelta,
    ChatParser,
    ContentDelta,
    ParsedMessage,
    ReasoningDelta,
    ToolCall,
    ToolCallEnd,
    ToolCallStart,
    join_deltas,
    parse_completion,
)
from k3jax.tokenizer import Tokenizer

GOLDEN = Path(__file__).parent.parent / "golden" / "chat_encoding"
FILE = json.loads((GOLDEN / "cases.json").read_text(encoding="utf-8"))
TOKENIZER = Tokenizer(GOLDEN / "tokenizer")
USER = {"role": "user", "content": "go"}
MARKERS = ("<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>")


def generated(messages, **options):
    """Of each assistant message, its index and the ids that the model generates for it."""
    encoded = encode_chat_with_roles(TOKENIZER, messages, **options)
    for index in sorted(set(encoded.message[encoded.generated].tolist())):
        yield index, encoded.ids[(encoded.message == index) & encoded.generated].tolist()


def completion(message, thinking=True):
    ((_, ids),) = generated([USER, message], thinking=thinking)
    return ids


def tokens(text):
    """Ids of a completion written with « for open, / for close, » for sep and ■ for end_of_msg."""
    for letter, marker in zip("«/»■", MARKERS, strict=True):
        text = text.replace(letter, marker)
    return TOKENIZER.encode(text, allow_special=True)


def parse(text, **options):
    return parse_completion(TOKENIZER, tokens(text), **options)


def in_steps(ids, sizes, **options):
    """All deltas of ids fed in pieces of the given sizes, over and over."""
    parser, deltas, start = ChatParser(TOKENIZER, **options), [], 0
    for size in itertools.cycle(sizes):
        if start >= len(ids):
            break
        deltas += parser.feed(ids[start : start + size])
        start += size
    deltas += parser.finish()
    return join_deltas(deltas, ended=parser.done)


def call_of(text):
    (call,) = parse(text).tool_calls
    return call


def plain(message):
    """An assistant message with everything that can be written in two ways written in one, without ids."""
    content = message.get("content") or ""
    if not isinstance(content, str):
        content = "".join(part["text"] for part in content)
    reasoning = message.get("reasoning_content") or message.get("reasoning") or ""
    calls = []
    for call in message.get("tool_calls") or []:
        function = call.get("function", call)
        arguments = function.get("arguments") or {}
        if isinstance(arguments, str):
            try:
                arguments = json.loads(arguments) if arguments.strip() else {}
            except json.JSONDecodeError:
                pass
        calls.append((function["name"], arguments))
    return reasoning if reasoning.strip() else "", content, calls


COMPLETIONS = [
    pytest.param(message, ids, thinking, id=f"{case['name']}-{index}")
    for case in FILE["cases"]
    for thinking in (True, False)
    for index, ids in generated(
        case["messages"], **{**case["options"], "thinking": thinking, "thinking_effort": None}
    )
    for message in [case["messages"][index]]
]


@pytest.mark.parametrize(("message", "ids", "thinking"), COMPLETIONS)
def test_parsing_undoes_encoding(message, ids, thinking):
    parsed = parse_completion(TOKENIZER, ids, thinking=thinking)
    reasoning, content, calls = plain(message)
    assert plain(parsed.message()) == (reasoning if thinking else "", content, calls)
    assert parsed.ended and all(call.complete for call in parsed.tool_calls)
    assert completion(parsed.message(), thinking) == ids


@pytest.mark.parametrize(("message", "ids", "thinking"), COMPLETIONS)
def test_a_stream_cut_anywhere_adds_up_to_the_whole(message, ids, thinking):
    whole = parse_completion(TOKENIZER, ids, thinking=thinking)
    for cut in range(1, len(ids)):
        assert in_steps(ids, [cut, len(ids)], thinking=thinking) == whole
    for size in range(1, 17):
        assert in_steps(ids, [size], thinking=thinking) == whole


@pytest.mark.parametrize(("message", "ids", "thinking"), COMPLETIONS)
def test_a_truncated_completion_is_a_prefix_of_the_whole(message, ids, thinking):
    whole = parse_completion(TOKENIZER, ids, thinking=thinking)
    for end in range(len(ids) - 3):  # the three last: message <|sep|> <|end_of_msg|>
        part = parse_completion(TOKENIZER, ids[:end], thinking=thinking)
        assert part == in_steps(ids[:end], [1], thinking=thinking)
        assert not part.ended
        assert whole.reasoning.startswith(part.reasoning.rstrip("�"))
        assert whole.content.startswith(part.content.rstrip("�"))
        for ours, theirs in zip(part.tool_calls, whole.tool_calls, strict=False):
            assert (ours.id, ours.name) == (theirs.id, theirs.name)
            assert theirs.arguments.startswith(ours.arguments.rstrip("�"))
            assert not ours.complete or ours == theirs


texts = st.text(st.one_of(st.characters(codec="utf-8"), st.sampled_from('«&"\\\n;')), max_size=12)
names = st.text(st.characters(codec="utf-8"), min_size=1, max_size=8)
values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=6,
)
calls = st.fixed_dictionaries({"name": names, "arguments": st.dictionaries(texts, values, max_size=3)})
messages = st.fixed_dictionaries(
    {
        "role": st.just("assistant"),
        "content": texts,
        "reasoning": texts,
        "tool_calls": st.lists(calls, max_size=3),
    }
)


@settings(deadline=None)
@given(messages, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_message_survives_encoding_and_parsing(message, thinking, sizes):
    ids = completion(message, thinking)
    parsed = parse_completion(TOKENIZER, ids, thinking=thinking)
    reasoning, content, calls = plain(message)
    assert plain(parsed.message()) == (reasoning if thinking else "", content, calls)
    assert completion(parsed.message(), thinking) == ids
    assert in_steps(ids, sizes, thinking=thinking) == parsed


tags = ["think", "response", "tools", 'call tool="f" index="1"', 'argument key="k" type="number"', "message"]
tags += ['argument key="s" type="string"', "json", "foo", "argument", "call", ""]
pieces = st.one_of(
    st.sampled_from([f"«{tag}»" for tag in tags] + [f"/{tag.split(' ')[0]}»" for tag in tags]).map(tokens),
    st.lists(st.integers(0, TOKENIZER.vocab_size - 1), max_size=4),
    st.sampled_from(["«", "/", "»", "■", "«call", " ", "12", "{", "世", '"']).map(tokens),
)
streams = st.lists(pieces, max_size=30).map(lambda parts: [token for part in parts for token in part])


@settings(max_examples=300, deadline=None)
@given(streams, st.booleans(), st.lists(st.integers(1, 9), min_size=1, max_size=4))
def test_any_stream_is_read_and_splitting_it_changes_nothing(ids, thinking, sizes):
    whole = parse_completion(TOKENIZER, ids, thinking=thinking)
    assert in_steps(ids, sizes, thinking=thinking) == whole
    shown = whole.reasoning + whole.content + "".join(call.arguments for call in whole.tool_calls)
    assert not any(marker in shown for marker in MARKERS)
    assert len({call.id for call in whole.tool_calls}) == len(whole.tool_calls)
    assert all(call.complete for call in whole.tool_calls) or not whole.ended


CALL = '«call tool="f" index="1"»«argument key="k" type="string"»v/argument»/call»'
F = ToolCall("functions.f:0", "f", '{"k": "v"}', True)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"why«tools»{CALL}/tools»/message»■", ParsedMessage("why", "", (F,), True)),
        ("why«response»answer/response»/message»■", ParsedMessage("why", "answer", (), True)),
        ("why/think»«response»answer/message»■", ParsedMessage("why", "answer", (), True)),
        ("why/think»«response»answer■", ParsedMessage("why", "answer", (), True)),
        ("why/message»■", ParsedMessage("why", "", (), True)),
        ("why[EOS]", ParsedMessage("why", "", (), True)),
        ("why/think»answer/message»■", ParsedMessage("why", "answer", (), True)),
        ("why/think» \n answer/message»■", ParsedMessage("why", " \n answer", (), True)),
        ("why/think»\n«response»answer/message»■", ParsedMessage("why", "answer", (), True)),
        (f"why/think»before«tools»{CALL}/tools»/message»■", ParsedMessage("why", "before", (F,), True)),
        (f"why/think»«response»before/response»{CALL}/message»■", ParsedMessage("why", "before", (F,), True)),
        (
            f"why«response»before«tools»\n{CALL}\n/tools»after/message»",
            ParsedMessage("why", "beforeafter", (F,), True),
        ),
        (f"why/think«response»a/response«tools»{CALL}/tools/message■", ParsedMessage("why", "a", (F,), True)),
        ("why/think»«response»a«b»c/b»d/response»/message»", ParsedMessage("why", "acd", (), True)),
        (
            "why/think»«response»a»b[PAD]c/argument»d/response»/message»",
            ParsedMessage("why", "abcd", (), True),
        ),
        ('why/think»«response»a/message»■«message role="user"»hi', ParsedMessage("why", "a", (), True)),
        ('why/think»«response»a«message role="user"»hi', ParsedMessage("why", "a", (), True)),
        ("«think»why/think»«response»a", ParsedMessage("why", "a", (), False)),
        ("why/think»«resp", ParsedMessage("why", "", (), False)),
        ("why/think", ParsedMessage("why", "", (), False)),
        ("", ParsedMessage("", "", (), False)),
    ],
)
def test_what_models_do_wrong_is_read(text, expected):
    assert parse(text) == expected
    assert in_steps(tokens(text), [1]) == expected


def test_an_instant_completion_starts_inside_response():
    assert parse("answer/response»/message»■", thinking=False) == ParsedMessage("", "answer", (), True)


def argument(type_, text):
    return call_of(
        f'«tools»«call tool="f" index="1"»«argument key="k" type="{type_}"»{text}/argument»/call»'
    ).arguments


@pytest.mark.parametrize(
    ("type_", "text", "arguments"),
    [
        ("number", "1e2", '{"k": 1e2}'),
        ("number", "-0.50", '{"k": -0.50}'),
        ("number", "9" * 5000, '{"k": ' + "9" * 5000 + "}"),
        ("number", "about 5", '{"k": "about 5"}'),
        ("number", "NaN", '{"k": "NaN"}'),
        ("number", "", '{"k": ""}'),
        ("boolean", "true", '{"k": true}'),
        ("boolean", "True", '{"k": "True"}'),
        ("null", "null", '{"k": null}'),
        ("array", "[1, 1.0,2]", '{"k": [1, 1.0,2]}'),
        ("array", "[" * 100_000, '{"k": "' + "[" * 100_000 + '"}'),
        ("object", '{"a": 1', '{"k": "{\\"a\\": 1"}'),
        ("string", "12", '{"k": "12"}'),
        ("string", ' say "hi"\n\\', '{"k": " say \\"hi\\"\\n\\\\"}'),
        ("odd", "12", '{"k": "12"}'),
    ],
)
def test_values_keep_their_spelling_and_arguments_stay_json(type_, text, arguments):
    assert argument(type_, text) == arguments
    json.loads(arguments, parse_int=str)


def test_a_number_spelled_1e2_survives_a_round_trip_by_value():
    parsed = parse(
        '«tools»«call tool="f" index="1"»«argument key="k" type="number"»1e2/argument»/call»/message»'
    )
    again = parse_completion(TOKENIZER, completion(parsed.message()))
    assert (
        json.loads(again.tool_calls[0].arguments) == json.loads(parsed.tool_calls[0].arguments) == {"k": 100}
    )


@pytest.mark.parametrize(
    ("body", "arguments"),
    [
        ("", "{}"),
        ('«json type="object"»{"a": 1}/json»', '{"a": 1}'),
        ('«json type="object"»{"a": /json»', '{"a": '),
        ('\n{"a": 1}', '\n{"a": 1}'),
        ("  ", "{}"),
        ('«json»{}/json»«argument key="k" type="string"»v/argument»', "{}"),
        ('«argument key="k" type="string"»v/argument»«json»{}/json»', '{"k": "v"}'),
        ('«argument key="k" type="string"»v/argument» stray', '{"k": "v"}'),
        ('«argument key="k" type="number"»1«argument key="l" type="number"»2', '{"k": 1, "l": 2}'),
        ('«argument key="&quot;&amp;quot;" type="string"»v/argument»', '{"\\"&quot;": "v"}'),
    ],
)
def test_calls_without_proper_arguments_are_read(body, arguments):
    call = call_of(f'«tools»«call tool="f" index="1"»{body}/call»/tools»/message»')
    assert call == ToolCall("functions.f:0", "f", arguments, True)


def test_half_a_character_at_the_end_is_shown_as_decoding_shows_it():
    ids = TOKENIZER.encode("so 🙂")[:-1]
    assert in_steps(ids, [1]).reasoning == parse_completion(TOKENIZER, ids).reasoning == TOKENIZER.decode(ids)


@pytest.mark.parametrize("end", ["/call»", "/tools»", "/message»", "■", '«call tool="g"»', "«response»"])
def test_a_call_ends_with_whatever_closes_it(end):
    text = f'«tools»«call tool="f" index="1"»«argument key="k" type="number"»12{end}'
    assert parse(text).tool_calls[0] == ToolCall("functions.f:0", "f", '{"k": 12}', True)


def test_a_call_cut_off_is_marked_and_never_valid_json():
    whole = tokens(f"«tools»{CALL}")
    start = whole.index(TOKENIZER.special_id("<|sep|>"), 6) + 1
    for end in range(start, len(whole)):
        (call,) = parse_completion(TOKENIZER, whole[:end]).tool_calls
        assert not call.complete
        with pytest.raises(json.JSONDecodeError):
            json.loads(call.arguments)
    held = call_of('«tools»«call tool="f" index="1"»«argument key="k" type="number"»12')
    assert (held.arguments, held.complete) == ('{"k": 12', False)


def test_long_arguments_come_through_in_pieces_of_any_size():
    long = 'line "one"\n' * 4000
    message = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"name": "w", "arguments": {"a": long, "b": [long]}}],
    }
    ids = completion(message)
    for size in (1, 7, 16, 4096):
        (call,) = in_steps(ids, [size]).tool_calls
        assert json.loads(call.arguments) == {"a": long, "b": [long]}


@pytest.mark.parametrize("before", ["", "/think»", "«tools»", '«tools»«call tool="f"»', f"«tools»{CALL[:-6]}", "«call "])
@pytest.mark.parametrize("unit", [" ", '"', 'a="'])
def test_endless_repetition_anywhere_takes_linear_time(before, unit):
    """What is held back is never read again token by token."""
    parser = ChatParser(TOKENIZER)
    parser.feed(tokens(before))
    start, ids = time.process_time(), TOKENIZER.encode(unit)
    for _ in range(200_000):
        parser.feed(ids)
    parser.feed(tokens("»"))
    parser.finish()
    assert time.process_time() - start < 3


def test_one_feed_may_close_a_call_and_open_the_next():
    second = CALL.replace('"f"', '"g"')
    ids = tokens(f"«tools»{CALL}{second}/tools»/message»")
    deltas = ChatParser(TOKENIZER).feed(ids)
    assert [d for d in deltas if not isinstance(d, ArgumentsDelta)] == [
        ToolCallStart(0, "functions.f:0", "f"),
        ToolCallEnd(0),
        ToolCallStart(1, "functions.g:1", "g"),
        ToolCallEnd(1),
    ]


def test_call_ids_continue_over_a_conversation_and_match_their_results():
    first = parse(f"«tools»{CALL}{CALL}/tools»/message»")
    second = parse(f"«tools»{CALL}/tools»/message»", first_call=2)
    assert [call.id for call in first.tool_calls + second.tool_calls] == [
        f"functions.f:{i}" for i in range(3)
    ]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": f"result of {call.id}"}
        for call in first.tool_calls
    ]
    conversation = [USER, first.message(), *reversed(results)]
    assert encode_chat(TOKENIZER, conversation) == encode_chat(TOKENIZER, [USER, first.message(), *results])


def test_text_is_shown_with_the_token_that_completes_it():
    parser = ChatParser(TOKENIZER)
    assert parser.feed(tokens("a")) == [ReasoningDelta("a")]
    assert parser.feed(tokens("/think»«response»")) == []
    assert parser.feed(tokens("b")) == [ContentDelta("b")]
    first, *rest = TOKENIZER.encode("🙂")
    assert parser.feed([first]) == []
    assert parser.feed(rest) == [ContentDelta("🙂")]
    assert parser.feed(tokens('«tools»«call tool="f"»«argument key="k" type="string"»'))[-1].text == '{"k": "'
    assert parser.feed(tokens("v")) == [ArgumentsDelta(0, "v")]


def test_a_marker_spelled_in_letters_is_text():
    ids = TOKENIZER.encode("<|close|>think<|sep|><|end_of_msg|>")
    assert parse_completion(TOKENIZER, ids) == ParsedMessage(
        "<|close|>think<|sep|><|end_of_msg|>", "", (), False
    )


def test_nothing_is_read_after_the_turns_end():
    parser = ChatParser(TOKENIZER)
    parser.feed(tokens("a/message»"))
    assert parser.done
    assert parser.feed(tokens("■b«response»c")) == parser.finish() == []


def test_stop_ids_end_the_turn():
    for token in stop_token_ids(TOKENIZER):
        assert parse_completion(TOKENIZER, np.array([97, token, 98])) == ParsedMessage("a", "", (), True)
    assert stop_token_ids(TOKENIZER)[0] == TOKENIZER.special_id("<|end_of_msg|>")


@pytest.mark.parametrize("token", [-1, TOKENIZER.vocab_size])
def test_ids_outside_the_vocabulary_are_refused(token):
    with pytest.raises(ValueError, match="outside this vocabulary"):
        ChatParser(TOKENIZER).feed([token])
