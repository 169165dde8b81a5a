"""The trainer: sessions, steps, epochs, metrics, callbacks, checkpoints."""
