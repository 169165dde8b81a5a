"""Check what callers pass; import optional packages; write files whole; issue warnings."""
