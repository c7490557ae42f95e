from html.parser import HTMLParser

from each_case import check_each
from wfm_ds.monitoring.gallery import GalleryEntry, gallery_page

VOID = {"meta", "img", "br"}


class Tree(HTMLParser):
    """Collect all elements with their attributes and text; fail on tags that are not closed in order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.elements = [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        element = {"tag": tag, "text": "", **dict(attrs)}
        self.elements.append(element)
        if tag not in VOID:
            self.open.append(element)

    def handle_endtag(self, tag):
        assert self.open.pop()["tag"] == tag

    def handle_data(self, data):
        for element in self.open:
            element["text"] += data

    def all(self, tag):
        return [element for element in self.elements if element["tag"] == tag]


def entry(number, prompt, kind="png", **changes):
    values = {"file": f"{number:04d}.{kind}", "width": 512, "height": 256, "caption": f"seed {number}"}
    return GalleryEntry(prompt=prompt, **values | changes)


def test_each_sample_is_next_to_its_seed_and_below_its_prompt():
    tree = Tree(gallery_page("model", {}, [entry(0, "a cat"), entry(1, "a cat"), entry(2, "a dog")]))
    assert [h["text"] for h in tree.all("h2")] == ["a cat", "a dog"]
    shown = [(i["src"], i["alt"], i["width"], i["height"]) for i in tree.all("img")]
    prompts = ("a cat", "a cat", "a dog")
    assert shown == [(f"000{number}.png", prompt, "512", "256") for number, prompt in enumerate(prompts)]
    assert [c["text"] for c in tree.all("figcaption")] == ["seed 0", "seed 1", "seed 2"]


def test_a_prompt_with_one_sample_is_its_caption():
    tree = Tree(gallery_page("model", {}, [entry(0, "a cat"), entry(1, "a dog")]))
    assert tree.all("h2") == []
    assert [c["text"] for c in tree.all("figcaption")] == ["a catseed 0", "a dogseed 1"]


def test_videos_are_played_and_images_are_links_to_files_of_the_folder():
    text = gallery_page("model", {"a": "b"}, [entry(0, "waves", "mp4"), entry(1, "a cat")])
    tree = Tree(text)
    (video,), links = tree.all("video"), tree.all("a")
    assert (video["src"], video["aria-label"]) == ("0000.mp4", "waves")
    assert {"controls", "loop", "muted", "playsinline"} <= video.keys()
    assert [a["href"] for a in links] == ["0000.mp4", "0001.png"]
    assert not [word for word in ("http", "url(") if word in text]


def test_text_of_users_is_escaped():
    nasty = '<script>alert("x")</script> & "quotes" \'too\' \u732b'
    tree = Tree(gallery_page(nasty, {nasty: nasty}, [entry(0, nasty, caption=nasty, failure=nasty)]))
    assert tree.all("script") == []
    (image,) = tree.all("img")
    assert image["alt"] == nasty
    assert [tree.all(tag)[0]["text"] for tag in ("title", "h1", "dt", "dd", "small")] == [nasty] * 5
    assert [(p["text"], p.get("class")) for p in tree.all("p")] == [(nasty, None), (nasty, "failed")]


@check_each(("size", "small"), [(8, True), (64, True), (512, False)])
def test_small_images_are_enlarged_without_smoothing(size, small):
    (image,) = Tree(gallery_page("m", {}, [entry(0, "a", width=size, height=size)])).all("img")
    assert (image.get("class") == "small") == small
