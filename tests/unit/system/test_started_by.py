"""A command that HetSeq starts itself knows which one started it."""

from __future__ import annotations

from hetseq.system.started_by import DEMO, SSH, environment_of_child, started_by, starting_by


def test_what_a_command_starts_knows_it_and_what_the_user_starts_does_not() -> None:
    assert started_by() == ""
    with starting_by(DEMO):
        assert started_by() == DEMO
    assert started_by() == ""
    assert environment_of_child(SSH)["HETSEQ_STARTED_BY"] == SSH
    assert started_by() == ""
