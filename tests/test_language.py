"""Names and prose are readable: limits on odd names and phrases, unique class names, one word for each concept.

CONTRIBUTING.md has the rules and the vocabulary table.
"""

import ast
import functools
import io
import re
import tokenize
from collections import Counter
from pathlib import Path

ROOT = Path(__file__).parent.parent
CODE = ["wfm_ds", "reward/wfm_reward", "kernels/wfm_kernels"]
PAGES = ["README.md", "CONTRIBUTING.md", "docs/**/*.md"]
GENERATED = {"recipes.md"}

MAX_ONE_WORD_NAMES = 0.20  # fraction of all functions and methods
MAX_ODD_PHRASES = 15  # per 10,000 words
FRAGMENTS = {"Of", "By", "Those", "As", "What", "How", "Who", "Where", "When", "Which"}
PREPOSITION = re.compile("of|in|on|at|by|for|from|to|with|around|between|within|apart|before|behind|beside")
PARTICIPLE = re.compile(
    r"\w{2,}ed|told|found|held|kept|heard|dealt|drawn|shown|known|given|taken|seen|sent|cut|led|lost|meant|made|built"
    "|chosen|written|frozen|left|met|said|hidden|broken|worn|brought|gone|done|come"
)
NOT_PARTICIPLES = {"embed", "feed", "need", "proceed", "seed", "shed", "signed", "speed"}
ODD_PHRASES = [
    r"(?:^|[.!?:]\s+)Of (?:a|an|the|all|each|what|those|several|its|one|two)\b",
    r"\b(?:is|are|was|were) no (?!longer\b|more\b|need\b)[a-z]",
    r"\b[Tt]hose (?:of|that|which|who|in|with|from)\b",
    r"\b[Ww]hat (?:is|was|are|it|a|an|the|no|they|has|have|does|comes|goes|stays|needs|that|this|each|every|trains)\b",
    r"\bof (?:which|whom)\b",
    r"\b(?:is|are|was|were|be|been|not|and) told\b",
    r"\b(?:is|are|was|were|be|been) asked\b",
    r"\b(?:goes|go|went|going) on\b",
    r"\b(?:stands?|stood|lies|lay) (?:in|on|at|beside|behind|below|above|there|elsewhere|alone)\b",
    r"\b(?:begins?|began|begun)\b",
    r"\bsuch an?\b",
    r"\b(?:all else|all but|nothing but|anything but|but for)\b",
    r"\b(?:likewise|hence|thereof|therein|whence|whereof)\b",
    r"\bmend(?:s|ed|ing)?\b",
    r"\b(?:a|the|each|one|every) medium\b",
    r"\b(?:let|lets) go\b",
    r"\bof (?:one's|its|his|their|your|ours?) own\b",
    r"\b(?:has|have|had) not (?!been)\b",
    r"\b(?:knows?|takes?|holds?|gives?|makes?|gets?|sees?|asks?) (?:no|nothing|none)\b",
    r"\bwhose\b",
    r"\b[Ww]here (?:a|an|the|it|they|there|no|all|one|none|several)\b",
    r"\bbeside\b",
]
RETIRED_WORDS = {"shelf", "levelled", "survey", "surveyed", "recalled", "medium", "told", "judged", "rooms", "floors"}
"""Words that names must not contain; CONTRIBUTING.md says what to use."""


def python_files():
    return [path for folder in CODE for path in sorted((ROOT / folder).rglob("*.py"))]


def parse(path):
    return ast.parse(path.read_text(encoding="utf-8"))


def is_property(function):
    decorators = [ast.unparse(decorator) for decorator in function.decorator_list]
    return any("property" in name or name.endswith((".setter", ".deleter")) for name in decorators)


@functools.cache
def functions():
    """Return (location, name) of all functions and methods, except properties and dunder methods."""
    found = []
    for path in python_files():
        for node in ast.walk(parse(path)):
            is_function = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
            if is_function and not node.name.startswith("__") and not is_property(node):
                found.append((f"{path.relative_to(ROOT)}:{node.lineno}", node.name))
    return found


