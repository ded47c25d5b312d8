"""Fetching from a mirror on the loopback that cuts, spoils and forgets as real ones do."""

from __future__ import annotations

import errno
import hashlib
import http.server
import os
import socket
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from hetseq import DataError
from hetseq.preprocessing import mnist
from hetseq.preprocessing.corpus import folders

CONTENT = {name: (name.encode() * 20_000)[:size] for name, size in zip(mnist.FILES, (300_000, 999, 150_000, 1))}
IMAGES = "train-images-idx3-ubyte.gz"


def ignore(completed: int) -> None:
    """Nobody watches the bar."""


class Mirror:
    """What a test may change about the server, and what the server was asked."""

    def __init__(self) -> None:
        self.files = dict(CONTENT)
        self.knows_ranges = True
        self.cuts: list[int] = []  # bytes after which the next answers break off
        self.asked: list[tuple[str, str | None]] = []  # name, Range
        self.url = ""


class Handler(http.server.BaseHTTPRequestHandler):
    mirror: Mirror

    def do_GET(self) -> None:
        name, asked = self.path.rpartition("/")[2], self.headers.get("Range")
        self.mirror.asked.append((name, asked))
        content = self.mirror.files.get(name)
        if content is None:
            self.send_error(404)
            return
        start = int(asked.removeprefix("bytes=").removesuffix("-")) if asked and self.mirror.knows_ranges else 0
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(content) - start))
        self.end_headers()
        end = start + self.mirror.cuts.pop(0) if self.mirror.cuts else len(content)
        self.wfile.write(content[start:end])

    def log_message(self, format: str, *arguments: object) -> None:
        """Nothing on the terminal."""


@pytest.fixture
def start_mirror(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[], Mirror]]:
    monkeypatch.setattr(
        mnist, "FILES", {name: (hashlib.md5(content).hexdigest(), len(content)) for name, content in CONTENT.items()}
    )
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    running = []

    def start() -> Mirror:
        mirror = Mirror()
        server = http.server.HTTPServer(("127.0.0.1", 0), type("OneHandler", (Handler,), {"mirror": mirror}))
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        running.append((server, thread))
        mirror.url = f"http://127.0.0.1:{server.server_port}/mnist/"
        return mirror

    yield start
    for server, thread in running:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture
def mirror(start_mirror: Callable[[], Mirror]) -> Mirror:
    return start_mirror()


