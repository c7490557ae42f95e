"""Contract checks of model families: each check must find the matching mistake in a deliberately broken family."""

import contextlib
import sys
from dataclasses import replace
from types import MappingProxyType

import numpy as np
import pytest

from commands import wfm_command
from each_case import check_each
from families import CASES
from wfm_ds.contract.case import PROMPTS, Case
from wfm_ds.contract.checks import CHECKS, run_checks
from wfm_ds.contract.family_under_test import FamilyUnderTest
from wfm_ds.models.cosmos3 import Cosmos3
from wfm_ds.models.input_specs import InputSpec
from wfm_ds.models.qwen_image_edit import QwenImageEdit
from wfm_ds.models.sd3 import StableDiffusion3

main = wfm_command("models check")
BY_NAME = {check.__name__.removeprefix("check_").replace("_", " "): check for check in CHECKS}


class Flipped(StableDiffusion3):
    def denoise(self, *arguments):
        return -super().denoise(*arguments)


class Unscaled(StableDiffusion3):
    def to_latents(self, pixels):
        return super().to_latents(pixels) / 1.5305


class Mixed(StableDiffusion3):
    """Broken: samples depend on the other samples of the batch."""

    def denoise(self, latents, sigma, *arguments):
        return super().denoise(latents, sigma.mean().expand(len(sigma)), *arguments)


class Deaf(StableDiffusion3):
    def encode_text(self, prompts):
        return super().encode_text(["a cat"] * len(prompts) if prompts and not isinstance(prompts, str) else prompts)


class Weak(StableDiffusion3):
    def combine_guidance(self, cond, uncond, scale):
        return super().combine_guidance(cond, uncond, scale - 1)


class Unchecked(StableDiffusion3):
    def check_denoise(self, *_):
        pass


class Misnamed(StableDiffusion3):
    default_lora_targets = ("to_q", "to_kv")


class Faint(StableDiffusion3):
    """A LoRA of these layers hardly changes the latents with the tiny pipeline's weights."""

    default_lora_targets = ("add_q_proj",)


