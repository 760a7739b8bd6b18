"""Model code that trainers and engines share: attention, checkpoints, images, routing and LoRA settings."""
