"""The manual as it is built: it fetches nothing, words of the field find their page first, and a phone can read it."""

from __future__ import annotations

import json
import queue
import re
import subprocess
import sys
import tempfile
import threading
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.end_to_end.test_report import BROWSER
from tests.support.commands import ROOT, run_command

pytestmark = pytest.mark.slow

needs_browser = pytest.mark.skipif(BROWSER is None, reason="there is no chromium on this machine")
PATIENCE_S = 90
#: what a newcomer types into the search box -> the page that must come first
FINDS = {
    "preemption": "guides/slurm",
    "straggler": "concepts/load-balancing",
    "heterogeneous": "concepts/load-balancing",
    "gradient accumulation": "guides/running",
    "mixed precision": "guides/running",
    "resume": "guides/checkpoints",
    "elastic": "guides/multi-node",
    "spot": "guides/sagemaker",
    "OOM": "reference/errors",
    "checkpoint": "guides/checkpoints",
    "Slurm": "guides/slurm",
    "requeue": "guides/slurm",
    "fault tolerance": "guides/fault-tolerance",
    "DDP": "concepts/compared",
    "torchrun": "guides/launchers",
    "Accelerate": "concepts/compared",
    "Lightning": "concepts/compared",
    "BatchNorm": "concepts/exactness",
    "dropout": "concepts/exactness",
    "learning rate": "reference/options",
    "multi-node": "guides/multi-node",
    "ssh": "guides/ssh",
    "secret": "guides/network",
    "firewall": "guides/network",
    "TensorBoard": "guides/monitor",
}
#: pages that must be readable on a phone
PHONE, ON_PHONE = 390, ("index", "reference/options", "guides/two-pcs", "guides/queues", "reference/errors")

SEARCH = """
const frame = await opened("/index.html", 1280);
const page = frame.contentDocument;
const box = page.querySelector("[data-md-component=search-query]");
const list = page.querySelector("[data-md-component=search-result] ol");
const said = page.querySelector(".md-search-result__meta");
page.querySelector("#__search").click();
const found = {};
for (const word of WORDS) {
  list.replaceChildren();
  said.textContent = "";
  box.value = word;
  box.dispatchEvent(new KeyboardEvent("keyup", {bubbles: true}));
  await until(() => list.querySelector("a") || said.textContent.includes("No matching"), word);
  found[word] = [...list.querySelectorAll("li > a")].map(link => new URL(link.href).pathname);
}
return found;
"""
BESIDES = """
const wide = {};
for (const name of NAMES) {
  const frame = await opened("/" + name + ".html", WIDTH);
  const page = frame.contentDocument.documentElement;
  wide[name] = page.scrollWidth - page.clientWidth;
  frame.remove();
}
return wide;
"""
DRIVER = """<!doctype html><body><script type="module">
const until = async (ready, what) => {
  const end = performance.now() + 20000;
  while (!ready()) {
    if (performance.now() > end) throw new Error("waited for " + what);
    await new Promise(again => setTimeout(again, 20));
  }
};
const opened = (path, width) => new Promise(ready => {
  const frame = document.createElement("iframe");
  frame.width = width;
  frame.height = 800;
  frame.style.border = 0;
  frame.onload = () => ready(frame);
  frame.src = path;
  document.body.append(frame);
});
const work = async () => {SCRIPT};
const answer = await work().catch(error => ({error: String(error)}));
await fetch("/answer", {method: "POST", body: JSON.stringify(answer)});
</script>"""


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    words = ["-m", "mkdocs", "build", "--strict", "--quiet", "--config-file", str(ROOT / "mkdocs.yml")]
    words += ["--site-dir", str(folder)]
    ended = run_command(words, cwd=folder, program=(sys.executable,), timeout_s=110)
    assert ended.code == 0, ended.err
    return folder


def asked(site: Path, script: str, folder: Path) -> dict[str, Any]:
    """What a script says in a browser that is served the site."""
    answers = queue.Queue[str]()

    class Handler(SimpleHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path != "/driver":
                return super().do_GET()
            self.send_response(200)
            self.send_header("Content-Type", "text/html; charset=utf-8")
            self.end_headers()
            self.wfile.write(DRIVER.replace("SCRIPT", script).encode())
            return None

        def do_POST(self) -> None:
            answers.put(self.rfile.read(int(self.headers["Content-Length"])).decode())
            self.send_response(204)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Nothing: the test's output is its own."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), lambda *given: Handler(*given, directory=str(site)))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    words = [
        str(BROWSER), "--headless=new", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-dev-shm-usage",
        "--disable-background-networking", "--disable-crash-reporter", "--disable-background-timer-throttling",
        f"--user-data-dir={folder / 'profile'}", "--remote-debugging-port=0",
        f"http://127.0.0.1:{server.server_address[1]}/driver",
    ]  # fmt: skip
    with tempfile.TemporaryDirectory(prefix="b") as short:  # the path of a socket of the browser has a limit
        environment = {"HOME": str(folder), "PATH": "/usr/bin:/bin", "TMPDIR": short}
        browser = subprocess.Popen(words, env=environment, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            answer: dict[str, Any] = json.loads(answers.get(timeout=PATIENCE_S))
        finally:
            browser.terminate()
            browser.wait(timeout=30)
            server.shutdown()
            thread.join()
            server.server_close()
    assert "error" not in answer, answer
    return answer


def test_it_builds_strictly_and_fetches_nothing_from_elsewhere(site: Path) -> None:
    built = "\n".join(page.read_text(encoding="utf-8") for page in site.rglob("*.html"))
    assert re.findall(r'(?:src="|<link[^>]* href=")https?://[^"]+', built) == []


def test_every_page_of_the_flat_manual_leads_to_its_new_place(site: Path) -> None:
    plugins = yaml.load((ROOT / "mkdocs.yml").read_text(encoding="utf-8"), Loader=yaml.BaseLoader)["plugins"]
    (moved,) = (plugin["redirects"]["redirect_maps"] for plugin in plugins if "redirects" in plugin)
    assert len(moved) > 30
    for old, new in moved.items():
        page = (site / old).with_suffix(".html").read_text(encoding="utf-8")
        assert f'content="0; url={Path(new).with_suffix(".html")}"' in page, old


@needs_browser
@pytest.mark.timeout(300)
def test_words_of_the_field_find_their_page_first(site: Path, tmp_path: Path) -> None:
    found = asked(site, SEARCH.replace("WORDS", json.dumps([*FINDS])), tmp_path)
    first = {word: pages[0].removeprefix("/").removesuffix(".html") for word, pages in found.items()}
    assert first == FINDS


@needs_browser
@pytest.mark.timeout(300)
def test_no_page_is_wider_than_a_phone(site: Path, tmp_path: Path) -> None:
    script = BESIDES.replace("NAMES", json.dumps(ON_PHONE)).replace("WIDTH", str(PHONE))
    assert asked(site, script, tmp_path) == dict.fromkeys(ON_PHONE, 0)
