"""Low-rank adapters (LoRA): add them to a model, recognize them again, merge them, and keep them in files."""
