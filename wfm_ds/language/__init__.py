"""SFT of vision-language models: conversations about images and videos are packed into token sequences."""
