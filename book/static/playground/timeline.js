/* Lessons 14 and 15: requests that a visitor makes, served by the lessons' schedulers in this page. */
(function () {
  "use strict";
  const ui = window.PlaygroundUI;
  const box = document.getElementById("timeline");
  const COLOURS = ["#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#D55E00", "#B8A900", "#8A8A8A"];
  const MOST = 8, LEFT = 104, RIGHT = 74, ROW = 30, STRIP = 44;
  const LISTS = {
    policy: ["static waves", "waves with a window", "continuous", "prompts first", "chunks"],
    places: [1, 2, 3, 4, 6, 8],
    budget: [128, 256, 512, 1024, 2048],
    blocks: [24, 48, 96, 192, 384],
    arrival: [...Array(31).keys()].map((at) => at * 20),
    prompt: [16, 32, 64, 128, 256, 512, 1024, 1536],
    output: [1, 2, 4, 8, 16, 32, 64],
  };
  const LABELS = {
    policy: "policy", places: "places", budget: "tokens of a step", blocks: "blocks of 16 tokens",
    arrival: "a new request: arrives at, ms", prompt: "its prompt, tokens", output: "its answer, tokens",
  };
  const START = { policy: 2, places: 3, budget: 2, blocks: 3, arrival: 5, prompt: 5, output: 4 };
  const FIRST = [[0, 128, 64], [0, 32, 8], [20, 64, 16], [60, 1024, 8], [80, 32, 32], [100, 64, 16]];
  const asked = ui.places();
  const state = {};
  for (const [name, list] of Object.entries(LISTS)) state[name] = ui.within(asked[name], list, START[name]);
  let requests = named() || FIRST;

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  for (const [name, list] of Object.entries(LISTS))
    ui.slider(controls, name, LABELS[name], list, state[name], (at) => {
      state[name] = at;
      changed();
    });
  const add = ui.element("button", { id: "add", type: "button" }, controls, "add this request");
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box, "Python starts …");
  const draw = ui.picture(box, drawLine);
  let shown = null;  // what Python found for the requests of the picture
  const list = ui.element("ul", { class: "requests" }, box);
  add.addEventListener("click", () => {
    requests = [...requests, [value("arrival"), value("prompt"), value("output")]];
    changed();
  });

  function value(name) {
    return LISTS[name][state[name]];
  }

  /* The requests that the address names: r=0.128.64_20.64.16 */
  function named() {
    const words = new URLSearchParams(location.hash.slice(1)).get("r");
    if (!words) return null;
    const rows = words.split("_").map((row) => row.split(".").map(Number));
    const known = (row) => row.length === 3 && row.every((one, at) => LISTS[["arrival", "prompt", "output"][at]].includes(one));
    return rows.length <= MOST && rows.every(known) ? rows : null;
  }

  function changed() {
    ui.keep({ ...state, r: requests.map((row) => row.join(".")).join("_") });
    show();
  }

  function show() {
    answered().catch((error) => {
      said.textContent = error.message;
      throw error;
    });
  }

  async function answered() {
    add.disabled = requests.length >= MOST;
    const wanted = {
      policy: value("policy"), places: value("places"), budget: value("budget"), blocks: value("blocks"),
      cost: window.PLAYGROUND.course.cost, requests,
    };
    const found = await window.PlaygroundPython.ask("timeline", wanted);
    list.textContent = "";
    requests.forEach((row, at) => drawRow(row, at));
    shown = found.error ? null : { ...found, requests: wanted.requests, blocks: wanted.blocks };
    draw();
    if (found.error) {
      said.textContent = `Refused: ${found.error}`;
      return;
    }
    const { rows, totals } = found;
    const first = Math.max(...rows.map((row) => row.first)), gap = Math.max(...rows.map((row) => row.gap));
    said.textContent = `${totals.passes} passes of the model in ${totals.makespan} ms: ${totals.rate} tokens/s. The latest first token ` +
      `takes ${first} ms, the longest pause of an answer ${gap} ms. ${totals.wasted} % of what is computed is padding.`;
  }

  function drawLine(picture, width) {
    ui.size(picture, width, 1);
    if (!shown) return;
    const { passes, rows, totals, requests, blocks } = shown;
    const bottom = requests.length * ROW + 8, scale = (width - LEFT - RIGHT) / totals.makespan;
    const x = (ms) => LEFT + ms * scale;
    ui.size(picture, width, bottom + STRIP + 26);
    ui.svg("title", {}, picture, "A row for each request: when it waits, when its prompt runs, and when its answer does");
    requests.forEach(([arrival, prompt, output], row) => {
      const y = row * ROW + 4;
      ui.svg("text", { x: 4, y: y + 15, class: "tick" }, picture, `${prompt} → ${output}`);
      const end = arrival + rows[row].left;
      ui.svg("rect", { x: x(arrival), y: y + 7, width: (end - arrival) * scale, height: 6, class: "track" }, picture);
      for (const part of parts(passes, row))
        ui.svg("rect", {
          x: x(part.start), y: part.prompt ? y : y + 3, width: Math.max(0.5, (part.end - part.start) * scale),
          height: part.prompt ? 20 : 14, fill: COLOURS[row], class: part.prompt ? "prompt" : "answer",
          "data-row": row, "data-tokens": part.tokens,
        }, picture);
      ui.svg("line", { x1: x(arrival), x2: x(arrival), y1: y - 2, y2: y + 22, class: "mark" }, picture);
      ui.svg("text", { x: x(end) + 5, y: y + 15, class: "tick" }, picture, `${rows[row].left} ms`);
    });
    for (const one of passes) {
      const high = (STRIP * one.used) / blocks;
      ui.svg("rect", { x: x(one.start), y: bottom + STRIP - high, width: (one.end - one.start) * scale, height: high, class: "used" }, picture);
    }
    ui.svg("text", { x: 4, y: bottom + STRIP - 4, class: "tick" }, picture, "blocks in use");
    ui.svg("line", { x1: LEFT, x2: width - RIGHT, y1: bottom + STRIP, y2: bottom + STRIP, class: "mark" }, picture);
    ui.svg("text", { x: LEFT, y: bottom + STRIP + 18, class: "tick" }, picture, "0 ms");
    ui.svg("text", { x: width - RIGHT, y: bottom + STRIP + 18, "text-anchor": "end", class: "tick" }, picture, `${totals.makespan} ms`);
  }

  /* A request's passes, those that follow each other as one. */
  function parts(passes, row) {
    const found = [];
    for (const one of passes)
      for (const [own, tokens, prompt] of one.chunks) {
        if (own !== row) continue;
        const last = found[found.length - 1];
        if (last && last.prompt === prompt && last.end === one.start) {
          last.end = one.end;
          last.tokens += tokens;
        } else found.push({ start: one.start, end: one.end, prompt, tokens });
      }
    return found;
  }

  function drawRow([arrival, prompt, output], at) {
    const item = ui.element("li", {}, list, `at ${arrival} ms, ${prompt} tokens of prompt, ${output} of answer `);
    if (requests.length === 1) return;
    const remove = ui.element("button", { type: "button", id: `remove${at}` }, item, "remove");
    remove.addEventListener("click", () => {
      requests = requests.filter((_, other) => other !== at);
      changed();
    });
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
