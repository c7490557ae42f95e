"""SFT of vision-language models on conversations about images and videos, packed into token sequences."""
