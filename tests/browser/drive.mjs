// Drive a page in a headless Chromium: node drive.mjs URL SCENARIO [JSON options]; prints the result as JSON.
import { chromium } from "playwright-core";

const [url, scenario, json = "{}"] = process.argv.slice(2);
const options = JSON.parse(json);
const executablePath = options.browser || (await (await import("@sparticuz/chromium")).default.executablePath());
const gpu = options.gpu ? ["--enable-unsafe-webgpu", "--use-webgpu-adapter=swiftshader", "--enable-features=Vulkan"] : [];
const browser = await chromium.launch({ executablePath, args: ["--no-sandbox", "--disable-dev-shm-usage", ...gpu] });

async function ready(page) {
  await page.goto(url);
  await page.waitForFunction(() => document.body.dataset.ready || document.querySelector("#status.error"), null, { timeout: 60000 });
}

/** Runs in the page: its height, its excess over the window, what is cut off, and words of tables that are broken. */
function layoutOfPage() {
  const article = document.querySelector("article");
  const scrolls = (element) => element !== article && (/auto|scroll/.test(getComputedStyle(element).overflowX) || scrolls(element.parentElement));
  const name = (element) => element.textContent.trim().slice(0, 60);
  const outside = (element) => element.getBoundingClientRect().right > window.innerWidth + 1 && !scrolls(element);
  const clipped = (element) => element.scrollWidth > element.clientWidth + 1 && /hidden|clip/.test(getComputedStyle(element).overflowX);
  const blocks = [...article.querySelectorAll("pre > code")];
  const longest = (block) => Math.max(...block.textContent.split("\n").map((line) => line.length));
  const broken = [];
  for (const cell of article.querySelectorAll("td, th")) {
    const texts = document.createTreeWalker(cell, NodeFilter.SHOW_TEXT);
    for (let text = texts.nextNode(); text; text = texts.nextNode()) {
      for (const word of text.data.matchAll(/\w+/g)) {
        const range = document.createRange();
        range.setStart(text, word.index);
        range.setEnd(text, word.index + word[0].length);
        if (range.getClientRects().length > 1) broken.push(word[0]);
      }
    }
  }
  return {
    height: document.documentElement.scrollHeight,
    sideways: document.documentElement.scrollWidth - window.innerWidth,
    hidden: [...article.querySelectorAll("pre, pre > code, table, td, img, p, li, h1, h2, h3")].filter((e) => outside(e) || clipped(e)).map(name),
    cut: blocks.filter((block) => block.scrollWidth > block.clientWidth + 1 && longest(block) <= 120).map(name),
    tables: [...article.querySelectorAll(".md-typeset__scrollwrap")].filter((box) => box.scrollWidth > box.clientWidth + 1).map(name),
    broken,
  };
}

const said = (page) => page.locator("#status").textContent();

async function exported(page, path) {
  const [file] = await Promise.all([page.waitForEvent("download"), page.click("#export")]);
  await file.saveAs(path);
}

