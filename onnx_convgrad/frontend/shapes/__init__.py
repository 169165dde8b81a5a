"""Shape inference: rules that onnx-shape-inference lacks, folded sizes, inferred ranks."""
