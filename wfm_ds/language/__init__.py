"""SFT of vision-language models: conversations about images and videos, packed into token sequences."""
