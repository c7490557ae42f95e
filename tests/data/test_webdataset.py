"""WebDataset shards: all member names, every kind of damage, and the same samples from local files and from S3."""

import itertools
import json
import os
import tarfile

import fsspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from clips import index_of, write_clip
from each_case import check_each
from folders import encode_image, write_tar
from s3 import BUCKET, VARIABLES, CuttingProxy, s3_server
from wfm_ds.data import webdataset
from wfm_ds.data.media import load_media
from wfm_ds.data.order import BatchSource
from wfm_ds.data.pixels import Framing, draw_centre
from wfm_ds.data.webdataset import TarShards, load_tar_index, unique_shard_names
from wfm_ds.errors import DataError, StorageError
from wfm_ds.storage import filesystem as storage


def sample(name, level=0, **caption):
    return [
        (f"{name}.png", encode_image(level)),
        (f"{name}.json", json.dumps({"prompt": f"grey {level}", **caption}).encode()),
    ]


def open_shards(*patterns, cache_dir=None, max_bad_fraction=0.99):
    return TarShards([str(p) for p in patterns], cache_dir=cache_dir, max_bad_fraction=max_bad_fraction)


def ids(found):
    """Return the ids without the folder name, which differs between tests."""
    return [sample.id.partition("/")[2] for sample in found.samples]


def test_text_that_utf8_cannot_encode_is_a_bad_sample_and_a_pipe_is_one_sentence(tmp_path):
    lone = ("lone.png", encode_image(1)), ("lone.json", b'{"prompt": "a \\ud800 cat"}')
    both = ("both.png", encode_image(1)), ("both.json", b'{"tag": "\\ud800"}'), ("both.txt", b"a dog")
    tar = write_tar(tmp_path / "a.tar", [*sample("good"), *lone, *both])
    found = open_shards(tar)
    assert [(one.id.split("/")[-1], one.prompt.text, one.prompt.metadata) for one in found.samples] == [
        ("both", "a dog", {}),
        ("good", "grey 0", {}),
    ]
    assert found.bad == {"no_prompt": [f"{tar}#lone"]}
    os.mkfifo(tmp_path / "pipe.tar")
    with pytest.raises(StorageError, match=r"pipe\.tar is not a regular file"):
        open_shards(tmp_path / "pipe.tar")


def test_a_shard_whose_name_is_no_text_gives_ids_that_are(tmp_path):
    tar = write_tar(tmp_path / os.fsdecode(b"caf\xe9.tar"), sample("a"))
    found = open_shards(tar)
    for text in (found.source, found.samples[0].id, found.samples[0].media.name):
        assert "caf\\udce9" in text.encode().decode()
    assert found.split_holdout(0.5)[0] == found.samples


def pixels(one):
    return load_media(one.media, Framing(height=8, width=8), draw_centre)


def test_members_with_one_key_are_a_sample(tmp_path):
    write_tar(tmp_path / "a.tar", [*sample("0001", 1, label=7), *sample("dir.v2/0001", 2), *sample("./0003.left", 3)])
    found = open_shards(tmp_path / "a.tar", max_bad_fraction=0.5)
    assert ids(found) == ["a/0001", "a/dir.v2/0001"]
    assert [s.prompt.text for s in found.samples] == ["grey 1", "grey 2"]
    assert found.samples[0].prompt.metadata == {"label": 7}
    assert [int(pixels(s)[0, 0, 0]) for s in found.samples] == [1, 2]
    assert found.bad == {}  # left.png and left.json are fields that the recipe does not request


def test_text_files_are_captions_and_objects_beside_them_metadata(tmp_path):
    members = [("a.jpg", b""), ("a.txt", b" a cat\n"), ("b.txt", b"a dog"), ("b.json", b'{"caption": "x", "w": 3}')]
    members += [("b.webp", b""), ("c.mp4", b""), ("c.json", b'{"prompt": "from json"}'), ("c.txt", b"from text")]
    found = open_shards(write_tar(tmp_path / "a.tar", members))
    assert [(s.prompt.text, s.prompt.metadata, s.media.suffix) for s in found.samples] == [
        ("a cat", {}, ".jpg"),
        ("a dog", {"caption": "x", "w": 3}, ".webp"),
        ("from json", {}, ".mp4"),
    ]


