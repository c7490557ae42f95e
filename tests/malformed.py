"""Malformed requests and damaged media, drawn from a seed, for the tests of the HTTP port.

`python tests/malformed.py URL COUNT [SEED]` sends them to a service that runs, with WFM_REWARD_TOKEN's token.
"""

import base64
import contextlib
import gzip
import io
import json
import os
import random
import socket
import struct
import sys
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, PngImagePlugin

ANSWER_S = 60.0
FORM = "application/x-www-form-urlencoded"
PART = b"--x\r\nContent-Disposition: form-data; "
TEXTS = ["", "a cat", "\ud800", "\udfff\ud800", "\x00", "a" * 5000, "\U0001f600", "../../etc/passwd", "%00", "'\"<b>"]
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -1e308, float("nan"), float("inf"), True, 0.5]


def requests(seed, count, reward):
    """(method, path, headers, body) of `count` malformed or odd requests; `reward` is a name that the service has."""
    draw = random.Random(seed)
    makers = [enqueued, forms, plain, encoded, headers_of, mutated_enqueue, mutated_plain]
    for number in range(count):
        yield makers[number % len(makers)](draw, reward)


def anything(draw, depth=0):
    """Any JSON value."""
    kind = draw.randrange(8 if depth < 3 else 5)
    if kind == 0:
        return draw.choice(TEXTS)
    if kind == 1:
        return draw.choice(NUMBERS)
    if kind == 2:
        return None
    if kind in (3, 4):
        return draw.choice([[], {}, "x", 1])
    if kind == 7:
        value = []
        for _ in range(draw.choice([2, 20, 200])):
            value = [value]
        return value
    if kind == 5:
        return [anything(draw, depth + 1) for _ in range(draw.randrange(4))]
    return {draw.choice(TEXTS): anything(draw, depth + 1) for _ in range(draw.randrange(4))}


def npy(array):
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def good_fields(reward):
    return {"prompts": ["a cat"], "reward_fn": {reward: 1.0}, "media_type": "image"}


def good_picture():
    return np.arange(8 * 8 * 3, dtype=np.uint8).reshape(1, 8, 8, 3)


def png(text=b"", kind=b"tEXt"):
    """A small picture, with a chunk of text in it."""
    buffer = io.BytesIO()
    info = PngImagePlugin.PngInfo()
    if text:
        info.add(kind, text)
    Image.fromarray(good_picture()[0]).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def spoilt(draw, data):
    """The bytes with a few of them changed, taken out, doubled or cut off."""
    data = bytearray(data)
    for _ in range(draw.choice([1, 1, 2, 4, 16])):
        at = draw.randrange(max(1, len(data)))
        match draw.randrange(5):
            case 0 if data:
                data[at] = draw.randrange(256)
            case 1:
                del data[at : at + draw.randrange(1, 9)]
            case 2:
                data[at:at] = draw.randbytes(draw.randrange(1, 9))
            case 3:
                data[at:at] = data[at : at + 16]
            case 4 if draw.random() < 0.2:
                del data[at:]
    return bytes(data)


NPY_HEADERS = [
    b"{'descr': oops }",
    b"'",
    b'"""',
    b"(",
    b"{'descr': '|u1', 'shape': (1,8,8,3)}",
    b"\xff\xfe",
    b"[" * 3000,
    b"\t\n  x",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (1L,8,8,3), }",
    b"{'descr': '|u1', 'fortran_order': 3, 'shape': 5}",
    b"{'descr': [('a','|u1')], 'fortran_order': False, 'shape': (1,), }",
    b"{'descr': '|O', 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (True,8,8,3), }",
    b"if True:\n  x\n y",
    b"0777L",
    b"-" * 3000 + b"1",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (-1,8,8,3), }",
    b"{'descr': ',,,', 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': '|u1', 'fortran_order': False, 'shape': (99999999999999999999,8,8,3), }",
    b"{'descr': ('f4', -1)}",
    b"{1: 2, 'a': 3}",
    b"{'descr': '<M8[zz]', 'fortran_order': False, 'shape': (1,)}",
    b"{'descr': ('|u1', (2**40,)), 'fortran_order': False, 'shape': ()}",
]


def with_header(header, version=b"\x01\x00"):
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + size + header


