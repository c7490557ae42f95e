"""The user-defined data kind of docs/data_layouts.md, tested with the code of that page."""

import pytest
from PIL import Image

from each_case import check_each
from folders import sft_recipe
from pages import write_code
from wfm_ds.data.datasets import load_data
from wfm_ds.errors import DataError

ROWS = ["a.png,a red square,red", "b.png,a blue square,blue", "c.png,,nothing", "d.png,not there,gone"]

TWICE = """
from my_data import CaptionTable


class Twice(CaptionTable):
    def __init__(self, *paths, **options):
        super().__init__(*paths, **options)
        self.samples.append(self.samples[0])
"""


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    """`recipe(**data)`: return an SFT recipe on a folder of this kind, with these keys of the data section changed."""
    write_code("data_layouts.md", "my_data.py", tmp_path)
    (tmp_path / "twice_data.py").write_text(TWICE)
    monkeypatch.syspath_prepend(tmp_path)
    for name in "abc":
        Image.new("RGB", (16, 16)).save(tmp_path / f"{name}.png")
    (tmp_path / "captions.csv").write_text("\n".join(["file,caption,short", *ROWS]))

    def made(**data):
        return sft_recipe({"kind": "my_data:CaptionTable", "path": str(tmp_path), "max_bad_fraction": 0.5, **data})

    return made


def texts(data):
    return {sample.id: sample.prompt.text for sample in [*data.samples, *data.held_out]}


def test_its_samples_and_what_it_rejects_are_the_runs(recipe):
    data = load_data(recipe())
    assert texts(data) == {"a.png": "a red square", "b.png": "a blue square"}
    assert data.bad == {"no_prompt": ["c.png"], "no_media": ["d.png"]}


def test_options_reach_its_constructor(recipe):
    assert texts(load_data(recipe(options={"column": "short"})))["b.png"] == "blue"


@check_each(
    ("data", "says"),
    [
        ({"options": {"colum": "short"}}, "data.options do not fit its constructor: got an unexpected .* 'colum'"),
        (
            {"kind": "my_data:Nothing"},
            "my_data has no class 'Nothing' that is a subclass of wfm_ds.data.samples.SampleSet",
        ),
        ({"kind": "not_there:X"}, "cannot import 'not_there'"),
        ({"path": "/not/there"}, "/not/there cannot be read: .*No such file"),
        ({"kind": "twice_data:Twice"}, "two samples have the id a.png; ids must be unique"),
        ({"max_bad_fraction": 0.1}, "2 of 4 samples are invalid"),
    ],
)
def test_errors_are_one_line(recipe, data, says):
    with pytest.raises(DataError, match=says):
        load_data(recipe(**data))