def test_each_kind_of_bad_entry_is_counted(tmp_path):
    members = [*sample("good")]
    members += [
        ("alone.png", encode_image(0)),
        ("text.txt", b"nothing to see"),
        ("empty.png", encode_image(0)),
        ("empty.txt", b" "),
    ]
    members += [("two.png", b""), ("two.jpg", b""), ("two.txt", b"x"), ("latin.png", b""), ("latin.txt", b"caf\xe9")]
    members += [*sample("other"), *sample("good"), ("model.pth", b"x"), ("code.py", b"x"), ("x.pickle", b"x")]
    write_tar(tmp_path / "a.tar", members)
    found = open_shards(tmp_path / "a.tar")
    assert ids(found) == ["a/good", "a/other"]
    shard = str(tmp_path / "a.tar")
    assert found.bad == {
        "no_json": [f"{shard}#alone"],
        "no_media": [f"{shard}#text"],
        "no_prompt": [f"{shard}#empty", f"{shard}#latin"],
        "ambiguous": [f"{shard}#two", f"{shard}#good"],  # a repeated key is counted as a sample with a duplicate name
    }


def test_names_are_keys_and_never_paths(tmp_path):
    members = [*sample("../../outside", 1), *sample("/etc/absolute", 2), (".hidden.png", b""), ("__MACOSX", b"")]
    link = tarfile.TarInfo("link.png")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc/passwd"
    path = write_tar(tmp_path / "in" / "a.tar", members)
    with tarfile.open(path, "a") as tar:
        tar.addfile(link)
    found = open_shards(path)
    assert [int(pixels(s)[0, 0, 0]) for s in found.samples] == [1, 2]
    assert [p.name for p in tmp_path.rglob("*")] == ["in", "a.tar"]
    assert found.bad == {}


@pytest.mark.parametrize("format", [tarfile.PAX_FORMAT, tarfile.GNU_FORMAT])
def test_long_and_foreign_names_are_read_in_every_dialect(tmp_path, format):
    names = ["long/" * 40 + "name", "caf\xe9/\u4e2d\u6587", "plain"]
    members = [member for i, name in enumerate(names) for member in sample(name, i)]
    found = open_shards(write_tar(tmp_path / "a.tar", members, format=format))
    assert set(ids(found)) == {f"a/{name}" for name in names}


KEYS = st.lists(st.text("ab", min_size=1, max_size=2), min_size=1, max_size=3).map("/".join)


@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_any_mix_of_members_gives_exactly_its_pairs(tmp_path_factory, data):
    """The members of a sample are in any order, mixed with unrelated members; the bytes are read back unchanged."""
    keys = data.draw(st.lists(KEYS, max_size=5, unique=True))
    members, wanted = [], {}
    for i, key in enumerate(keys):
        body = data.draw(st.binary(max_size=700))
        one = [(f"{key}.png", body), (f"{key}.txt", f"text {i}".encode())]
        extra = data.draw(st.lists(st.sampled_from(["cls", "seg.png", "npy"]), unique=True))
        members += data.draw(st.permutations(one + [(f"{key}.{field}", b"?") for field in extra]))
        wanted[key] = (f"text {i}", body)
    path = tmp_path_factory.mktemp("any") / "a.tar"
    write_tar(path, members)
    if not wanted:
        with pytest.raises(DataError):
            open_shards(path)
        return
    samples = open_shards(path, max_bad_fraction=0.0).samples
    found = {s.id: (s.prompt.text, s.media.open().read()) for s in samples}
    assert found == {f"{path.parent.name}/a/{key}": content for key, content in wanted.items()}


