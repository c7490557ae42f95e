"""Prompts for vision-language models that judge edited images, and parsers of their replies.

The formats of the replies are those of published judges (file and commit of each format):

* edit_score: EditScore (arXiv 2509.23909), github.com/VectorSpaceLab/EditScore 6e0f1b9, editscore/vie_prompts.py and
  editscore/__init__.py; also UnifiedReward-Edit, github.com/CodeGoat24/UnifiedReward ff6f520, UnifiedReward-Edit/
  edit_pointwise_instruction_following.py and edit_pointwise_quality.py
* rational_rewards: RationalRewards (arXiv 2604.11626), github.com/TIGER-AI-Lab/RationalRewards 44e27ab,
  diffusion_rl_training/train_qwen_edit_rationalrewards.py; the mean over all aspects is from
  github.com/X-GenGroup/Flow-Factory a0b2bc5, src/flow_factory/rewards/rational_rewards_edit.py

The prompts ask for the same scores in our own words.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

NUMBER = r"(\d+(?:\.\d+)?)"
EXCERPT_CHARS = 80
EDIT_PLACEHOLDERS = ("{instruction}", "{source}", "{result}")
PLACEHOLDERS: dict[str, tuple[str, ...]] = {"system": (), "edit": EDIT_PLACEHOLDERS, "quality": ("{result}",)}
"""{name of a prompt: what it must contain}. {source} stands for all source images."""


class ReplyError(ValueError):
    """Raised if a reply has no scores. The message quotes its first 80 characters."""


@dataclass(frozen=True, slots=True)
class JudgeTemplate:
    """The questions to a judge, and how its replies become a score.

    prompts: {name: text}, with the placeholders of PLACEHOLDERS. `system` is the system message of all questions.
    parse: returns {part: score from 0 to 1} for {question: reply}, or raises ReplyError.
    combine: returns the total score for these parts.
    """

    prompts: Mapping[str, str]
    parse: Callable[[Mapping[str, str]], dict[str, float]]
    combine: Callable[[Mapping[str, float]], float]


def parse_named_scores(replies: Mapping[str, str]) -> dict[str, float]:
    parts = {}
    for name in ("instruction", "preservation"):
        found = re.findall(rf'"{name}"\s*:\s*{NUMBER}\s*[,}}]', replies["edit"])
        parts[name] = scale_score(found[-1] if found else None, 0, 10, f"score of {name}", replies["edit"])
    return parts


def parse_score_lists(replies: Mapping[str, str]) -> dict[str, float]:
    scores = {}
    for question, reply in replies.items():
        found = re.findall(rf'"score"\s*:\s*\[\s*{NUMBER}\s*,\s*{NUMBER}\s*\]', reply)
        pair = found[-1] if found else (None, None)
        scores[question] = [scale_score(text, 0, 25, "list of two scores", reply) for text in pair]
    instruction, preservation = scores["edit"]
    return {"instruction": instruction, "preservation": preservation, "quality": min(scores["quality"])}


ASPECTS = {
    "instruction": "Text Faithfulness",
    "preservation": "Image Faithfulness",
    "quality": "Physical and Visual Quality",
    "text": "Text Rendering",
}


def parse_aspects(replies: Mapping[str, str]) -> dict[str, float]:
    """Parse a section with the title `N. Aspect` and a line `Score: ...` per aspect. The last one may be N/A."""
    reply, parts = replies["edit"], {}
    judgement = (reply.partition("# Detailed Judgement")[2] or reply).partition("# Summary")[0]
    pieces = re.split(rf"^[\s#*]*\d\.[\s*]*({'|'.join(ASPECTS.values())})", judgement, flags=re.MULTILINE)
    sections = dict(zip(pieces[1::2], pieces[2::2], strict=True))
    for part, title in ASPECTS.items():
        line = re.search(rf"^[\s#*]*Score[\s*]*:[\s*\[]*(?:{NUMBER}|N/A)", sections.get(title, ""), re.MULTILINE)
        if part != "text" or (line is not None and line[1] is not None):
            parts[part] = scale_score(None if line is None else line[1], 1, 4, f"score of {title}", reply)
    return parts


def scale_score(text: str | None, low: float, high: float, label: str, reply: str) -> float:
    """Return a number from `low` to `high` on a scale from 0 to 1. Raises ReplyError for None and other numbers."""
    if text is None or not low <= float(text) <= high:
        excerpt = " ".join(reply.split())[:EXCERPT_CHARS]
        raise ReplyError(f"the reply has no {label} from {low:g} to {high:g}: {excerpt!r}")
    return (float(text) - low) / (high - low)


def geometric_mean(parts: Mapping[str, float]) -> float:
    return math.prod(parts.values()) ** (1 / len(parts))


def combine_edit_score(parts: Mapping[str, float]) -> float:
    """Return the geometric mean of the lower score of the edit and the quality, as EditScore and VIEScore do."""
    return math.sqrt(min(parts["instruction"], parts["preservation"]) * parts["quality"])


def mean(parts: Mapping[str, float]) -> float:
    return sum(parts.values()) / len(parts)


SHOW_EDIT = "Original image: {source}\nEdited image: {result}\nInstruction: {instruction}\n\n"

NAMED_SCORES_PROMPT = (
    "An image was edited according to an instruction. Judge the edit.\n" + SHOW_EDIT + "Give two scores from 0 to 10:\n"
    "* instruction: does the edited image show what the instruction asks for? 0: not at all, for example because the "
    "image is unchanged. 10: completely.\n"
    "* preservation: is everything that the instruction does not mention the same as in the original, without new "
    "artifacts? 0: it is a different image. 10: nothing else has changed.\n"
    "Reply with only this JSON object, where N stands for a number:\n"
    '{"reasoning": "one or two sentences", "instruction": N, "preservation": N}'
)

SCORE_LIST_FORMAT = (
    "\nReply with only this JSON object, where N stands for a number:\n"
    '{"reasoning": "one or two sentences", "score": [N, N]}'
)
SCORE_LIST_PROMPT = (
    "The last image is an edited version of the first image. Judge how well the edit follows its instruction. If the "
    "edit failed, both images can be identical.\n"
    + SHOW_EDIT
    + "Give two scores from 0 to 25. The first score rates the success of the edit. 0: the edited image does not "
    "follow the instruction at all. 25: it follows the instruction perfectly. The second score rates overediting. 0: "
    "the edited image is completely different from the original. 25: the edit is effective and changes as little as "
    "possible." + SCORE_LIST_FORMAT
)
QUALITY_PROMPT = (
    "Judge how well this generated image is made: {result}\n"
    "Give two scores from 0 to 25. The first score rates naturalness. 0: unnatural, for example wrong distances, "
    "shadows or light. 25: natural. The second score rates artifacts. 0: many artifacts, such as distortions, "
    "watermarks, scratches, blurred faces or wrong body parts. 25: no artifacts." + SCORE_LIST_FORMAT
)

ASPECTS_SYSTEM = "You are an expert who evaluates edited images, given the source image and the user's instruction."
ASPECTS_PROMPT = (
    "User Instruction: {instruction}\n1. Source Image {source}\n2. Edited Image {result}\n\n"
    "Rate the edited image on four aspects, each from 1.0 (worst) to 4.0 (best) with decimals, and justify each score "
    "with what you see:\n"
    "1. Text Faithfulness: does the image show what the instruction asks for? 4: all of it. 1: the instruction is "
    "ignored or contradicted.\n"
    "2. Image Faithfulness: does the image preserve the parts of the source that should not change? 4: all of them, "
    "including background, style, light and identity. 1: the source is ignored or destroyed.\n"
    "3. Physical and Visual Quality: is the image plausible and free of artifacts? 4: no visible flaws. 1: severe "
    "flaws.\n"
    "4. Text Rendering: if the instruction asks for text, is the text correct and legible? 4: fully. 1: unreadable or "
    "missing. Otherwise N/A.\n\n"
    "Reply in this format:\n# User Request Analysis\n[analysis]\n# Detailed Judgement\n"
    + "".join(
        f"{number}. {title}:\n## Justification: [justification]\n## Score: [score]\n"
        for number, title in enumerate(ASPECTS.values(), 1)
    )
    + "# Summary: [summary]"
)

TEMPLATES = {
    "scores": JudgeTemplate({"edit": NAMED_SCORES_PROMPT}, parse_named_scores, geometric_mean),
    "edit_score": JudgeTemplate(
        {"edit": SCORE_LIST_PROMPT, "quality": QUALITY_PROMPT}, parse_score_lists, combine_edit_score
    ),
    "rational_rewards": JudgeTemplate({"system": ASPECTS_SYSTEM, "edit": ASPECTS_PROMPT}, parse_aspects, mean),
}
