"""Malformed requests and damaged media, drawn from a seed, for the tests of the HTTP port."""

import base64
import contextlib
import gzip
import io
import json
import random
import socket
import struct
import tempfile
import zlib
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
from PIL import Image, PngImagePlugin

ANSWER_S = 60.0
FORM = "application/x-www-form-urlencoded"
TEXTS = ["", "a cat", "\ud800", "\udfff\ud800", "\x00", "a" * 5000, "\U0001f600", "../../etc/passwd", "%00", "'\"<b>"]
NUMBERS = [0, -1, 1, 2**31, 2**63, 2**64, 10**400, 1e308, -1e308, float("nan"), float("inf"), True, 0.5]


def requests(seed, count, reward):
    """Yield (method, path, headers, body) of `count` malformed or odd requests. The service must have `reward`."""
    draw = random.Random(seed)
    makers = [enqueued, forms, plain, encoded, headers_of, mutated_enqueue, mutated_plain]
    for number in range(count):
        yield makers[number % len(makers)](draw, reward)


def anything(draw, depth=0):
    """Draw a JSON value, including edge cases."""
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
    """Encode a small PNG, optionally with a text chunk."""
    buffer = io.BytesIO()
    info = PngImagePlugin.PngInfo()
    if text:
        info.add(kind, text)
    Image.fromarray(good_picture()[0]).save(buffer, "PNG", pnginfo=info)
    return buffer.getvalue()


def spoilt(draw, data):
    """Return the bytes with some changed, removed, inserted, duplicated or cut off."""
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
    *(b"", b"'", b"(", b"\xff\xfe", b"[" * 3000, b"-" * 3000 + b"1", b"if True:\n  x\n y", b"{1: 2, 'a': 3}"),
    *(b"{'descr': oops }", b"{'descr': '|u1', 'shape': (1,8,8,3)}", b"{'descr': ('f4', -1)}", b"{'descr': ',,,'}"),
    *(
        b"{'descr': '|u1', 'fortran_order': False, 'shape': (%s,8,8,3), }" % n
        for n in (b"1L", b"True", b"-1", b"9" * 20)
    ),
    *(b"{'descr': %s, 'fortran_order': False, 'shape': (1,), }" % d for d in (b"'|O'", b"'<M8[zz]'", b"[('a','|u1')]")),
    b"{'descr': ('|u1', (2**40,)), 'fortran_order': 3, 'shape': ()}",
]


def with_header(header, version=b"\x01\x00"):
    size = struct.pack("<H" if version == b"\x01\x00" else "<I", len(header))
    return b"\x93NUMPY" + version + size + header


def enqueued(draw, reward):
    """Draw an enqueue request with a wrong first line or array."""
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
    """Draw a /compute request with wrong fields, or an image with hostile text chunks."""
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
    """Draw a pull request with an unreadable or empty form."""
    charsets = [f"{FORM}; charset={name}" for name in ("utf-7", "klingon", "rot13", "idna", "base64", "\x7f")]
    multipart = [f"multipart/form-data{end}" for end in ("", "; boundary=", "; boundary=x", '; boundary="x')]
    odd = ["multipart/mixed; boundary=x", "text/plain", "application/json", "/", ";;;", "a/b/c; charset"]
    kind = draw.choice([FORM, *charsets, *multipart, *odd])
    plain = [b"", b"uuid=x&type=y", b"uuid=%ff%fe", b"\xff\xfe\xfd", b"&" * 2000, b"uuid" * 20000, b"=" * 5000]
    heads = [
        b'Content-Disposition: form-data; name="uuid"',
        b"",
        b'Content-Disposition: form-data; name="u"\r\nContent-Type: text/plain; charset=klingon',
        b'Content-Disposition: form-data; name="u"\r\nContent-Transfer-Encoding: odd',
        b"Content-Type: multipart/mixed; boundary=z",
        b'Content-Disposition: form-data; name="f"; filename="g"\r\nContent-Encoding: gzip',
        b"bad header",
    ]
    body = draw.choice([*plain, *(b"--x\r\n%s\r\n\r\nv\r\n--x--\r\n" % head for head in heads)])
    return "POST", "/api/reward/pull", {"Content-Type": kind}, body