def test_a_truncated_shard_gives_the_samples_before_the_end(tmp_path):
    path = write_tar(tmp_path / "a.tar", [m for i in range(6) for m in sample(f"{i}", i)])
    content = path.read_bytes()
    path.write_bytes(content[: content.index(b"4.png") + 530])  # in the middle of the fifth image
    found = open_shards(path)
    assert found.bad == {"shard": [str(path)]}
    assert [int(pixels(s)[0, 0, 0]) for s in found.samples] == list(range(4))


@check_each("damage", ["header", "cut at a member", "cut within a header"])
def test_a_shard_that_ends_without_its_end_is_not_intact(tmp_path, damage):
    """tarfile itself reads each of these as the regular end of the tar."""
    path = write_tar(tmp_path / "a.tar", [m for i in range(6) for m in sample(f"{i}", i)])
    content = path.read_bytes()
    header = content.index(b"4.png")
    damaged = content[:header] + b"\xff" * 512 + content[header + 512 :]
    path.write_bytes({"header": damaged, "cut at a member": content[:header]}.get(damage, content[: header + 100]))
    found = open_shards(path)
    assert found.bad == {"shard": [str(path)]}
    assert len(found.samples) == 4


def test_files_that_are_not_tars_are_named(tmp_path):
    (tmp_path / "text.tar").write_text("<html>" * 1000)
    with pytest.raises(DataError, match=r"text\.tar is not an uncompressed tar file"):
        open_shards(tmp_path / "text.tar")
    write_tar(tmp_path / "a.tar.gz", sample("0"), mode="w:gz")
    with pytest.raises(DataError, match=r"a\.tar\.gz is not an uncompressed tar file"):
        open_shards(tmp_path / "a.tar.gz")
    with pytest.raises(DataError, match=r"nowhere\.tar not found"):
        open_shards(tmp_path / "nowhere.tar")
    write_tar(tmp_path / "empty.tar", [])
    with pytest.raises(DataError, match=r"no captioned media in 1 tar files"):
        open_shards(tmp_path / "empty.tar")
    with pytest.raises(DataError, match=r"/\*\.tgz: no matching files"):
        open_shards(tmp_path / "empty.tar", tmp_path / "*.tgz")


def test_ids_differ_between_shards(tmp_path):
    for part in ("x", "y"):
        for number in range(2):
            write_tar(tmp_path / part / f"{number:03}.tar", sample("0", number))
    found = open_shards(tmp_path / "x" / "{000..001}.tar", tmp_path / "y" / "*.tar", tmp_path / "x" / "000.tar")
    assert [s.id for s in found.samples] == ["x/000/0", "x/001/0", "y/000/0", "y/001/0"]
    assert unique_shard_names(["s3://b/0.tar", "s3://b/a/0.tar", "/c/0.tar"]) == ["b/0", "a/0", "c/0"]
    with pytest.raises(DataError, match=r"/c/a/0\.tar and s3://b/a/0\.tar would have the same sample ids a/0/\.\.\."):
        unique_shard_names(["/c/a/0.tar", "s3://b/a/0.tar"])


def test_an_id_does_not_depend_on_other_shards_nor_on_how_its_own_is_addressed(tmp_path, monkeypatch):
    for folder in ("x", "y/deep"):
        write_tar(tmp_path / folder / "0.tar", sample("0"))
    alone = open_shards(tmp_path / "x" / "0.tar").samples
    monkeypatch.chdir(tmp_path / "x")
    both = open_shards("0.tar", tmp_path / "y" / "*" / "0.tar")
    assert [s.id for s in both.samples] == ["deep/0/0", alone[0].id] == ["deep/0/0", "x/0/0"]


