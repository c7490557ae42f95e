"""Uploads to and downloads from a real S3 server, with broken connections, error responses and changed bytes."""

import hashlib
import os
import socket

import moto.s3.models
import pytest

import s3
from wfm_ds.errors import StorageError
from wfm_ds.storage import transfer

CONTENT = bytes(range(256)) * 1024
ROOT = f"s3://{s3.BUCKET}/run"


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(CONTENT)
    return path


@pytest.fixture(params=["one request", "parts"])
def small_parts(request, monkeypatch):
    if request.param == "parts":
        monkeypatch.setattr(transfer, "PART_BYTES", 100_000)
        monkeypatch.setattr(moto.s3.models, "S3_UPLOAD_PART_MIN_SIZE", 1)  # else 5 MiB, as in S3


def stored(s3_server, name):
    return s3_server[1].get_object(Bucket=s3.BUCKET, Key=f"run/{name}")["Body"].read()


@pytest.mark.usefixtures("small_parts")
def test_uploads_and_downloads_are_lossless(s3_server, s3_proxy, file, tmp_path):
    moved = []
    digest = transfer.upload_file(file, f"{ROOT}/file", on_progress=moved.append)
    assert digest == hashlib.sha256(CONTENT).hexdigest()
    assert sum(moved) == len(CONTENT)
    assert stored(s3_server, "file") == CONTENT
    transfer.download_file(f"{ROOT}/file", tmp_path / "back", size=len(CONTENT), sha256=digest)
    assert (tmp_path / "back").read_bytes() == CONTENT
    assert s3_proxy.num_failed == 0


def test_a_growing_file_is_uploaded_with_its_initial_size(s3_server, s3_proxy, file):
    assert transfer.upload_file(file, f"{ROOT}/log", size=1000) == hashlib.sha256(CONTENT[:1000]).hexdigest()
    assert stored(s3_server, "log") == CONTENT[:1000]
    transfer.upload_file(file, f"{ROOT}/log", size=0)
    assert stored(s3_server, "log") == b""
    with pytest.raises(OSError, match="became shorter"):
        transfer.upload_file(file, f"{ROOT}/log", size=len(CONTENT) + 1)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["upload_cuts", "errors"])
@pytest.mark.slow
def test_a_request_that_fails_is_tried_again(s3_server, s3_proxy, file, fault):
    setattr(s3_proxy, fault, 2)
    transfer.upload_file(file, f"{ROOT}/{fault}")
    assert (s3_proxy.num_failed, stored(s3_server, fault)) == (2, CONTENT)


@pytest.mark.usefixtures("small_parts")
@pytest.mark.parametrize("fault", ["upload_cuts", "errors", "flips"])
def test_a_failed_upload_keeps_the_old_object_and_removes_its_parts(s3_server, s3_proxy, file, fault, monkeypatch):
    monkeypatch.setattr(transfer, "NUM_TRIES", 1)
    transfer.put_object(b"before", f"{ROOT}/kept")
    setattr(s3_proxy, fault, 100)
    with pytest.raises(StorageError, match=rf"{ROOT}/kept "):
        transfer.upload_file(file, f"{ROOT}/kept")
    setattr(s3_proxy, fault, 0)
    if fault != "flips":
        assert stored(s3_server, "kept") == b"before"
    assert "Uploads" not in s3_server[1].list_multipart_uploads(Bucket=s3.BUCKET)
    transfer.upload_file(file, f"{ROOT}/kept")
    assert stored(s3_server, "kept") == CONTENT


def test_a_byte_changed_in_transit_is_detected(s3_proxy, file):
    s3_proxy.flips = 1
    with pytest.raises(StorageError, match="was damaged in transit: the storage reports another MD5 than was sent"):
        transfer.upload_file(file, f"{ROOT}/flipped")


def test_a_damaged_object_is_refused(s3_server, s3_proxy, file, tmp_path):
    digest = transfer.upload_file(file, f"{ROOT}/damaged")
    s3_server[1].put_object(Bucket=s3.BUCKET, Key="run/damaged", Body=CONTENT[::-1])
    (tmp_path / "back").write_bytes(b"before")
    with pytest.raises(StorageError, match="is damaged: its SHA-256"):
        transfer.download_file(f"{ROOT}/damaged", tmp_path / "back", size=len(CONTENT), sha256=digest)
    assert not any(path.read_bytes()[:2] == CONTENT[::-1][:2] for path in tmp_path.iterdir())
    with pytest.raises(StorageError, match="instead of"):
        transfer.download_file(f"{ROOT}/damaged", tmp_path / "back", size=len(CONTENT) + 5)
    with pytest.raises(StorageError, match="does not exist"):
        transfer.download_file(f"{ROOT}/nothing", tmp_path / "back", size=5)


def test_names_texts_copies_and_removal(s3_server, s3_proxy):
    for number in range(3):
        transfer.put_object(b"text", f"{ROOT}/list/{number}/a")
    assert transfer.list_objects(f"{ROOT}/list") == {"0/a": 4, "1/a": 4, "2/a": 4}
    assert transfer.list_objects(f"{ROOT}/lis") == {}
    assert transfer.read_text(f"{ROOT}/list/0/a") == "text"
    transfer.copy_object(f"{ROOT}/list/0/a", f"{ROOT}/list/b", 4)
    assert stored(s3_server, "list/b") == b"text"
    transfer.remove_objects([f"{ROOT}/list/0/a", f"{ROOT}/list/nothing", f"{ROOT}/list/1/a"])
    assert sorted(transfer.list_objects(f"{ROOT}/list")) == ["2/a", "b"]
    with pytest.raises(FileNotFoundError):
        transfer.read_text(f"{ROOT}/list/0/a")


def test_long_listings_are_complete(s3_proxy, monkeypatch):
    monkeypatch.setattr(transfer, "KEYS_PER_PAGE", 2)
    for number in range(5):
        transfer.put_object(b"", f"{ROOT}/many/{number}")
    assert sorted(transfer.list_objects(f"{ROOT}/many")) == ["0", "1", "2", "3", "4"]


def test_a_storage_that_is_not_writable_gives_the_reason(s3_server, s3_proxy, monkeypatch):
    transfer.require_writable(ROOT)
    assert [name for name in transfer.list_objects(ROOT) if ".wfm_ds" in name] == []
    with pytest.raises(StorageError, match=r"s3://nobodys/run/\.wfm_ds-\w+: the bucket does not exist"):
        transfer.require_writable("s3://nobodys/run")
    monkeypatch.setattr(transfer, "NUM_TRIES", 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        s3.use(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"cannot be written: .*onnect"):
            transfer.require_writable(ROOT)


def test_a_file_that_cannot_be_read_is_not_the_storages_fault(s3_proxy, tmp_path):
    with pytest.raises(FileNotFoundError):
        transfer.upload_file(tmp_path / "nothing", f"{ROOT}/nothing")
    assert "nothing" not in transfer.list_objects(ROOT)
    assert os.environ[s3.VARIABLES[0]] == "key"
