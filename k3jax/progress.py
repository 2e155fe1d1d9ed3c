"""Progress of long file work, logged every few seconds."""

import logging
import time

logger = logging.getLogger(__name__)


class Progress:
    """Counts bytes towards a total; `interval` seconds apart it logs how far, how fast and how long still."""

    def __init__(self, label: str, total: int, interval: float = 10.0):
        self.label, self.total, self.interval = label, total, interval
        self.done, self.start = 0, time.monotonic()
        self.last = self.start

    def add(self, nbytes: int) -> None:
        self.done += nbytes
        now = time.monotonic()
        if now - self.last < self.interval:
            return
        self.last = now
        rate = self.done / (now - self.start)
        left = max(self.total - self.done, 0) / max(rate, 1)
        logger.info(
            "%s: %.1f of %.1f GB (%.0f %%), %.0f MB/s, %.0f s left",
            self.label,
            self.done / 1e9,
            self.total / 1e9,
            100 * self.done / max(self.total, 1),
            rate / 1e6,
            left,
        )
