// Run a model with one of its adapters from JavaScript, whose packages of ONNX Runtime (1.30) have no add_active_adapter.
//
//   npm install --ignore-scripts onnxruntime-node        (or onnxruntime-web, which runs in WebAssembly)
//   node adapter_in_node.mjs MODEL ADAPTER DATA [PACKAGE]
//
// MODEL has the weights of its adapters as inputs without defaults, see docs/training/lora.md. ADAPTER is
// a .safetensors file written by `trainer.export_adapter`. DATA is one too, with the other inputs. Prints the first output.
import { readFileSync } from "node:fs";

const [model, adapter, data, runtime = "onnxruntime-node"] = process.argv.slice(2);
const ort = await import(runtime);

/** Read the float32 tensors of a safetensors file: the length of the header, the header as JSON, the numbers. */
function tensors(path) {
  const bytes = readFileSync(path);
  const start = 8 + Number(bytes.readBigUInt64LE(0));
  const { __metadata__, ...header } = JSON.parse(bytes.toString("utf8", 8, start));
  return Object.fromEntries(Object.entries(header).map(([name, { shape, data_offsets: [first, end] }]) => {
    const own = new Uint8Array(bytes.subarray(start + first, start + end));
    return [name, new ort.Tensor("float32", new Float32Array(own.buffer), shape)];
  }));
}

const session = await ort.InferenceSession.create(readFileSync(model));
const results = await session.run({ ...tensors(data), ...tensors(adapter) });
console.log(JSON.stringify(Array.from(results[session.outputNames[0]].data)));
