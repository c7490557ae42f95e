"""670 seeded mutations of real recipes: each one is valid or gives a one-sentence error."""

import contextlib
import io
import random
import re
import signal
from pathlib import Path

import pytest
import yaml

from wfm_ds import train
from wfm_ds.errors import UserError
from wfm_ds.recipe import file as recipe_file

TESTS = Path(__file__).parent.parent
RECIPES = TESTS.parent / "recipes"
BASES = [*sorted((TESTS / "recipes").glob("*.yaml")), *sorted(RECIPES.glob("*.yaml"))]
NUM_MUTATIONS = 670
CHECKED_EVERY = 3  # every third valid recipe also runs --check, which loads a tiny model
DEADLINE_S = 120  # limit per recipe; a hang fails the test
ODD = [
    *("null", "true", "yes", "0", "-1", "1e30", "-1e-30", ".inf", "-.inf", ".nan", "1_000", "0x10", "99999999999"),
    *("''", "[]", "{}", "[1, 2]", "{a: 1}", "{name: sft}", "[[[]]]", "&a [*a]", "*a", "!!python/name:os.system x"),
    *("/", "..", "~nobody_here/x", "s3://", "tcp://x", "color/", "tiny:", "tiny:none"),
    *("2024-01-01", "\u202e", "'unclosed", "@at", "%tag", "`tick", "a: b: c", "!!binary aa"),
    *("9" * 99, "a" * 300, "a/" * 5000, "x" * 100_000, "[" * 40),
]
NOISE = [*"{}[]:,&*!|>'\"%@`#-?\t\n \0\x85\ufeff", "\u2028", "<<: ", "---\n", "...\n", "? ", "- ", "defaults: "]


def leaves(values, path=()):
    entries = values.items() if isinstance(values, dict) else enumerate(values) if isinstance(values, list) else ()
    found = [leaf for key, value in entries for leaf in leaves(value, (*path, key))]
    return [*found, path] if path else found


def override(rng, text):
    """Return an override that sets an odd value at an existing or unknown key."""
    path = [str(part) for part in rng.choice(leaves(yaml.safe_load(text)))]
    if rng.random() < 0.2:
        path[rng.randrange(len(path))] = rng.choice(["", "none", "0", "9", "-1", "a b", "name", "x" * 5000])
    return f"{'.'.join(path)}={rng.choice(ODD)}"


def extreme(rng, text):
    """Return an override that sets a value of the right type but of extreme size."""
    values = yaml.safe_load(text)
    path = rng.choice(leaves(values))
    for part in path:
        values = values[part]
    match values:
        case bool():
            odd = "false" if values else "true"
        case int():
            odd = rng.choice(["0", "1", "3", "7", "4096", "99999999999", str(2**62), str(2**63 - 1), "1e9"])
        case float():
            odd = rng.choice(["0", "1e-320", "1e-12", "0.5", "1", "1e12", "1e300", "-1"])
        case str():
            odd = rng.choice(
                [values, values + "x", values.upper(), "a" * 255, "s3://bucket/x", "tiny:wan21", "tiny:sana"]
            )
        case _:
            odd = rng.choice(["null", "[]", "{}"])
    return f"{'.'.join(map(str, path))}={odd}"


def scramble(rng, text):
    """Return the text after random edits of lines (dropped, duplicated, indented, changed) and characters."""
    for _ in range(rng.randint(1, 4)):
        lines, at = text.split("\n"), rng.randrange(len(text) + 1)
        one = rng.randrange(len(lines))
        match rng.randrange(7):
            case 0:
                del lines[one]
            case 1:
                lines.insert(one, rng.choice(lines))
            case 2:
                lines[one] = " " * rng.randint(1, 4) + lines[one]
            case 3:
                lines[one] = re.sub(r": .*", lambda _: f": {rng.choice(ODD)}", lines[one], count=1)
            case 4:
                lines = [text[:at] + rng.choice(NOISE) + text[at:]]
            case 5:
                lines = [text[:at] + text[at + rng.randint(1, 40) :]]
            case 6:
                lines = [text.replace(*rng.sample(re.findall(r"\w+", text), 2), 1)]
        text = "\n".join(lines) or "x"
    return text


def case(seed):
    """Return (text, overrides) of a seed."""
    rng = random.Random(seed)
    base = rng.choice(BASES)
    text = base.read_text(encoding="utf-8")
    # The `defaults` file is missing in the test's folder; a resolved recipe has every key.
    if "defaults:" in text or rng.random() < 0.3:
        text = recipe_file.dump_recipe(recipe_file.load_recipe(base))
    if rng.random() < 0.4:
        return text, [extreme(rng, text) for _ in range(rng.choice([1, 2]))]
    words = [override(rng, text) for _ in range(rng.choice([0, 1, 2]))]
    return (scramble(rng, text) if rng.random() < 0.6 or not words else text), words


@contextlib.contextmanager
def deadline(seconds):
    def too_late(number, frame):
        raise TimeoutError(f"no answer within {seconds} s")

    before = signal.signal(signal.SIGALRM, too_late)
    signal.alarm(seconds)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def answer(seed, folder):
    """Return "valid" or the error message; errors other than UserError fail the test."""
    text, words = case(seed)
    path = folder / "recipe.yaml"
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    with deadline(DEADLINE_S):
        try:
            recipe = recipe_file.load_recipe(path, words)
        except UserError as error:
            return str(error)
        again = folder / "again.yaml"
        again.write_text(recipe_file.dump_recipe(recipe), encoding="utf-8")
        assert recipe_file.load_recipe(again) == recipe
    return "valid"


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Change to an empty folder, so that no file named in a recipe exists by accident."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def check(seed, path):
    """Return exit code and stderr of `--check` on a valid recipe."""
    text, words = case(seed)
    path.write_bytes(text.encode("utf-8", "surrogatepass"))
    err = io.StringIO()
    with deadline(DEADLINE_S), contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(err):
        try:
            code = train.main([str(path), "--check", *words])
        except SystemExit as leaving:
            code = leaving.code
    return code, err.getvalue()


@pytest.mark.slow
def test_mutated_recipes_are_valid_or_refused_in_a_sentence(folder, monkeypatch):
    said = {seed: answer(seed, folder) for seed in range(NUM_MUTATIONS)}
    refused = [text for text in said.values() if text != "valid"]
    assert len(said) // 2 < len(refused) < len(said), "too few or too many are valid"
    for text in refused:
        for line in text.split("\n"):
            assert 10 < len(line) < 2000
            assert re.match(r"\S*(recipe\.yaml|override |and \d+ more)", line), line
    monkeypatch.chdir(RECIPES.parent)  # the data paths of the tiny recipes are relative to it
    codes = set()
    for seed in [seed for seed, text in said.items() if text == "valid"][::CHECKED_EVERY]:
        code, err = check(seed, folder / "recipe.yaml")
        assert code in (0, 2), (seed, err)
        assert err.count("error: ") == (code == 2), (seed, err)
        codes.add(code)
    assert codes == {0, 2}