def enqueued(draw, reward):
    """An enqueue whose first line or array is wrong."""
    fields, data = good_fields(reward), npy(good_picture())
    match draw.randrange(4):
        case 0:
            fields[draw.choice([*fields, "metadata", "video_infos", "geneval_tags", "geneval_includes"])] = anything(
                draw
            )
        case 1:
            data = with_header(
                draw.choice(NPY_HEADERS), draw.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x09"])
            )
        case 2:
            shape = draw.choice([(1, 8, 8, 3), (0, 8, 8, 3), (8,), (), (1, 3, 2, 8, 8), (1, 16, 1, 2, 2), (1, 8, 8, 4)])
            data = npy(np.zeros(shape, draw.choice(["u1", ">f4", "f2", "f4", "f8", "i8", "c8", "U3", "M8[s]", "?"])))
            fields["media_type"] = draw.choice(["image", "video", "latent", None, [], {}, 3])
        case 3:
            fields["metadata"] = [{"key": anything(draw)}]
    return "POST", "/api/reward/enqueue", {}, json.dumps(fields).encode() + b"\n" + data


def mutated_enqueue(draw, reward):
    body = json.dumps(good_fields(reward)).encode() + b"\n" + npy(good_picture())
    return "POST", "/api/reward/enqueue", {}, spoilt(draw, body)


def plain(draw, reward):
    """A /compute with wrong fields, or media that hide something."""
    body = {"prompt": ["x"], "image": [base64.b64encode(png()).decode()], "rewards": [reward]}
    match draw.randrange(4):
        case 0:
            body[draw.choice([*body, "video", "metadata", "fps", "timeout_s", "other"])] = anything(draw)
        case 1:
            text = draw.choice([b"x", b"Comment\0" + b"x" * 2**21, b"\xff\xff", b"a\0b\0c"])
            picture = png(text, draw.choice([b"tEXt", b"zTXt", b"iTXt", b"eXIf", b"iCCP", b"gAMA"]))
            body["image"] = [base64.b64encode(picture).decode()]
        case 2:
            packed = b"Comment\0\0" + zlib.compress(b"x" * draw.choice([10, 2**21, 2**23]))
            body["image"] = [base64.b64encode(png(packed, b"zTXt")).decode()]
        case 3:
            body["metadata"] = [{"key": anything(draw)}]
    body.setdefault("timeout_s", 20)
    return "POST", "/compute", {}, json.dumps(body).encode()


def mutated_plain(draw, reward):
    body = {"prompt": ["x"], "image": [base64.b64encode(spoilt(draw, png(b"a\0b"))).decode()], "rewards": [reward]}
    text = json.dumps(body).encode()
    return "POST", "/compute", {}, spoilt(draw, text) if draw.random() < 0.3 else text


def forms(draw, _):
    """A pull whose form cannot be read, or asks for nothing."""
    kind = draw.choice(
        [
            FORM,
            f"{FORM}; charset=utf-7",
            f"{FORM}; charset=klingon",
            f"{FORM}; charset=rot13",
            f"{FORM}; charset=idna",
            f"{FORM}; charset=base64",
            f"{FORM}; charset=\x7f",
            "multipart/form-data",
            "multipart/form-data; boundary=",
            "multipart/form-data; boundary=x",
            f"multipart/form-data; boundary={'y' * 90}",
            "text/plain",
            "application/json",
            'multipart/form-data; boundary="x',
            "multipart/mixed; boundary=x",
            "/",
            ";;;",
            "a/b/c; charset",
        ]
    )
    body = draw.choice(
        [
            b"",
            b"uuid=x&type=y",
            b"uuid=%ff%fe",
            b"\xff\xfe\xfd",
            b"&" * 2000,
            b"uuid" * 20000,
            b"=" * 5000,
            b"--x--\r\n",
            b'--x\r\nContent-Disposition: form-data; name="uuid"\r\n\r\nv\r\n--x--\r\n',
            b"--x\r\n\r\nno name\r\n--x--\r\n",
            PART + b'name="u"\r\nContent-Type: text/plain; charset=klingon\r\n\r\nv\r\n--x--\r\n',
            b'--x\r\nContent-Disposition: form-data; name="u"\r\nContent-Transfer-Encoding: odd\r\n\r\nv\r\n--x--\r\n',
            b"--x\r\nContent-Type: multipart/mixed; boundary=z\r\n\r\n--z\r\n\r\n--z--\r\n--x--\r\n",
            b"--x\r\nbad header\r\n",
            PART + b'name="f"; filename="g"\r\nContent-Encoding: gzip\r\n\r\nv\r\n--x--\r\n',
        ]
    )
    return "POST", "/api/reward/pull", {"Content-Type": kind}, body


def encoded(draw, reward):
    """A body under an encoding that it does not have, or that unpacks to much."""
    body = json.dumps(good_fields(reward)).encode() + b"\n" + npy(good_picture())
    packed = draw.choice(
        [body, gzip.compress(body), gzip.compress(body)[:-9], zlib.compress(bytes(2**22)), b"\x1f\x8b", b""]
    )
    path = draw.choice(["/api/reward/enqueue", "/api/reward/pull", "/compute", "/api/reward/ping"])
    kind = draw.choice(["gzip", "deflate", "br", "zstd", "x-gzip", "identity", "gzip, gzip", "\t", "klingon"])
    return "POST", path, {"Content-Encoding": kind, "Content-Type": draw.choice([FORM, "application/json", ""])}, packed


