// What a page needs: the trainer in a Worker, storage in the browser, the curve, and files.

/** A Trainer in a Worker: `call("step", batch)` calls its method. */
export class RemoteTrainer {
  #calls = 0;
  /** @type {Map<number, {resolve: (result: any) => void, reject: (problem: Error) => void, event: (event: any) => void}>} */
  #open = new Map();

  constructor() {
    this.worker = new Worker(new URL("./worker.js", import.meta.url), { type: "module" });
    this.worker.onmessage = ({ data: { id, result, error, event } }) => {
      const call = this.#open.get(id);
      if (event) return call?.event(event);
      this.#open.delete(id);
      if (error !== undefined) call?.reject(new Error(error));
      else call?.resolve(result);
    };
    this.worker.onerror = (problem) => {
      for (const call of this.#open.values()) call.reject(new Error(problem.message || "The worker could not be started."));
      this.#open.clear();
    };
  }

  /** @param {string} method @param {any[]} args @returns {Promise<any>} */
  call(method, ...args) {
    return this.watch(() => {}, method, ...args);
  }

  /** Call a method that tells of its progress. @param {(event: any) => void} event @param {string} method @param {any[]} args
   * @returns {Promise<any>} */
  watch(event, method, ...args) {
    const id = this.#calls++;
    return new Promise((resolve, reject) => {
      this.#open.set(id, { resolve, reject, event });
      this.worker.postMessage({ id, method, args });
    });
  }

  close() {
    this.worker.terminate();
  }
}

/** Run one request on the browser's database. @param {IDBTransactionMode} mode
 * @param {(store: IDBObjectStore) => IDBRequest} request @returns {Promise<any>} */
function database(mode, request) {
  return new Promise((resolve, reject) => {
    const opening = indexedDB.open("onnx_convgrad", 1);
    opening.onupgradeneeded = () => opening.result.createObjectStore("saved");
    opening.onerror = () => reject(opening.error);
    opening.onsuccess = () => {
      const asked = request(opening.result.transaction("saved", mode).objectStore("saved"));
      asked.onerror = () => reject(asked.error);
      asked.onsuccess = () => {
        resolve(asked.result);
        opening.result.close();
      };
    };
  });
}

/** Store a value in this browser. @param {string} key @param {any} value */
export const save = (key, value) => database("readwrite", (store) => store.put(value, key));

/** A stored value, or undefined. @param {string} key */
export const stored = (key) => database("readonly", (store) => store.get(key));

/** Offer bytes as a download. @param {Uint8Array} bytes @param {string} name */
export function download(bytes, name) {
  const link = document.createElement("a");
  link.href = URL.createObjectURL(new Blob([/** @type {any} */ (bytes)], { type: "application/octet-stream" }));
  link.download = name;
  link.click();
  URL.revokeObjectURL(link.href);
}

/** Draw the losses of all steps. @param {HTMLCanvasElement} canvas @param {number[]} losses */
export function drawCurve(canvas, losses) {
  const scale = window.devicePixelRatio || 1;
  const [width, height] = [canvas.clientWidth, canvas.clientHeight];
  [canvas.width, canvas.height] = [width * scale, height * scale];
  const g = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
  const ink = getComputedStyle(canvas);
  g.scale(scale, scale);
  g.font = "12px system-ui, sans-serif";
  const [left, right, top, bottom] = [44, width - 8, 12, height - 22];
  const most = Math.max(...losses, 1e-9);
  g.strokeStyle = g.fillStyle = ink.color;
  g.globalAlpha = 0.4;
  g.strokeRect(left, top, right - left, bottom - top);
  g.globalAlpha = 1;
  g.textAlign = "right";
  g.fillText(most.toPrecision(3), left - 5, top + 6);
  g.fillText("0", left - 5, bottom);
  g.textAlign = "center";
  g.fillText(`loss over ${losses.length} step${losses.length === 1 ? "" : "s"}`, (left + right) / 2, height - 6);
  g.strokeStyle = ink.getPropertyValue("--accent") || "#1565c0";
  g.lineWidth = 1.5;
  g.beginPath();
  losses.forEach((loss, i) => {
    const x = left + ((right - left) * i) / Math.max(losses.length - 1, 1);
    g.lineTo(x, bottom - ((bottom - top) * loss) / most);
  });
  g.stroke();
}

/** @type {Record<string, any>} */
const NPY = {
  "<f4": Float32Array, "<f8": Float64Array, "<i8": BigInt64Array, "<i4": Int32Array, "<i2": Int16Array, "|i1": Int8Array,
  "|u1": Uint8Array, "<u2": Uint16Array, "<u4": Uint32Array, "|b1": Uint8Array,
};

/** Read an .npy file. @param {File} file */
export async function readNpy(file) {
  const bytes = await file.arrayBuffer();
  const view = new DataView(bytes);
  if (bytes.byteLength < 12 || view.getUint32(0) !== 0x934e554d) throw new Error(`${file.name} is not an .npy file.`);
  const wide = view.getUint8(6) > 1;
  const start = (wide ? 12 + view.getUint32(8, true) : 10 + view.getUint16(8, true));
  const header = new TextDecoder("latin1").decode(new Uint8Array(bytes, 0, start));
  const kind = header.match(/'descr': '(.*?)'/)?.[1] ?? "";
  if (!NPY[kind] || header.includes("'fortran_order': True")) throw new Error(`${file.name} has numbers of a kind or order that this page does not read.`);
  const shape = (header.match(/'shape': \((.*?)\)/)?.[1] ?? "").split(",").filter((size) => size.trim()).map(Number);
  return { data: new NPY[kind](bytes.slice(start)), shape };
}
