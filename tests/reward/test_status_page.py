"""The status page, rendered by a real browser after real scores, failures and restarts."""

import os
import re
import shutil
import signal
import subprocess
from html.parser import HTMLParser
from pathlib import Path

import numpy as np
import pytest

from reward_http import TIMEOUT_S, Http, serving

PROBES = Path(__file__).parent
BRIGHTNESS, MOODY = "probe_rewards:Brightness", "probe_rewards:Moody"
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
HOSTILE = "<script>document.title='stolen'</script><b>bold</b>"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return a service that has scored images, failed on some, and lost a worker."""
    folder = tmp_path_factory.mktemp("page")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", str(PROBES), prepend=os.pathsep)
        rewards = {BRIGHTNESS: {"workers": 2}, MOODY: {"options": {"journal": str(folder / "journal")}}, "motion": {}}
        with serving(folder, {"http": {"bind": "127.0.0.1:0"}, "rewards": rewards}) as (process, said):
            http = Http(said["http"], None)
            picture = np.zeros((2, 40, 60, 3), np.uint8)
            picture[0, :, :30] = (255, 0, 0)
            fields = {"prompts": [f"half red {HOSTILE}", "x"], "media_type": "image", "reward_fn": {BRIGHTNESS: 1}}
            http.scores(fields, picture, BRIGHTNESS)
            fields = {"prompts": ["refuse", "die once"], "media_type": "image", "reward_fn": {MOODY: 1}}
            http.scores(fields, picture, MOODY)
            yield http, said["http"], process


def in_browser(url, folder, *options):
    """Return Chromium's output for a page; --virtual-time-budget ends it before the next reload."""
    command = [
        CHROMIUM, "--headless=new", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run",
        f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=2000", *options, url,
    ]  # fmt: skip
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, start_new_session=True
    ) as browser:
        try:
            return browser.communicate(timeout=3 * TIMEOUT_S)[0]
        finally:
            if browser.poll() is None:
                os.killpg(browser.pid, signal.SIGKILL)


class Page(HTMLParser):
    """A parsed page: text of each table cell by row, all images, all tags."""

    def __init__(self, text):
        super().__init__()
        self.rows, self.images, self.tags, self._cell = [], [], set(), False
        self.feed(text)

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        if tag == "tr":
            self.rows.append([])
        if tag in ("td", "th"):
            self.rows[-1].append("")
        if tag == "img":
            self.images.append(dict(attributes))
        self._cell = self._cell or tag in ("td", "th")

    def handle_endtag(self, tag):
        self._cell = self._cell and tag not in ("td", "th")

    def handle_data(self, data):
        if self._cell:
            self.rows[-1][-1] += data

    def row(self, first):
        return next(row for row in self.rows if row and row[0] == first)


def check(text):
    page = Page(text)
    assert "Reward service" in text
    row = dict(zip(page.row("reward"), page.row(BRIGHTNESS), strict=True))
    assert (row["state"], row["scored"], row["failed"], row["waiting"]) == ("ready", "2", "0", "0")
    mean = (255 / 3 / 2 / 255 + 0.0) / 2
    assert float(row["mean"]) == pytest.approx(mean, rel=1e-3)
    assert row["batch"] == "2.0"
    row = dict(zip(page.row("reward"), page.row(MOODY), strict=True))
    assert (row["scored"], row["failed"]) == ("1", "1")
    workers = [r for r in page.rows if r and re.fullmatch(r"probe_rewards:\w+-\d|motion-0", r[0])]
    assert [r[0].rpartition(":")[2] for r in workers] == ["Brightness-0", "Brightness-1", "Moody-0", "motion-0"]
    assert [r[4] for r in workers] == ["0", "0", "1", "0"], "restarts"
    assert any("nothing to see" in r for r in page.rows), "the last failures"
    assert len(page.images) == 2
    assert all(image["src"].startswith("data:image/png;base64,") for image in page.images)
    assert "half red" in text
    return page


def test_the_page_shows_workers_queues_scores_failures_and_images(service):
    http, _, _ = service
    status, content, headers = http.get("/")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'")
    page = check(content.decode())
    assert "script" not in page.tags


@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium: apt-get install chromium")
def test_a_browser_shows_the_same(service, tmp_path):
    _, url, _ = service
    text = in_browser(f"{url}/", tmp_path, "--dump-dom")
    page = check(text)
    assert "script" not in page.tags, "what a prompt says is text"
    assert "<title>wfm_reward</title>" in text
    shot = tmp_path / "page.png"
    in_browser(f"{url}/", tmp_path, f"--screenshot={shot}", "--window-size=1200,1400")
    from PIL import Image

    with Image.open(shot) as image:
        pixels = np.asarray(image.convert("RGB"))
    assert pixels.shape == (1400, 1200, 3)
    red = (pixels == (255, 0, 0)).all(axis=2)
    assert 0.9 < red.sum() / (2 * 30 * 40) <= 1.0, "the left halves of both sample pictures, without round corners"


@pytest.mark.slow
def test_a_reward_that_is_given_up_is_shown_as_down(tmp_path, monkeypatch):
    monkeypatch.setenv("PYTHONPATH", str(PROBES), prepend=os.pathsep)
    options = {"journal": str(tmp_path / "journal")}
    config = {"http": {"bind": "127.0.0.1:0"}, "rewards": {MOODY: {"workers": 5, "max_batch": 1, "options": options}}}
    with serving(tmp_path, config) as (_, said):
        http = Http(said["http"], None)
        fields = {"prompts": ["die"] * 2, "media_type": "image", "reward_fn": {MOODY: 1}}
        http.scores(fields, np.zeros((2, 8, 8, 3), np.uint8), MOODY)
        text = http.get("/")[1].decode()
        page = Page(text)
        assert dict(zip(page.row("reward"), page.row(MOODY), strict=True))["state"] == "down"
        assert "is down: its workers died 5 times within 10 minutes, last: killed by SIGKILL" in text
        status, content, _ = http.get("/health")
        assert (status, content) == (503, {"ready": False, "waiting_for": [MOODY]})
