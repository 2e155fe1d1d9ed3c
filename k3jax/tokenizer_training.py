"""Learn a small byte-pair vocabulary from a corpus, in the format that Tokenizer reads."""

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence

import regex

from k3jax.tokenizer import SPECIAL_SLOTS, SPLIT_PATTERN, Tokenizer

SPECIAL_TOKENS = (
    "[BOS]", "[EOS]", "[UNK]", "[PAD]",
    "<|open|>", "<|close|>", "<|sep|>", "<|end_of_msg|>",
    "<|media_begin|>", "<|media_content|>", "<|media_end|>", "<|media_pad|>",
)  # fmt: skip

Pair = tuple[int, int]


def train_bpe(
    texts: Iterable[str], vocab_size: int, special_tokens: Sequence[str] = SPECIAL_TOKENS
) -> Tokenizer:
    """Byte-pair encoding (arXiv 1508.07909): start from the 256 bytes and, again and again, merge the
    most frequent pair of neighbours inside the pieces that the split pattern cuts.

    texts           the corpus; a few MB, since this is plain Python
    vocab_size      ids in all, so 256 bytes + merges + 256 special slots: at least 512
    special_tokens  names, given the first special ids in this order

    Deterministic: equal counts are decided by the bytes of the pair. Raises ValueError when the corpus
    has too few different pairs for vocab_size.
    """
    num_base_tokens = vocab_size - SPECIAL_SLOTS
    if num_base_tokens < 256:
        raise ValueError(
            f"vocab_size={vocab_size} is too small: 256 bytes and {SPECIAL_SLOTS} special slots "
            f"take {256 + SPECIAL_SLOTS} ids."
        )
    if len(set(special_tokens)) != len(special_tokens) or len(special_tokens) > SPECIAL_SLOTS:
        raise ValueError(f"special_tokens must be at most {SPECIAL_SLOTS} different names.")
    merges = _Merges(texts)
    while len(merges.tokens) < num_base_tokens:
        if not merges.merge_best():
            possible = len(merges.tokens) + SPECIAL_SLOTS
            raise ValueError(
                f"vocab_size={vocab_size} needs {num_base_tokens - 256} merges, but the corpus yields only "
                f"{len(merges.tokens) - 256}. Give more text, or vocab_size={possible}."
            )
    ranks = {token: rank for rank, token in enumerate(merges.tokens)}
    assert len(ranks) == num_base_tokens, "two merges spell the same bytes"
    names = {name: num_base_tokens + slot for slot, name in enumerate(special_tokens)}
    roles = {"bos_token": "[BOS]", "eos_token": "[EOS]", "unk_token": "[UNK]", "pad_token": "[PAD]"}
    return Tokenizer.from_ranks(ranks, names, **{r: name for r, name in roles.items() if name in names})


class _Merges:
    """The corpus as distinct pieces with counts, and the counts of all neighbouring pairs in them."""

    def __init__(self, texts: Iterable[str]):
        split = regex.compile(SPLIT_PATTERN, flags=regex.VERSION1)
        pieces: Counter[bytes] = Counter()
        for text in texts:
            pieces.update(piece.encode("utf-8") for piece in split.findall(text))
        self.tokens = [bytes([byte]) for byte in range(256)]
        self._pieces = [list(piece) for piece in pieces]
        self._counts = list(pieces.values())
        self._pair_counts: Counter[Pair] = Counter()
        self._pieces_with: defaultdict[Pair, set[int]] = defaultdict(set)
        for index in range(len(self._pieces)):
            self._count_pairs(index)

    def _count_pairs(self, index: int) -> None:
        piece = self._pieces[index]
        for pair in zip(piece, piece[1:], strict=False):
            self._pair_counts[pair] += self._counts[index]
            self._pieces_with[pair].add(index)

    def _forget_pairs(self, index: int) -> None:
        piece = self._pieces[index]
        for pair in zip(piece, piece[1:], strict=False):
            self._pair_counts[pair] -= self._counts[index]
            self._pieces_with[pair].discard(index)
            if not self._pair_counts[pair]:
                del self._pair_counts[pair], self._pieces_with[pair]

    def merge_best(self) -> bool:
        """Merge the most frequent pair everywhere; False when no pair is left."""
        if not self._pair_counts:
            return False
        best = min(self._pair_counts, key=self._preference)
        merged = len(self.tokens)
        self.tokens.append(self.tokens[best[0]] + self.tokens[best[1]])
        for index in sorted(self._pieces_with[best]):
            self._forget_pairs(index)
            self._pieces[index] = _replace_pair(self._pieces[index], best, merged)
            self._count_pairs(index)
        return True

    def _preference(self, pair: Pair) -> tuple[int, bytes, bytes]:
        return -self._pair_counts[pair], self.tokens[pair[0]], self.tokens[pair[1]]


def _replace_pair(piece: list[int], pair: Pair, merged: int) -> list[int]:
    result: list[int] = []
    position = 0
    while position < len(piece):
        if position + 1 < len(piece) and (piece[position], piece[position + 1]) == pair:
            result.append(merged)
            position += 2
        else:
            result.append(piece[position])
            position += 1
    return result