def headers_of(draw, _):
    """Methods, paths and headers that nobody expects."""
    method = draw.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "BREW", "get"])
    path = draw.choice(
        [
            "/",
            "/metrics",
            "/compute",
            "/%ff",
            "/%00",
            "//",
            "/a" * 3000,
            "/health?x=%zz",
            "/../..",
            "*",
            "/api/rewards?\xff",
        ]
    )
    headers = draw.choice(
        [
            {},
            {"Authorization": "Basic =="},
            {"Content-Length": "-1"},
            {"Content-Length": "1e9"},
            {"Expect": "100-continue"},
            {"Expect": "magic"},
            {"Transfer-Encoding": "chunked"},
            {"Transfer-Encoding": "gzip, chunked"},
            {"Range": "bytes=-"},
            {"Upgrade": "websocket", "Connection": "Upgrade"},
            {"Content-Type": "\xff"},
            {"Cookie": "a=" + "b" * 4000},
            {"If-Modified-Since": "yesterday"},
            {"Content-Length": "99999999999999999999"},
            {"Host": "\x00"},
        ]
    )
    return method, path, headers, draw.choice([b"", b"x" * 100])


def send(address, token, request):
    """The status of the answer, 0 where the connection ends without one."""
    method, path, headers, body = request
    lines = [f"{method} {path} HTTP/1.1"]
    fields = {
        "Host": "test",
        "Authorization": f"Bearer {token}",
        "Content-Length": str(len(body)),
        "Connection": "close",
    }
    lines += [f"{name}: {value}" for name, value in {**fields, **headers}.items()]
    with socket.create_connection(address, timeout=ANSWER_S) as connection:
        answer = b""
        with contextlib.suppress(ConnectionError):
            connection.sendall("\r\n".join([*lines, "", ""]).encode("latin1") + body)
            if "Content-Length" in headers or "Transfer-Encoding" in headers:
                connection.shutdown(socket.SHUT_WR)  # more was promised than comes; a server may end at once then
            while b"\r\n" not in answer and (more := connection.recv(4096)):
                answer += more
    return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0


def statuses(url, token, drawn):
    """How often each status came back, and the requests that were answered 5xx."""
    address = (urlsplit(url).hostname, urlsplit(url).port)
    counts, failed = Counter(), []
    for request in drawn:
        status = send(address, token, request)
        counts[status] += 1
        if status >= 500:
            failed.append((status, *request))
    return counts, failed


# Media


def originals():
    """A small file of each format that is read, by whether it is a video."""
    from wfm_ds.monitoring.videos import encode_gif, save_mp4

    frames = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    texts = [b"text" * 100, b"text" * 2**20]  # the second is more than PIL unpacks
    made = [(False, png(b"a\0b")), *((False, png(b"a\0\0" + zlib.compress(text), b"zTXt")) for text in texts)]
    for kind, options in [
        ("PNG", {}),
        ("JPEG", {}),
        ("JPEG", {"progressive": True}),
        ("WEBP", {}),
        ("WEBP", {"lossless": True}),
    ]:
        buffer = io.BytesIO()
        Image.fromarray(frames[0]).save(buffer, kind, **options)
        made.append((False, buffer.getvalue()))
    for mode in ("1", "L", "P", "RGBA", "I;16", "LA"):
        buffer = io.BytesIO()
        Image.new(mode, (9, 7)).save(buffer, "PNG")
        made.append((False, buffer.getvalue()))
    with tempfile.TemporaryDirectory() as folder:
        save_mp4(Path(folder) / "v.mp4", frames, 8)
        made.append((True, (Path(folder) / "v.mp4").read_bytes()))
    return [*made, (True, encode_gif(frames, 8))]


def media(seed, count):
    """(is a video, bytes) of `count` damaged files."""
    draw, whole = random.Random(seed), originals()
    for number in range(count):
        video, data = whole[number % len(whole)]
        yield video, spoilt(draw, data)


if __name__ == "__main__":
    target, number = sys.argv[1], int(sys.argv[2])
    seed = int(sys.argv[3]) if len(sys.argv) > 3 else 0
    offered = sys.argv[4] if len(sys.argv) > 4 else "jpeg_incompressibility"
    found, worst = statuses(target, os.environ.get("WFM_REWARD_TOKEN", ""), requests(seed, number, offered))
    sys.stdout.write(f"{dict(found)}\n" + "".join(f"{one!r:.300}\n" for one in worst))
