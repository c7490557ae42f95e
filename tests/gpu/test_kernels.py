"""Kernels run on the device of their tensors, in any thread."""


def in_a_thread(device):
    """Return the largest differences between the Triton and torch backends on the last device.

    The kernels are launched from a new thread that sets no device.
    """
    import threading

    import torch

    from wfm_kernels import sde_coefficients, sde_log_prob, sde_step

    place = torch.device(f"cuda:{torch.cuda.device_count() - 1}") if device == "cuda" else torch.device("cpu")
    generator = torch.Generator().manual_seed(0)
    velocity, latents = (torch.randn(3, 4, 9, 7, generator=generator).to(place) for _ in range(2))
    sigmas = torch.tensor([0.9, 0.7, 0.4, 0.2], dtype=torch.float64)
    rows = sde_coefficients("flow_sde", sigmas[:-1], sigmas[1:], eta=0.7, sigma_max=0.9).to(place)
    seeds, found, errors = torch.tensor([1, 2, 3], device=place), {}, []

    def compute():
        try:
            for backend in ("triton", "torch"):
                step = sde_step(velocity, latents, rows, seeds=seeds, backend=backend)
                again = sde_log_prob(velocity, latents, step.next_latents, rows, backend=backend)
                found[backend] = (step.next_latents, step.log_prob, again)
        except Exception as error:  # noqa: BLE001, raised again outside the thread
            errors.append(error)

    thread = threading.Thread(target=compute)
    thread.start()
    thread.join()
    if errors:
        raise errors[0]
    assert all(value.device == place for values in found.values() for value in values)
    return [float((a - b).abs().max()) for a, b in zip(*found.values(), strict=True)]


def test_a_thread_launches_on_the_device_of_the_tensors(there, device):
    """The tensors are on the last device. A new thread uses the first device by default."""
    assert max(there(in_a_thread, device=device)) < 2e-5
