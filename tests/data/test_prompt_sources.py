"""Published prompt sets, downloaded from a local server: complete files, interrupted transfers, wrong content."""

import hashlib
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from commands import wfm_command
from prompt_server import COMMIT, TEST, TRAIN, prompt_server, served_files, use_test_source
from wfm_ds.data import prompt_sources
from wfm_ds.data.prompt_sources import PROMPT_SOURCES, download_prompt_set
from wfm_ds.data.prompts import PROMPT_FORMATS, load_prompts
from wfm_ds.errors import DataError
from wfm_ds.recipe import file as recipe_file
from wfm_ds.recipe import shipped_recipes

main = wfm_command("data prompts")


@pytest.fixture
def server(monkeypatch):
    with prompt_server(served_files()) as made:
        use_test_source(monkeypatch, made.url)
        yield made


def test_a_prompt_set_is_downloaded_once_and_says_where_it_is_from(server, tmp_path, capsys):
    folder = tmp_path / "datasets" / "ocr"
    assert main(["ocr", str(folder)]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{folder}/train.txt: 2 prompts, invalid lines left blank: 1",
        f"{folder}/test.txt: 1 prompts",
        "source: github.com/somebody/prompts, licence MIT. Texts.",
    ]
    # The blank line keeps the line numbers in the ids.
    assert [(p.id, p.metadata["ocr_target"]) for p in load_prompts(folder, "ocr", "train")] == [
        ("ocr/train/1", "HELLO"),
        ("ocr/train/4", "42"),
    ]
    note = (folder / prompt_sources.NOTE_FILE).read_text()
    assert COMMIT in note
    assert f"test.txt: ocr/test.txt, sha256 {hashlib.sha256(TEST).hexdigest()}" in note
    num_requests = len(server.starts)
    (folder / "test.txt").write_bytes(TEST)
    assert main(["ocr", str(folder)]) == 0
    assert len(server.starts) == num_requests
    assert capsys.readouterr().out.splitlines()[:2] == [
        f"{folder}/train.txt: 2 prompts, already here, {prompt_sources.CHANGED_REMARK}",
        f"{folder}/test.txt: 1 prompts, already here",
    ]
    assert prompt_sources.CHANGED_REMARK in (folder / prompt_sources.NOTE_FILE).read_text()


def test_an_interrupted_transfer_continues(server, tmp_path):
    server.num_cuts = 2
    (tmp_path / ".train.txt.part").write_bytes(TRAIN[:5])  # of an earlier, killed process
    assert main(["ocr", str(tmp_path)]) == 0
    assert server.starts == [5, 15, 25, 0]
    assert (tmp_path / "test.txt").read_bytes() == TEST
    assert not list(tmp_path.glob(".*.part"))


def test_several_processes_download_the_same_prompt_set(server, tmp_path):
    server.num_cuts = 3
    with ThreadPoolExecutor(6) as pool:
        done = list(pool.map(lambda _: list(download_prompt_set("ocr", tmp_path)), range(6)))
    assert len(done) == 6
    assert (tmp_path / "test.txt").read_bytes() == TEST
    assert len(load_prompts(tmp_path, "ocr", "train")) == 2
    assert not list(tmp_path.glob(".*.part"))


def test_a_full_disk_and_a_server_behind_a_firewall_are_one_sentence_each(server, tmp_path, capsys, monkeypatch):
    (tmp_path / ".train.txt.part").symlink_to("/dev/full")
    assert main(["ocr", str(tmp_path)]) == 2
    assert ".train.txt.part cannot be written (No space left on device): free space" in capsys.readouterr().err
    waits = []

    def wait_for_a_connection(request, timeout):
        waits.append(timeout)
        raise urllib.error.URLError(TimeoutError("timed out"))

    monkeypatch.setattr(urllib.request, "urlopen", wait_for_a_connection)
    assert main(["ocr", str(tmp_path)]) == 2
    assert "cannot be downloaded (timed out)" in capsys.readouterr().err
    assert len(waits) == 1  # each further one would be as long


def test_another_content_and_a_missing_server_are_one_sentence_each(server, tmp_path, capsys, monkeypatch):
    path = next(iter(server.files))
    server.files[path] = b'<html>"sorry"</html>'
    assert main(["ocr", str(tmp_path)]) == 2
    assert "is not the published file" in capsys.readouterr().err
    assert not list(tmp_path.glob("*.txt*"))
    del server.files[path]
    assert main(["ocr", str(tmp_path)]) == 2
    assert f"copy the file to {tmp_path}/train.txt" in capsys.readouterr().err
    monkeypatch.setenv(prompt_sources.MIRROR, "http://127.0.0.1:9")
    assert main(["ocr", str(tmp_path)]) == 2
    assert "refused" in capsys.readouterr().err
    assert main(["orc", str(tmp_path)]) == 2
    assert "unknown prompt set orc: choose one of ocr, " in capsys.readouterr().err


def test_every_published_format_has_a_pinned_source_and_recipes_name_no_other(tmp_path, capsys):
    assert PROMPT_SOURCES.keys() == PROMPT_FORMATS.keys()
    assert main([]) == 0
    listing = capsys.readouterr().out
    assert all(f"\n{name} " in f"\n{listing}" for name in PROMPT_SOURCES)
    for name, source in PROMPT_SOURCES.items():
        assert len(source.commit) == 40
        assert all(len(file.blob) == 40 for file in source.files)
        form = {n.format(split=split) for n in PROMPT_FORMATS[name][0] for split in ("train", "test")}
        assert {file.name for file in source.files} <= form
    names = {
        (recipe.data.name, recipe.data.path, recipe.validation.prompts)
        for path in shipped_recipes.recipes_folder().glob("*.yaml")
        for recipe in [recipe_file.load_recipe(path)]
        if recipe.data.kind == "prompts"
    }
    published = {row for row in names if row[0] in PROMPT_SOURCES}
    assert {row[0] for row in names - published} == {"prompts"}  # recipes/prompts/colors, which is shipped
    for name, folder, validation in published:
        assert folder == f"datasets/{name}"
        assert validation is None or validation.name in {file.name for file in PROMPT_SOURCES[name].files}


def test_a_missing_prompt_set_is_an_error_with_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    command = "to download the published set: wfm data prompts ocr datasets/ocr$"
    with pytest.raises(DataError, match=command):
        load_prompts(Path("datasets/ocr"), "ocr", "train")
    Path("datasets/ocr").mkdir(parents=True)
    with pytest.raises(DataError, match=command):
        load_prompts(Path("datasets/ocr"), "ocr", "train")
