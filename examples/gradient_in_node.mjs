// Compute a gradient in JavaScript: which pixels speak for the class that a network predicts.
//
//   npm install --ignore-scripts onnxruntime-node        (or onnxruntime-web, which runs in WebAssembly)
//   node gradient_in_node.mjs MODEL DATA [PACKAGE]
//
// MODEL is a classifier with its gradient, written with `og.augment(..., wrt=INPUT, of=LOGITS)`. DATA is a JSON object with
// the `shape` and the `values` of the input. Prints a JSON object: the predicted classes, and the gradient with its shape.
import { readFileSync } from "node:fs";

const [model, data, runtime = "onnxruntime-node"] = process.argv.slice(2);
const ort = await import(runtime);
const session = await ort.InferenceSession.create(readFileSync(model));
const [input, seed] = session.inputNames; // the inputs of the model, then the cotangents
const [output, gradient] = session.outputNames; // the outputs of the model, then the gradients

const { shape, values } = JSON.parse(readFileSync(data, "utf8"));
const x = new ort.Tensor("float32", Float32Array.from(values), shape);
const sizes = [shape[0], session.inputMetadata[1].shape[1]]; // samples and classes

/** Run the model; `cotangent` is the derivative of a number by the logits, the gradient is its derivative by the input. */
const run = (cotangent) => session.run({ [input]: x, [seed]: new ort.Tensor("float32", cotangent, sizes) });

const cotangent = new Float32Array(sizes[0] * sizes[1]);
const logits = (await run(cotangent))[output].data; // the cotangent is zero: only the logits are of use
const predicted = Array.from({ length: sizes[0] }, (_, n) => {
  const own = logits.subarray(n * sizes[1], (n + 1) * sizes[1]);
  return own.indexOf(Math.max(...own));
});
predicted.forEach((label, n) => (cotangent[n * sizes[1] + label] = 1)); // of the sum of the predicted logits
const result = (await run(cotangent))[gradient];
console.log(JSON.stringify({ predicted, shape: result.dims, gradient: Array.from(result.data) }));
