"""Addresses, credentials, and S3 over a network that fails: real requests to a server on this machine."""

import os
import socket

import fsspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from s3 import BUCKET, VARIABLES, CuttingProxy, s3_server
from wfm_ds.errors import DataError, StorageError
from wfm_ds.storage import filesystem as storage

CONTENT = bytes(range(256)) * 512


@pytest.fixture(scope="module")
def server():
    with s3_server() as (url, client):
        client.put_object(Bucket=BUCKET, Key="dir/a.bin", Body=CONTENT)
        client.put_object(Bucket=BUCKET, Key="dir/b.bin", Body=b"b")
        yield url


@pytest.fixture
def s3(server, monkeypatch):
    """`s3(url)` sets the four variables, for another endpoint if one is given; no connection is left from before."""

    def use(url=server, key="key", secret="secret"):
        fsspec.get_filesystem_class("s3").clear_instance_cache()
        for name, value in zip(VARIABLES, (key, secret, url, "us-east-1"), strict=True):
            monkeypatch.setenv(name, value)

    use()
    return use


@pytest.fixture
def proxy(server, s3):
    one = CuttingProxy(server)
    s3(one.url)
    yield one
    one.close()


def test_a_range_is_exactly_its_bytes_locally_and_in_s3(s3, tmp_path):
    (tmp_path / "a.bin").write_bytes(CONTENT)
    for address in (f"s3://{BUCKET}/dir/a.bin", str(tmp_path / "a.bin")):
        for offset, size in ((0, 1), (255, 3), (1000, 70000), (len(CONTENT) - 1, 1)):
            assert storage.read_range(address, offset, size) == CONTENT[offset : offset + size]
        with pytest.raises(StorageError, match=r"read 2 instead of 5 bytes"):
            storage.read_range(address, len(CONTENT) - 2, 5)


def test_a_connection_cut_in_the_middle_is_opened_again(proxy):
    proxy.cuts = 2
    assert storage.read_range(f"s3://{BUCKET}/dir/a.bin", 5, 100000) == CONTENT[5:100005]
    assert (proxy.num_cut, proxy.cuts) == (2, 0)


def test_a_connection_that_is_always_cut_is_an_error_after_a_few_tries(proxy, monkeypatch):
    monkeypatch.setattr(storage, "NUM_TRIES", 3)
    proxy.cuts = 1000
    with pytest.raises(StorageError, match=rf"s3://{BUCKET}/dir/a\.bin cannot be read: ."):
        storage.read_range(f"s3://{BUCKET}/dir/a.bin", 0, 100000)
    assert proxy.num_cut == 3


def test_a_storage_that_is_not_there_is_an_error(s3, monkeypatch):
    monkeypatch.setattr(storage, "NUM_TRIES", 1)
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        s3(f"http://127.0.0.1:{closed.getsockname()[1]}")
        with pytest.raises(StorageError, match=r"cannot be read: .*onnect"):
            storage.read_range(f"s3://{BUCKET}/dir/a.bin", 0, 1)


def test_what_does_not_exist_is_no_failure_of_the_storage(s3, tmp_path):
    for address in (f"s3://{BUCKET}/nothing", str(tmp_path / "nothing")):
        with pytest.raises(FileNotFoundError):
            storage.read_range(address, 0, 1)
        with pytest.raises(FileNotFoundError):
            storage.file_version(address)


def test_a_version_changes_with_the_file(s3, server, tmp_path):
    import boto3

    address = f"s3://{BUCKET}/changing"
    client = boto3.client(
        "s3", endpoint_url=server, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
    )
    versions = []
    for content in (b"one", b"two"):
        client.put_object(Bucket=BUCKET, Key="changing", Body=content)
        s3()
        versions.append(storage.file_version(address))
    assert versions[0] != versions[1]
    assert versions[0][:2] == (address, 3)
    file = tmp_path / "file"
    file.write_bytes(b"one")
    before = storage.file_version(str(file))
    os.utime(file, ns=(1, 1))
    assert storage.file_version(str(file)) != before


@pytest.mark.parametrize(("key", "secret"), [("AKIAEXAMPLE", ""), ("", "hunter2")])
def test_a_key_without_its_secret_is_an_error_that_shows_neither(s3, key, secret):
    s3(key=key, secret=secret)
    with pytest.raises(StorageError, match=r"_ACCESS_KEY(_ID)? is set but PROD_S3_CHECKPOINT_\w+ is not") as raised:
        storage.open_filesystem(f"s3://{BUCKET}/a")
    assert (key or secret) not in str(raised.value)


def test_without_the_variables_awss_own_ways_are_used():
    options = storage.s3_options({}, 1)
    assert (options["key"], options["secret"], options["client_kwargs"]) == (None, None, {})


def test_errors_and_logs_show_no_secret(s3, proxy, monkeypatch, caplog):
    monkeypatch.setattr(storage, "NUM_TRIES", 2)
    s3(proxy.url, key="AKIAEXAMPLE", secret="hunter2")
    proxy.cuts = 1000
    with caplog.at_level("DEBUG"), pytest.raises(StorageError) as raised:
        storage.read_range(f"s3://{BUCKET}/dir/a.bin", 0, 100000)
    assert "hunter2" not in str(raised.value) + caplog.text


def test_other_kinds_of_address_are_refused():
    with pytest.raises(StorageError, match=r"gs:// is not supported; use a path or an s3:// address"):
        storage.open_filesystem("gs://bucket/a")


@given(first=st.integers(0, 200), count=st.integers(1, 30), width=st.integers(1, 6))
def test_ranges_keep_their_digits(first, count, width):
    last = first + count - 1
    made = storage.expand_pattern(f"s3://b/{{{first:0{width}d}..{last:0{width}d}}}.tar")
    assert made == [f"s3://b/{number:0{width}d}.tar" for number in range(first, last + 1)]


def test_ranges_multiply_and_run_forwards():
    assert storage.expand_pattern("/a{0..1}/{08..10}") == [f"/a{i}/{j}" for i in (0, 1) for j in ("08", "09", "10")]
    with pytest.raises(StorageError, match="is descending"):
        storage.expand_pattern("{5..3}")


def test_globs_are_sorted_and_find_something(s3, tmp_path):
    for name in ("b.tar", "a.tar", "c.txt"):
        (tmp_path / name).write_bytes(b"")
    assert storage.expand_pattern(f"{tmp_path}/*.tar") == [f"{tmp_path}/a.tar", f"{tmp_path}/b.tar"]
    assert storage.expand_pattern(f"s3://{BUCKET}/dir/?.bin") == [f"s3://{BUCKET}/dir/{name}.bin" for name in "ab"]
    with pytest.raises(DataError, match=r"\*\.zip: no matching files"):
        storage.expand_pattern(f"{tmp_path}/*.zip")


def test_a_relative_path_and_its_absolute_one_are_one_address(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert storage.expand_pattern("a.tar") == storage.expand_pattern(f"{tmp_path}/a.tar") == [f"{tmp_path}/a.tar"]
