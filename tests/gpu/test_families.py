"""Each family's denoiser has the same predictions and gradients on the device as on the CPU."""

import pytest

from families import CASES


def passes(folder, device, family):
    """Run a forward and backward pass of two samples in float32. Return the velocity and all gradients."""
    from pathlib import Path

    import torch

    from families import CASES
    from wfm_ds.contract.family_under_test import FamilyUnderTest

    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    torch.manual_seed(0)
    subject = FamilyUnderTest(Path(folder), CASES[family])
    model = subject.load_model(device=torch.device(device))
    for part in (model.denoiser, *model.auxiliary_modules()):
        part.to(device)
    model.denoiser.requires_grad_(True)
    latents, sigma, conditioning = subject.denoise_arguments(model)
    latents = latents.to(device).requires_grad_(True)
    conditioning = {name: value.to(device) for name, value in conditioning.items()}
    velocity = model.denoise(latents, sigma.to(device), conditioning, model.select_expert(float(sigma[0])))
    velocity.square().mean().backward()
    named = {n: p.grad.cpu() for n, p in model.denoiser.named_parameters() if p.grad is not None}
    return {"velocity": velocity.detach().cpu(), "latents": latents.grad.cpu(), **named}


MOST = {"sana_wm": 3e-2}  # some of its attention rounds to bfloat16 in any dtype


@pytest.mark.parametrize("family", CASES)
def test_forward_and_backward_equal_those_on_the_cpu(family, there, on_cpu, device, tiny_pipelines):
    settings = {"folder": str(tiny_pipelines(family)), "family": family}
    found, expected = there(passes, device=device, **settings), on_cpu(passes, device="cpu", **settings)
    assert found.keys() == expected.keys()
    assert len(found) > 10
    for name, value in expected.items():
        difference = float((found[name] - value).norm())
        assert difference <= MOST.get(family, 1e-4) * float(value.norm()) + 1e-7, name
