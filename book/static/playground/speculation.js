/* Lesson 16: two distributions that are dragged, and what a draft's tokens are worth. */
(function () {
  "use strict";
  const { words, tenths, counts, rows, tokens } = window.PLAYGROUND.speculation;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("speculation");
  const asked = ui.places();
  const SIDES = { p: "target", q: "draft" };
  const state = { p: start("p", [5, 3, 2]), q: start("q", [2, 6, 2]), count: ui.within(asked.count, counts, 3) };
  const HIGH = 270, BASE = 240, TOP = 8;
  const move = { p: [], q: [] };

  /* Of the address: #p0=5&p1=3&p2=2; a row that does not add up is not taken. */
  function start(side, otherwise) {
    const found = words.map((_, at) => asked[side + at]);
    const whole = found.every((one) => Number.isInteger(one) && one >= 0);
    return whole && found.reduce((a, b) => a + b) === tenths ? found : otherwise;
  }

  /* The others make room, in proportion, and all add up to ten tenths. */
  function rebalance(values, at, value) {
    const others = [...values.keys()].filter((one) => one !== at);
    const before = others.reduce((sum, one) => sum + values[one], 0);
    let left = tenths - value;
    others.forEach((one, place) => {
      const share = before ? values[one] / before : 1 / others.length;
      const last = place === others.length - 1;
      values[one] = last ? left : Math.min(left, Math.round((tenths - value) * share));
      left -= values[one];
    });
    values[at] = value;
  }

  function set(side, at, value) {
    rebalance(state[side], at, Math.max(0, Math.min(tenths, value)));
    state[side].forEach((one, place) => move[side][place](one));
    const flat = { count: state.count };
    for (const name of Object.keys(SIDES)) state[name].forEach((one, place) => (flat[name + place] = one));
    ui.keep(flat);
    show();
  }

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  const values = [...Array(tenths + 1).keys()].map((one) => (one / tenths).toFixed(1));
  for (const [side, name] of Object.entries(SIDES))
    words.forEach((word, at) => {
      const label = `${name}: ${word}`;
      move[side].push(ui.slider(controls, side + at, label, values, state[side][at], (value) => set(side, at, value)));
    });
  ui.slider(controls, "count", "drafted tokens of a step", counts, state.count, (at) => {
    state.count = at;
    set("p", 0, state.p[0]);
  });
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const table = ui.element("dl", {}, box);
  const outputs = {};
  for (const [id, label] of [["alpha", "a drafted token stays with probability"],
    ["residual", "after a rejection, drawn from"], ["tokens", "tokens of a step on average"]]) {
    ui.element("dt", {}, table, label);
    outputs[id] = ui.element("dd", { id }, table);
  }
  const draw = ui.picture(box, drawBars);
  const picture = box.querySelector("svg");
  ui.element("p", { class: "note" }, box, "Left: the target. Right: the draft. The pale part is in both, and is accepted.");

  function show() {
    const [alpha, ...rest] = rows[state.p.join(",")][state.q.join(",")];
    outputs.alpha.textContent = alpha;
    outputs.residual.textContent = alpha === 1 ? "nothing: no draft is rejected" :
      words.map((word, at) => `${word} ${rest[at]}`).join(", ");
    outputs.tokens.textContent = tokens[Math.round(alpha * tenths)][state.count];
    said.textContent = "What comes out has the target's probabilities, whatever the draft's are.";
    draw();
  }

  const height = (value) => ((BASE - TOP) * value) / tenths;

  function drawBars(picture, width) {
    const each = width / words.length, bar = Math.round(each / 2.8);
    ui.size(picture, width, HIGH);
    ui.svg("title", {}, picture, "Target and draft, word by word; drag a bar");
    words.forEach((word, at) => {
      const left = (at + 0.5) * each - bar - 3;
      Object.keys(SIDES).forEach((side, place) => {
        const value = state[side][at], x = left + place * (bar + 6);
        ui.svg("rect", { x, y: TOP, width: bar, height: BASE - TOP, class: "track", "data-bar": side + at }, picture);
        ui.svg("rect", { x, y: BASE - height(value), width: bar, height: height(value), class: side, "data-bar": side + at }, picture);
        const shared = height(Math.min(state.p[at], state.q[at]));
        ui.svg("rect", { x, y: BASE - shared, width: bar, height: shared, class: "shared" }, picture);
      });
      ui.svg("text", { x: left + bar + 3, y: BASE + 20, "text-anchor": "middle", class: "tick" }, picture, word);
    });
  }

  let dragged = null;
  function drag(event) {
    const frame = picture.getBoundingClientRect();
    const y = ((event.clientY - frame.top) / frame.height) * HIGH;
    set(dragged[0], +dragged[1], Math.round(((BASE - y) / (BASE - TOP)) * tenths));
  }
  picture.addEventListener("pointerdown", (event) => {
    dragged = event.target.dataset.bar || null;
    if (!dragged) return;
    picture.setPointerCapture(event.pointerId);
    drag(event);
  });
  picture.addEventListener("pointermove", (event) => dragged && drag(event));
  for (const end of ["pointerup", "pointercancel"]) picture.addEventListener(end, () => (dragged = null));
  window.addEventListener("hashchange", () => location.reload());
  show();
})();
