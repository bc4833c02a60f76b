/* What the pages of the playground share: sliders whose places are in the address, and SVG. */
window.PlaygroundUI = (function () {
  "use strict";

  /* The places of sliders that the address names: #batch=3&chip=1 */
  function places() {
    const found = {};
    for (const [name, value] of new URLSearchParams(location.hash.slice(1))) found[name] = +value;
    return found;
  }

  function keep(state) {
    const said = Object.entries(state).map(([name, value]) => `${name}=${value}`).join("&");
    history.replaceState(null, "", `#${said}`);
  }

  function element(name, attributes, parent, words) {
    const made = document.createElement(name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (words !== undefined) made.textContent = words;
    if (parent) parent.appendChild(made);
    return made;
  }

  function svg(name, attributes, parent, words) {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes || {})) made.setAttribute(key, value);
    if (words !== undefined) made.textContent = words;
    if (parent) parent.appendChild(made);
    return made;
  }

  /* A slider over a list of values. Returns the function that moves it without a call of onMove. */
  function slider(parent, name, label, values, start, onMove) {
    const row = element("label", { class: "row" }, parent);
    element("span", {}, row, label);
    const input = element("input", { type: "range", min: 0, max: values.length - 1, step: 1, id: name }, row);
    const shown = element("output", { id: `${name}-shown` }, row);
    function move(at) {
      input.value = at;
      shown.textContent = values[at];
      input.setAttribute("aria-valuetext", values[at]);
    }
    input.addEventListener("input", () => {
      move(+input.value);
      onMove(+input.value);
    });
    move(start);
    return move;
  }

  /* A place within the list, whatever the address says. */
  function within(place, values, otherwise) {
    return Number.isInteger(place) && place >= 0 && place < values.length ? place : otherwise;
  }

  /* A picture below what a box has. draw(picture, width) is given as many units as there are pixels, at most 720,
     so that words keep their size on a phone. Returns the function that draws it. */
  function picture(box, draw) {
    const made = svg("svg", { role: "img" }, box);
    let drawn = 0;
    function again() {
      const { paddingLeft, paddingRight } = getComputedStyle(box);
      const room = box.clientWidth - parseFloat(paddingLeft) - parseFloat(paddingRight);
      drawn = Math.round(Math.max(280, Math.min(720, room)));
      made.textContent = "";
      draw(made, drawn);
      return drawn;
    }
    let before = box.clientWidth;
    new ResizeObserver(() => {
      if (box.clientWidth !== before && drawn) again();
      before = box.clientWidth;
    }).observe(box);
    return again;
  }

  /* How large a picture is. */
  function size(picture, width, height) {
    picture.setAttribute("viewBox", `0 0 ${width} ${height}`);
  }

  return { places, keep, element, svg, slider, within, picture, size };
})();
