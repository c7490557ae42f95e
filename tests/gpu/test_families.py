"""Each family's denoiser has the same predictions and gradients on the device as on the CPU."""

import pytest

from families import CASES


def passes(folder, device, size, load_options, sigma):
    """Run a forward and backward pass of two samples in float32. Return the velocity and all gradients."""
    import torch

    from wfm_ds.models import registry

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    model = registry.load_model(folder, dtype=torch.float32, device=torch.device(device), **load_options)
    for part in (model.denoiser, *model.auxiliary_modules()):
        part.to(device)
    model.denoiser.requires_grad_(True)
    conditioning = model.encode_text(["a red circle on white", "the digit 7"])
    generator = torch.Generator().manual_seed(0)
    latents = torch.randn(2, *model.latent_shape(*size), generator=generator).to(device).requires_grad_(True)
    velocity = model.denoise(latents, torch.tensor(sigma, device=device), conditioning, model.select_expert(sigma[0]))
    velocity.square().mean().backward()
    named = {n: p.grad.cpu() for n, p in model.denoiser.named_parameters() if p.grad is not None}
    return {"velocity": velocity.detach().cpu(), "latents": latents.grad.cpu(), **named}


MOST = {"sana_wm": 3e-2}  # some of its attention rounds to bfloat16 in any dtype


@pytest.mark.parametrize("family", CASES)
def test_forward_and_backward_equal_those_on_the_cpu(family, there, on_cpu, device, tiny_pipelines):
    case = CASES[family]
    settings = {
        "folder": str(tiny_pipelines(family)),
        "size": list(case.size),
        "load_options": case.load_options,
        "sigma": list(case.sigmas[0]),
    }
    found, expected = there(passes, device=device, **settings), on_cpu(passes, device="cpu", **settings)
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, value in expected.items():
        difference = float((found[name] - value).norm())
        assert difference <= MOST.get(family, 1e-4) * float(value.norm()) + 1e-7, name
