"""NVIDIA's network of Cosmos-Predict2.5 with actions at a small size: names, weights, inputs, and results of its code.

ActionChunkConditionedMinimalV1LVGDiT and MiniTrainDIT, cosmos_predict2/_src/predict2 in
NVIDIA-Medtech/Cosmos-H-Surgical-Simulator@8c4bcb00.
"""

import math
import zlib

import numpy as np
import torch
from torch.nn.functional import gelu, linear, silu

WIDTH, HEADS, BLOCKS, LORA, TEXT, TEXT_INPUTS, ACTIONS, ACTION_HIDDEN, CHANNELS = 48, 2, 2, 8, 32, 64, 7, 40, 4
FRAMES, SIZE = 4, (6, 10)
CONFIG = {"attention_head_dim": WIDTH // HEADS, "mlp_ratio": 4.0}  # where it differs from the tiny pipeline
# float64 results of NVIDIA's code on 2026-11-30, with Transformer Engine's norm and rotation replaced by plain PyTorch:
# the values that `sample` returns.
RESULTS = (-2.49791603, 2.17592674, -0.36188568, -0.62726384, -0.8391516, 0.04272686, -2.55667251, 0.92420293)


def shapes():
    """Return {name: shape} of all weights."""
    adaln = {"1": (LORA, WIDTH), "2": (3 * WIDTH, LORA)}
    layers = {
        "x_embedder.proj.1": (WIDTH, 4 * (CHANNELS + 2)),
        "t_embedder.1.linear_1": (WIDTH, WIDTH),
        "t_embedder.1.linear_2": (3 * WIDTH, WIDTH),
        "t_embedding_norm": (WIDTH,),
        "crossattn_proj.0": (TEXT, TEXT_INPUTS),
        "final_layer.linear": (4 * CHANNELS, WIDTH),
        "final_layer.adaln_modulation.1": (LORA, WIDTH),
        "final_layer.adaln_modulation.2": (2 * WIDTH, LORA),
        "action_embedder_B_D.fc1": (ACTION_HIDDEN, 4 * ACTIONS),
        "action_embedder_B_D.fc2": (WIDTH, ACTION_HIDDEN),
        "action_embedder_B_3D.fc1": (ACTION_HIDDEN, 4 * ACTIONS),
        "action_embedder_B_3D.fc2": (3 * WIDTH, ACTION_HIDDEN),
    }
    for i in range(BLOCKS):
        for part, context in (("self_attn", WIDTH), ("cross_attn", TEXT)):
            for layer, inputs in (("q_proj", WIDTH), ("k_proj", context), ("v_proj", context), ("output_proj", WIDTH)):
                layers[f"blocks.{i}.{part}.{layer}"] = (WIDTH, inputs)
            layers |= {f"blocks.{i}.{part}.{norm}": (WIDTH // HEADS,) for norm in ("q_norm", "k_norm")}
        for part in ("self_attn", "cross_attn", "mlp"):
            layers |= {f"blocks.{i}.adaln_modulation_{part}.{k}": shape for k, shape in adaln.items()}
        layers |= {f"blocks.{i}.mlp.layer1": (4 * WIDTH, WIDTH), f"blocks.{i}.mlp.layer2": (WIDTH, 4 * WIDTH)}
    biased = ("crossattn_proj", "action_embedder")
    return {f"{name}.weight": shape for name, shape in layers.items()} | {
        f"{name}.bias": shape[:1] for name, shape in layers.items() if name.startswith(biased)
    }


def draw(name, *shape):
    """Draw float64 standard normal numbers that depend on the name only."""
    return torch.from_numpy(np.random.default_rng(zlib.crc32(name.encode())).normal(size=shape))


def weights():
    """Return all weights by name: matrices of unit gain, and vectors near 1 (norms) or 0 (biases)."""
    return {
        name: draw(name, *shape) * (0.2 if len(shape) == 1 else 1 / math.sqrt(shape[1])) + float("norm" in name)
        for name, shape in shapes().items()
    }


def inputs():
    """Return latents, sigma, text, actions and condition mask of two samples, with one and two conditioning frames."""
    mask = torch.zeros(2, 1, FRAMES, *SIZE, dtype=torch.float64)
    mask[0, :, :1] = mask[1, :, :2] = 1
    return {
        "latents": draw("latents", 2, CHANNELS, FRAMES, *SIZE),
        "sigma": torch.tensor([0.9, 0.31], dtype=torch.float64),
        "text": draw("text", 2, 5, TEXT_INPUTS),
        "actions": draw("actions", 2, 4 * (FRAMES - 1), ACTIONS),
        "mask": mask,
    }


def sample(output):
    """Return a value of each frame of an output [2, 4, 4, 6, 10]."""
    return [float(output[b, 3 - t, t, b, b + t]) for b in range(2) for t in range(FRAMES)]


def time_embeddings(w, sigma, actions, mask):
    """Return the modulation [B,T,3D] and the normalized embedding [B,T,D], computed frame by frame.

    w: NVIDIA's weights by name. sigma: [B]. actions: [B,4(T-1),A]. mask: [B,T], 1 on conditioning frames.
    """
    angles = sigma[:, None] * torch.exp(-math.log(10000) * torch.arange(WIDTH // 2) / (WIDTH // 2))
    time = torch.cat([angles.cos(), angles.sin()], 1)
    hidden = silu(linear(time, w["t_embedder.1.linear_1.weight"]))
    modulations, embeddings = [], []
    for t in range(mask.shape[1]):
        modulation, embedding = linear(hidden, w["t_embedder.1.linear_2.weight"]), time
        if t > 0:
            four = actions[:, 4 * (t - 1) : 4 * t].flatten(1)
            free = 1 - mask[:, t, None]
            modulation = modulation + free * _mlp(w, "action_embedder_B_3D", four)
            embedding = embedding + free * _mlp(w, "action_embedder_B_D", four)
        modulations.append(modulation)
        size = embedding.square().mean(1, keepdim=True).add(1e-6).sqrt()
        embeddings.append(embedding / size * w["t_embedding_norm.weight"])
    return torch.stack(modulations, 1), torch.stack(embeddings, 1)


def _mlp(w, name, x):
    hidden = gelu(linear(x, w[f"{name}.fc1.weight"], w[f"{name}.fc1.bias"]), approximate="tanh")
    return linear(hidden, w[f"{name}.fc2.weight"], w[f"{name}.fc2.bias"])
