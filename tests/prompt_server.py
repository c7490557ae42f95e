"""A local server with the files of a small OCR prompt set, in place of GitHub."""

import contextlib
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from wfm_ds.data.prompt_sources import MIRROR, PROMPT_SOURCES, PromptFile, PromptSource, git_blob_id

TRAIN = b'A sign says "HELLO".\nA wall without a text.\n\nA shop called "42".\n'
TEST = b'A cup with "tea".\n'
COMMIT = "c" * 40


class Handler(BaseHTTPRequestHandler):
    """Serves `server.files`. Cuts the first `server.num_cuts` transfers after ten bytes."""

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.do_GET()

    def do_GET(self):
        data = self.server.files.get(self.path)
        if data is None:
            self.send_error(404)
            return
        start = int(self.headers.get("Range", "bytes=0-").removeprefix("bytes=").removesuffix("-"))
        if start >= len(data):
            self.send_error(416)
            return
        self.server.starts.append(start)
        self.send_response(206 if start else 200)
        self.send_header("Content-Length", str(len(data) - start))
        self.end_headers()
        if self.command == "HEAD":
            return
        is_cut = self.server.num_cuts > 0
        self.server.num_cuts -= is_cut
        self.wfile.write(data[start : start + 10] if is_cut else data[start:])


@contextlib.contextmanager
def prompt_server(files):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.files, server.num_cuts, server.starts = files, 0, []
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use_test_source(monkeypatch, url):
    """Replace the published OCR prompts by the two small files of this module."""
    files = tuple(PromptFile(f"{n}.txt", f"ocr/{n}.txt", git_blob_id(d)) for n, d in (("train", TRAIN), ("test", TEST)))
    monkeypatch.setitem(PROMPT_SOURCES, "ocr", PromptSource("somebody/prompts", COMMIT, "MIT", "Texts.", files))
    monkeypatch.setenv(MIRROR, url)


def served_files():
    return {f"/somebody/prompts/{COMMIT}/ocr/{n}.txt": d for n, d in (("train", TRAIN), ("test", TEST))}
