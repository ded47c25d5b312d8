"""What a task says about the weights of a start is said once, and only where a run begins with them."""

from __future__ import annotations

import logging

import pytest

from hetseq.run.start_notes import kept_back, log_again

logger = logging.getLogger("some.task")
ABOUT_START = {"is_about_start": True}


def test_marked_records_are_kept_back_until_they_are_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO), kept_back() as kept:
        logger.warning("left as initialised", extra=ABOUT_START)
        logger.info("the text")
        assert caplog.messages == ["the text"]
    logger.warning("after it", extra=ABOUT_START)
    assert caplog.messages == ["the text", "after it"]
    log_again(kept)
    assert caplog.messages == ["the text", "after it", "left as initialised"]


def test_nothing_is_printed_in_a_program_without_handlers(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(logging.getLogger(), "handlers", [])
    with kept_back() as kept:
        logger.warning("left as initialised", extra=ABOUT_START)
    assert [record.getMessage() for record in kept] == ["left as initialised"]
    logger.warning("said")
    assert capsys.readouterr().err == "said\n"
