"""Text to token ids and back, from the tiktoken.model and tokenizer_config.json of a checkpoint folder."""

import base64
import binascii
import codecs
import json
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import tiktoken

RANKS_FILE = "tiktoken.model"
CONFIG_FILE = "tokenizer_config.json"

# Ids num_base_tokens .. num_base_tokens + 255 are special; those without a name get a reserved one.
SPECIAL_SLOTS = 256

# The reference encodes text in pieces of at most this many characters, and cuts longer runs of
# whitespace or of non-whitespace. Cuts change ids, so both limits are part of the vocabulary's definition.
PIECE_CHARS = 400_000
RUN_CHARS = 25_000

_UPPER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LOWER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"
_LEAD = r"[^\r\n\p{L}\p{N}]?"
_CONTRACTION = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
SPLIT_PATTERN = "|".join(
    (
        r"[\p{Han}]+",
        f"{_LEAD}{_UPPER}*{_LOWER}+{_CONTRACTION}",
        f"{_LEAD}{_UPPER}+{_LOWER}*{_CONTRACTION}",
        r"\p{N}{1,3}",
        r" ?[^\s\p{L}\p{N}]+[\r\n]*",
        r"\s*[\r\n]+",
        r"\s+(?!\S)",
        r"\s+",
    )
)

_NAMED_ROLES = ("bos_token", "eos_token", "pad_token", "unk_token")


