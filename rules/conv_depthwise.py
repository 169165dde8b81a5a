"""Ways of computing the weight gradient of depthwise convolutions."""
