"""The language server of editors completes and checks recipes: npm install -g yaml-language-server (tested: 1.25.0)."""

import json
import shutil
import subprocess

import pytest

from wfm_ds.recipe import shipped_recipes


@pytest.fixture
def server():
    if shutil.which("yaml-language-server") is None:
        pytest.skip("needs the npm package yaml-language-server")
    command = ["timeout", "60", "yaml-language-server", "--stdio"]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        yield process
        process.terminate()


def send(server, **message):
    body = json.dumps({"jsonrpc": "2.0", **message}).encode()
    server.stdin.write(b"Content-Length: %d\r\n\r\n%s" % (len(body), body))
    server.stdin.flush()


def receive(server):
    """Yield the messages of the server, and answer its questions with null."""
    while header := server.stdout.readline():
        assert server.stdout.readline() == b"\r\n"
        message = json.loads(server.stdout.read(int(header.removeprefix(b"Content-Length: "))))
        if {"id", "method"} <= message.keys():
            send(server, id=message["id"], result=[None] * len(message["params"].get("items", [])))
        yield message


def ask(server, method, **params):
    send(server, id="test", method=method, params=params)
    return next(message["result"] for message in receive(server) if message.get("id") == "test")


def test_keys_are_completed_and_a_misspelled_key_is_marked(server):
    path = shipped_recipes.require_recipe("sd3_image_sft")
    document, text = {"uri": path.as_uri(), "version": 1, "languageId": "yaml"}, path.read_text()
    ask(server, "initialize", processId=None, rootUri=None, capabilities={})
    send(server, method="initialized", params={})
    wrong, incomplete = text.replace("  steps:", "  stpes:"), text.replace("run:\n", "run:\n  \n")
    send(server, method="textDocument/didOpen", params={"textDocument": {**document, "text": wrong}})
    assert any("Property stpes is not allowed." in str(message) for message in receive(server))
    change = {"textDocument": {**document, "version": 2}, "contentChanges": [{"text": incomplete}]}
    send(server, method="textDocument/didChange", params=change)
    assert any(message.get("params", {}).get("diagnostics") == [] for message in receive(server))
    position = {"line": text.splitlines().index("run:") + 1, "character": 2}
    items = ask(server, "textDocument/completion", textDocument=document, position=position)["items"]
    assert {item["label"]: item["documentation"] for item in items}["seed"].startswith("Random seed.")
