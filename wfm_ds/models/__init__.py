"""Model families: subclasses of DiffusionModel, one for each supported kind of diffusers pipeline."""
