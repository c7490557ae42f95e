"""Constants of the noise contract: Philox4x32-10 (Salmon et al. 2011) and the conversion to the unit interval."""

WORD_MASK = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# TO_UNIT maps 31-bit integers to [0, 1): the largest factor with products below 1 in float32. MIN_UNIFORM bounds |z|.
TO_UNIT, MIN_UNIFORM = 4.6566127342e-10, 1e-7
TWO_PI = 6.283185307179586
