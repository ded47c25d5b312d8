"""The secret: one for all who start together, whole or not there, and refused where somebody else had a hand in it."""

from __future__ import annotations

import errno
import logging
import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from hetseq.cluster.rendezvous import secret
from hetseq.cluster.rendezvous.secret import SecretError, copy_command, derive_key, load_secret, secret_file
from hetseq.errors import RendezvousError

DIGITS = "0123456789abcdef" * 4

LOAD = """
import sys
from hetseq.cluster.rendezvous.secret import load_secret
sys.stdin.readline()
for name in sys.argv[1:]:
    print(load_secret(name).hex())
"""


class Clock:
    """Time that passes only while somebody sleeps; `at` has things happen on the way."""

    def __init__(self) -> None:
        self.now_s = 100.0
        self.plans: list[tuple[float, Callable[[], object]]] = []

    def __call__(self) -> float:
        return self.now_s

    def at(self, after_s: float, happen: Callable[[], object]) -> None:
        self.plans.append((100.0 + after_s, happen))

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds
        for plan in [plan for plan in self.plans if plan[0] <= self.now_s]:
            self.plans.remove(plan)
            plan[1]()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of mode 0700, whatever the umask."""
    path = tmp_path / "own"
    path.mkdir(mode=0o700)
    return path


def written(file: Path, content: str = DIGITS + "\n", mode: int = 0o600) -> Path:
    file.write_text(content)
    file.chmod(mode)
    return file


def refusal(path: Path | None, *, create: bool = True) -> str:
    """What `load_secret` says against `path`, on a clock that costs no time."""
    clock = Clock()
    with pytest.raises(SecretError) as caught:
        load_secret(path, create=create, now=clock, sleep=clock.sleep)
    assert isinstance(caught.value, RendezvousError)
    assert caught.value.exit_code == 2
    return str(caught.value)


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


# Making it.


def test_two_processes_that_make_it_at_once_get_the_same_bytes(folder: Path) -> None:
    files = [folder / str(number) for number in range(20)]  # twenty races
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD, *map(str, files)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=Path(secret.__file__).parents[3],
        )
        for _ in range(2)
    ]
    for process in processes:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    answers = [process.communicate(timeout=30)[0].split() for process in processes]
    assert answers[0] == answers[1] == [load_secret(file).hex() for file in files]
    assert len(set(answers[0])) == 20  # the twin: another file, another secret
    assert sorted(folder.iterdir()) == sorted(files)


def test_whoever_links_second_takes_the_secret_of_the_first(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, link = folder / "secret", os.link

    def be_late(*args: str, **words: int) -> None:
        written(file)
        link(*args, **words)  # type: ignore[arg-type]

    monkeypatch.setattr(os, "link", be_late)
    assert load_secret(file).hex() == DIGITS
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_a_half_written_file_never_has_the_name(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, fsync = folder / "secret", os.fsync
    seen: list[list[str]] = []

    def look(descriptor: int) -> None:
        seen.append([path.name for path in folder.iterdir()])
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", look)
    load_secret(file)
    assert len(seen) == 1
    assert len(seen[0]) == 1
    assert seen[0][0].startswith(".secret.")


def test_a_full_disk_leaves_nothing_behind(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    said = refusal(folder / "secret")
    assert str(folder / "secret") in said
    assert "No space left" in said
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize("umask", [0o000, 0o022, 0o777])
def test_whatever_the_umask_the_file_is_private(folder: Path, umask: int) -> None:
    before = os.umask(umask)
    try:
        load_secret(folder / "secret")
    finally:
        os.umask(before)
    assert mode(folder / "secret") == 0o600


def test_the_default_is_in_a_private_folder_at_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    made = load_secret()
    assert len(made) == 32
    assert mode(tmp_path / ".hetseq") == 0o700
    assert mode(tmp_path / ".hetseq" / "secret") == 0o600
    assert load_secret() == made == load_secret(secret_file())


def test_where_links_are_refused_a_folder_decides(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_links(*_: str, **__: int) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    made = load_secret(folder / "secret")
    assert load_secret(folder / "secret") == made
    assert [path.name for path in folder.iterdir()] == ["secret"]


def test_where_links_are_refused_and_another_holds_the_claim_his_secret_is_awaited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def no_links(*_: str, **__: int) -> None:
        raise OSError(errno.EPERM, "no links here")

    monkeypatch.setattr(os, "link", no_links)
    (folder / "secret.claim").mkdir()
    clock = Clock()
    clock.at(3.0, lambda: written(folder / "secret"))
    assert load_secret(folder / "secret", now=clock, sleep=clock.sleep).hex() == DIGITS
    (folder / "secret").unlink()
    assert f"{folder / 'secret'} is still missing after 15 s" in refusal(folder / "secret")
    assert "secret.claim" in refusal(folder / "secret")  # that process was killed


# Waiting for it.


def test_a_file_that_appears_late_is_awaited(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    file, clock = folder / "secret", Clock()
    clock.at(7.0, lambda: written(file))
    with caplog.at_level(logging.WARNING):
        assert load_secret(file, create=False, now=clock, sleep=clock.sleep).hex() == DIGITS
    assert 7.0 <= clock.now_s - 100.0 <= 7.5
    assert [str(file) in line for line in caplog.messages] == [True]  # told once


def test_a_file_that_never_appears_is_named(folder: Path) -> None:
    file, clock = folder / "secret", Clock()
    clock.at(16.0, lambda: written(file))
    with pytest.raises(SecretError, match="still missing after 15 s") as caught:
        load_secret(file, create=False, now=clock, sleep=clock.sleep)
    assert str(file) in str(caught.value)
    assert 15.0 <= clock.now_s - 100.0 < 16.0


def test_a_file_that_was_linked_elsewhere_and_is_not_seen_yet_is_awaited(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A network mount remembers for seconds that a name was not there, while link(2) asks the server."""
    file, clock, really_open = folder / "secret", Clock(), os.open
    written(file)

    def forgetful(path: str, flags: int, mode: int = 0o777, *, dir_fd: int | None = None) -> int:
        if path == file.name and clock.now_s < 103.0:
            raise FileNotFoundError(errno.ENOENT, "cached", path)
        return really_open(path, flags, mode, dir_fd=dir_fd)

    monkeypatch.setattr(os, "open", forgetful)
    assert load_secret(file, now=clock, sleep=clock.sleep).hex() == DIGITS
    assert clock.now_s >= 103.0
    assert [path.name for path in folder.iterdir()] == ["secret"]


