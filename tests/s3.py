"""An S3 server on this machine (moto, in a thread), and a proxy before it that cuts connections."""

import contextlib
import socket
import threading

import boto3
from moto.server import ThreadedMotoServer

from wfm_ds import storage

BUCKET = "shards"
VARIABLES = (storage.ACCESS_KEY, storage.SECRET_KEY, storage.ENDPOINT, storage.REGION)


@contextlib.contextmanager
def s3_server():
    """The endpoint's URL and a client that writes; BUCKET exists and is empty."""
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


class CuttingProxy:
    """Passes connections on to a server; while `cuts` is above 0 it counts down and closes one in mid-answer."""

    def __init__(self, url):
        host, port = url.removeprefix("http://").split(":")
        self.server, self.cuts, self.num_cut = (host, int(port)), 0, 0
        self.min_bytes = 20000  # answers below are passed on whole: those to questions about size and name
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
