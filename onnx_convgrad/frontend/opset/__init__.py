"""Upgrade a model of any supported opset to the canonical one."""
