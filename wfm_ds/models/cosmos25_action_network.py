"""The network of Cosmos-Predict2.5 that follows robot actions, and a diffusers pipeline that passes actions to it.

The formulas are those of ActionChunkConditionedMinimalV1LVGDiT in NVIDIA's cosmos-predict2.5. `model_index.json` of
pipeline folders names this module.
"""

from __future__ import annotations

from functools import wraps
from typing import Any

import torch
from diffusers import (
    Cosmos2_5_PredictBasePipeline,
    CosmosTransformer3DModel,
    ModelMixin,  # noqa: F401, diffusers recognizes the networks of a module by this name
)
from diffusers.configuration_utils import register_to_config
from diffusers.models.transformers.transformer_cosmos import CosmosEmbedding
from torch import Tensor, nn
from torch.nn import functional

ACTIONS_PER_LATENT = 4  # actions, and video frames, per latent frame; the first latent frame has one video frame
UNIFORM_TIMESTEP = -1.0  # the diffusers pipeline then gives conditioning frames the same timestep as other frames


class ActionTimeEmbedding(CosmosEmbedding):  # type: ignore[misc]
    """Adds embeddings of actions to the two embeddings of the timestep.

    `actions` holds the inputs of the current forward pass of the network, or None: the actions of each latent frame
    [batch * latent frames, 4 * action_dim], and a factor for their embeddings [batch * latent frames, 1].
    """

    def __init__(self, hidden_size: int, action_dim: int, action_hidden_size: int) -> None:
        super().__init__(hidden_size, hidden_size)
        self.action_embedder, self.action_modulation = (
            nn.Sequential(
                nn.Linear(ACTIONS_PER_LATENT * action_dim, action_hidden_size),
                nn.GELU(approximate="tanh"),
                nn.Linear(action_hidden_size, size),
            )
            for size in (hidden_size, 3 * hidden_size)
        )
        self.actions: tuple[Tensor, Tensor] | None = None

    def forward(self, hidden_states: Tensor, timestep: Tensor) -> tuple[Tensor, Tensor]:
        """Return the modulation [..., 3 * hidden_size] that all blocks add to theirs, and the normalized embedding.

        timestep: [batch], or [batch * latent frames] with actions.
        """
        if self.actions is None:
            modulation, embedding = super().forward(hidden_states, timestep)
            return modulation, embedding
        actions, factor = (x.type_as(hidden_states) for x in self.actions)
        embedding = self.time_proj(timestep).type_as(hidden_states)
        modulation = self.t_embedder(embedding) + factor * self.action_modulation(actions)
        return modulation, self.norm(embedding + factor * self.action_embedder(actions))


