"""A tiny pipeline of a family that wfm_ds does not ship, of diffusers' own classes: that of docs/models.md."""

from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, Lumina2Pipeline, Lumina2Transformer2DModel

from wfm_ds.models.base import seeded
from wfm_ds.models.tiny.parts.gemma import gemma_encoder, gemma_tokenizer


def tiny_lumina():
    with seeded(0):
        transformer = Lumina2Transformer2DModel(
            sample_size=4, in_channels=4, hidden_size=24, num_layers=2, num_refiner_layers=1, num_attention_heads=2,
            num_kv_heads=1, multiple_of=8, axes_dim_rope=(4, 4, 4), axes_lens=(300, 16, 16), cap_feat_dim=32,
        )  # fmt: skip
    with seeded(1):
        vae = AutoencoderKL(
            latent_channels=4,
            block_out_channels=(8,) * 4,
            down_block_types=("DownEncoderBlock2D",) * 4,
            up_block_types=("UpDecoderBlock2D",) * 4,
            norm_num_groups=4,
            shift_factor=0.1,
            scaling_factor=0.4,
        )
    tokenizer = gemma_tokenizer()
    return Lumina2Pipeline(
        transformer=transformer.eval(),
        scheduler=FlowMatchEulerDiscreteScheduler(shift=6.0),
        vae=vae.eval(),
        text_encoder=gemma_encoder(len(tokenizer), 14).eval(),
        tokenizer=tokenizer,
    )