def closed_url() -> str:
    """An address on which nobody listens."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{probe.getsockname()[1]}/"


def names_in(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_four_files_arrive_whole_and_nothing_else(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "new" / "mnist"
    assert mnist.main(["--output", str(folder), "--mirror", mirror.url]) == 0
    assert {name: (folder / name).read_bytes() for name in names_in(folder)} == CONTENT
    assert f"--data {folder}" in capsys.readouterr().out


def test_files_that_are_there_are_not_fetched_again(mirror: Mirror, tmp_path: Path) -> None:
    arguments = ["--output", str(tmp_path), "--mirror", mirror.url]
    assert mnist.main(arguments) == 0
    (tmp_path / IMAGES).write_bytes(b"spoilt")
    mirror.asked.clear()
    assert mnist.main(arguments) == 0
    assert mirror.asked == [(IMAGES, None)]
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]


def test_an_answer_that_breaks_off_is_continued_where_it_stopped(mirror: Mirror, tmp_path: Path) -> None:
    mirror.cuts = [100_000, 50_000]
    assert mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore) == mirror.url
    assert mirror.asked == [(IMAGES, None), (IMAGES, "bytes=100000-"), (IMAGES, "bytes=150000-")]
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]


def test_a_download_that_was_killed_goes_on_in_the_next_process(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f".{IMAGES}.part").write_bytes(CONTENT[IMAGES][:250_000])
    mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore)
    assert mirror.asked == [(IMAGES, "bytes=250000-")]
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]
    assert names_in(tmp_path) == {IMAGES}


def test_a_server_without_ranges_begins_anew(mirror: Mirror, tmp_path: Path) -> None:
    mirror.knows_ranges = False
    (tmp_path / f".{IMAGES}.part").write_bytes(CONTENT[IMAGES][:250_000])
    mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore)
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]


@pytest.mark.parametrize("length", [7, 300_000, 400_000])
def test_a_part_with_a_wrong_beginning_is_thrown_away(mirror: Mirror, tmp_path: Path, length: int) -> None:
    (tmp_path / f".{IMAGES}.part").write_bytes(b"x" * length)
    mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore)
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]
    assert names_in(tmp_path) == {IMAGES}


@pytest.mark.parametrize(
    ("spoilt", "told"),
    [
        (b"x" * 300_000, "another md5"),
        (CONTENT[IMAGES] + b"more", "another md5"),
        (b"<html>please log in</html>", "ended after 26 of 300,000 bytes"),
        (None, "HTTP 404"),
    ],
    ids=["same length", "too long", "login page", "absent"],
)
def test_a_wrong_file_never_gets_the_name_and_the_next_mirror_is_asked(
    start_mirror: Callable[[], Mirror], tmp_path: Path, spoilt: bytes | None, told: str
) -> None:
    bad, good = start_mirror(), start_mirror()
    bad.files = {} if spoilt is None else {IMAGES: spoilt}
    with pytest.raises(DataError, match=told):
        mnist.fetch(IMAGES, tmp_path, [bad.url], ignore)
    assert IMAGES not in names_in(tmp_path)

    assert mnist.fetch(IMAGES, tmp_path, [bad.url, good.url], ignore) == good.url
    assert (tmp_path / IMAGES).read_bytes() == CONTENT[IMAGES]


def test_offline_tells_what_was_tried_and_how_to_do_it_by_hand(
    start_mirror: Callable[[], Mirror], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = closed_url()
    assert mnist.main(["--output", str(tmp_path), "--mirror", url]) == 2
    told = capsys.readouterr().err
    assert f"{url}{IMAGES}: Connection refused" in told
    assert f"by hand to {tmp_path}" in told
    for name, (md5, _) in mnist.FILES.items():
        assert f"{name}  md5 {md5}" in told
    assert names_in(tmp_path) == set()


def test_verify_names_what_is_missing_or_wrong_and_fetches_nothing(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--output", str(tmp_path), "--mirror", mirror.url]
    mnist.main(arguments)
    mirror.asked.clear()
    assert mnist.main([*arguments, "--verify"]) == 0
    assert capsys.readouterr().out.count(": right\n") == 4

    (tmp_path / IMAGES).unlink()
    (tmp_path / "t10k-labels-idx1-ubyte.gz").write_bytes(b"spoilt")
    assert mnist.main([*arguments, "--verify"]) == 1
    told = capsys.readouterr().out
    assert f"{IMAGES}: missing" in told
    assert "t10k-labels-idx1-ubyte.gz: md5 " in told
    assert told.count(": right\n") == 2
    assert mirror.asked == []


def test_two_downloads_into_one_folder_do_not_meet(mirror: Mirror, tmp_path: Path) -> None:
    with (
        folders.locked(tmp_path, "in use"),
        pytest.raises(DataError, match="another download into it is running; wait"),
    ):
        mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore)
    assert mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore) == mirror.url


def test_a_file_system_that_locks_no_folders_is_downloaded_into_all_the_same(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: int) -> None:
        raise OSError(errno.ENOLCK, os.strerror(errno.ENOLCK))

    monkeypatch.setattr(folders.fcntl, "flock", refuse)
    assert mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore) == mirror.url


def test_a_file_is_on_the_disk_before_it_has_its_name_and_then_the_name_is(
    mirror: Mirror, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    fsync, replace = os.fsync, os.replace

    def seen_fsync(handle: int) -> None:
        said.append(f"fsync {os.path.basename(os.readlink(f'/proc/self/fd/{handle}'))}")
        fsync(handle)

    def seen_replace(source: Path, target: Path) -> None:
        said.append(f"rename {source.name}")
        replace(source, target)

    monkeypatch.setattr(os, "fsync", seen_fsync)
    monkeypatch.setattr(os, "replace", seen_replace)
    mnist.fetch(IMAGES, tmp_path, [mirror.url], ignore)
    part = f".{IMAGES}.part"
    assert said == [f"fsync {part}", f"rename {part}", f"fsync {tmp_path.name}"]


def test_progress_counts_the_bytes_that_are_there(mirror: Mirror, tmp_path: Path) -> None:
    (tmp_path / f".{IMAGES}.part").write_bytes(CONTENT[IMAGES][:200_000])
    seen: list[int] = []
    mnist.fetch(IMAGES, tmp_path, [mirror.url], seen.append)
    assert seen == sorted(seen)
    assert seen[0] > 200_000
    assert seen[-1] == 300_000


def test_an_output_that_is_a_file_is_refused(
    mirror: Mirror, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "file"
    target.write_text("mine")
    assert mnist.main(["--output", str(target), "--mirror", mirror.url]) == 2
    assert f"{target} cannot be written" in capsys.readouterr().err
    assert target.read_text() == "mine"


@pytest.mark.parametrize("url", ["mirror.example.org/mnist", "file:///etc/", "ftp://a/b", "http:///mnist"])
def test_a_mirror_that_is_no_address_is_refused(url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert mnist.main(["--output", str(tmp_path), "--mirror", url]) == 2
    assert f"--mirror {url}" in capsys.readouterr().err


def test_the_published_sums_are_those_of_the_real_files(mnist_data: Path) -> None:
    real = {name: mnist_data / name for name in mnist.FILES if (mnist_data / name).exists()}
    if len(real) < 4:
        pytest.skip("the real files are there unpacked only")
    assert mnist.verify(mnist_data) == {}
    assert {name: path.stat().st_size for name, path in real.items()} == {
        name: size for name, (_, size) in mnist.FILES.items()
    }