class CosmosActionTransformer3DModel(CosmosTransformer3DModel):  # type: ignore[misc]
    """The Cosmos-Predict2.5 network with actions. Each latent frame after the first receives four actions.

    The actions of a latent frame that is conditioned on are ignored. Without actions, the network computes the same as
    CosmosTransformer3DModel.
    """

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        in_channels: int = 17,
        out_channels: int = 16,
        num_attention_heads: int = 16,
        attention_head_dim: int = 128,
        num_layers: int = 28,
        mlp_ratio: float = 4.0,
        text_embed_dim: int = 1024,
        adaln_lora_dim: int = 256,
        max_size: tuple[int, int, int] = (128, 240, 240),
        patch_size: tuple[int, int, int] = (1, 2, 2),
        rope_scale: tuple[float, float, float] = (1.0, 3.0, 3.0),
        concat_padding_mask: bool = True,
        extra_pos_embed_type: str | None = None,
        use_crossattn_projection: bool = True,
        crossattn_proj_in_channels: int = 100352,
        encoder_hidden_states_channels: int = 1024,
        controlnet_block_every_n: int | None = None,
        img_context_dim_in: int | None = None,
        img_context_num_tokens: int = 256,
        img_context_dim_out: int = 2048,
        action_dim: int = 7,
        action_hidden_size: int | None = None,
    ) -> None:
        """The defaults are those of NVIDIA's 2B model robot/action-cond. For the other parameters, see the base class.

        action_dim: numbers per action. action_hidden_size: width of the hidden layer of the two action embeddings, by
        default four times the width of the network.
        """
        super().__init__(
            in_channels=in_channels,
            out_channels=out_channels,
            num_attention_heads=num_attention_heads,
            attention_head_dim=attention_head_dim,
            num_layers=num_layers,
            mlp_ratio=mlp_ratio,
            text_embed_dim=text_embed_dim,
            adaln_lora_dim=adaln_lora_dim,
            max_size=max_size,
            patch_size=patch_size,
            rope_scale=rope_scale,
            concat_padding_mask=concat_padding_mask,
            extra_pos_embed_type=extra_pos_embed_type,
            use_crossattn_projection=use_crossattn_projection,
            crossattn_proj_in_channels=crossattn_proj_in_channels,
            encoder_hidden_states_channels=encoder_hidden_states_channels,
            controlnet_block_every_n=controlnet_block_every_n,
            img_context_dim_in=img_context_dim_in,
            img_context_num_tokens=img_context_num_tokens,
            img_context_dim_out=img_context_dim_out,
        )
        hidden_size = num_attention_heads * attention_head_dim
        self.time_embed = ActionTimeEmbedding(hidden_size, action_dim, action_hidden_size or 4 * hidden_size)

    def forward(
        self,
        hidden_states: Tensor,
        timestep: Tensor,
        *arguments: Any,
        condition_mask: Tensor | None = None,
        actions: Tensor | None = None,
        **options: Any,
    ) -> Any:
        """Run the network. For the other arguments, see CosmosTransformer3DModel.

        condition_mask: [batch, 1, latent frames, h, w], 1 on conditioning frames. Required with actions.
        actions: [batch, 4 * (latent frames - 1), action_dim].
        timestep: one per sample [batch], or one per latent frame [batch, 1, latent frames, 1, 1].
        Raises ValueError for actions of another shape.
        """
        if actions is None:
            return super().forward(hidden_states, timestep, *arguments, condition_mask=condition_mask, **options)
        count, _, num_frames, *_ = hidden_states.shape
        expected = (count, ACTIONS_PER_LATENT * (num_frames - 1), self.config.action_dim)
        if actions.shape != expected or condition_mask is None:
            raise ValueError(f"actions must be {list(expected)} with a condition_mask, got {list(actions.shape)}")
        if timestep.shape == (count,):
            timestep = timestep.view(-1, 1, 1, 1, 1).expand(-1, 1, num_frames, 1, 1)
        # The first latent frame has no actions.
        by_frame = functional.pad(actions.reshape(count, num_frames - 1, -1), (0, 0, 1, 0))
        factor = functional.pad(1 - condition_mask[:, 0, 1:, 0, 0], (1, 0))
        self.time_embed.actions = by_frame.flatten(0, 1), factor.reshape(-1, 1)
        try:
            return super().forward(hidden_states, timestep, *arguments, condition_mask=condition_mask, **options)
        finally:
            self.time_embed.actions = None


class CosmosActionPipeline(Cosmos2_5_PredictBasePipeline):  # type: ignore[misc]
    """The diffusers pipeline of Cosmos-Predict2.5 with one more call argument, `actions`.

    actions: [batch, num_frames - 1, action_dim]. All latent frames have the same timestep, as in NVIDIA's code.
    """

    @torch.no_grad()
    @wraps(Cosmos2_5_PredictBasePipeline.__call__)
    def __call__(self, *arguments: Any, actions: Tensor, **options: Any) -> Any:
        def add_actions(network: Any, args: Any, kwargs: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
            return args, kwargs | {"actions": actions.to(network.device, network.dtype)}

        with self.transformer.register_forward_pre_hook(add_actions, with_kwargs=True):
            call = {"conditional_frame_timestep": UNIFORM_TIMESTEP, **options}
            return super().__call__(*arguments, **call)
