"""The mount by which tests see a network file system: what it passes on, what it believes for a while, what it keeps.

Each test that something is late has its twin on a mount that believes nothing.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.support.cached_mount import CachedMount, cached_mount
from tests.support.trials import until

pytestmark = pytest.mark.netns

FOR_EVER, NEVER, SHORTLY = 1000.0, 0.0, 0.2


@contextmanager
def two_mounts(folder: Path, cache_s: float) -> Iterator[tuple[CachedMount, CachedMount, Path]]:
    """Two mounts of one folder at one path, and that path."""
    backing, point = folder / "backing", folder / "point"
    for path in (backing, point):
        path.mkdir()
    with cached_mount(backing, point, cache_s=cache_s) as one, cached_mount(backing, point, cache_s=cache_s) as other:
        yield one, other, point


def said(mount: CachedMount, script: str) -> str:
    """What a shell says there, in its mount."""
    return mount.run("sh", "-c", f"cd {mount.point} && {script}").stdout.strip()


@pytest.mark.parametrize(("cache_s", "seen"), [(FOR_EVER, ""), (NEVER, "hello")])
def test_a_name_that_was_missing_stays_missing_for_the_time_of_the_cache(
    tmp_path: Path, cache_s: float, seen: str
) -> None:
    with two_mounts(tmp_path, cache_s) as (one, other, _):
        assert said(other, "cat name") == ""
        assert said(one, "echo hello > name; cat name") == "hello"
        assert said(other, "cat name") == seen


@pytest.mark.parametrize(("cache_s", "seen"), [(FOR_EVER, "a first 6"), (NEVER, "a b second 7")])
def test_listings_content_and_attributes_are_those_of_the_first_look(tmp_path: Path, cache_s: float, seen: str) -> None:
    look = "echo $(ls) $(cat a) $(stat -c %s a)"
    with two_mounts(tmp_path, cache_s) as (one, other, _):
        said(one, "echo first > a")
        # a second time, since a listing is kept that was read to its end
        assert (said(other, look), said(other, look)) == ("a first 6", "a first 6")
        said(one, "echo second > a; touch b")
        assert said(other, look) == seen


def test_what_was_late_is_seen_in_the_end(tmp_path: Path) -> None:
    with two_mounts(tmp_path, SHORTLY) as (one, other, _):
        assert said(other, "ls; cat name") == ""
        said(one, "echo hello > name")
        until(lambda: said(other, "ls; cat name") == "name\nhello", "the name", within_s=10)
        said(one, "echo world 1<> name")  # in its place, and of the same length
        until(lambda: said(other, "cat name") == "world", "the content", within_s=10)


def test_a_lock_is_seen_in_its_own_mount_alone(tmp_path: Path) -> None:
    with two_mounts(tmp_path, NEVER) as (one, other, point):
        with one.start("flock", point / "lock", "sh", "-c", "echo held; cat") as holder:
            assert holder.stdout is not None
            assert holder.stdout.readline() == b"held\n"
            codes = [mount.run("flock", "-n", point / "lock", "true").returncode for mount in (one, other)]
        assert codes == [1, 0]


def test_everything_that_a_run_does_to_files_is_passed_on(tmp_path: Path) -> None:
    steps = """
        set -e
        mkdir d; echo one > d/a; ln d/a b; test $(stat -c %h d/a) = 2; test d/a -ef b
        ln -s d/a l; test "$(readlink l)" = d/a; test "$(cat l)" = one
        echo two >> b; test "$(cat d/a | tr '\\n' ' ')" = "one two "
        mv b d/c; chmod 600 d/c; test $(stat -c %a d/c) = 600; touch -d @1000000000 d/c
        test $(stat -c %Y d/a) = 1000000000; truncate -s 2 d/a; test "$(cat d/c)" = on
        head -c 3000000 /dev/urandom > big; cp big copy; cmp big copy; sync big d
        rm copy big d/c; test "$(ls d)" = a; if rmdir d 2> /dev/null; then exit 1; fi
        exec 7<> d/a; rm d/a; echo gone >&7; rmdir d; df . > /dev/null; ls -a
    """
    with two_mounts(tmp_path, FOR_EVER) as (one, _, point):
        done = one.run("sh", "-c", f"cd {point}; {steps}")
    assert (done.stdout, done.stderr) == (".\n..\nl\n", "")
    assert os.listdir(tmp_path / "backing") == ["l"]


def test_a_request_without_an_answer_holds_even_a_killed_process_until_the_mount_is_let_go(tmp_path: Path) -> None:
    for name in ("backing", "point"):
        (tmp_path / name).mkdir()
    (tmp_path / "backing" / "never").touch()
    (tmp_path / "backing" / "always").touch()
    with cached_mount(tmp_path / "backing", tmp_path / "point", unanswered="never") as mount:
        assert mount.run("cat", mount.point / "always").returncode == 0
        with mount.start("cat", mount.point / "never") as hung:
            process = Path(f"/proc/{hung.pid}")
            until(lambda: "request_wait" in (process / "wchan").read_text(), "a request without an answer", within_s=10)
            hung.kill()
            until(lambda: (process / "stat").read_text().rpartition(")")[2].split()[0] == "D", "D", within_s=10)
            assert hung.poll() is None
            mount.let_go()
            assert hung.wait(10) == -9
