"""Text of a sample as its ids arrive, and the stop strings in it."""

from collections.abc import Iterable, Sequence

from k3jax.tokenizer import StreamDecoder, Tokenizer


class StopText:
    """Decodes ids and looks for stop strings, which may span tokens and split characters."""

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]):
        self._decoder = StreamDecoder(tokenizer)
        self._stop = stop
        self._longest = max(map(len, stop), default=0)
        self.text = ""
        self.stopped = False

    def feed(self, ids: Iterable[int]) -> int | None:
        """Takes ids up to the first that completes a stop string and returns how many; None: all, and nothing stopped."""
        for count, token in enumerate(ids, start=1):
            seen = max(0, len(self.text) - self._longest + 1)
            self.text += self._decoder.feed([token])
            found = [at for at in (self.text.find(s, seen) for s in self._stop) if at >= 0]
            if found:
                self.text, self.stopped = self.text[: min(found)], True
                return count
        return None

    def finish(self) -> str:
        """The whole text, up to the stop string if there was one."""
        if not self.stopped:
            self.text += self._decoder.finish()
        return self.text
