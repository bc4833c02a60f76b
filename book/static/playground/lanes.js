/* Lesson 0: the bytes that a warp's lanes ask for, and the sectors that hold them. */
(function () {
  "use strict";
  const { sliders, rows } = window.PLAYGROUND.lanes;
  const ui = window.PlaygroundUI;
  const box = document.getElementById("lanes");
  const asked = ui.places();
  const labels = {
    distance: "distance, in elements", itemsize: "bytes of an element", count: "elements",
    access: "access", lane: "lanes that have asked, up to",
  };
  const starts = { distance: 0, itemsize: 2, count: 0, access: 0, lane: 31 };
  const SECTOR = 32, IN_A_ROW = 16, WIDE = 40, HIGH = 16, GAP = 4;
  const state = {};

  box.textContent = "";
  const controls = ui.element("div", { class: "controls" }, box);
  for (const name of Object.keys(labels)) {
    state[name] = ui.within(asked[name], sliders[name], starts[name]);
    ui.slider(controls, name, labels[name], sliders[name], state[name], (at) => {
      state[name] = at;
      ui.keep(state);
      show();
    });
  }
  const said = ui.element("p", { id: "said", "aria-live": "polite" }, box);
  const picture = ui.svg("svg", { role: "img" }, box);

  function request() {
    const { distance, itemsize, count } = sliders;
    const at = (state.distance * itemsize.length + state.itemsize) * count.length + state.count;
    return rows[at][sliders.access[state.access]];
  }

  function show() {
    const found = request(), size = sliders.itemsize[state.itemsize], lane = sliders.lane[state.lane];
    const place = found.lanes.indexOf(lane);
    const own = place < 0 ? `Lane ${lane} asks for nothing: its mask is off.` :
      `Lane ${lane} asks for byte ${found.bytes[place]}${size > 1 ? ` to ${found.bytes[place] + size - 1}` : ""}.`;
    said.textContent = `${own} All lanes together ask for ${found.sectors} sectors.`;
    draw(found, size, lane);
  }

  function draw(found, size, lane) {
    const count = Math.max(...found.bytes) + size, sectors = Math.ceil(count / SECTOR);
    const rowsOfSectors = Math.ceil(sectors / IN_A_ROW);
    picture.textContent = "";
    picture.setAttribute("viewBox", `0 0 ${IN_A_ROW * (WIDE + GAP)} ${rowsOfSectors * (HIGH + 8) + 10}`);
    ui.svg("title", {}, picture, "Memory in sectors of 32 bytes, and the bytes that lanes ask for");
    const touched = new Set();
    found.lanes.forEach((one, at) => one <= lane && touched.add(Math.floor(found.bytes[at] / SECTOR)));
    for (let sector = 0; sector < sectors; sector++) {
      const [x, y] = corner(sector);
      ui.svg("rect", { x, y, width: WIDE, height: HIGH, class: touched.has(sector) ? "sector asked" : "sector" }, picture);
    }
    found.lanes.forEach((one, at) => {
      if (one > lane) return;
      const [x, y] = corner(Math.floor(found.bytes[at] / SECTOR));
      const start = ((found.bytes[at] % SECTOR) * WIDE) / SECTOR;
      ui.svg("rect", {
        x: x + start, y: y + 2, width: (size * WIDE) / SECTOR - 0.4, height: HIGH - 4,
        class: one === lane ? "lane now" : "lane", "data-lane": one,
      }, picture);
    });
  }

  function corner(sector) {
    return [(sector % IN_A_ROW) * (WIDE + GAP) + 2, Math.floor(sector / IN_A_ROW) * (HIGH + 8) + 4];
  }

  window.addEventListener("hashchange", () => location.reload());
  show();
})();
