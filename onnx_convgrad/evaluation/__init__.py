"""Run finished models over data: predictions, scores, and gradients of many inputs."""