const scenarios = {
  /** Steps on given batches, in the Worker, without the page's own controls. */
  async steps(page) {
    await ready(page);
    return page.evaluate(async ({ provider, batch, steps }) => {
      const { RemoteTrainer } = await import("./client.js");
      const { PROGRAM, RUNTIME } = await import("./config.js");
      const address = (path) => new URL(path, location.href).href;
      const trainer = new RemoteTrainer();
      await trainer.call("load", address(PROGRAM), address(RUNTIME), { provider });
      const read = async (name) => (await fetch(name)).arrayBuffer();
      const image = new Float32Array(await read("image.f32"));
      const target = new BigInt64Array(await read("target.i64"));
      const losses = [];
      for (let i = 0; i < steps; i++) {
        losses.push(await trainer.call("step", {
          image: { data: image.slice(64 * i * batch, 64 * (i + 1) * batch), shape: [batch, 1, 8, 8] },
          target: { data: target.slice(i * batch, (i + 1) * batch), shape: [batch] },
        }));
      }
      trainer.close();
      return { losses };
    }, options);
  },

  /** Milliseconds from the navigation to the page until it has trained a step, with its own controls. */
  async first(page) {
    await ready(page);
    await page.click("#random");
    await page.click("#train");
    const trained = () => /^Step [1-9]/.test(document.querySelector("#status").textContent) && performance.now();
    const after = await page.waitForFunction(trained, null, { polling: 5, timeout: 60000 });
    return { after: await after.jsonValue(), said: await said(page) };
  },

  /** The page's own controls: data from files, training, undo, storage, export. */
  async train(page) {
    await ready(page);
    await page.setInputFiles("#file-image", options.image);
    await page.setInputFiles("#file-target", options.target);
    await page.fill("#epochs", String(options.epochs));
    if (options.provider) await page.selectOption("#provider", options.provider);
    await exported(page, options.before);
    await page.click("#train");
    await page.waitForFunction(() => !document.querySelector("#undo").disabled, null, { timeout: 120000 });
    const trained = await said(page);
    await page.screenshot({ path: options.shot, fullPage: true });
    await exported(page, options.after);
    await page.click("#save");
    await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("Saved"));
    await page.click("#undo");
    await page.waitForFunction(() => document.querySelector("#undo").disabled);
    await exported(page, options.undone);
    await ready(page); // a reload starts from the beginning
    await page.click("#load");
    await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("Loaded"));
    await exported(page, options.loaded);
    return { trained, loaded: await said(page) };
  },

  /** Teach three symbols by drawing them with the mouse, test on more drawings, undo, save and load. */
  async draw(page) {
    await ready(page);
    const box = await page.locator("#pad").boundingBox();
    let seed = 7;
    const random = () => (seed = (seed * 1664525 + 1013904223) % 4294967296) / 4294967296 - 0.5;
    const stroke = async ([first, ...rest]) => {
      const at = ([x, y]) => [box.x + box.width / 2 + x, box.y + box.height / 2 + y];
      await page.mouse.move(...at(first));
      await page.mouse.down();
      for (const point of rest) await page.mouse.move(...at(point), { steps: 3 });
      await page.mouse.up();
    };
    const symbol = async (kind) => {
      const [cx, cy, r] = [random() * 24, random() * 24, 60 + random() * 24];
      const point = (angle) => [cx + r * Math.cos(angle) + random() * 10, cy + r * Math.sin(angle) + random() * 10];
      const turn = Math.PI / 4;
      if (kind === 0) await stroke(Array.from({ length: 17 }, (_, i) => point((i * Math.PI) / 8)));
      if (kind === 1) await stroke([point(turn), point(5 * turn)]), await stroke([point(3 * turn), point(7 * turn)]);
      if (kind === 2) await stroke([0, 1, 2, 3].map((i) => point(-Math.PI / 2 + (i * 2 * Math.PI) / 3)));
    };
    const drawings = (count) => page.waitForFunction((n) => document.querySelectorAll("#examples canvas").length === n, count);
    for (let i = 0; i < 12; i++) {
      await symbol(i % 3);
      await page.locator("#teach button").nth(i % 3).click();
      await drawings(i + 1);
    }
    const best = () => page.evaluate(() => {
      const shares = [...document.querySelectorAll("#guess tr")].map((row) => parseInt(row.cells[2].textContent));
      return shares.indexOf(Math.max(...shares));
    });
    let right = 0;
    for (let i = 0; i < 24; i++) {
      await page.click("#clear");
      await page.evaluate(() => document.querySelector("#guess").replaceChildren());
      await symbol(i % 3);
      await page.waitForSelector("#guess tr");
      await page.waitForTimeout(100); // after the last of two strokes
      right += (await best()) === i % 3;
    }
    await page.screenshot({ path: options.shot, fullPage: true });
    const taught = await said(page);
    await page.click("#save");
    await page.waitForFunction(() => document.querySelector("#status").textContent.startsWith("Saved"));
    await exported(page, options.after);
    await page.click("#undo");
    await drawings(11);
    const undone = await said(page);
    await ready(page);
    await page.click("#load");
    await drawings(12);
    await exported(page, options.loaded);
    return { right, taught, undone };
  },

  /** For each page of the documentation and each width in pixels: its height, and what a reader cannot see or reach. */
  async layout(page) {
    const measured = {};
    for (const path of options.pages) {
      await page.goto(url + path);
      await page.waitForFunction(() => [...document.querySelectorAll("article table")].every((table) => table.closest(".md-typeset__scrollwrap")));
      measured[path] = {};
      for (const width of options.widths) {
        await page.setViewportSize({ width, height: 900 });
        measured[path][width] = await page.evaluate(layoutOfPage);
      }
    }
    return { measured };
  },

  /** The addresses that the search of the documentation finds, by query, best first. */
  async search(page) {
    const found = {};
    for (const query of options.queries) {
      await page.goto(url);
      const field = page.getByRole("combobox", { name: "Search" }).or(page.getByRole("textbox", { name: "Search" }));
      while (!(await field.count())) await page.keyboard.press("Control+k"), await page.waitForTimeout(200);
      await field.first().fill(query);
      await page.getByRole("option").first().waitFor();
      found[query] = await page.getByRole("option").evaluateAll((links) => links.map((link) => new URL(link.href).pathname.slice(1)));
    }
    return { found };
  },

  /** What the page says without WebGPU, and without data. */
  async errors(page) {
    await ready(page);
    await page.click("#train");
    await page.waitForSelector("#status.error");
    const nothing = await said(page);
    await page.selectOption("#provider", "webgpu");
    await page.waitForFunction(() => /WebGPU/.test(document.querySelector("#status").textContent), null, { timeout: 60000 });
    const result = { nothing, gpu: await said(page), provider: await page.inputValue("#provider") };
    await page.click("#random");
    await page.fill("#epochs", "1");
    await page.click("#train");
    await page.waitForFunction(() => !document.querySelector("#undo").disabled, null, { timeout: 60000 });
    return { ...result, random: await said(page) };
  },
};

try {
  const page = await browser.newPage({ viewport: { width: 900, height: 900 }, acceptDownloads: true });
  const problems = [];
  page.on("pageerror", (problem) => problems.push(problem.message));
  const result = await scenarios[scenario](page);
  console.log(JSON.stringify({ ...result, problems, version: browser.version() }));
} finally {
  await browser.close();
}