class Tokenizer:
    """Byte-pair encoding with Kimi's split pattern and 256 special ids after the base vocabulary.

    folder  a checkpoint folder holding tiktoken.model (one "base64(bytes) rank" per line) and
            tokenizer_config.json (added_tokens_decoder: id -> name; bos/eos/pad/unk_token)

    Raises FileNotFoundError when a file is missing and ValueError when one is corrupt.
    """

    def __init__(self, folder: str | os.PathLike[str]):
        folder = Path(folder)
        ranks = _read_ranks(_existing(folder, RANKS_FILE))
        special_tokens, settings = _read_config(_existing(folder, CONFIG_FILE))
        self._build(ranks, special_tokens, settings)

    @classmethod
    def from_ranks(
        cls, ranks: Mapping[bytes, int], special_tokens: Mapping[str, int], **settings: Any
    ) -> "Tokenizer":
        """A tokenizer from its parts.

        ranks           bytes of a token -> its id, 0 .. n-1, the 256 single bytes among them
        special_tokens  name -> id, n <= id < n + 256
        settings        further entries of tokenizer_config.json, such as bos_token="[BOS]"
        """
        tokenizer = cls.__new__(cls)
        tokenizer._build(dict(ranks), dict(special_tokens), dict(settings))
        return tokenizer

    def _build(self, ranks: dict[bytes, int], named: dict[str, int], settings: dict[str, Any]) -> None:
        _check_ranks(ranks)
        self.num_base_tokens = len(ranks)
        self.vocab_size = len(ranks) + SPECIAL_SLOTS
        _check_named(named, self.num_base_tokens)
        names = {token: name for name, token in named.items()}
        self.special_tokens = {
            names.get(token, f"<|reserved_token_{token}|>"): token
            for token in range(self.num_base_tokens, self.vocab_size)
        }
        if len(self.special_tokens) != SPECIAL_SLOTS:
            raise ValueError("A special token is named like the reserved name of another id; rename it.")
        self._named = named
        self._settings = settings
        self._ranks = ranks
        self._encoding = tiktoken.Encoding(
            "kimi", pat_str=SPLIT_PATTERN, mergeable_ranks=ranks, special_tokens=self.special_tokens
        )
        for role in _NAMED_ROLES:
            name = self._role_name(role)
            if name is not None and name not in self.special_tokens:
                raise ValueError(
                    f"{role} is {name!r}, which is not among the special tokens {sorted(named)}. "
                    f"Add it to added_tokens_decoder in {CONFIG_FILE}."
                )

    def save(self, folder: str | os.PathLike[str]) -> None:
        """Write tiktoken.model and tokenizer_config.json; each file appears whole or not at all."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        by_rank = sorted(self._ranks.items(), key=lambda item: item[1])
        lines = (f"{base64.b64encode(token).decode('ascii')} {rank}\n" for token, rank in by_rank)
        _write_whole(folder / RANKS_FILE, "".join(lines))
        flags = {"lstrip": False, "normalized": False, "rstrip": False, "single_word": False, "special": True}
        by_id = sorted(self._named.items(), key=lambda item: item[1])
        config = {
            "tokenizer_class": "TikTokenTokenizer",
            **self._settings,
            "added_tokens_decoder": {str(token): {"content": name, **flags} for name, token in by_id},
        }
        _write_whole(folder / CONFIG_FILE, json.dumps(config, indent=1, ensure_ascii=False) + "\n")

    def encode(self, text: str, allow_special: bool = False) -> list[int]:
        """Ids of text. The names of special tokens become their ids only with allow_special;
        otherwise they are letters like any others, so nobody's text can smuggle one in."""
        if not isinstance(text, str):
            raise TypeError(f"encode needs a str, got {type(text).__name__}.")
        ids: list[int] = []
        for piece in _pieces(text):
            if allow_special:
                ids += self._encoding.encode(piece, allowed_special="all", disallowed_special=())
            else:
                ids += self._encoding.encode_ordinary(piece)
        return ids

    def decode(self, ids: Iterable[int]) -> str:
        """Text of ids, special ones by name; bytes that are not UTF-8 become U+FFFD."""
        return b"".join(map(self.token_bytes, ids)).decode("utf-8", errors="replace")

    def token_bytes(self, token: int) -> bytes:
        """The bytes of one id: part of a UTF-8 sequence, perhaps, or a special token's name."""
        token = int(token)
        if not 0 <= token < self.vocab_size:
            raise ValueError(f"Token id {token} is outside this vocabulary of {self.vocab_size} ids.")
        return self._encoding.decode_single_token_bytes(token)

    def is_special(self, token: int) -> bool:
        return token >= self.num_base_tokens

    def special_id(self, name: str) -> int:
        """The id of a special token, by name ("<|open|>", "[EOS]", ...)."""
        if name not in self.special_tokens:
            raise ValueError(f"This tokenizer has no special token {name!r}; it has {sorted(self._named)}.")
        return self.special_tokens[name]

    def _role_name(self, role: str) -> str | None:
        entry = self._settings.get(role)
        return entry.get("content") if isinstance(entry, dict) else entry

    def _role_id(self, role: str) -> int:
        name = self._role_name(role)
        if name is None:
            raise ValueError(f"This tokenizer has no {role}: set it in {CONFIG_FILE}.")
        return self.special_tokens[name]

    @property
    def bos_id(self) -> int:
        return self._role_id("bos_token")

    @property
    def eos_id(self) -> int:
        return self._role_id("eos_token")

    @property
    def pad_id(self) -> int:
        return self._role_id("pad_token")

    @property
    def unk_id(self) -> int:
        return self._role_id("unk_token")

    @property
    def media_begin_id(self) -> int:
        return self.special_id("<|media_begin|>")

    @property
    def media_content_id(self) -> int:
        return self.special_id("<|media_content|>")

    @property
    def media_end_id(self) -> int:
        return self.special_id("<|media_end|>")

    @property
    def media_pad_id(self) -> int:
        """The id that each image feature takes the place of."""
        return self.special_id("<|media_pad|>")


class StreamDecoder:
    """Decodes ids as they arrive, holding back the bytes of an unfinished UTF-8 character.

    The texts of all feeds and of finish, joined, equal Tokenizer.decode of all ids.
    """

    def __init__(self, tokenizer: Tokenizer):
        self._token_bytes = tokenizer.token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")(errors="replace")

    def feed(self, ids: Iterable[int]) -> str:
        """The characters that these ids complete; at most three bytes wait for the next call."""
        return self._utf8.decode(b"".join(map(self._token_bytes, ids)))

    def finish(self) -> str:
        """What is left at the end, U+FFFD for an unfinished character. The decoder can then be used anew."""
        return self._utf8.decode(b"", final=True)


