"""The `bench` command: what a model's gradients cost here, convolution by convolution."""
