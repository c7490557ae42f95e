"""Copies to a simulated GPU at the start of a chunk: none waits for the chunk that the GPU still denoises."""

import torch

from benchmarks.rehearsal.fake_machine import fake_gpus
from wfm_ds.sampling.edm import Churn, make_edm_plan
from wfm_ds.sampling.plan import stochastic_plan

SIGMAS = torch.linspace(1, 0, 11, dtype=torch.float64)
PLANS = {  # with the number of copies: the table of coefficients and the seeds of all steps
    "flow": (stochastic_plan("flow_sde", SIGMAS, noise_level=0.7), 2),
    "edm": (make_edm_plan("edm_2ab", 10, Churn(relative=0.1)), 1),
}


def test_all_noisy_steps_share_one_copy_from_pinned_memory():
    found = {}
    with fake_gpus() as record:
        noise = torch.empty(3, 4, 8, 8, device=torch.device("cuda", 0))
        for name, (plan, _) in PLANS.items():
            record.clear()
            trajectory = plan.denoise(lambda latents, sigma: latents, noise, [5, 6, 7])
            assert trajectory.clean_latents.device.type == "cuda"
            found[name] = [(event.kind, event.blocking) for event in record.events]
    assert found == {name: [("copy", False)] * count for name, (_, count) in PLANS.items()}