def encoded(draw, reward):
    """Draw a request with a wrong Content-Encoding, or a small body that decompresses to a large one."""
    body = json.dumps(good_fields(reward)).encode() + b"\n" + npy(good_picture())
    packed = draw.choice(
        [body, gzip.compress(body), gzip.compress(body)[:-9], zlib.compress(bytes(2**22)), b"\x1f\x8b", b""]
    )
    path = draw.choice(["/api/reward/enqueue", "/api/reward/pull", "/compute", "/api/reward/ping"])
    kind = draw.choice(["gzip", "deflate", "br", "zstd", "x-gzip", "identity", "gzip, gzip", "\t", "klingon"])
    return "POST", path, {"Content-Encoding": kind, "Content-Type": draw.choice([FORM, "application/json", ""])}, packed


def headers_of(draw, _):
    """Draw a request with an unusual method, path or headers."""
    method = draw.choice(["GET", "POST", "PUT", "HEAD", "OPTIONS", "DELETE", "TRACE", "BREW", "get"])
    paths = ["/", "/metrics", "/compute", "/%ff", "/%00", "//", "/a" * 3000, "/health?x=%zz", "/../..", "*", "/?\xff"]
    headers = draw.choice([
        {}, {"Authorization": "Basic =="}, {"Content-Length": "-1"}, {"Content-Length": "1e9"},
        {"Content-Length": "9" * 20}, {"Expect": "100-continue"}, {"Expect": "magic"}, {"Range": "bytes=-"},
        {"Transfer-Encoding": "chunked"},
        {"Transfer-Encoding": "gzip, chunked"}, {"Upgrade": "websocket", "Connection": "Upgrade"}, {"Host": "\x00"},
        {"Content-Type": "\xff"}, {"Cookie": "a=" + "b" * 4000}, {"If-Modified-Since": "yesterday"},
    ])  # fmt: skip
    return method, draw.choice(paths), headers, draw.choice([b"", b"x" * 100])


def send(address, token, request):
    """Send a request and return the HTTP status, or 0 if the connection closes without an answer."""
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
                # The headers may promise more bytes than sent. Closing the write side lets the server stop waiting.
                connection.shutdown(socket.SHUT_WR)
            while b"\r\n" not in answer and (more := connection.recv(4096)):
                answer += more
    return int(answer.split(b" ")[1]) if answer.startswith(b"HTTP/") else 0


def statuses(url, token, drawn):
    """Send all requests. Return the count of each status, and the requests answered with 5xx."""
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
    """Return (is a video, bytes) of a small file in each supported format."""
    from wfm_ds.monitoring.media_files import encode_gif, save_mp4

    def saved(image, kind="PNG", **options):
        buffer = io.BytesIO()
        image.save(buffer, kind, **options)
        return False, buffer.getvalue()

    frames = np.random.default_rng(0).integers(0, 256, (4, 16, 16, 3), dtype=np.uint8)
    texts = [b"text" * 100, b"text" * 2**20]  # the second exceeds PIL's decompression limit
    made = [(False, png(b"a\0b")), *((False, png(b"a\0\0" + zlib.compress(text), b"zTXt")) for text in texts)]
    kinds = [("PNG", {}), ("JPEG", {}), ("JPEG", {"progressive": True}), ("WEBP", {}), ("WEBP", {"lossless": True})]
    made += [saved(Image.fromarray(frames[0]), kind, **options) for kind, options in kinds]
    made += [saved(Image.new(mode, (9, 7))) for mode in ("1", "L", "P", "RGBA", "I;16", "LA")]
    with tempfile.TemporaryDirectory() as folder:
        save_mp4(Path(folder) / "v.mp4", frames, 8)
        made.append((True, (Path(folder) / "v.mp4").read_bytes()))
    return [*made, (True, encode_gif(frames, 8))]


def media(seed, count):
    """Yield (is a video, bytes) of `count` damaged files."""
    draw, whole = random.Random(seed), originals()
    for number in range(count):
        video, data = whole[number % len(whole)]
        yield video, spoilt(draw, data)
