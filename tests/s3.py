"""A local S3 server (moto in a thread), a proxy that cuts responses and a proxy that makes uploads fail."""

import contextlib
import socket
import threading

import boto3
from moto.server import ThreadedMotoServer

from wfm_ds.storage import filesystem as storage

BUCKET = "shards"
VARIABLES = (storage.ACCESS_KEY, storage.SECRET_KEY, storage.ENDPOINT, storage.REGION)


@contextlib.contextmanager
def s3_server():
    """Start a server with an empty BUCKET. Yield its URL and a boto3 client."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        host, port = server.get_host_and_port()
        url = f"http://{host}:{port}"
        client = boto3.client(
            "s3", endpoint_url=url, aws_access_key_id="key", aws_secret_access_key="secret", region_name="us-east-1"
        )
        client.create_bucket(Bucket=BUCKET)
        yield url, client
    finally:
        server.stop()


def use(url, key="key", secret="secret"):
    """Set the environment variables of the S3 server, and clear cached fsspec connections."""
    import os

    import fsspec

    fsspec.get_filesystem_class("s3").clear_instance_cache()
    os.environ |= dict(zip(VARIABLES, (key, secret, url, "us-east-1"), strict=True))


class CuttingProxy:
    """A proxy that closes the next `cuts` connections in the middle of a response."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.server, self.cuts, self.num_cut = (host, int(port)), 0, 0
        self.min_bytes = 20000  # responses with fewer bytes are never cut: file sizes and listings
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listening.getsockname()[1]}"
        self._thread = threading.Thread(target=self._accept, daemon=True)
        self._thread.start()

    def close(self):
        self._listening.close()

    def _accept(self):
        while True:
            try:
                client, _ = self._listening.accept()
            except OSError:
                return
            upstream = socket.create_connection(self.server)
            threading.Thread(target=self._pass_on, args=(client, upstream), daemon=True).start()
            threading.Thread(target=self._answer, args=(upstream, client), daemon=True).start()

    def _pass_on(self, source, target):
        with contextlib.suppress(OSError):
            while part := source.recv(65536):
                target.sendall(part)
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _answer(self, source, target):
        passed = 0
        with contextlib.suppress(OSError):
            while part := source.recv(4096):
                passed += len(part)
                if self.cuts > 0 and passed > self.min_bytes:
                    self.cuts -= 1
                    self.num_cut += 1
                    break
                target.sendall(part)
        for end in (target, source):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class FaultyProxy(CuttingProxy):
    """A proxy that makes uploads fail. Each counter is the number of uploads that fail in its way."""

    def __init__(self, url):
        self.upload_cuts = 0  # connection closed in the middle of a request
        self.errors = 0  # answered 500, Internal Server Error
        self.flips = 0  # forwarded with one changed byte
        self.gone = False  # the server is unreachable
        self.gone_at, self.pass_first = None, 0  # unreachable from a PUT of this name on, after `pass_first` of them
        self.num_failed, self.copies = 0, 0
        super().__init__(url)

    def _pass_on(self, source, target):
        passed = 0
        with contextlib.suppress(OSError):
            while (part := source.recv(65536)) and not self._counted(part).gone:
                passed += len(part)
                if self.errors > 0 and part.startswith(b"PUT "):
                    self.errors, self.num_failed = self.errors - 1, self.num_failed + 1
                    self._refuse(source, part)
                    break
                if self.upload_cuts > 0 and passed > self.min_bytes:
                    self.upload_cuts, self.num_failed = self.upload_cuts - 1, self.num_failed + 1
                    break
                if self.flips > 0 and passed > self.min_bytes:
                    self.flips, self.num_failed = self.flips - 1, self.num_failed + 1
                    part = part[:-1] + bytes([part[-1] ^ 1])
                target.sendall(part)
        with contextlib.suppress(OSError):  # then _answer closes both sides
            target.shutdown(socket.SHUT_RDWR)

    def _counted(self, part):
        if part.startswith(b"PUT "):
            self.copies += b"x-amz-copy-source" in part.lower()
            if self.gone_at is not None and self.gone_at in part.partition(b"\r\n")[0]:
                self.pass_first -= 1
                self.gone |= self.pass_first < 0
        return self

    def come_back(self):
        self.gone, self.gone_at = False, None

    @staticmethod
    def _refuse(client, part):
        """Read the whole request and answer 500. Clients read the response only after the request is sent."""
        head, _, body = part.partition(b"\r\n\r\n")
        lengths = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length:")]
        left = int(lengths[0].partition(b":")[2]) - len(body)
        if b"100-continue" in head.lower():
            client.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
        while left > 0:
            left -= len(client.recv(65536)) or left
        client.sendall(b"HTTP/1.1 500 Internal Server Error\r\nContent-Length: 0\r\nConnection: close\r\n\r\n")
