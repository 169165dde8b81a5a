// Train a saved training program with onnxruntime-web. Plain JavaScript; no part of it knows a page.

/**
 * An input or output, as in manifest.json.
 * @typedef {{name: string, dtype: string, shape: (number | string | null)[] | null}} Port
 * A parameter or a state: `next` is the output with its next value.
 * @typedef {Port & {next: string, kind?: string, of?: string | null, slot?: string | null}} Moving
 * @typedef {{data: Port[], targets: Port[], learning_rate: Port, loss: string, terms: string[], outputs: string[],
 *   parameters: Moving[], state: Moving[], options: Record<string, any>}} Manifest
 * Numbers of one input, one sample after another.
 * @typedef {{data: ArrayLike<any>, shape: number[]}} Numbers
 * Values by name: what `snapshot` gives, which a page can store.
 * @typedef {Record<string, {type: string, data: any, dims: number[]}>} Snapshot
 */

/** @type {Record<string, any>} */
const ARRAYS = {
  float32: Float32Array, float64: Float64Array, int64: BigInt64Array, uint64: BigUint64Array, int32: Int32Array,
  uint32: Uint32Array, int16: Int16Array, uint16: Uint16Array, int8: Int8Array, uint8: Uint8Array, bool: Uint8Array,
};

/** A program with its current values. */
export class Trainer {
  /** @type {Snapshot[]} */
  #marks = [];

  /** Use `Trainer.load`. @param {any} ort @param {Manifest} manifest @param {any} sessions @param {any} values
   * @param {string} folder */
  constructor(ort, manifest, sessions, values, folder) {
    this.ort = ort;
    this.manifest = manifest;
    this.sessions = sessions;
    this.values = values;
    this.folder = folder;
    this.stopping = false;
  }

  /**
   * Load a program that was saved without defaults.
   * @param {string} folder Address of the program, with a slash at the end.
   * @param {string} runtime Address of the folder `dist` of onnxruntime-web, with a slash at the end.
   * @param {{provider?: "wasm" | "webgpu", threads?: number}} [options] `threads` above 1 need a page that is
   *   cross-origin isolated; see `_headers`.
   */
  static async load(folder, runtime, { provider = "wasm", threads = 1 } = {}) {
    if (provider === "webgpu" && !(await /** @type {any} */ (navigator).gpu?.requestAdapter())) {
      throw new Error("This browser offers no WebGPU device. Use WebAssembly, or a browser and a driver with WebGPU.");
    }
    const ort = await import(`${runtime}${provider === "webgpu" ? "ort.webgpu.min.mjs" : "ort.wasm.min.mjs"}`);
    ort.env.wasm.wasmPaths = runtime;
    ort.env.wasm.numThreads = globalThis.crossOriginIsolated ? threads : 1;
    ort.env.logLevel = "error";
    const response = await fetch(`${folder}manifest.json`);
    if (!response.ok) throw new Error(`${folder}manifest.json cannot be read: ${response.status}.`);
    /** @type {Manifest & {format: string, version: number}} */
    const manifest = await response.json();
    if (manifest.format !== "onnx_convgrad.training_program" || manifest.version !== 2) {
      throw new Error(`${folder}manifest.json is of another format or version.`);
    }
    const options = { executionProviders: [provider], enableMemPattern: false };
    const onGpu = provider === "webgpu" ? [...manifest.parameters, ...manifest.state] : [];
    const large = onGpu.filter((port) => port.dtype === "float32" && port.shape?.length);
    const kept = Object.fromEntries(large.map((port) => [port.next, "gpu-buffer"]));
    const sessions = {
      step: await ort.InferenceSession.create(`${folder}step.onnx`, { ...options, preferredOutputLocation: kept }),
      evaluate: await ort.InferenceSession.create(`${folder}evaluate.onnx`, options),
    };
    const initial = await ort.InferenceSession.create(`${folder}initial.onnx`, { executionProviders: ["wasm"] });
    const values = await initial.run({});
    await initial.release();
    return new Trainer(ort, manifest, sessions, values, folder);
  }

