"""Winograd forms of the convolution and its gradients: fewer multiplications for small dense kernels."""
