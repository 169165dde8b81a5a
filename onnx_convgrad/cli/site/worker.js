// Runs a Trainer outside the page's thread. A message names a method and its arguments; the answer has its result.
import { Trainer } from "./trainer.js";

/** @type {any} */
let trainer = null;

onmessage = async ({ data: { id, method, args } }) => {
  try {
    /** @type {any} */
    let result;
    if (method === "load") {
      trainer = await Trainer.load(.../** @type {[any, any, any]} */ (args));
      result = trainer.manifest;
    } else {
      const progress = (/** @type {any} */ event) => postMessage({ id, event });
      result = await trainer[method](...args, ...(method === "fit" ? [progress] : []));
    }
    postMessage({ id, result });
  } catch (problem) {
    postMessage({ id, error: problem instanceof Error ? problem.message : String(problem) });
  }
};
