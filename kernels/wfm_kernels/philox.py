"""Constants of the noise contract: Philox4x32-10 (Salmon et al. 2011), and its words in the unit interval."""

WORD = 0xFFFFFFFF
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
ROUNDS = 10
# 32 signed bits to [0, 1), the largest scale whose product stays below 1 in float32; and the floor that bounds |z|.
TO_UNIT, FLOOR = 4.6566127342e-10, 1e-7
TWO_PI = 6.283185307179586