_RUN = re.compile(r"\s+|\S+")


def _pieces(text: str) -> Iterator[str]:
    """Cut text where the reference cuts it, so that no piece holds a run longer than RUN_CHARS."""
    for start in range(0, len(text), PIECE_CHARS):
        piece = text[start : start + PIECE_CHARS]
        if len(piece) <= RUN_CHARS:
            yield piece
            continue
        cuts = [0]
        for run in _RUN.finditer(piece):
            cuts += range(run.start() + RUN_CHARS, run.end(), RUN_CHARS)
        cuts.append(len(piece))
        for begin, end in zip(cuts, cuts[1:], strict=False):
            yield piece[begin:end]


def _existing(folder: Path, name: str) -> Path:
    path = folder / name
    if path.is_file():
        return path
    if not folder.is_dir():
        raise FileNotFoundError(f"There is no folder {folder}: give a checkpoint folder that holds {name}.")
    raise FileNotFoundError(
        f"{folder} has no {name}. A tokenizer needs both {RANKS_FILE} and {CONFIG_FILE}: copy them from the "
        f"checkpoint that the model came from."
    )


def _read_ranks(path: Path) -> dict[bytes, int]:
    ranks: dict[bytes, int] = {}
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if not line:
            continue
        try:
            token, rank = line.split()
            ranks[base64.b64decode(token, validate=True)] = int(rank)
        except (ValueError, binascii.Error) as error:
            raise ValueError(
                f"{path} line {number} is not 'base64 rank': {line[:60]!r}. "
                f"The file is corrupt: fetch it again."
            ) from error
    return ranks


def _read_config(path: Path) -> tuple[dict[str, int], dict[str, Any]]:
    """Names and ids of the special tokens, and the settings that save writes back."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
        added = {int(token): str(entry["content"]) for token, entry in config["added_tokens_decoder"].items()}
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise ValueError(
            f"{path} must be a JSON object whose added_tokens_decoder maps ids to {{'content': name}} "
            f"({type(error).__name__}: {error}). The file is corrupt: fetch it again."
        ) from error
    named = {name: token for token, name in added.items()}
    if len(named) != len(added):
        raise ValueError(f"{path}: added_tokens_decoder gives one name to two ids.")
    settings = {key: value for key, value in config.items() if key != "added_tokens_decoder"}
    return named, settings


def _check_ranks(ranks: dict[bytes, int]) -> None:
    if sorted(ranks.values()) != list(range(len(ranks))):
        raise ValueError(
            f"The {len(ranks)} tokens of {RANKS_FILE} must have the ranks 0..{len(ranks) - 1}, each once. "
            f"The file is corrupt or cut short: fetch it again."
        )
    missing = [byte for byte in range(256) if bytes([byte]) not in ranks]
    if missing:
        raise ValueError(
            f"{RANKS_FILE} lacks {len(missing)} of the 256 single bytes (first {missing[0]:#04x}), so some "
            f"text could not be encoded. The file is corrupt or cut short: fetch it again."
        )


def _check_named(named: dict[str, int], num_base_tokens: int) -> None:
    end = num_base_tokens + SPECIAL_SLOTS
    outside = {name: token for name, token in named.items() if not num_base_tokens <= token < end}
    if outside:
        raise ValueError(
            f"Special tokens must have ids {num_base_tokens}..{end - 1}, after the {num_base_tokens} base "
            f"tokens; got {outside}. {RANKS_FILE} and {CONFIG_FILE} probably belong to two models."
        )
    if len(set(named.values())) != len(named):
        raise ValueError(f"Two special tokens share an id: {named}.")


def _write_whole(path: Path, text: str) -> None:
    partial = path.with_name(path.name + ".partial")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)
