"""Lower the operators of ai.onnx.preview.training (Gradient, Adam, Adagrad, Momentum) to plain ones."""
