import pytest
import torch

from wfm_ds.models.conditioning_frames import LATENTS_KEY, MASK_KEY, add_clean_frames, get_clean_frames


def test_each_row_has_its_own_number_of_conditioning_frames():
    conditioning = add_clean_frames({"text": torch.zeros(3, 1)}, torch.randn(3, 2, 4, 2, 2), torch.tensor([0, 1, 3]))
    assert conditioning[MASK_KEY].flatten(1).tolist() == [[0, 0, 0, 0], [1, 0, 0, 0], [1, 1, 1, 0]]
    assert conditioning.keys() == {"text", LATENTS_KEY, MASK_KEY}


def test_conditioning_frames_are_clean_inputs_and_predicted_exactly():
    noisy, latents, network = (torch.randn(2, 3, 4, 2, 2) for _ in range(3))
    sigma = torch.tensor([0.7, 0.2])
    conditional_frames = get_clean_frames(add_clean_frames({}, latents, torch.tensor([1, 2])))
    seen, velocity = (
        conditional_frames.insert_clean_latents(noisy),
        conditional_frames.insert_known_velocity(network, noisy, sigma),
    )
    clean = noisy - sigma.view(-1, 1, 1, 1, 1) * velocity
    for row, count in enumerate((1, 2)):
        torch.testing.assert_close(seen[row, :, :count], latents[row, :, :count], rtol=0, atol=0)
        torch.testing.assert_close(clean[row, :, :count], latents[row, :, :count])
        torch.testing.assert_close(seen[row, :, count:], noisy[row, :, count:], rtol=0, atol=0)
        torch.testing.assert_close(velocity[row, :, count:], network[row, :, count:], rtol=0, atol=0)


def test_half_a_pair_of_keys_and_counts_that_leave_nothing_free_are_refused():
    assert get_clean_frames({"text": torch.zeros(1)}) is None
    with pytest.raises(ValueError, match="both of"):
        get_clean_frames({MASK_KEY: torch.zeros(1, 1, 4, 1, 1)})
    with pytest.raises(ValueError, match="conditioning frames must be 0 to 3"):
        add_clean_frames({}, torch.zeros(1, 2, 4, 2, 2), torch.tensor([4]))
    with pytest.raises(ValueError, match=r"\[B,C,T,h,w\]"):
        add_clean_frames({}, torch.zeros(1, 2, 4, 2), torch.tensor([1]))
