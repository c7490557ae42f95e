"""`wfm data captions`: the written files make a paired folder, and existing captions are kept without --overwrite."""

import csv
import json
import os

import pytest

from commands import wfm_command
from each_case import check_each
from wfm_ds.cli.captions import read_caption_table
from wfm_ds.data.captioned_folder import CaptionedFolder
from wfm_ds.errors import DataError

main = wfm_command("data captions")


@pytest.fixture
def folder(tmp_path):
    for name in ("media/a.mp4", "media/sub/b.v2.PNG", "media/notes.txt", "media/.hidden.png"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(b"")
    return tmp_path / "media"


def prompts(folder):
    return {s.id: (s.prompt.text, s.prompt.metadata) for s in CaptionedFolder(folder, max_bad_fraction=0.0).samples}


def test_one_prompt_for_all(folder, capsys):
    assert main([str(folder), "--prompt", " a caf\xe9 "]) == 0
    assert prompts(folder) == {"a": ("a caf\xe9", {}), "sub/b.v2": ("a caf\xe9", {})}
    assert capsys.readouterr().out == f"2 captions in {folder} (NAME.json)\n"


def test_text_that_utf8_cannot_encode_is_refused_before_anything_is_written(folder, tmp_path, capsys):
    table = tmp_path / "table.jsonl"
    table.write_text('{"file": "a.mp4", "prompt": "a"}\n{"file": "sub/b.v2.PNG", "prompt": "a \\ud800 cat"}\n')
    assert main([str(folder), "--from", str(table)]) == 2
    assert main([str(folder), "--prompt", "caf\udce9"]) == 2
    first, second = capsys.readouterr().err.splitlines()
    assert first == f"error: {table}: line 2 has text that cannot be encoded as UTF-8"
    assert second == "error: --prompt is blank or cannot be encoded as UTF-8"
    assert list(folder.rglob("*.json")) == []


def test_a_pipe_as_a_table_is_a_one_line_error(folder, tmp_path):
    os.mkfifo(tmp_path / "table.csv")
    with pytest.raises(DataError, match="is not a regular file"):
        read_caption_table(tmp_path / "table.csv")


@pytest.mark.parametrize("kind", ["csv", "jsonl"])
def test_a_table_gives_each_file_its_own(folder, tmp_path, kind):
    rows = [{"file": "sub/b.v2.PNG", "prompt": 'says "hi", twice\nor more', "shot": "7"}]
    rows += [{"file": "a.mp4", "prompt": "a dog", "shot": "8"}]
    table = tmp_path / f"table.{kind}"
    with table.open("w", newline="") as file:
        if kind == "csv":
            writer = csv.DictWriter(file, ["file", "prompt", "shot"])
            writer.writeheader()
            writer.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n\n" for row in rows)
    assert main([str(folder), "--from", str(table)]) == 0
    assert prompts(folder) == {r["file"].rpartition(".")[0]: (r["prompt"], {"shot": r["shot"]}) for r in rows}


def test_existing_captions_are_kept_without_overwrite(folder, capsys):
    (folder / "a.json").write_text('{"prompt": "mine"}')
    assert main([str(folder), "--prompt", "theirs"]) == 2
    assert "1 captions exist" in capsys.readouterr().err
    assert not (folder / "sub/b.v2.json").exists()
    assert (folder / "a.json").read_text() == '{"prompt": "mine"}'
    assert main([str(folder), "--prompt", "theirs", "--overwrite"]) == 0
    assert {text for text, _ in prompts(folder).values()} == {"theirs"}


@check_each(
    ("text", "complaint"),
    [
        ("file,prompt\na.mp4,x\n", "1 files have no row in the table for .*sub/b.v2.PNG"),
        ("file,prompt\na.mp4,x\nsub/b.v2.PNG,y\nc.mp4,z\n", "1 files are in the table but not in .*c.mp4"),
        ("file,prompt\na.mp4,x\na.mp4,y\n", "line 3 repeats the file a.mp4"),
        ("file,prompt\na.mp4,\n", "line 2 has no `file` or no `prompt`"),
        ("name,prompt\na.mp4,x\n", "line 2 has no `file`"),
        ("file,prompt\na.mp4,x,y\n", "line 2 has more or fewer fields"),
        ("file,prompt\na.mp4\n", "line 2 has more or fewer fields"),
        ('file,prompt\na.mp4,"x\n', "cannot be read: unexpected end of data"),
    ],
)
def test_a_table_that_does_not_fit_is_refused_and_nothing_written(folder, tmp_path, capsys, text, complaint):
    (tmp_path / "t.csv").write_text(text)
    assert main([str(folder), "--from", str(tmp_path / "t.csv")]) == 2
    with pytest.raises(DataError, match=complaint):
        raise DataError(capsys.readouterr().err)
    assert list(folder.rglob("*.json")) == []


@check_each("line", ["{", "[]", '{"file": "a.mp4"}', '{"file": 3, "prompt": "x"}', "[" * 99999])
def test_a_bad_json_line_is_named(tmp_path, line):
    (tmp_path / "t.jsonl").write_text(f'{{"file": "b", "prompt": "x"}}\n{line}\n')
    with pytest.raises(DataError, match=r"t\.jsonl: line 2"):
        read_caption_table(tmp_path / "t.jsonl")


def test_media_that_would_share_a_caption_are_refused(folder, capsys):
    (folder / "a.png").write_bytes(b"")
    assert main([str(folder), "--prompt", "x"]) == 2
    assert "share one caption" in capsys.readouterr().err


def test_a_lerobot_dataset_is_refused_and_nothing_is_written(folder, capsys):
    (folder / "meta").mkdir()
    (folder / "meta" / "info.json").write_text('{"codebase_version": "v2.1", "features": {}, "fps": 10}')
    before = sorted(folder.rglob("*"))
    for arguments in (["--prompt", "a robot"], ["--prompt", "a robot", "--layout", "cosmos", "--overwrite"]):
        assert main([str(folder), *arguments]) == 2
        assert "is a LeRobot dataset. Its tasks are the captions: set data.kind: lerobot" in capsys.readouterr().err
    assert sorted(folder.rglob("*")) == before


def test_a_folder_without_media_is_refused(tmp_path, capsys):
    for path, complaint in ((tmp_path, "no images or videos"), (tmp_path / "none", "is not a folder")):
        assert main([str(path), "--prompt", "x"]) == 2
        assert complaint in capsys.readouterr().err
