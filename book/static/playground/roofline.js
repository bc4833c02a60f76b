/* Lesson 1: a plan, its times, and where it is under the roof. All numbers are of the table. */
(function () {
  "use strict";
  const { sliders, roofs, rows } = window.PLAYGROUND.roofline;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("roofline");
  const labels = {
    model: "model", chip: "GPU", gpus: "GPUs", weight_bits: "bits of a weight",
    kv_bits: "bits of K and V", context: "tokens of context", batch: "sequences wanted",
  };
  const starts = { model: 0, chip: 1, gpus: 0, weight_bits: 0, kv_bits: 0, context: 1, batch: 3 };
  const names = Object.keys(labels);  // the order of the rows, the last one fastest
  const state = {}, asked = ui.places();
  const LEFT = 60, BOTTOM = 42, TOP = 22;
  const X = [0.5, 4096], Y = [0.1, 20000];

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  for (const name of names) {
    state[name] = ui.within(asked[name], sliders[name], starts[name]);
    ui.slider(controls, name, labels[name], sliders[name], state[name], (at) => {
      state[name] = at;
      ui.keep(state);
      show();
    });
  }
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const table = ui.element("dl", {}, box);
  const outputs = {};
  for (const [id, label] of [["running", "sequences that run"], ["memory", "ms to move the bytes"],
    ["compute", "ms to compute"], ["rate", "tokens/s at most"], ["intensity", "FLOP per byte"],
    ["tflops", "TFLOP/s"]]) {
    ui.element("dt", {}, table, label);
    outputs[id] = ui.element("dd", { id }, table);
  }
  const draw = ui.picture(box, (picture, width) => drawRoof(picture, width, row(), roofs[state.chip][state.gpus]));

  function row() {
    let at = 0;
    for (const name of names) at = at * sliders[name].length + state[name];
    return rows[at];
  }

  function part(value, [low, high]) {
    return Math.log(value / low) / Math.log(high / low);
  }

  function show() {
    const found = row(), chip = sliders.chip[state.chip], gpus = sliders.gpus[state.gpus];
    const wanted = sliders.batch[state.batch];
    for (const [at, id] of ["running", "memory", "compute", "rate", "intensity", "tflops"].entries())
      outputs[id].textContent = found ? found[at] : "–";
    if (!found) said.textContent = `Weights and one sequence do not fit on ${gpus} × ${chip}.`;
    else {
      const bound = found[1] >= found[2] ? "moving bytes" : "arithmetic";
      const fewer = found[0] < wanted ? ` Only ${found[0]} of ${wanted} sequences fit.` : "";
      said.textContent = `A step is bound by ${bound}.${fewer}`;
    }
    draw();
  }

  function drawRoof(picture, width, found, roof) {
    const high = Math.round(160 + width / 4);
    const x = (value) => LEFT + part(value, X) * (width - LEFT - 12);
    const y = (value) => high - BOTTOM - part(value, Y) * (high - BOTTOM - TOP);
    ui.size(picture, width, high);
    ui.svg("title", {}, picture, "The roof of this machine, and one decode step under it");
    for (const tick of [1, 10, 100, 1000]) {
      ui.svg("text", { x: x(tick), y: high - 24, "text-anchor": "middle", class: "tick" }, picture, tick);
      ui.svg("line", { x1: x(tick), x2: x(tick), y1: y(Y[0]), y2: y(Y[1]), class: "grid" }, picture);
    }
    for (const tick of [1, 10, 100, 1000, 10000]) {
      ui.svg("text", { x: LEFT - 8, y: y(tick) + 4, "text-anchor": "end", class: "tick" }, picture, tick);
      ui.svg("line", { x1: x(X[0]), x2: x(X[1]), y1: y(tick), y2: y(tick), class: "grid" }, picture);
    }
    ui.svg("text", { x: (LEFT + width) / 2, y: high - 5, "text-anchor": "middle", class: "tick" }, picture, "FLOP per byte");
    ui.svg("text", { x: 4, y: 12, class: "tick" }, picture, "TFLOP/s");
    const points = roof.map(([fx, fy]) => `${x(fx)},${y(fy)}`).join(" ");
    ui.svg("polyline", { points, class: "roof" }, picture);
    if (found) ui.svg("circle", { cx: x(found[4]), cy: y(found[5]), r: 8, class: "dot" }, picture);
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
