// Train a saved training program from JavaScript, with ONNX Runtime and nothing else.
//
//   npm install --ignore-scripts onnxruntime-node        (or onnxruntime-web, which runs in WebAssembly)
//   node train_in_node.mjs PROGRAM DATA [BATCH] [STEPS] [PACKAGE]
//
// PROGRAM is a folder written by `og.build_training(...).save("program", defaults=False)`. DATA is a folder with one file
// NAME.npy for each input that the manifest lists under `data` and `targets`. Prints the loss of each step.
import { readFileSync } from "node:fs";
import { join } from "node:path";

const [program, data, batch = "64", steps = "30", runtime = "onnxruntime-node"] = process.argv.slice(2);
const ort = await import(runtime);

const TYPES = { "<f4": ["float32", Float32Array], "<i8": ["int64", BigInt64Array] };

/** Read an .npy file: a header with a Python literal, then the numbers. */
function load(path) {
  const bytes = readFileSync(path);
  const start = 10 + bytes.readUInt16LE(8);
  const header = bytes.toString("latin1", 10, start);
  const [type, Numbers] = TYPES[header.match(/'descr': '(.*?)'/)[1]];
  const shape = header.match(/\((.*?)\)/)[1].split(",").filter((d) => d.trim()).map(Number);
  return { type, shape, values: new Numbers(new Uint8Array(bytes.subarray(start)).buffer) };
}

/** Samples `first` to `first + count` as a tensor, continuing with sample 0 after the last. */
function slice({ type, shape, values }, first, count) {
  const size = values.length / shape[0];
  const picked = new values.constructor(count * size);
  for (let i = 0; i < count; i++) {
    const sample = (first + i) % shape[0];
    picked.set(values.subarray(sample * size, (sample + 1) * size), i * size);
  }
  return new ort.Tensor(type, picked, [count, ...shape.slice(1)]);
}

const manifest = JSON.parse(readFileSync(join(program, "manifest.json"), "utf8"));
const names = [...manifest.data, ...manifest.targets].map((port) => port.name);
const arrays = Object.fromEntries(names.map((name) => [name, load(join(data, `${name}.npy`))]));
const [initial, step] = await Promise.all(
  ["initial", "step"].map((part) =>
    ort.InferenceSession.create(readFileSync(join(program, `${part}.onnx`)), { enableMemPattern: false }),
  ),
);

const values = await initial.run({}); // parameters, state and learning rate
for (let i = 0; i < Number(steps); i++) {
  const fed = names.map((name) => [name, slice(arrays[name], i * batch, Number(batch))]);
  const results = await step.run({ ...values, ...Object.fromEntries(fed) });
  for (const { name, next } of [...manifest.parameters, ...manifest.state]) values[name] = results[next];
  console.log(results[manifest.loss].data[0]);
}
