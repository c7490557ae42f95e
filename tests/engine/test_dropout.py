"""Dropout of the trained adapter: keyed masks, and none without a gradient."""

import torch

from multi_rank.training import inputs, small_sd3
from wfm_ds.engine.policies import AdapterDropout, add_adapters
from wfm_ds.recipe.sections import LoraRecipe


def test_masks_follow_from_the_step_and_stay_away_without_a_gradient():
    module = small_sd3()
    adapters = add_adapters(module, LoraRecipe(rank=2, alpha=4, dropout=0.5), ["to_q"], ["ema"], seed=0)
    for name, parameter in module.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter)
    cpu = torch.device("cpu")

    def forward(dropout, step):
        with dropout.seed_masks(step, cpu):
            return module(**inputs(range(1)), return_dict=False)[0].detach()

    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, resumed, other_rank = (AdapterDropout(module, 3, rank) for rank in (0, 0, 1))
    drawn = [forward(first, 0), forward(first, 0), forward(first, 1)]
    assert torch.equal(forward(resumed, 1), drawn[2])
    assert not any(torch.equal(drawn[2], other) for other in (drawn[0], drawn[1], forward(other_rank, 1)))
    assert not torch.equal(drawn[0], drawn[1])
    with torch.no_grad():
        assert torch.equal(forward(first, 0), forward(other_rank, 5))
    assert torch.equal(torch.get_rng_state(), before)
    adapters.activate("ema")
    assert torch.equal(forward(first, 0), forward(first, 1))
