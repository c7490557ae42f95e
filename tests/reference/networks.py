"""Tiny diffusers pipelines in float64: text, latents, pixels, and the velocity with guidance and experts."""

import contextlib
import copy
import json
from pathlib import Path

import numpy as np
import torch
from diffusers import DiffusionPipeline
from peft import LoraConfig

from reference.draws import derive_seed
from wfm_ds.models.cosmos25 import provide_torchvision_resize

SD3_TARGETS = ("to_q", "to_k", "to_v", "to_out.0", "add_q_proj", "add_k_proj", "add_v_proj", "to_add_out")
VIDEO_TARGETS = ("to_q", "to_k", "to_v", "to_out.0")
# The last block of SD3 drops its text tokens, so these layers have no gradient. They are not trained in full training.
SD3_UNUSED = ("transformer_blocks.1.attn.add_q_proj.", "transformer_blocks.1.attn.norm_added_q.")


class NoChecker:
    """Replace the safety checker of Cosmos."""

    def to(self, *args):
        return self


class TrainedWeights:
    """Copies of the parameters in `trained`."""

    def copy_weights(self):
        return [p.detach().clone() for p in self.trained]

    @contextlib.contextmanager
    def use(self, weights):
        """Predict with these weights inside the context, without gradient."""
        current = self.copy_weights()
        self._write(weights)
        try:
            with torch.no_grad():
                yield
        finally:
            self._write(current)

    @torch.no_grad()
    def _write(self, weights):
        for parameter, value in zip(self.trained, weights, strict=True):
            parameter.copy_(value)


