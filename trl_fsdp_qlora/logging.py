"""One logger for the package: on rank 0 only, unless a record says otherwise, and visible without any set-up."""

import functools
import logging
import os
import sys

# `logger.warning(..., extra=ANY_RANK)`: what happens to one rank alone is said by that rank.
ANY_RANK = {"any_rank": True}


class _RankZero(logging.Filter):
    def filter(self, record: logging.LogRecord) -> bool:
        rank = int(os.environ.get("RANK", "0"))
        if rank and getattr(record, "any_rank", False):
            record.name += f", rank {rank}"
            return True
        return rank == 0


@functools.cache
def warn_once(logger: logging.Logger, message: str) -> None:
    """For what would be said again in every step."""
    logger.warning(message)


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
