"""Hidden states on disk: one safetensors file per sample, and the list of those that exist."""