@pytest.mark.parametrize(
    ("content", "what"),
    [("", "empty"), ("\n", "empty"), (DIGITS[:40], "truncated (40 of 64 digits)")],
)
def test_an_incomplete_file_is_awaited_and_then_named(folder: Path, content: str, what: str) -> None:
    file, clock = written(folder / "secret", content), Clock()
    said = refusal(file)
    assert f"{file} is still {what} after 15 s" in said
    assert "remove it" in said
    clock.at(2.0, lambda: written(file))  # the twin: a copy that was under way
    assert load_secret(file, now=clock, sleep=clock.sleep).hex() == DIGITS


@pytest.mark.parametrize("content", ["swordfish\n", DIGITS + DIGITS, DIGITS + "0", DIGITS[:-1] + "g"])
def test_what_is_no_secret_is_refused_at_once(folder: Path, content: str) -> None:
    file, clock = written(folder / "secret", content), Clock()
    with pytest.raises(SecretError, match="64 hexadecimal digits") as caught:
        load_secret(file, now=clock, sleep=clock.sleep)
    assert clock.now_s == 100.0
    assert str(file) in str(caught.value)
    assert content.strip() not in str(caught.value)


def test_a_secret_in_capitals_and_without_a_newline_is_one(folder: Path) -> None:
    assert load_secret(written(folder / "secret", "  " + DIGITS.upper())).hex() == DIGITS


# Trusting it.


@pytest.mark.parametrize("loose", [0o644, 0o640, 0o604, 0o660, 0o601])
def test_a_file_that_others_may_read_is_refused_with_the_line_to_type(folder: Path, loose: int) -> None:
    file = written(folder / "secret", mode=loose)
    said = refusal(file)
    assert f"{file} has mode {loose:04o}" in said
    assert f"chmod 600 {file}" in said
    file.chmod(0o600)
    assert load_secret(file).hex() == DIGITS


def test_a_link_is_refused(folder: Path) -> None:
    written(folder / "real")
    (folder / "secret").symlink_to(folder / "real")
    assert f"{folder / 'secret'} is a link" in refusal(folder / "secret")
    (folder / "dangling").symlink_to(folder / "nowhere")
    assert "is a link" in refusal(folder / "dangling")
    assert not (folder / "nowhere").exists()


