"""Vision-language models: conversations about images and videos, as rows of tokens that a model is trained on."""
