"""Model code shared by trainers and engines: attention, checkpoints, images, routing and LoRA settings."""
