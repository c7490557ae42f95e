"""Cosmos-Reason1-7B-Reward (arXiv 2503.15558): a vision-language model decides whether a video contains anomalies."""

from __future__ import annotations

import math
from typing import Any, ClassVar

from wfm_reward.base import MediaItem, Range, Score
from wfm_reward.rewards._vlm import VlmReward, mp4_data_url

DEFAULT_FPS = 16.0  # for videos without fps
QUESTION = "Does the video contain any anomalies or artifacts?"
SYSTEM_PROMPT = (  # the prompt that the model was trained with: huggingface.co/nvidia/Cosmos-Reason1-7B-Reward
    "You are a helpful video analyzer. The goal is to identify artifacts and anomalies in the video. Watch carefully "
    "and focus on the following aspects:\n\n"
    "* Gravity (e.g. a ball cannot fly in the air)\n"
    "* Collision (e.g. two objects cannot penetrate each other)\n"
    "* Object interaction (e.g. an object cannot move without any apparent reason)\n"
    "* Fluid dynamics (e.g. a liquid cannot flow through a solid object)\n"
    "* Object permanence (e.g. an object cannot suddenly appear, disappear or change its shape)\n"
    "* Common sense (e.g. an object should be functional and useful)\n"
    "* Cause-and-effect (e.g. a door cannot open without any apparent reason)\n"
    "* Human motion (e.g. a person's body cannot morph and the joints cannot move in impossible ways)\n\n"
    "Here are some examples of non-artifacts you should not include in your analysis:\n\n"
    "* Being an animated video, such as a cartoon, does not automatically make it artifacts.\n"
    "* The video has no sound. Do not make any conclusions based on sound.\n"
    "* Ignore any lighting, shadows, blurring, and camera effects.\n"
    "* Avoid judging based on overall impression, artistic style, or background elements.\n\n"
    'Begin your response with a single word: "Yes" or "No".'
)


class CosmosReason1(VlmReward):
    """Probability, 0 to 1, that the reply starts with "No" (no anomaly) and not with "Yes". The prompt has no effect.

    The reward also reports `yes_logprob` and `no_logprob`, the log-probabilities of these two tokens. A token that is
    not among the endpoint's top 20 gets the lowest log-probability of the top 20.
    """

    name = "cosmos_reason1"
    media_types = frozenset({"video"})
    outputs: ClassVar = {
        "no_score": Range(0.0, 1.0),
        "yes_logprob": Range(-math.inf, 0.001),
        "no_logprob": Range(-math.inf, 0.001),
    }
    primary_output = "no_score"

    def __init__(self, device: str = "cpu", *, model: str = "nvidia/Cosmos-Reason1-7B-Reward", **options: Any) -> None:
        super().__init__(device, model=model, **options)

    def rate_item(self, item: MediaItem) -> Score:
        content = [
            {"type": "video_url", "video_url": {"url": mp4_data_url(item.frames, item.fps or DEFAULT_FPS)}},
            {"type": "text", "text": QUESTION},
        ]
        messages = [{"role": "system", "content": SYSTEM_PROMPT}, {"role": "user", "content": content}]
        choice = self.request_choice({"messages": messages, "max_tokens": 1, "logprobs": True, "top_logprobs": 20})
        top_tokens = choice["logprobs"]["content"][0]["top_logprobs"]
        logprobs = {entry["token"].strip(): float(entry["logprob"]) for entry in top_tokens}
        if not logprobs.keys() & {"Yes", "No"}:
            return item.fail(f"neither Yes nor No is among the likely tokens: {', '.join(list(logprobs)[:5])}")
        least = min(logprobs.values())
        yes, no = logprobs.get("Yes", least), logprobs.get("No", least)
        return item.score(1.0 / (1.0 + math.exp(min(yes - no, 700.0))), yes_logprob=yes, no_logprob=no)
