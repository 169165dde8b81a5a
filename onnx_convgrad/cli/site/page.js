// The page for any program: data from .npy files, training, undo, storage, export.
import { download, drawCurve, readNpy, RemoteTrainer, save, stored } from "./client.js";
import { PROGRAM, RUNTIME } from "./config.js";

const $ = (/** @type {string} */ id) => /** @type {any} */ (document.getElementById(id));
const address = (/** @type {string} */ path) => new URL(path, location.href).href;
const KEY = `values ${location.pathname}`;

/** @type {RemoteTrainer} */
let trainer;
/** @type {any} */
let manifest;
/** @type {Record<string, {data: any, shape: number[]}>} */
let data = {};
/** @type {number[]} */
let losses = [];
/** Number of losses at each mark. @type {number[]} */
let marks = [];

function say(/** @type {string} */ text, error = false) {
  $("status").textContent = text;
  $("status").classList.toggle("error", error);
}

/** A handler that shows what goes wrong. */
const guarded = (/** @type {() => Promise<void>} */ act) => async () => {
  try {
    await act();
  } catch (problem) {
    say(problem instanceof Error ? problem.message : String(problem), true);
  }
};

const shapeText = (/** @type {any} */ port) => (port.shape ?? ["?"]).join(" x ") || "scalar";

async function start() {
  const provider = $("provider").value;
  const next = new RemoteTrainer();
  let values = null;
  try {
    if (trainer) values = await trainer.call("snapshot");
    manifest = await next.call("load", address(PROGRAM), address(RUNTIME), { provider, threads: 1 });
    if (values) await next.call("restore", values);
  } catch (problem) {
    next.close();
    throw problem;
  }
  trainer?.close();
  trainer = next;
  marks = [];
  $("undo").disabled = true;
  $("rate").value = Number((await trainer.call("learningRate")).toPrecision(6));
  const count = manifest.parameters.reduce((/** @type {number} */ sum, /** @type {any} */ p) => sum + p.shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1), 0);
  $("about").textContent = `${count.toLocaleString("en")} parameters, ${manifest.optimizer.name}; loss ${manifest.losses.map((/** @type {any} */ l) => l.loss ?? l.output).join(" + ")}.`;
}

function showInputs() {
  for (const port of [...manifest.data, ...manifest.targets]) {
    const row = $("inputs").insertRow();
    row.insertCell().textContent = port.name;
    row.insertCell().textContent = `${port.dtype}, ${shapeText(port)}`;
    const input = document.createElement("input");
    Object.assign(input, { type: "file", accept: ".npy", id: `file-${port.name}`, ariaLabel: `${port.name}, an .npy file` });
    row.insertCell().append(input);
    const note = row.insertCell();
    note.id = `note-${port.name}`;
    input.onchange = guarded(async () => {
      const file = input.files?.[0];
      if (file) give(port, await readNpy(file));
    });
  }
}

/** Take the numbers of an input. */
function give(/** @type {any} */ port, /** @type {{data: any, shape: number[]}} */ numbers) {
  const wrong = port.shape && (port.shape.length !== numbers.shape.length
    || port.shape.some((/** @type {any} */ size, /** @type {number} */ axis) => axis > 0 && Number.isInteger(size) && size !== numbers.shape[axis]));
  if (wrong) throw new Error(`${port.name} takes ${shapeText(port)}, not ${numbers.shape.join(" x ")}.`);
  data[port.name] = numbers;
  $(`note-${port.name}`).textContent = `${numbers.shape[0]} samples`;
  say("");
}

/** Random numbers of every input: normal data, labels of two classes. */
function giveRandom() {
  const samples = 2 * Number($("batch").value);
  for (const port of [...manifest.data, ...manifest.targets]) {
    const shape = (port.shape ?? [0]).map((/** @type {any} */ size, /** @type {number} */ axis) => (axis === 0 ? samples : Number.isInteger(size) ? size : 32));
    const length = shape.reduce((/** @type {number} */ a, /** @type {number} */ b) => a * b, 1);
    const float = port.dtype.startsWith("float");
    const draw = () => (float ? Math.sqrt(-2 * Math.log(1 - Math.random())) * Math.cos(2 * Math.PI * Math.random()) : Math.floor(2 * Math.random()));
    give(port, { data: Float32Array.from({ length }, draw), shape });
  }
}

async function train() {
  const missing = [...manifest.data, ...manifest.targets].filter((port) => !data[port.name]).map((port) => port.name);
  if (missing.length) throw new Error(`Give a file for ${missing.join(", ")}, or take random numbers.`);
  $("train").disabled = true;
  $("stop").disabled = false;
  try {
    await trainer.call("setLearningRate", Number($("rate").value));
    await trainer.call("mark");
    marks.push(losses.length);
    const options = { batch: Number($("batch").value), epochs: Number($("epochs").value), seed: losses.length };
    let shown = 0;
    await trainer.watch((event) => {
      losses.push(event.loss);
      if (performance.now() - shown > 100 || event.step === event.steps) {
        shown = performance.now();
        say(`Step ${event.step} of ${event.steps}: loss ${event.loss.toPrecision(4)}, ${event.ms.toFixed(1)} ms a step.`);
        drawCurve($("curve"), losses);
      }
    }, "fit", data, options);
    drawCurve($("curve"), losses);
  } finally {
    $("train").disabled = false;
    $("stop").disabled = true;
    $("undo").disabled = !marks.length;
  }
}

$("random").onclick = guarded(async () => giveRandom());
$("train").onclick = guarded(train);
$("stop").onclick = guarded(async () => trainer.call("stop"));
$("undo").onclick = guarded(async () => {
  const left = await trainer.call("undo");
  losses.length = marks.pop() ?? 0;
  $("undo").disabled = left <= 0;
  drawCurve($("curve"), losses);
  say("The values are those before the last training.");
});
$("save").onclick = guarded(async () => {
  await save(KEY, { values: await trainer.call("snapshot"), losses });
  say("Saved in this browser.");
});
$("load").onclick = guarded(async () => {
  const held = await stored(KEY);
  if (!held) throw new Error("Nothing is saved in this browser.");
  await trainer.call("mark");
  marks.push(losses.length);
  await trainer.call("restore", held.values);
  losses = held.losses;
  $("undo").disabled = false;
  drawCurve($("curve"), losses);
  say(`Loaded, after ${losses.length} steps.`);
});
$("export").onclick = guarded(async () => download(await trainer.call("model"), "trained.onnx"));
$("provider").onchange = async () => {
  const before = $("provider").value === "webgpu" ? "wasm" : "webgpu";
  try {
    say("Loading.");
    await start();
    say(`Runs on ${$("provider").selectedOptions[0].textContent}.`);
  } catch (problem) {
    $("provider").value = before;
    say(problem instanceof Error ? problem.message : String(problem), true);
  }
};
guarded(async () => {
  await start();
  showInputs();
  say("Ready.");
  document.body.dataset.ready = "yes";
})();
