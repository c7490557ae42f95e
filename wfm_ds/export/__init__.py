"""Export weights as diffusers pipelines and LoRA files."""
