"""One logger for the package: on rank 0 only, and visible without any set-up."""

import logging
import os
import sys


class _RankZero(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        return int(os.environ.get("RANK", "0")) == 0


def get_logger(name: str) -> logging.Logger:
    """A logger under the package's, which writes to stderr at level INFO unless the application set it up itself."""
    root = logging.getLogger(__package__)
    if not root.handlers:
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("[%(name)s] %(levelname)s: %(message)s"))
        handler.addFilter(_RankZero())
        root.addHandler(handler)
        root.setLevel(logging.INFO)
        root.propagate = False
    return logging.getLogger(name)
