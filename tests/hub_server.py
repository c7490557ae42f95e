"""A local server with the part of the Hugging Face Hub protocol that downloads and uploads use.

The client is the real huggingface_hub, which writes its cache and raises its errors as with the real Hub.
"""

import base64
import contextlib
import hashlib
import json
import threading
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import unquote, urlsplit

from huggingface_hub import constants


@dataclass
class Repo:
    """A repository: its files, its branches, the metadata of its page, and the status and error code of refused
    requests, if any."""

    files: dict[str, bytes]
    branches: tuple[str, ...] = ("main",)
    refusal: tuple[int, str] | None = None
    card: dict[str, str] = field(default_factory=dict)

    @property
    def commit(self):
        digest = hashlib.sha1(b"".join(name.encode() + data for name, data in sorted(self.files.items())))
        return digest.hexdigest()


@dataclass
class Hub:
    """The server's repositories by name, and a record of its requests."""

    repos: dict[str, Repo] = field(default_factory=dict)
    sent: list[str] = field(default_factory=list)
    asked: int = 0
    url: str = ""
    large: dict[str, bytes] = field(default_factory=dict)  # uploaded LFS objects by digest
    commits: list[tuple[str, str]] = field(default_factory=list)  # (repository, summary)
    private: set[str] = field(default_factory=set)
    dropped: set[str] = field(default_factory=set)  # kinds of requests without an answer: "revision", "tree", "resolve"
    tokens: set[str] = field(default_factory=set)


def files_of(folder):
    """Return the content of each file in a folder by its path in a repository."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def entry(name, data):
    """Return the entry of a file in a repository listing."""
    return {"type": "file", "path": name, "size": len(data), "oid": hashlib.sha1(data).hexdigest()}


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def log_message(self, *args):
        pass

    def do_HEAD(self):
        self.answer(body=False)

    def do_GET(self):
        self.answer(body=True)

    def do_PUT(self):
        data = self.received()
        self.server.broker.large[self.path.rpartition("/")[2]] = data
        self.respond(200, b"", {})

    def do_POST(self):
        hub, body = self.server.broker, self.received()
        words = unquote(urlsplit(self.path).path).strip("/").split("/")
        repo = "/".join(words[2:4])
        hub.tokens.add(self.headers.get("Authorization", ""))
        if words[:3] == ["api", "repos", "create"]:
            self.create(json.loads(body))
        elif words[:2] == ["api", "validate-yaml"]:
            self.send_json({"errors": [], "warnings": []})
        elif words[-1] == "batch":
            objects = [
                {"oid": o["oid"], "size": o["size"], "actions": {"upload": {"href": f"{hub.url}/lfs/{o['oid']}"}}}
                for o in json.loads(body)["objects"]
            ]
            self.send_json({"transfer": "basic", "objects": objects})
        elif hub.repos[repo].refusal is not None:
            self.refuse(*hub.repos[repo].refusal)
        elif words[4] == "preupload":
            names = [file["path"] for file in json.loads(body)["files"]]
            modes = {name: "lfs" if name.endswith(".safetensors") else "regular" for name in names}
            self.send_json({"files": [{"path": n, "uploadMode": m, "shouldIgnore": False} for n, m in modes.items()]})
        else:
            self.commit(repo, [json.loads(line) for line in body.splitlines()])

    def create(self, wanted):
        hub, name = self.server.broker, f"{wanted['organization']}/{wanted['name']}"
        hub.repos.setdefault(name, Repo({}))
        if wanted.get("private") or wanted.get("visibility") == "private":
            hub.private.add(name)
        self.send_json({"url": f"{hub.url}/{name}"})

    def commit(self, repo, lines):
        hub = self.server.broker
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                hub.commits.append((repo, value["summary"]))
            elif line["key"] == "file":
                hub.repos[repo].files[value["path"]] = base64.b64decode(value["content"])
            else:
                hub.repos[repo].files[value["path"]] = hub.large[value["oid"]]
        self.send_json({"commitUrl": f"{hub.url}/{repo}/commit/{'a' * 40}", "commitOid": "a" * 40})

    def received(self):
        """Read the body of a request, with or without chunked encoding."""
        if self.headers.get("Transfer-Encoding") != "chunked":
            return self.rfile.read(int(self.headers.get("Content-Length", 0)))
        data = b""
        while size := int(self.rfile.readline(), 16):
            data += self.rfile.read(size)
            self.rfile.readline()
        self.rfile.readline()
        return data

    def answer(self, *, body):
        hub = self.server.broker
        hub.asked += 1
        words = unquote(urlsplit(self.path).path).replace("/api/datasets/", "/api/models/").strip("/").split("/")
        words = words[words[0] == "datasets" :]  # datasets are served like models
        if words[0] == "api" and words[1] != "models":
            self.send_json({"name": "somebody", "auth": {}})
            return
        if words[:2] == ["api", "models"]:
            repo, what, rest = "/".join(words[2:4]), words[4] if len(words) > 4 else "revision", words[5:]
        else:
            repo, what, rest = "/".join(words[:2]), words[2], words[3:]
        if what in hub.dropped:
            self.close_connection = True
            return
        found = hub.repos.get(repo)
        branches = (*found.branches, found.commit) if found else ()
        revision = next((name for name in branches if rest[: name.count("/") + 1] == name.split("/")), None)
        if found is None:
            self.refuse(401, "RepoNotFound")
        elif found.refusal is not None and what != "revision":
            self.refuse(*found.refusal)
        elif rest and revision is None:
            self.refuse(404, "RevisionNotFound")
        elif what == "resolve":
            self.send_file(found, "/".join(rest[revision.count("/") + 1 :]), body)
        elif what == "tree":
            self.send_json([entry(name, data) for name, data in found.files.items()])
        else:
            names = [{"rfilename": name} for name in found.files]
            self.send_json({"id": repo, "sha": found.commit, "siblings": names, "cardData": found.card})

    def send_file(self, repo, name, body):
        if name not in repo.files:
            self.refuse(404, "EntryNotFound", {"X-Repo-Commit": repo.commit})
            return
        data = repo.files[name]
        if body:
            self.server.broker.sent.append(name)
        headers = {"ETag": json.dumps(entry(name, data)["oid"]), "X-Repo-Commit": repo.commit}
        self.respond(200, data, headers)

    def send_json(self, value):
        self.respond(200, json.dumps(value).encode(), {"Content-Type": "application/json"})

    def refuse(self, status, code, headers=None):
        self.respond(status, b"{}", {"X-Error-Code": code, "X-Error-Message": code, **(headers or {})})

    def respond(self, status, data, headers):
        self.send_response(status)
        for name, value in {"Content-Length": str(len(data)), **headers}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(data)


@contextlib.contextmanager
def hub_server():
    """Run a Hub server on the loopback interface."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.broker = Hub(url=f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield server.broker
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


def use(monkeypatch, *, url, cache, offline=False):
    """Make huggingface_hub in this process use the server at `url` and the cache folder `cache`."""
    monkeypatch.setattr(constants, "ENDPOINT", url)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", offline)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)  # Xet is a separate protocol for large files
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", url + "/{repo_id}/resolve/{revision}/{filename}")