class Rough(StableDiffusion3):
    def latent_shape(self, height, width, num_frames=1):
        return super().latent_shape(height // 16 * 16, width // 16 * 16, num_frames)


class Raw(StableDiffusion3):
    def to_pixels(self, latents):
        return super().to_pixels(latents).nan_to_num()[..., :-1]


class Terse(StableDiffusion3):
    """A correct family with short error messages."""

    def latent_shape(self, *size):
        with own_words():
            return super().latent_shape(*size)

    def encode_text(self, prompts):
        with own_words():
            return super().encode_text(prompts)

    def denoise(self, *arguments):
        with own_words():
            return super().denoise(*arguments)


@contextlib.contextmanager
def own_words():
    try:
        yield
    except ValueError:
        raise ValueError("no") from None


class Untold(Cosmos3):
    def denoise(self, latents, sigma, conditioning, *arguments):
        text = {name: tensor for name, tensor in conditioning.items() if name not in self.optional_conditioning_keys}
        return super().denoise(latents, sigma, text, *arguments)


class Averaged(Cosmos3):
    """Broken: all samples of a batch have the same conditioning inputs."""

    def encode_inputs(self, *arguments):
        told = super().encode_inputs(*arguments)
        return {name: tensor if name == "domain" else 0 * tensor + tensor.mean(0) for name, tensor in told.items()}


class OneHalf(Cosmos3):
    """Broken: the unconditional prediction of guidance ignores the conditioning inputs."""

    def denoise(self, latents, sigma, conditioning, *arguments):
        if conditioning["text_mask"].shape[1] < len(self.tokenize_prompt(self.format_prompt(PROMPTS[1], 32, 48, 9))):
            conditioning = {
                name: tensor for name, tensor in conditioning.items() if name not in self.optional_conditioning_keys
            }
        return super().denoise(latents, sigma, conditioning, *arguments)


class Demanding(Cosmos3):
    input_specs = MappingProxyType({"actions": InputSpec(rank=2, required=True), "domain": InputSpec(rank=0)})


class Sightless(QwenImageEdit):
    """Broken: the text encoder sees a grey image with negative prompts."""

    def encode_text_with_images(self, text):
        images = tuple(np.full_like(image, 128) for image in text.images)
        return super().encode_text_with_images(replace(text, images=images) if text.negative else text)


class Remembering(QwenImageEdit):
    """Broken: every text is encoded with the first image that the text encoder has seen."""

    def encode_text_with_images(self, text):
        self.seen = getattr(self, "seen", text.images)
        return super().encode_text_with_images(replace(text, images=self.seen))


@pytest.fixture
def subject(tiny_pipelines):
    def of(family):
        name = family.family
        return FamilyUnderTest(tiny_pipelines(name), CASES[name], f"{__name__}:{family.__name__}")

    sys.modules.setdefault(__name__, sys.modules[Flipped.__module__])
    return of


@check_each(
    ("family", "name", "says"),
    [
        (Flipped, "latents without guidance", "two prompts at guidance scale 1: values differ by"),
        (Flipped, "full export", "the latents that diffusers generates from the export: values differ by"),
        (Unscaled, "encode inverts decode", "pixels after encoding and decoding: values differ"),
        (Mixed, "batch matches samples", "sample 0 of a batch: values differ"),
        (Deaf, "prompts matter", "prompts differ by only 0, required: more than 0.001; use larger random weights"),
        (Weak, "latents with guidance", "two prompts at guidance scale 4: values differ by"),
        (Unchecked, "invalid arguments", "sigma [2, 1] raises AssertionError ("),
        (Misnamed, "lora and checkpointing", "no linear layer's name ends with to_kv"),
        (Faint, "lora export", "; use larger random weights in the tiny pipeline (docs/own_model.md)"),
        (Rough, "size multiples", "the size (17, 16, 1) is not rejected; raise a ValueError"),
        (Untold, "inputs change velocity", "different inputs change the velocity by only 0"),
        (Averaged, "batch with inputs", "sample 0 of a batch with inputs: values differ by"),
        (OneHalf, "inputs in both guidance halves", "change the negative half of guidance by only 0"),
        (Demanding, "missing inputs", "a sample without actions is not rejected; raise a ValueError"),
        (Sightless, "images change embeddings", "of NegativeText(text='a red circle on white') by only 0"),
        (Remembering, "images change embeddings", "the embedding of a red circle on white by only 0"),
        (Raw, "decoded pixels", "the shape is [2, 3, 32, 47] and should be [2, 3, 32, 48]"),
    ],
)
@pytest.mark.slow
def test_a_mistake_is_found_and_named(subject, family, name, says):
    (finding,) = run_checks(subject(family), [BY_NAME[name]])
    assert finding.name == name
    assert says in (finding.message or "nothing")


def test_the_wording_of_errors_is_not_checked(subject):
    names = ("size multiples", "shapes", "prompt lists", "invalid arguments", "unsupported frames")
    assert [finding.message for finding in run_checks(subject(Terse), [BY_NAME[name] for name in names])] == [None] * 5


def test_an_error_of_the_family_s_code_is_a_finding_with_its_place(subject, monkeypatch):
    def fails(self, shape):
        raise KeyError("patches")

    monkeypatch.setattr(Flipped, "num_tokens", fails)
    (finding,) = run_checks(subject(Flipped), [BY_NAME["num tokens"]])
    assert finding.message.startswith(f"KeyError in {__file__}:")
    assert finding.message.endswith("'patches'")


def test_unsupported_features_are_neither_passed_nor_failed(subject):
    (finding,) = run_checks(subject(StableDiffusion3), [BY_NAME["inputs change velocity"]])
    assert (finding.applies, finding.message) == (False, "the family has no inputs")


def test_the_command_ends_with_one_for_a_broken_family_and_two_for_a_mistake(subject, monkeypatch, capsys):
    of = subject(Flipped)
    monkeypatch.setattr("wfm_ds.contract.checks.run_checks.__defaults__", ((BY_NAME["latents without guidance"],),))
    words = [of.user_family, "--tiny", str(of.folder)]
    monkeypatch.setattr(sys.modules[__name__], "EULER", CASES["sd3"], raising=False)
    assert main([*words, "--case", f"{__name__}:EULER"]) == 1
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("FAILED  latents without guidance: the latents of two prompts")
    assert last == "sd3: 0 of 1 checks passed"
    for wrong, says in (
        ([*words, "--case", "not_there:CASE"], "--case not_there:CASE: cannot import 'not_there'"),
        ([*words, "--case", ":CASE"], "--case :CASE: expected package.module:CASE"),
        ([*words, "--case", f"{__name__}:CASE"], "has no 'CASE' that is a wfm_ds.contract.case.Case"),
        (["my.module", "--tiny", str(of.folder)], "model.family my.module: expected package.module:Class"),
        ([of.user_family, "--tiny", "/nowhere"], "/nowhere does not exist"),
    ):
        assert main(wrong) == 2
        assert says in capsys.readouterr().err


def test_default_sizes_are_the_smallest_unequal_ones(tiny_pipelines):
    sizes = [FamilyUnderTest(tiny_pipelines(name), Case()).size for name in ("sd3", "wan21")]
    assert sizes == [(8, 12, 1), (32, 48, 5)]
