"""Addresses, credentials, and S3 over a failing network, with real requests to a server on this machine."""

import os
import socket

import pytest
from hypothesis import given
from hypothesis import strategies as st

import s3
from wfm_ds.checkpoint.remote_store import open_locally
from wfm_ds.cli.doctor.machine import read_hosts
from wfm_ds.errors import DataError, StorageError, UserError
from wfm_ds.recipe.deepspeed import read_deepspeed_config
from wfm_ds.storage import filesystem as storage
from wfm_ds.transport.sockets import resolve_endpoint
from wfm_reward.config import _read_token_file, load_config
from wfm_reward.decoder import VaeScale

CONTENT = bytes(range(256)) * 512
FILE = f"s3://{s3.BUCKET}/dir/a.bin"


@pytest.fixture
def proxy(s3_server, s3_proxy):
    for name, content in (("a", CONTENT), ("b", b"b")):
        s3_server[1].put_object(Bucket=s3.BUCKET, Key=f"dir/{name}.bin", Body=content)
    return s3_proxy


def test_a_range_is_exactly_its_bytes_locally_and_in_s3(proxy, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    for address in (FILE, str(tmp_path / "a.bin")):
        for offset, size in ((0, 1), (255, 3), (1000, 70000), (len(CONTENT) - 1, 1)):
            assert storage.read_range(address, offset, size) == CONTENT[offset : offset + size]
        with pytest.raises(StorageError, match=r"read 2 instead of 5 bytes"):
            storage.read_range(address, len(CONTENT) - 2, 5)


def test_the_rest_of_a_stream_is_read_with_one_request(tmp_path, monkeypatch):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    ranges, read_range = [], storage.read_range
    monkeypatch.setattr(storage, "read_range", lambda *args: ranges.append(args[1:]) or read_range(*args))
    for start in (0, 1000, len(CONTENT), len(CONTENT) + 1):
        stream = storage.open_stream(str(tmp_path / "a.bin"))
        stream.seek(start)
        assert stream.read() == CONTENT[start:]
    assert ranges == [(0, len(CONTENT)), (1000, len(CONTENT) - 1000)]


@pytest.mark.slow
def test_a_connection_that_is_cut_is_opened_again_a_few_times(proxy, monkeypatch):
    proxy.cuts = 2
    assert storage.read_range(FILE, 5, 100000) == CONTENT[5:100005]
    assert (proxy.num_cut, proxy.cuts) == (2, 0)
    monkeypatch.setattr(storage, "NUM_TRIES", 3)
    proxy.num_cut, proxy.cuts = 0, 1000
    with pytest.raises(StorageError, match=rf"{FILE} cannot be read: ."):
        storage.read_range(FILE, 0, 100000)
    assert proxy.num_cut == 3
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        s3.use(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"cannot be read: .*onnect"):
            storage.read_range(FILE, 0, 1)


def test_a_missing_object_is_not_a_storage_failure(proxy, tmp_path):
    for address in (f"s3://{s3.BUCKET}/nothing", str(tmp_path / "nothing")):
        for read in (lambda address: storage.read_range(address, 0, 1), storage.file_version):
            with pytest.raises(FileNotFoundError):
                read(address)


def test_a_version_changes_with_the_file(s3_server, proxy, tmp_path):
    address, versions = f"s3://{s3.BUCKET}/changing", []
    for content in (b"one", b"two"):
        s3_server[1].put_object(Bucket=s3.BUCKET, Key="changing", Body=content)
        s3.use(proxy.url)
        versions.append(storage.file_version(address))
    assert versions[0] != versions[1]
    assert versions[0][:2] == (address, 3)
    file = tmp_path / "file"
    file.write_bytes(b"one")
    before = storage.file_version(str(file))
    os.utime(file, ns=(1, 1))
    assert storage.file_version(str(file)) != before


def test_errors_and_logs_show_no_key(proxy, monkeypatch, caplog):
    for key, secret in (("AKIAEXAMPLE", ""), ("", "hunter2")):
        s3.use(proxy.url, key=key, secret=secret)
        with pytest.raises(StorageError, match=r"_ACCESS_KEY(_ID)? is set but PROD_S3_CHECKPOINT_\w+ is not") as raised:
            storage.open_filesystem(FILE)
        assert (key or secret) not in str(raised.value)
    monkeypatch.setattr(storage, "NUM_TRIES", 2)
    s3.use(proxy.url, key="AKIAEXAMPLE", secret="hunter2")
    proxy.cuts = 1000
    with caplog.at_level("DEBUG"), pytest.raises(StorageError) as raised:
        storage.read_range(FILE, 0, 100000)
    assert "hunter2" not in str(raised.value) + caplog.text


def test_without_variables_the_default_credentials_of_aws_are_used():
    options = storage.s3_options({}, 1)
    assert (options["key"], options["secret"], options["client_kwargs"]) == (None, None, {})


def test_other_addresses_are_refused(tmp_path):
    for address, message in (
        ("gs://bucket/a", "gs:// is not supported; use a path or an s3:// address"),
        ("s3://", "s3:// names no bucket; use s3://BUCKET/PATH"),
        ("s3:///a", "s3:///a names no bucket"),
    ):
        with pytest.raises(StorageError, match=message):
            storage.open_filesystem(address)
        with pytest.raises(StorageError, match=message), open_locally(address, tmp_path):
            pass


@given(first=st.integers(0, 200), count=st.integers(1, 30), width=st.integers(1, 6))
def test_ranges_keep_their_digits(first, count, width):
    last = first + count - 1
    made = storage.expand_pattern(f"s3://b/{{{first:0{width}d}..{last:0{width}d}}}.tar")
    assert made == [f"s3://b/{number:0{width}d}.tar" for number in range(first, last + 1)]


def test_ranges_multiply_and_run_forwards():
    assert storage.expand_pattern("/a{0..1}/{08..10}") == [f"/a{i}/{j}" for i in (0, 1) for j in ("08", "09", "10")]
    with pytest.raises(StorageError, match="is descending"):
        storage.expand_pattern("{5..3}")


def test_globs_are_sorted_and_find_something(proxy, tmp_path):
    for name in ("b.tar", "a.tar", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert storage.expand_pattern(f"{tmp_path}/*.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert storage.expand_pattern(f"s3://{s3.BUCKET}/dir/?.bin") == [
        f"s3://{s3.BUCKET}/dir/{name}.bin" for name in "ab"
    ]
    with pytest.raises(DataError, match=r"\*\.zip: no matching files"):
        storage.expand_pattern(f"{tmp_path}/*.zip")


def test_a_relative_path_and_its_absolute_one_are_one_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.expand_pattern("a.tar") == storage.expand_pattern(f"{tmp_path}/a.tar") == [f"{tmp_path}/a.tar"]


def test_a_pipe_as_a_settings_file_is_refused_at_once(tmp_path):
    os.mkfifo(tmp_path / "config.json")
    pipe = tmp_path / "config.json"
    for read in (read_deepspeed_config, resolve_endpoint, read_hosts, load_config, _read_token_file):
        with pytest.raises(UserError, match=r"config\.json.* is not a regular file"):
            read(str(pipe) if read is resolve_endpoint else pipe)
    with pytest.raises(UserError, match=r"config\.json cannot be read: .* is not a regular file"):
        VaeScale.from_vae_config(16, str(tmp_path))