def test_a_pipe_or_a_folder_under_the_name_is_refused_and_does_not_block(folder: Path) -> None:
    os.mkfifo(folder / "pipe", 0o600)
    (folder / "folder").mkdir()
    assert "not a regular file" in refusal(folder / "pipe")
    assert "not a regular file" in refusal(folder / "folder")


def test_a_file_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file, owner = written(folder / "secret"), os.geteuid()
    descriptor_facts = os.fstat

    def as_theirs(descriptor: int) -> os.stat_result:
        facts = descriptor_facts(descriptor)
        return os.stat_result((*facts[:4], owner + 1, *facts[5:])) if stat.S_ISREG(facts.st_mode) else facts

    monkeypatch.setattr(os, "fstat", as_theirs)
    said = refusal(file)
    assert f"{file} belongs to user {owner + 1} and you are {owner}" in said
    assert "--secret-file" in said


def test_a_folder_of_somebody_else_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    written(folder / "secret")
    owner, really = os.geteuid(), os.fstat

    def as_theirs(descriptor: int) -> os.stat_result:
        facts = really(descriptor)
        return os.stat_result((*facts[:4], owner + 1, *facts[5:])) if stat.S_ISDIR(facts.st_mode) else facts

    monkeypatch.setattr(os, "fstat", as_theirs)
    assert f"{folder}, the folder of the secret, belongs to user {owner + 1}" in refusal(folder / "secret")


@pytest.mark.parametrize("loose", [0o777, 0o770, 0o702])
def test_a_folder_in_which_others_may_put_a_file_is_refused(folder: Path, loose: int) -> None:
    file = written(folder / "secret")
    folder.chmod(loose)
    said = refusal(file)
    assert f"{folder} has mode {loose:04o}" in said
    assert f"chmod 700 {folder}" in said
    for harmless in (0o755, 0o1777):  # may be read; may be written, but no file of another replaced
        folder.chmod(harmless)
        assert load_secret(file).hex() == DIGITS


# Places that are none.


def test_a_home_that_does_not_exist_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path / "nobody"))
    said = refusal(None)
    assert f"your home {tmp_path / 'nobody'} does not exist" in said
    assert "--secret-file" in said


def test_a_user_without_a_home_is_told_what_to_give(monkeypatch: pytest.MonkeyPatch) -> None:
    def nowhere(path: Path) -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.setattr(Path, "expanduser", nowhere)
    assert "knows no home directory" in refusal(None)
    assert "--secret-file" in refusal(None)


def test_a_missing_folder_is_named_with_the_line_that_makes_it(tmp_path: Path) -> None:
    said = refusal(tmp_path / "no where" / "secret")
    assert f"mkdir -m 700 -p '{tmp_path / 'no where'}'" in said
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_a_file_is_named(folder: Path) -> None:
    (folder / "file").touch()
    assert str(folder / "file" / "secret") in refusal(folder / "file" / "secret")


# Using it.


def test_keys_differ_by_label_and_by_secret() -> None:
    one, other = bytes(32), bytes(31) + b"\1"
    keys = [
        derive_key(one),
        derive_key(one, ""),
        derive_key(one, "control"),
        derive_key(one, "store"),
        derive_key(other, "store"),
        derive_key(one, "control", "store"),
        derive_key(one, "store", "control"),
        derive_key(one, "controlstore"),
        derive_key(one, "control", "", "store"),
    ]
    assert len(set(keys)) == len(keys)
    assert {len(key) for key in keys} == {32}
    assert derive_key(one, "control", "store") == keys[5]


def test_a_key_is_the_same_on_every_machine() -> None:
    # frozen: nodes derive it each for itself
    assert (
        derive_key(bytes(range(32)), "run", "7").hex()
        == "edd7901b959448f1e762896438fbc4522a5e64a1f26939a4c41f45765dcebf48"
    )


def test_the_line_that_copies_the_secret_begins_at_home_on_both_sides(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/homes/ada")
    assert copy_command("labA", secret_file()) == "scp labA:.hetseq/secret /homes/ada/.hetseq/secret"
    assert copy_command("labA", Path("/srv/a b")) == "scp 'labA:/srv/a b' '/srv/a b'"
    assert copy_command("fd00::7", Path("/srv/s")) == "scp '[fd00::7]:/srv/s' /srv/s"