def words_of_name(name):
    return name.strip("_").lower().split("_")


def is_participle(word):
    return PARTICIPLE.fullmatch(word) is not None and word not in NOT_PARTICIPLES


def code_prose(path):
    """Return docstrings, comments and the messages of errors and logs."""
    texts = []
    for node in ast.walk(parse(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts.append(ast.get_docstring(node) or "")
        if isinstance(node, ast.ClassDef):
            strings = [s.value for s in node.body if isinstance(s, ast.Expr) and isinstance(s.value, ast.Constant)]
            texts += [string.value for string in strings if isinstance(string.value, str)]
        logs = isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("info", "warning", "error", "debug")
        if isinstance(node, ast.Raise) or logs:
            constants = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
            texts += [value for value in constants if isinstance(value, str) and " " in value]
    source = path.read_text(encoding="utf-8")
    tokens = tokenize.generate_tokens(io.StringIO(source).readline)
    texts += [token.string.lstrip("# ") for token in tokens if token.type == tokenize.COMMENT]
    return "\n\n".join(re.sub(r"`[^`]*`", "X", text) for text in texts)


def page_prose(path):
    text = re.sub(r"```.*?```", " ", path.read_text(encoding="utf-8"), flags=re.DOTALL)
    return re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "X", text))


def odd_phrases(prose_by_path):
    """Return the number of words, and the odd phrases with their files."""
    found = []
    for path, prose in prose_by_path.items():
        for pattern in ODD_PHRASES:
            found += [f"{path.relative_to(ROOT)}: {match[0].strip()}" for match in re.finditer(pattern, prose, re.M)]
    return sum(len(prose.split()) for prose in prose_by_path.values()), found


def pages():
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return [path for path in paths if path.name not in GENERATED]


def test_functions_have_names_of_several_words():
    names = [name for _, name in functions()]
    short = [name for name in names if len(words_of_name(name)) == 1]
    assert len(short) <= MAX_ONE_WORD_NAMES * len(names), Counter(short).most_common(20)


def test_no_function_is_named_by_a_participle_or_ends_in_a_preposition():
    bad = [f"{at} {name}" for at, name in functions() if is_participle(words_of_name(name)[0])]
    bad += [f"{at} {name}" for at, name in functions() if PREPOSITION.fullmatch(words_of_name(name)[-1])]
    assert [name for name in bad if not name.endswith(" to")] == []  # diffusers defines `to`


def test_class_names_are_unique():
    names = Counter(
        node.name for path in python_files() for node in ast.walk(parse(path)) if isinstance(node, ast.ClassDef)
    )
    assert [name for name, count in names.items() if count > 1] == []


def test_names_have_no_retired_words():
    assert [f"{at} {name}" for at, name in functions() if RETIRED_WORDS & set(words_of_name(name))] == []


def test_prose_of_the_code_has_few_odd_phrases():
    num_words, found = odd_phrases({path: code_prose(path) for path in python_files()})
    assert len(found) * 10_000 <= MAX_ODD_PHRASES * num_words, "\n".join(found)


def test_prose_of_the_docs_has_few_odd_phrases():
    num_words, found = odd_phrases({path: page_prose(path) for path in pages()})
    assert len(found) * 10_000 <= MAX_ODD_PHRASES * num_words, "\n".join(found)


def test_odd_prose_is_counted():
    text = {ROOT / "x.md": "Of a video N frames are taken. There is no file. It goes on where the run stood beside it."}
    assert len(odd_phrases(text)[1]) >= 4


def test_docstrings_open_with_an_imperative_or_a_noun_phrase():
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    bad = []
    for path in [*python_files(), *sorted((ROOT / "benchmarks").rglob("*.py"))]:
        for node in ast.walk(parse(path)):
            text = ast.get_docstring(node) if isinstance(node, documented) else None
            if text and text.split()[0] in FRAGMENTS:
                bad.append(f"{path.relative_to(ROOT)}:{getattr(node, 'lineno', 1)}: {text.splitlines()[0]}")
    assert bad == []
