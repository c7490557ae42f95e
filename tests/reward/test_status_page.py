"""The status page after real scores, failures and restarts."""

import base64
import io
import re
from html.parser import HTMLParser

import numpy as np
import pytest
from PIL import Image

from reward_http import Http, serving

BRIGHTNESS, MOODY = "probe_rewards:Brightness", "probe_rewards:Moody"
PICTURE = np.zeros((40, 60, 3), np.uint8)
PICTURE[:, :30] = (255, 0, 0)
HOSTILE = "<script>document.title='stolen'</script><b>bold</b>"


@pytest.fixture(scope="module")
def service(tmp_path_factory):
    """Return a service that has scored images, failed on some, and lost a worker."""
    folder = tmp_path_factory.mktemp("page")
    rewards = {BRIGHTNESS: {"workers": 2}, MOODY: {"options": {"journal": str(folder / "journal")}}, "motion": {}}
    with serving(folder, {"http": {"bind": "127.0.0.1:0"}, "rewards": rewards}) as (_, said):
        http = Http(said["http"], None)
        media = np.stack([PICTURE, np.zeros_like(PICTURE)])
        fields = {"prompts": [f"half red {HOSTILE}", "x"], "media_type": "image", "reward_fn": {BRIGHTNESS: 1}}
        http.scores(fields, media, BRIGHTNESS)
        fields = {"prompts": ["refuse", "die once"], "media_type": "image", "reward_fn": {MOODY: 1}}
        http.scores(fields, media, MOODY)
        yield http


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


def test_the_page_shows_workers_queues_scores_failures_and_images(service):
    status, content, headers = service.get("/")
    assert status == 200
    assert headers["Content-Security-Policy"].startswith("default-src 'none'; img-src data:")
    text = content.decode()
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
    for image in page.images:
        data = base64.b64decode(image["src"].removeprefix("data:image/png;base64,"))
        np.testing.assert_array_equal(np.asarray(Image.open(io.BytesIO(data))), PICTURE)
    assert "half red" in text
    assert "script" not in page.tags


@pytest.mark.slow
def test_a_reward_that_is_given_up_is_shown_as_down(tmp_path):
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
