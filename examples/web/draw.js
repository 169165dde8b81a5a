// Teach symbols by drawing them: the last layer of the digits network is trained in a Worker after every drawing.
import { download, drawCurve, RemoteTrainer, save, stored } from "./client.js";
import { PROGRAM, RUNTIME } from "./config.js";

const $ = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const address = (/** @type {string} */ path) => new URL(path, location.href).href;
const SIZE = 8;
const STEPS = 12;
const KEY = "symbols";

/** @type {RemoteTrainer} */
let trainer;
/** @type {any} */
let manifest;
let names = ["circle", "cross", "triangle"];
/** Drawings with the number of their symbol. @type {{pixels: number[], label: number}[]} */
let examples = [];
/** @type {number[]} */
let losses = [];
let busy = Promise.resolve();

function say(/** @type {string} */ text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

/** Run actions one after another, and show what goes wrong. */
const queued = (/** @type {() => Promise<any>} */ act) => () =>
  (busy = busy.then(act).catch((problem) => say(problem.message, true)));

// -- drawing ------------------------------------------------------------------------------------------------------------

const pad = $("pad");
const pen = pad.getContext("2d", { willReadFrequently: true });
pen.lineWidth = 22;
pen.lineCap = pen.lineJoin = "round";
let down = false;

function clear() {
  pen.clearRect(0, 0, pad.width, pad.height);
}

/** The drawing as 8 x 8 numbers from 0 to 1, moved and scaled so that it fills the square. @returns {number[]} */
function pixels() {
  const alpha = pen.getImageData(0, 0, pad.width, pad.height).data.filter((/** @type {number} */ _, /** @type {number} */ i) => i % 4 === 3);
  let [left, right, top, bottom] = [pad.width, -1, pad.height, -1];
  for (let y = 0; y < pad.height; y++) {
    for (let x = 0; x < pad.width; x++) {
      if (alpha[y * pad.width + x] < 128) continue;
      [left, right, top, bottom] = [Math.min(left, x), Math.max(right, x), Math.min(top, y), Math.max(bottom, y)];
    }
  }
  const ink = /** @type {number[]} */ (new Array(SIZE * SIZE).fill(0));
  if (right < 0) return ink;
  const side = Math.max(right - left, bottom - top) + 1;
  const [x0, y0, cell] = [(left + right + 1 - side) / 2, (top + bottom + 1 - side) / 2, side / SIZE];
  for (let y = Math.max(0, top); y <= bottom; y++) {
    for (let x = Math.max(0, left); x <= right; x++) {
      const [column, row] = [Math.floor((x + 0.5 - x0) / cell), Math.floor((y + 0.5 - y0) / cell)];
      ink[row * SIZE + column] += alpha[y * pad.width + x] / 255 / cell ** 2;
    }
  }
  return ink.map((amount) => Math.min(amount, 1));
}

const at = (/** @type {PointerEvent} */ event) => {
  const box = pad.getBoundingClientRect();
  return [(event.clientX - box.left) * (pad.width / box.width), (event.clientY - box.top) * (pad.height / box.height)];
};
pad.onpointerdown = (/** @type {PointerEvent} */ event) => {
  down = true;
  pen.beginPath();
  pen.moveTo(...at(event));
};
window.onpointermove = (event) => {
  if (!down) return;
  pen.lineTo(...at(event));
  pen.stroke();
};
window.onpointerup = () => {
  if (down) queued(guess)();
  down = false;
};

// -- learning -----------------------------------------------------------------------------------------------------------

/** A drawing moved by whole pixels. @param {number[]} image @param {number} down @param {number} right */
function shifted(image, down, right) {
  return image.map((_, i) => {
    const [row, column] = [Math.floor(i / SIZE) - down, (i % SIZE) - right];
    return row >= 0 && row < SIZE && column >= 0 && column < SIZE ? image[row * SIZE + column] : 0;
  });
}

/** What the network makes of the drawing: a probability for each symbol. @returns {Promise<number[]>} */
async function guess() {
  const image = { data: Float32Array.from(pixels()), shape: [1, 1, SIZE, SIZE] };
  const results = await trainer.call("evaluate", { [manifest.data[0].name]: image });
  const scores = [...results[manifest.outputs[0]].data].slice(0, names.length);
  const powers = scores.map((score) => Math.exp(score - Math.max(...scores)));
  const total = powers.reduce((a, b) => a + b);
  showGuess(powers.map((power) => power / total));
  return powers.map((power) => power / total);
}

/** Learn a drawing, together with all earlier ones; half of each batch is moved a little. @param {number} label */
async function teach(label) {
  const image = pixels();
  if (!image.some(Boolean)) throw new Error("Draw something first.");
  await trainer.call("mark");
  examples.push({ pixels: image, label });
  for (let i = 0; i < STEPS; i++) {
    const moved = examples.map((e) => shifted(e.pixels, (i % 3) - 1, (Math.floor(i / 3) % 3) - 1));
    const images = [...examples.map((e) => e.pixels), ...moved];
    const labels = [...examples, ...examples].map((e) => e.label);
    losses.push(await trainer.call("step", {
      [manifest.data[0].name]: { data: Float32Array.from(images.flat()), shape: [images.length, 1, SIZE, SIZE] },
      [manifest.targets[0].name]: { data: labels, shape: [labels.length] },
    }));
  }
  clear();
  show();
}

// -- the page -----------------------------------------------------------------------------------------------------------

function show() {
  $("teach").replaceChildren(...names.map((name, label) => {
    const row = document.createElement("div");
    const button = Object.assign(document.createElement("button"), { textContent: "This is a", onclick: queued(() => teach(label)) });
    const input = Object.assign(document.createElement("input"), { value: name, ariaLabel: `name of symbol ${label + 1}` });
    input.oninput = () => (names[label] = input.value);
    row.append(button, input);
    return row;
  }));
  $("examples").replaceChildren(...examples.map(({ pixels: image, label }) => {
    const canvas = Object.assign(document.createElement("canvas"), { width: SIZE, height: SIZE, title: names[label] });
    const g = /** @type {CanvasRenderingContext2D} */ (canvas.getContext("2d"));
    const shades = g.createImageData(SIZE, SIZE);
    image.forEach((amount, i) => shades.data.set([255 - 255 * amount, 255 - 255 * amount, 255 - 255 * amount, 255], 4 * i));
    g.putImageData(shades, 0, 0);
    return canvas;
  }));
  $("undo").disabled = !examples.length;
  $("add").disabled = names.length === manifest.options.classes[manifest.targets[0].name][0];
  drawCurve($("curve"), losses);
  const last = losses.length ? `, loss ${losses[losses.length - 1].toFixed(3)}` : "";
  say(`${examples.length} drawing${examples.length === 1 ? "" : "s"}, ${losses.length} steps${last}.`);
}

/** @param {number[]} shares */
function showGuess(shares) {
  $("guess").replaceChildren(...names.map((name, i) => {
    const row = document.createElement("tr");
    const bar = Object.assign(document.createElement("div"), { className: "bar" });
    bar.style.width = `${100 * shares[i]}%`;
    row.insertCell().textContent = name;
    row.insertCell().append(bar);
    row.insertCell().textContent = `${Math.round(100 * shares[i])} %`;
    return row;
  }));
}

async function start() {
  const next = new RemoteTrainer();
  try {
    const held = trainer ? await trainer.call("snapshot") : null;
    manifest = await next.call("load", address(PROGRAM), address(RUNTIME), { provider: $("provider").value });
    if (held) await next.call("restore", held);
  } catch (problem) {
    next.close();
    throw problem;
  }
  trainer?.close();
  trainer = next;
  show();
  $("undo").disabled = true;
}

$("clear").onclick = clear;
$("add").onclick = () => {
  names.push(`symbol ${names.length + 1}`);
  show();
};
$("undo").onclick = queued(async () => {
  if ((await trainer.call("undo")) < 0) throw new Error("There is nothing left to undo.");
  examples.pop();
  losses.length = Math.max(losses.length - STEPS, 0);
  show();
});
$("save").onclick = queued(async () => {
  await save(KEY, { values: await trainer.call("snapshot"), names, examples, losses });
  say("Saved in this browser.");
});
$("load").onclick = queued(async () => {
  const held = await stored(KEY);
  if (!held) throw new Error("Nothing is saved in this browser.");
  await trainer.call("restore", held.values);
  ({ names, examples, losses } = held);
  show();
  $("undo").disabled = true;
});
$("export").onclick = queued(async () => download(await trainer.call("model"), "symbols.onnx"));
$("provider").onchange = queued(async () => {
  try {
    await start();
  } catch (problem) {
    $("provider").value = "wasm";
    throw problem;
  }
});
queued(async () => {
  await start();
  document.body.dataset.ready = "yes";
})();