  get #moving() {
    return [...this.manifest.parameters, ...this.manifest.state];
  }

  /** Tensors of the named inputs. @param {Record<string, Numbers>} batch */
  #tensors(batch) {
    /** @type {Record<string, any>} */
    const tensors = {};
    for (const port of [...this.manifest.data, ...this.manifest.targets]) {
      const numbers = batch[port.name];
      if (!numbers) continue;
      const Kind = ARRAYS[port.dtype];
      const big = Kind === BigInt64Array || Kind === BigUint64Array;
      const data = numbers.data instanceof Kind ? numbers.data : Kind.from(numbers.data, big ? BigInt : Number);
      tensors[port.name] = new this.ort.Tensor(port.dtype, data, numbers.shape);
    }
    return tensors;
  }

  /**
   * Train on one batch.
   * @param {Record<string, Numbers>} batch Numbers of every input of the data and the labels.
   * @returns {Promise<number>} The loss before the step.
   */
  async step(batch) {
    const { loss, learning_rate: rate } = this.manifest;
    const results = await this.sessions.step.run(
      { ...this.values, ...this.#tensors(batch) },
      [loss, ...this.#moving.map((port) => port.next)],
    );
    const before = this.values;
    this.values = { [rate.name]: before[rate.name] };
    for (const { name, next } of this.#moving) {
      this.values[name] = results[next];
      before[name].dispose();
    }
    return Number((await results[loss].getData())[0]);
  }

  /**
   * Train on several batches, in a random order of the samples, until `stop` is called.
   * @param {Record<string, Numbers>} data Numbers of every input; the first axis is that of the samples.
   * @param {{batch?: number, epochs?: number, seed?: number}} options
   * @param {(progress: {step: number, steps: number, loss: number, ms: number}) => void} [onStep] Called after each step.
   * @returns {Promise<number[]>} The losses.
   */
  async fit(data, { batch = 32, epochs = 1, seed = 0 } = {}, onStep = () => {}) {
    const count = Math.min(...Object.values(data).map((numbers) => numbers.shape[0]));
    const size = Math.min(batch, count);
    const steps = epochs * Math.floor(count / size);
    const random = generator(seed);
    const losses = [];
    this.stopping = false;
    let paused = performance.now();
    for (let epoch = 0; epoch < epochs; epoch++) {
      const order = shuffled(count, random);
      for (let first = 0; first + size <= count && !this.stopping; first += size) {
        const start = performance.now();
        const loss = await this.step(rows(data, order.slice(first, first + size)));
        losses.push(loss);
        onStep({ step: losses.length, steps, loss, ms: performance.now() - start });
        if (!Number.isFinite(loss)) throw new Error(`The loss is ${loss}. Lower the learning rate, and undo.`);
        if (performance.now() - paused > 30) {
          await new Promise((resume) => setTimeout(resume)); // let messages in
          paused = performance.now();
        }
      }
    }
    return losses;
  }

  /** End `fit` after its current step. */
  stop() {
    this.stopping = true;
  }

  /**
   * Run the model in inference mode.
   * @param {Record<string, Numbers>} batch Numbers of the data; without labels, a loss of zeros is computed.
   * @returns {Promise<Record<string, {data: any, dims: number[]}>>} The loss and the outputs by name.
   */
  async evaluate(batch) {
    const count = Object.values(batch)[0].shape[0];
    /** @type {Record<string, Numbers>} */
    const whole = { ...batch };
    for (const port of this.manifest.targets) {
      const shape = (port.shape ?? []).map((size, axis) => (axis === 0 ? count : Number(size)));
      const zeros = () => new ARRAYS[port.dtype](shape.reduce((product, size) => product * size, 1));
      whole[port.name] ??= { data: zeros(), shape };
    }
    const averages = Object.fromEntries(
      this.manifest.state.filter((port) => port.slot === "ema").map((port) => [port.of, this.values[port.name]]),
    );
    const feeds = { ...this.values, ...averages, ...this.#tensors(whole) };
    const wanted = Object.fromEntries(this.sessions.evaluate.inputNames.map((name) => [name, feeds[name]]));
    const results = await this.sessions.evaluate.run(wanted);
    /** @type {Record<string, {data: any, dims: number[]}>} */
    const outputs = {};
    for (const [name, tensor] of Object.entries(results)) {
      outputs[name] = { data: await /** @type {any} */ (tensor).getData(), dims: [.../** @type {any} */ (tensor).dims] };
    }
    return outputs;
  }

  /** The learning rate. @returns {Promise<number>} */
  async learningRate() {
    return Number((await this.values[this.manifest.learning_rate.name].getData())[0]);
  }

  /** @param {number} rate */
  setLearningRate(rate) {
    this.values[this.manifest.learning_rate.name] = new this.ort.Tensor("float32", Float32Array.of(rate), []);
  }

  /** A copy of all values. @returns {Promise<Snapshot>} */
  async snapshot() {
    /** @type {Snapshot} */
    const copies = {};
    for (const [name, tensor] of Object.entries(this.values)) {
      copies[name] = { type: tensor.type, data: (await tensor.getData()).slice(), dims: [...tensor.dims] };
    }
    return copies;
  }

  /** Take the values of a snapshot of this program. @param {Snapshot} snapshot */
  restore(snapshot) {
    for (const port of [this.manifest.learning_rate, ...this.#moving]) {
      const held = snapshot[port.name];
      if (!held || held.dims.join() !== (port.shape ?? []).join() || held.type !== port.dtype) {
        throw new Error(`What was saved is of another program: it has no ${port.name} of that shape.`);
      }
    }
    for (const [name, { type, data, dims }] of Object.entries(snapshot)) {
      this.values[name]?.dispose();
      this.values[name] = new this.ort.Tensor(type, data.slice(), dims);
    }
  }

  /** Remember the values, for `undo`. The last 20 are kept. */
  async mark() {
    this.#marks = [...this.#marks.slice(-19), await this.snapshot()];
  }

  /** Return to the values of the last `mark`. @returns {number} How many marks are left, or -1 if there was none. */
  undo() {
    const last = this.#marks.pop();
    if (last) this.restore(last);
    return last ? this.#marks.length : -1;
  }

  /** The trained model as an ONNX file: that of the program, with the trained values. @returns {Promise<Uint8Array>} */
  async model() {
    const file = new Uint8Array(await (await fetch(`${this.folder}inference.onnx`)).arrayBuffer());
    const averages = new Map(this.manifest.state.filter((port) => port.slot === "ema").map((port) => [port.of, port.name]));
    const stored = [...this.manifest.parameters, ...this.manifest.state.filter((port) => port.kind === "statistic")];
    for (const { name } of stored) {
      const values = await this.values[averages.get(name) ?? name].getData();
      writeInitializer(file, name, new Uint8Array(values.buffer, values.byteOffset, values.byteLength));
    }
    return file;
  }
}

/** The given samples of every input. @param {Record<string, Numbers>} data @param {number[]} order
 * @returns {Record<string, Numbers>} */
export function rows(data, order) {
  return Object.fromEntries(
    Object.entries(data).map(([name, { data: numbers, shape }]) => {
      const size = shape.slice(1).reduce((product, axis) => product * axis, 1);
      const picked = new /** @type {any} */ (numbers).constructor(order.length * size);
      order.forEach((row, i) => {
        for (let k = 0; k < size; k++) picked[i * size + k] = numbers[row * size + k];
      });
      return [name, { data: picked, shape: [order.length, ...shape.slice(1)] }];
    }),
  );
}

/** Random numbers in [0, 1) that depend on the seed alone (Numerical Recipes' linear congruence). @param {number} seed */
function generator(seed) {
  let state = seed >>> 0;
  return () => (state = (Math.imul(state, 1664525) + 1013904223) >>> 0) / 2 ** 32;
}

/** The numbers below `count` in random order. @param {number} count @param {() => number} random */
function shuffled(count, random) {
  const order = Array.from({ length: count }, (_, i) => i);
  for (let i = count - 1; i > 0; i--) {
    const j = Math.floor(random() * (i + 1));
    [order[i], order[j]] = [order[j], order[i]];
  }
  return order;
}

// An ONNX file is a protocol buffer: fields of a number, a kind and, for kind 2, a length and that many bytes. The graph is
// field 7 of the model; a stored value is field 5 of the graph, with its name in field 8 and its numbers in 4, 9 or 10.

/** The fields of kind 2 between two positions: their number, start and end. @param {Uint8Array} file @param {number} at
 * @param {number} end @returns {Generator<[number, number, number]>} */
function* fields(file, at, end) {
  const varint = () => {
    let value = 0;
    for (let shift = 0; ; shift += 7) {
      const byte = file[at++];
      value += (byte & 127) * 2 ** shift;
      if (byte < 128) return value;
    }
  };
  while (at < end) {
    const tag = varint();
    const kind = tag % 8;
    const size = kind === 0 ? (varint(), 0) : kind === 1 ? 8 : kind === 5 ? 4 : varint();
    if (kind === 2) yield [Math.floor(tag / 8), at, at + size];
    at += size;
  }
}

/** Overwrite the numbers of a stored value in place. @param {Uint8Array} file @param {string} name @param {Uint8Array} bytes */
function writeInitializer(file, name, bytes) {
  for (const [graph, start, end] of fields(file, 0, file.length)) {
    for (const [value, first, last] of graph === 7 ? fields(file, start, end) : []) {
      const parts = value === 5 ? [...fields(file, first, last)] : [];
      const title = parts.find(([field]) => field === 8);
      if (!title || new TextDecoder().decode(file.subarray(title[1], title[2])) !== name) continue;
      const numbers = parts.find(([field, from, to]) => [4, 9, 10].includes(field) && to - from === bytes.length);
      if (!numbers) throw new Error(`The file stores ${name} in a form that cannot be overwritten.`);
      file.set(bytes, numbers[1]);
      return;
    }
  }
  throw new Error(`The file stores no ${name}.`);
}
