"""Who says what: rank 0, and whoever something happened to."""

import logging

import pytest

from trl_fsdp_qlora.logging import ANY_RANK, get_logger


@pytest.mark.parametrize("rank, said", [("0", ["to all", "to one"]), ("1", ["to one"])])
def test_a_rank_speaks_for_itself(monkeypatch, rank, said):
    monkeypatch.setenv("RANK", rank)
    handler = next(h for h in get_logger("trl_fsdp_qlora.test").parent.handlers if h.filters)
    lines = []
    monkeypatch.setattr(handler, "emit", lambda record: lines.append(handler.format(record)))
    logger = logging.getLogger("trl_fsdp_qlora.test")
    logger.warning("to all")
    logger.warning("to one", extra=ANY_RANK)
    assert [line.rpartition(": ")[2] for line in lines] == said
    assert ("rank 1" in lines[-1]) == (rank == "1")
