"""VAEs of the tiny pipelines: random VAEs, and three VAEs of the quickstarts with latents equal to the pixels."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

import diffusers
import torch
from torch import nn

from wfm_ds.models.base import temporary_seed

SEED = 1
WAN_VAE: Mapping[str, Any] = MappingProxyType(
    {
        "base_dim": 8,
        "z_dim": 4,
        "dim_mult": [1, 1, 1, 1],
        "num_res_blocks": 1,
        "temperal_downsample": [False, True, True],
        "latents_mean": [0.0, 0.1, 0.2, 0.3],
        "latents_std": [1.0, 1.1, 1.2, 1.3],
    }
)
EXACT_WIDTH = 9
CONSTANT_CHANNEL = EXACT_WIDTH - 1  # the channel with a constant value
CONSTANT = 1e4
FLUX2_CONSTANT = 256.0
SOUND_GAIN = 2.5  # the sound of a random vocoder is nearly constant
QWEN_OUTPUT_GAIN = 3.0  # images of a random decoder are nearly grey; two training steps would not change 8-bit values


def image_vae(class_name: str = "AutoencoderKL", *, widths: tuple[int, ...], **config: Any) -> Any:
    """Return a random image VAE with 4 latent channels.

    widths: number of channels at each resolution. Every entry after the first halves height and width.
    """
    with temporary_seed(SEED):
        return getattr(diffusers, class_name)(
            latent_channels=4,
            block_out_channels=widths,
            down_block_types=("DownEncoderBlock2D",) * len(widths),
            up_block_types=("UpDecoderBlock2D",) * len(widths),
            layers_per_block=1,
            norm_num_groups=4,
            use_quant_conv=False,
            use_post_quant_conv=False,
            **config,
        )


def flux2_vae() -> Any:
    """Return a random image VAE that halves height and width. Its batch norm changes the latents."""
    vae = image_vae("AutoencoderKLFlux2", widths=(8, 16))
    vae.bn.running_mean.copy_(torch.linspace(-0.5, 0.5, vae.bn.num_features))
    vae.bn.running_var.copy_(torch.linspace(0.5, 2.0, vae.bn.num_features))
    return vae


def sana_vae() -> Any:
    blocks, widths = ("ResBlock", "ResBlock", "EfficientViTBlock"), (8, 16, 16)
    with temporary_seed(SEED):
        return diffusers.AutoencoderDC(
            latent_channels=4,
            attention_head_dim=8,
            encoder_block_types=blocks,
            decoder_block_types=blocks,
            encoder_block_out_channels=widths,
            decoder_block_out_channels=widths,
            encoder_layers_per_block=(1, 1, 1),
            decoder_layers_per_block=(1, 1, 1),
            encoder_qkv_multiscales=((), (), (5,)),
            decoder_qkv_multiscales=((), (), (5,)),
            upsample_block_type="interpolate",
            downsample_block_type="stride_conv",
            decoder_norm_types="rms_norm",
            decoder_act_fns="silu",
            scaling_factor=0.41407,
        )


def wan_vae(seed: int = SEED, **config: Any) -> Any:
    """Return a random video VAE with spatial factor 8, temporal factor 4, and a latent mean and std for each channel.

    config: constructor arguments to add or replace.
    """
    with temporary_seed(seed):
        return diffusers.AutoencoderKLWan(**{**WAN_VAE, **config})


def wan22_ti2v_vae() -> Any:
    """Return a random video VAE with spatial factor 16, including its patches of 2 x 2 pixels."""
    return wan_vae(
        decoder_base_dim=8,
        is_residual=True,
        in_channels=12,
        out_channels=12,
        patch_size=2,
        scale_factor_spatial=16,
        scale_factor_temporal=4,
    )


def qwen_image_vae() -> Any:
    with temporary_seed(SEED):
        vae = diffusers.AutoencoderKLQwenImage(**WAN_VAE)
    vae.decoder.conv_out.weight.data.mul_(QWEN_OUTPUT_GAIN)
    return vae


def ltx2_vae() -> Any:
    """Return a random video VAE with temporal factor 2 and spatial factor 8. Its latents have a mean other than 0."""
    with temporary_seed(SEED):
        vae = diffusers.AutoencoderKLLTX2Video(
            latent_channels=4,
            block_out_channels=(8,),
            decoder_block_out_channels=(8,),
            layers_per_block=(1,),
            decoder_layers_per_block=(1, 1),
            spatio_temporal_scaling=(True,),
            decoder_spatio_temporal_scaling=(True,),
            decoder_inject_noise=(False, False),
            downsample_type=("spatiotemporal",),
            upsample_residual=(False,),
            upsample_factor=(1,),
            timestep_conditioning=False,
            patch_size=4,
            patch_size_t=1,
            encoder_causal=True,
            decoder_causal=False,
            scaling_factor=1.25,
        )
        vae.latents_mean.copy_(0.3 * torch.randn(4))
        vae.latents_std.copy_(0.5 + torch.rand(4))
    return vae


def hunyuan_video15_vae() -> Any:
    """Return a random video VAE with spatial factor 16 and temporal factor 4."""
    with temporary_seed(SEED):
        return diffusers.AutoencoderKLHunyuanVideo15(
            latent_channels=4, block_out_channels=(16,) * 5, layers_per_block=1, scaling_factor=1.03682
        )


def ltx2_sound_parts() -> dict[str, Any]:
    """Return the random audio VAE and vocoder of LTX-2. The sound has two channels and 8000 samples per second."""
    from diffusers.pipelines.ltx2.vocoder import LTX2Vocoder

    with temporary_seed(SEED):
        audio_vae = diffusers.AutoencoderKLLTX2Audio(
            base_channels=4,
            ch_mult=(1, 1, 1),  # the encoder divides frames and mel bins by 4
            num_res_blocks=1,
            resolution=32,
            latent_channels=2,
            mel_bins=8,
        )
        audio_vae.latents_mean.copy_(0.3 * torch.randn(4))
        audio_vae.latents_std.copy_(0.5 + torch.rand(4))
        vocoder = LTX2Vocoder(
            in_channels=16,
            hidden_channels=32,
            upsample_kernel_sizes=[16, 20],
            upsample_factors=[8, 10],
            resnet_kernel_sizes=[3],
            resnet_dilations=[[1, 3, 5]],
            output_sampling_rate=8000,
        )
        for name, parameter in vocoder.named_parameters():
            parameter.data.mul_(0.0 if name.endswith("bias") else SOUND_GAIN)
    return {"audio_vae": audio_vae.eval(), "vocoder": vocoder.eval()}


def identity_vae() -> Any:
    """Return a VAE with latents equal to the pixels in [-1, 1]. Encoding and decoding are exact to 1e-4.

    AutoencoderTiny passes (x + 1) / 2 to the encoder for pixels x, and returns 2 y - 1 for the decoder's output y. Its
    decoder starts with a tanh and uses ReLUs. The encoder therefore divides by 20, so that the tanh is almost linear,
    and the decoder multiplies by 20. A ReLU removes negative values z, so the decoder computes z as relu(z) - relu(-z).
    """
    vae = diffusers.AutoencoderTiny(
        encoder_block_out_channels=(6,),
        decoder_block_out_channels=(6,),
        num_encoder_blocks=(0,),
        num_decoder_blocks=(0,),
        latent_channels=3,
        scaling_factor=20.0,
        shift_factor=0.0,
    )
    encoder: list[Any] = [layer for layer in vae.encoder.modules() if isinstance(layer, nn.Conv2d)]
    decoder: list[Any] = [layer for layer in vae.decoder.modules() if isinstance(layer, nn.Conv2d)]
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        for i in range(3):
            encoder[0].weight[i, i, 1, 1], encoder[0].bias[i] = 2.0, -1.0
            encoder[1].weight[i, i, 1, 1] = 0.05
            decoder[0].weight[i, i, 1, 1], decoder[0].weight[i + 3, i, 1, 1] = 1.0, -1.0
            decoder[1].weight[i, i, 1, 1], decoder[1].weight[i, i + 3, 1, 1] = 10.0, -10.0
            decoder[1].bias[i] = 0.5
    return vae


def exact_flux2_vae() -> Any:
    """Return a FLUX.2 VAE with latents equal to the pixels.

    Encoding and decoding are exact to 1e-4 for grey images in [-1, 1] that are constant on cells of 8 x 8 pixels. The
    single latent channel contains the mean of each cell. Of the four hidden channels, 0 contains x and 1 contains -x,
    because silu(x) - silu(-x) = x. Channels 2 and 3 are large constants of opposite sign, so that norms only scale by a
    constant.
    """
    vae = diffusers.AutoencoderKLFlux2(
        latent_channels=1,
        block_out_channels=(4,) * 4,
        layers_per_block=0,
        norm_num_groups=1,
        use_quant_conv=False,
        use_post_quant_conv=False,
        mid_block_add_attention=False,
    )
    encoder, decoder = vae.encoder, vae.decoder
    downsamplers = [block.downsamplers[0].conv for block in encoder.down_blocks[:-1]]
    upsamplers = [block.upsamplers[0].conv for block in decoder.up_blocks[:-1]]
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        for network in (encoder, decoder):
            network.conv_in.weight[0, :, 1, 1] = 1 / network.conv_in.in_channels
            network.conv_in.weight[1, :, 1, 1] = -1 / network.conv_in.in_channels
            network.conv_in.bias[2], network.conv_in.bias[3] = FLUX2_CONSTANT, -FLUX2_CONSTANT
            network.conv_norm_out.weight.fill_(FLUX2_CONSTANT / 2**0.5)  # the divisor of the norm
        for channel in range(4):
            for conv in downsamplers:
                conv.weight[channel, channel, :2, :2] = 0.25
            for conv in upsamplers:
                conv.weight[channel, channel, 1, 1] = 1.0
        encoder.conv_out.weight[0, 0, 1, 1], encoder.conv_out.weight[0, 1, 1, 1] = 1.0, -1.0
        encoder.conv_out.bias[1] = -30.0  # log variance: almost zero variance
        decoder.conv_out.weight[:, 0, 1, 1], decoder.conv_out.weight[:, 1, 1, 1] = 1.0, -1.0
    return vae.eval()


def exact_vae() -> Any:
    """Return a Wan VAE with latents equal to the pixels.

    Encoding and decoding are exact to 1e-6 for grey videos in [-1, 1] that are constant on cells of 4 x 4 pixels. A
    latent is the mean of a cell. The four latent channels contain four successive frames. The first latent frame has
    the first frame in channel 0 and zeros in the other channels.
    Hidden channels 0 to 3 contain x, and 4 to 7 contain -x, because silu(x) - silu(-x) = x. Hidden channel 8 is a
    constant much larger than x, so that norms only scale by a constant.
    """
    vae = diffusers.AutoencoderKLWan(
        base_dim=EXACT_WIDTH,
        z_dim=4,
        dim_mult=[1, 1, 1],
        num_res_blocks=0,
        temperal_downsample=[True, True],
        latents_mean=[0.0] * 4,
        latents_std=[1.0] * 4,
        scale_factor_temporal=4,
        scale_factor_spatial=4,
    )
    with torch.no_grad():
        for parameter in vae.parameters():
            parameter.zero_()
        set_encoder_weights(vae)
        set_decoder_weights(vae)
    return vae.eval()


def set_encoder_weights(vae: Any) -> None:
    encoder = vae.encoder
    centre = (2, 1, 1)  # the centre tap of a causal 3 x 3 x 3 convolution
    for rgb in range(3):
        encoder.conv_in.weight[0, rgb][centre], encoder.conv_in.weight[4, rgb][centre] = 1 / 3, -1 / 3
    encoder.conv_in.bias[CONSTANT_CHANNEL] = CONSTANT
    first, second = encoder.down_blocks
    for block, slots in ((first, 1), (second, 2)):
        for channel in range(EXACT_WIDTH):
            block.resample[1].weight[channel, channel, :2, :2] = 0.25
        block.time_conv.weight[CONSTANT_CHANNEL, CONSTANT_CHANNEL, 2] = 1.0
        for half in (0, 4):
            for slot in range(slots):  # two concatenated frames: channels of the earlier, then of the later frame
                block.time_conv.weight[half + slot, half + slot, 1] = 1.0
                block.time_conv.weight[half + slots + slot, half + slot, 2] = 1.0
    neutralize_norm(encoder.norm_out)
    for channel in range(4):
        encoder.conv_out.weight[channel, channel][centre] = 1.0
        encoder.conv_out.weight[channel, channel + 4][centre] = -1.0
        vae.quant_conv.weight[channel, channel] = 1.0
    vae.quant_conv.bias[4:] = -30.0  # log variance: almost zero variance


def set_decoder_weights(vae: Any) -> None:
    decoder = vae.decoder
    centre = (2, 1, 1)
    first, second, last = decoder.up_blocks
    for channel in range(4):
        vae.post_quant_conv.weight[channel, channel] = 1.0
        decoder.conv_in.weight[channel, channel][centre] = 1.0
        second.resnets[0].conv_shortcut.weight[channel, channel] = 1.0
    for block, slots in ((first, 2), (second, 1)):
        resample = block.upsamplers[0]
        for slot in range(slots):
            resample.time_conv.weight[slot, slot, 2] = 1.0
            resample.time_conv.weight[EXACT_WIDTH + slot, slots + slot, 2] = 1.0
        for channel in range(EXACT_WIDTH // 2):
            resample.resample[1].weight[channel, channel, 1, 1] = 1.0
    shortcut = last.resnets[0].conv_shortcut
    shortcut.weight[0, 0], shortcut.weight[4, 0], shortcut.bias[CONSTANT_CHANNEL] = 1.0, -1.0, CONSTANT
    neutralize_norm(decoder.norm_out)
    for rgb in range(3):
        decoder.conv_out.weight[rgb, 0][centre], decoder.conv_out.weight[rgb, 4][centre] = 1.0, -1.0


def neutralize_norm(norm: Any) -> None:
    """Set the weight of a norm layer to the layer's divisor (about CONSTANT), so that the layer has no effect."""
    norm.gamma.fill_(CONSTANT / EXACT_WIDTH**0.5)
