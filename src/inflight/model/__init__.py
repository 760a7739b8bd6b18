"""What trainers and engines both know of a model: attention, checkpoints, images, routing and LoRA settings."""