class Network(TrainedWeights):
    """A pipeline with float64 denoisers and copies of their trained weights.

    `experts`: the denoisers, high noise first. `boundary`: the noise level between two experts.
    """

    def __init__(self, folder, options):
        self.folder, self.o = folder, options
        self.pipe = load_pipeline(folder)
        self.experts = [part for name in ("transformer", "transformer_2") if (part := getattr(self.pipe, name, None))]
        self.boundary = self.pipe.config.get("boundary_ratio") if len(self.experts) == 2 else 0.0
        families = {"StableDiffusion3": "sd3", "Wan": "wan", "Cosmos2_5": "cosmos"}
        self.family = next(name for prefix, name in families.items() if type(self.pipe).__name__.startswith(prefix))
        if options.get("lora"):
            self._add_adapters(options["lora"])
        else:
            for expert in self.experts:
                for name, parameter in expert.named_parameters():
                    parameter.requires_grad_(not name.startswith(SD3_UNUSED))
        for expert in self.experts:
            expert.double()
        self.trained = [p for expert in self.experts for p in expert.parameters() if p.requires_grad]
        self.texts = {}
        self.num_tokens = json.loads((Path(folder) / "call.json").read_text())["max_sequence_length"]

    def _add_adapters(self, lora):
        torch.manual_seed(derive_seed(self.o["run.seed"], "lora_init"))
        for expert in self.experts:
            expert.requires_grad_(False)
            targets = list(SD3_TARGETS if self.family == "sd3" else VIDEO_TARGETS)
            expert.add_adapter(
                LoraConfig(
                    r=lora["rank"], lora_alpha=lora["alpha"], target_modules=targets, init_lora_weights="gaussian"
                )
            )

    def named_weights(self, weights):
        """Return {name: tensor} of a copy of the trained weights, named as in an engine's tensors."""
        names = []
        for i, expert in enumerate(self.experts):
            prefix = ("transformer.", "transformer_2.")[i] if len(self.experts) == 2 else ""
            names += [prefix + n.replace(".default.", ".") for n, p in expert.named_parameters() if p.requires_grad]
        return dict(zip(names, weights, strict=True))

    @torch.no_grad()
    def encode_text(self, text):
        """Return the embeddings of one text from a cache."""
        if text not in self.texts:
            words = {"do_classifier_free_guidance": False, "max_sequence_length": self.num_tokens}
            if self.family == "sd3":
                embeds, _, pooled, _ = self.pipe.encode_prompt([text], [text], [text], **words)
                self.texts[text] = embeds.double(), pooled.double()
            else:
                self.texts[text] = (self.pipe.encode_prompt([text], **words)[0].double(),)
        return self.texts[text]

    def expert_of(self, sigma):
        return 0 if sigma >= self.boundary else len(self.experts) - 1

    def _predict(self, expert, latents, sigma, texts, frames):
        embeds = [torch.cat(part) for part in zip(*(self.encode_text(text) for text in texts), strict=True)]
        words = {"encoder_hidden_states": embeds[0], "return_dict": False}
        if self.family == "cosmos":
            clean, mask = frames or (latents, latents.new_zeros(len(latents), 1, latents.shape[2], 1, 1))
            s = sigma.view(-1, 1, 1, 1, 1)
            latents, timestep = mask * clean + (1 - mask) * latents, mask * 1e-4 + (1 - mask) * s
            words["condition_mask"] = mask.expand(-1, -1, -1, *latents.shape[-2:])
            words["padding_mask"] = latents.new_zeros(1, 1, *latents.shape[-2:])
        else:
            assert frames is None
            timestep = 1000 * sigma
        if self.family == "sd3":
            words["pooled_projections"] = embeds[1]
        return self.experts[expert](hidden_states=latents, timestep=timestep, **words)[0]

    def velocity(self, latents, sigma, texts, *, guided=False, frames=None):
        """Return the velocity [B, ...] at noise levels [B]. guided: apply each expert's guidance scale.

        frames: (clean latents [B, ...], mask [B,1,T,1,1] that is 1 on conditioning frames). The gradient goes only
        through the prediction for `texts`.
        """
        out = [None] * len(texts)
        for expert in range(len(self.experts)):
            rows = [i for i, s in enumerate(sigma.tolist()) if self.expert_of(s) == expert]
            if not rows:
                continue
            x, s, prompts = latents[rows], sigma[rows], [texts[i] for i in rows]
            part = None if frames is None else tuple(tensor[rows] for tensor in frames)
            predicted = self._predict(expert, x, s, prompts, part)
            scale = self._guidance_scale(expert)
            if guided and scale != 1:
                with torch.no_grad():
                    negative = self._predict(expert, x, s, [""] * len(rows), part)
                predicted = negative + scale * (predicted - negative)
            for row, value in zip(rows, predicted, strict=True):
                out[row] = value
        return torch.stack(out)

    def _guidance_scale(self, expert):
        low = self.o.get("sampling.guidance_scale_low")
        return low if expert == 1 and low is not None else self.o.get("sampling.guidance_scale", 1)

    @torch.no_grad()
    def encode_pixels(self, pixels):
        """Return the clean latents of one uint8 image [H,W,3] or video [F,H,W,3], [C,...] float64."""
        x = torch.from_numpy(np.array(pixels)).movedim(-1, 0)[None].float() / 127.5 - 1
        z = self.pipe.vae.encode(x[:, :, None] if self.family != "sd3" and x.ndim == 4 else x).latent_dist.mode()
        shift, scale = self._vae_statistics()
        return ((z - shift) * scale)[0].double()

    @torch.no_grad()
    def decode(self, latents):
        """Return uint8 pixels [H,W,3], or [F,H,W,3] for videos, of one sample's latents."""
        shift, scale = self._vae_statistics()
        pixels = self.pipe.vae.decode(latents[None].float() / scale + shift, return_dict=False)[0][0]
        return (255 * (pixels / 2 + 0.5).clamp(0, 1)).round().to(torch.uint8).movedim(0, -1).numpy()

    def _vae_statistics(self):
        config = self.pipe.vae.config
        if self.family == "sd3":
            return config.shift_factor, config.scaling_factor
        mean, std = (torch.tensor(v).view(1, -1, 1, 1, 1) for v in (config.latents_mean, config.latents_std))
        return mean, 1 / std

    def latent_shape(self):
        """Return the shape of one sample's latents for the recipe's size."""
        height, width = self.o["sampling.height"], self.o["sampling.width"]
        if self.family == "sd3":
            factor = self.pipe.vae_scale_factor
            return self.experts[0].config.in_channels, height // factor, width // factor
        factor, num_frames = self.pipe.vae_scale_factor_spatial, self.o["sampling.num_frames"]
        return self.pipe.vae.config.z_dim, (num_frames - 1) // 4 + 1, height // factor, width // factor

    def sigmas(self, num_steps):
        """Return the scheduler's noise levels, num_steps + 1 numbers from at most 1 to 0."""
        scheduler = copy.deepcopy(self.pipe.scheduler)
        scheduler.set_timesteps(num_steps)
        return scheduler.sigmas.double().tolist()

    def shift(self):
        config = self.pipe.scheduler.config
        return config.get("flow_shift") or config["shift"]


def load_pipeline(folder):
    """Load a pipeline folder in float32 with plain diffusers."""
    words = {"safety_checker": NoChecker()} if "cosmos" in str(folder) else {}
    if words:
        provide_torchvision_resize()  # torchvision is not installed in the tests
    pipe = DiffusionPipeline.from_pretrained(folder, torch_dtype=torch.float32, local_files_only=True, **words)
    pipe.set_progress_bar_config(disable=True)
    return pipe


def as_overrides(options):
    """Return the command-line overrides for a mapping of recipe keys."""
    return [f"{key}={json.dumps(value)}" for key, value in options.items()]