def test_an_index_is_kept_until_the_shard_changes(tmp_path, monkeypatch):
    path = write_tar(tmp_path / "a.tar", sample("one"))
    first = load_tar_index(str(path), tmp_path / "cache")
    reads = []
    read = webdataset.scan_tar
    monkeypatch.setattr(webdataset, "scan_tar", lambda *a: reads.append(a) or read(*a))
    assert load_tar_index(str(path), tmp_path / "cache") == first
    assert reads == []
    write_tar(path, [*sample("one"), *sample("two")])
    assert len(load_tar_index(str(path), tmp_path / "cache").members) == 4
    (kept,) = [p for p in (tmp_path / "cache").rglob("*.json") if "two" in p.read_text()]
    for damaged in ('{"half": ', "[" * 99999, "[]", "{}"):
        kept.write_text(damaged)
        assert len(load_tar_index(str(path), tmp_path / "cache").members) == 4
    assert len(reads) == 5


def test_videos_in_shards_train_like_those_in_files(tmp_path):
    clip = write_clip(tmp_path / "clip.mp4", count=20)
    found = open_shards(write_tar(tmp_path / "a.tar", [("v.mp4", clip.read_bytes()), ("v.txt", b"a clip")]))
    frames = load_media(found.samples[0].media, Framing(height=32, width=48, num_frames=5), draw_centre)
    assert [index_of(frame) for frame in frames] == [8, 9, 10, 11, 12]


@pytest.fixture(scope="module")
def server(tmp_path_factory):
    with s3_server() as (url, client):
        for number in range(2):
            noise = np.random.default_rng(number)
            pictures = [encode_image(noise.integers(0, 256, (120, 120, 3), dtype=np.uint8)) for _ in range(6)]
            members = [part for i, p in enumerate(pictures) for part in ((f"{i}.png", p), (f"{i}.txt", b"noise"))]
            shard = write_tar(tmp_path_factory.mktemp("shard") / "0.tar", members)
            client.put_object(Bucket=BUCKET, Key=f"set/{number:03}.tar", Body=shard.read_bytes())
        yield url


def test_s3_shards_stream_through_a_network_that_breaks(server, tmp_path, monkeypatch):
    """The batches equal the batches of local files although connections are cut during indexing and during training."""
    proxy = CuttingProxy(server)
    fsspec.get_filesystem_class("s3").clear_instance_cache()
    for name, value in zip(VARIABLES, ("key", "secret", proxy.url, "us-east-1"), strict=True):
        monkeypatch.setenv(name, value)
    fs, _ = storage.open_filesystem("s3://x")
    copy = tmp_path / "set"
    copy.mkdir()
    for number in range(2):
        fs.get_file(f"{BUCKET}/set/{number:03}.tar", str(copy / f"{number:03}.tar"))
    settings = {"global_batch": 4, "seed": 1, "shuffle": True, "max_bad_fraction": 0.0}
    framing = Framing(height=120, width=120)

    monkeypatch.setattr(storage, "NUM_TRIES", 3)
    proxy.cuts = 2
    remote = open_shards(f"s3://{BUCKET}/set/{{000..001}}.tar", cache_dir=tmp_path / "cache", max_bad_fraction=0.0)
    assert proxy.num_cut == 2
    local = open_shards(copy / "{000..001}.tar")
    sources = [BatchSource(found.samples, framings=[framing], **settings) for found in (remote, local)]
    try:
        for step in range(1, 4):
            proxy.cuts = 1
            for theirs, ours in itertools.zip_longest(*(source.read_batch(step, 0, 1) for source in sources)):
                assert theirs.sample_id == ours.sample_id
                np.testing.assert_array_equal(theirs.pixels, ours.pixels)
        assert proxy.num_cut >= 4
        proxy.cuts = 1000  # permanent failure: this is not a bad sample, so nothing is skipped
        with pytest.raises(StorageError, match=r"s3://shards/set/00\d\.tar cannot be read"):
            sources[0].read_batch(9, 0, 1)
    finally:
        for source in sources:
            source.close()
        proxy.close()
    assert sources[0].bad == {}
