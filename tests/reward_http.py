"""Start reward services, and send them samples or plain HTTP requests."""

import http.client
import io
import json
import subprocess
import sys
import threading
from contextlib import closing, contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import urlencode, urlsplit

import numpy as np
import yaml

from wfm_ds.recipe.sections import RewardRecipe
from wfm_ds.rollout.reward_service import RewardService
from wfm_ds.rollout.rewards import RewardClient

TOKEN = "correct horse"
TIMEOUT_S = 60


@contextmanager
def serving(folder, config, environment=None):
    """Start a reward service. Yield its process and the JSON that it printed when ready."""
    path = folder / "service.yaml"
    path.write_text(yaml.safe_dump(config, sort_keys=False))
    with (folder / "service.log").open("wb") as log:
        service = subprocess.Popen(
            [sys.executable, "-m", "wfm_reward.serve", str(path)], stdout=subprocess.PIPE, stderr=log, env=environment
        )
    try:
        line = service.stdout.readline()
        assert line, (folder / "service.log").read_text()
        yield service, json.loads(line)
    finally:
        service.terminate()
        service.stdout.close()
        service.wait(TIMEOUT_S)


@contextmanager
def started_client(folder, *functions, **changes):
    """Start a reward service for reward functions of a recipe, and yield a client of it."""
    recipe = RewardRecipe(functions=list(functions), **({"timeout_s": 60, "start_timeout_s": 60} | changes))
    with (
        RewardService(recipe, folder) as service,
        closing(RewardClient(service.endpoint, recipe, "run", "rank0")) as client,
    ):
        yield client


class Http:
    """An HTTP client. `http.post(path, body)` returns (status, content, headers)."""

    def __init__(self, url, token=TOKEN):
        self.address = urlsplit(url).netloc
        self.headers = {} if token is None else {"Authorization": f"Bearer {token}"}

    def ask(self, method, path, body=None, **headers):
        connection = http.client.HTTPConnection(self.address, timeout=TIMEOUT_S)
        try:
            connection.request(method, path, body, {**self.headers, **headers})
            answer = connection.getresponse()
            content = answer.read()
            if answer.headers.get_content_type() == "application/json":
                content = json.loads(content)
            return answer.status, content, answer.headers
        finally:
            connection.close()

    def get(self, path):
        return self.ask("GET", path)

    def post(self, path, body, **headers):
        return self.ask("POST", path, body, **headers)

    def enqueue(self, fields, array):
        return self.post("/api/reward/enqueue", enqueue_body(fields, array))

    def pull(self, uuid, reward):
        form = urlencode({"uuid": uuid, "type": reward})
        return self.post("/api/reward/pull", form, **{"Content-Type": "application/x-www-form-urlencoded"})

    def scores(self, fields, array, reward):
        """Enqueue a request, pull until the scores are ready, and return them."""
        status, content, _ = self.enqueue(fields, array)
        assert status == 200, content
        while (answer := self.pull(content["uuid"], reward))[0] == 400:
            assert answer[1]["error"]["code"] == "not_ready"
        assert answer[0] == 200, answer[1]
        return answer[1]


def chat_reply(text):
    """Return an answer of `Server`: the reply of a model in OpenAI's format."""
    return 200, {"choices": [{"message": {"role": "assistant", "content": text}}]}


def enqueue_body(fields, array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return json.dumps(fields).encode() + b"\n" + buffer.getvalue()


class Server:
    """An HTTP server that answers each request with the next (status, body) of `answers`. The last one repeats.

    A body is bytes, or a value that is sent as JSON.
    """

    def __init__(self):
        self.answers, self.requests = [], []
        outer = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self):
                body = self.rfile.read(int(self.headers["Content-Length"]))
                outer.requests.append((self.path, dict(self.headers), body))
                status, content = outer.answers.pop(0) if len(outer.answers) > 1 else outer.answers[0]
                content = content if isinstance(content, bytes) else json.dumps(content).encode()
                self.send_response(status)
                if status == 302:
                    self.send_header("Location", "/elsewhere")
                self.send_header("Content-Length", str(len(content)))
                self.end_headers()
                self.wfile.write(content)

            def log_message(self, *_):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        self.thread = threading.Thread(target=self.server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
        self.thread.start()

    def close(self):
        self.server.shutdown()
        self.server.server_close()
        self.thread.join(10)
