"""Check names and numbers that callers pass; issue warnings; run a function once."""
