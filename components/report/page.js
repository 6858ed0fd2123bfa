"use strict";
// Draws the curves of the page's data as SVG. Text reaches the page as text nodes only, never as markup.
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const byId = (id) => document.getElementById(id);
  const HEIGHT = 230, LEFT = 58, RIGHT = 12, TOP = 10, BOTTOM = 24, COLOURS = 8, FEW = 40;
  const AXES = { step: "steps", tokens: "tokens", seconds: "time in steps" };
  const state = { axis: "step", log: false, smoothing: 0, marks: true, hidden: new Set() };

  function element(name, attributes = {}, words = "") {
    const made = document.createElementNS("http://www.w3.org/2000/svg", name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (words) made.textContent = words;
    return made;
  }

  function html(name, className = "", words = "") {
    const made = document.createElement(name);
    made.className = className;
    made.textContent = words;
    return made;
  }

  // The first index whose number is at least x.
  function lowerBound(numbers, x) {
    let low = 0, high = numbers.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (numbers[middle] < x) low = middle + 1; else high = middle;
    }
    return low;
  }

  // What the chosen axis shows for a step of a run, interpolated between the steps that are given.
  function along(run, step) {
    const steps = run.axes.step, values = run.axes[state.axis];
    if (state.axis === "step") return step;
    const index = lowerBound(steps, step);
    if (index === 0) return values[0] * Math.max(0, step) / steps[0];
    if (index === steps.length) return values[index - 1];
    const share = (step - steps[index - 1]) / (steps[index] - steps[index - 1]);
    return values[index - 1] + share * (values[index] - values[index - 1]);
  }

  function number(value) {
    const size = Math.abs(value);
    if (size >= 1e4) {
      for (const [unit, sign] of [[1e12, "T"], [1e9, "G"], [1e6, "M"], [1e3, "k"]]) {
        if (size >= unit) return `${Number((value / unit).toPrecision(4))} ${sign}`;
      }
    }
    if (size > 0 && size < 1e-3) return Number(value.toPrecision(4)).toExponential();
    return String(Number(value.toPrecision(5)));
  }

  function position(value) {
    if (state.axis !== "seconds") return value >= 1e4 ? number(value) : String(Math.round(value));
    const seconds = Math.round(value), two = (part) => String(part).padStart(2, "0");
    return `${Math.floor(seconds / 3600)}:${two(Math.floor(seconds / 60) % 60)}:${two(seconds % 60)}`;
  }

  // Round numbers from low to high: steps of 1, 2 or 5 times a power of ten.
  function ticks(low, high, most) {
    const least = (high - low) / most || 1, power = 10 ** Math.floor(Math.log10(least));
    const step = [1, 2, 5, 10].map((factor) => factor * power).find((each) => each >= least * 0.999);
    const found = [];
    for (let tick = Math.ceil(low / step - 1e-9); tick * step <= high + step * 1e-9; tick++) found.push(tick * step);
    return found;
  }

  function logTicks(low, high) {
    const decades = Math.log10(high / low), factors = decades > 4 ? [1] : decades > 1.2 ? [1, 3] : [1, 1.5, 2, 3, 5, 7];
    const found = [];
    for (let power = Math.floor(Math.log10(low)); power <= Math.log10(high); power++) {
      for (const factor of factors) found.push(factor * 10 ** power);
    }
    const stride = Math.ceil(decades / 8);
    const inside = found.filter((tick) => tick >= low * 0.999 && tick <= high * 1.001);
    return stride > 1 ? inside.filter((_, index) => index % stride === 0) : inside;
  }

  // An exponential mean that is not drawn towards zero at its beginning (Adam's correction).
  function smoothed(values) {
    let mean = 0, weight = 0;
    return values.map((value) => {
      mean = state.smoothing * mean + (1 - state.smoothing) * value;
      weight = state.smoothing * weight + (1 - state.smoothing);
      return mean / weight;
    });
  }

  const shown = () => data.runs.map((run, index) => ({ run, index })).filter(({ index }) => !state.hidden.has(index));

  function scales(name, width) {
    let low = Infinity, high = -Infinity, end = 0;
    for (const { run } of shown()) {
      end = Math.max(end, along(run, run.axes.step[run.axes.step.length - 1] || 0));
      const curve = run.curves[name];
      if (!curve) continue;
      for (const value of curve.low || curve.y) if (!state.log || value > 0) low = Math.min(low, value);
      for (const value of curve.high || curve.y) high = Math.max(high, value);
    }
    const log = state.log && low > 0 && high > 0 && low < Infinity;
    if (!(low <= high)) [low, high] = [0, 1];
    if (low === high) [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) / 10 || 1), high + (Math.abs(low) / 10 || 1)];
    const change = log ? Math.log : (value) => value;
    const [from, to] = [change(low), change(high)], margin = 0.04 * (to - from);
    const y = (value) => TOP + (HEIGHT - TOP - BOTTOM) * (1 - (change(value) - from + margin) / (to - from + 2 * margin));
    const x = (value) => LEFT + (width - LEFT - RIGHT) * value / (end || 1);
    return { x, y, log, end, yTicks: log ? logTicks(low, high) : ticks(low, high, 7) };
  }

  function path(xs, ys, scale) {
    let drawn = "", pen = "M";
    xs.forEach((x, index) => {
      const y = ys[index];
      if (scale.log && !(y > 0)) { pen = "M"; return; }
      drawn += `${pen}${scale.x(x).toFixed(1)} ${scale.y(y).toFixed(1)}`;
      pen = "L";
    });
    return drawn;
  }

  function drawGrid(svg, scale, width) {
    for (const tick of scale.yTicks) {
      const y = scale.y(tick);
      svg.append(element("path", { class: "grid", d: `M${LEFT} ${y}H${width - RIGHT}` }));
      svg.append(element("text", { x: LEFT - 7, y: y + 4, "text-anchor": "end" }, number(tick)));
    }
    for (const tick of ticks(0, scale.end || 1, Math.max(2, Math.floor((width - LEFT) / 72)))) {
      const anchor = scale.x(tick) > width - 30 ? "end" : "middle";
      svg.append(element("text", { x: scale.x(tick), y: HEIGHT - 7, "text-anchor": anchor }, position(tick)));
    }
  }

  function drawMarks(svg, run, colour, scale) {
    for (const [step, kind] of run.marks) {
      const x = scale.x(along(run, step)).toFixed(1), top = kind === "skipped" ? HEIGHT - BOTTOM - 9 : TOP;
      const mark = element("path", { class: `mark ${kind} c${colour}`, d: `M${x} ${top}V${HEIGHT - BOTTOM}` });
      mark.append(element("title", {}, `${run.name}: ${kind} at step ${step}`));
      svg.append(mark);
    }
  }

  function drawCurve(svg, run, colour, curve, scale) {
    const xs = curve.x.map((step) => along(run, step)), group = element("g", { class: `c${colour}` });
    if (curve.low) {
      const back = path([...xs].reverse(), [...curve.low].reverse(), scale).replace("M", "L");
      group.append(element("path", { class: "band", d: path(xs, curve.high, scale) + back + "Z" }));
    }
    group.append(element("path", { class: state.smoothing ? "line raw" : "line", d: path(xs, curve.y, scale) }));
    if (state.smoothing) group.append(element("path", { class: "line", d: path(xs, smoothed(curve.y), scale) }));
    if (xs.length <= FEW) {
      xs.forEach((x, index) => {
        if (scale.log && !(curve.y[index] > 0)) return;
        group.append(element("circle", { class: "dot", cx: scale.x(x), cy: scale.y(curve.y[index]), r: 2.4 }));
      });
    }
    svg.append(group);
    return xs;
  }

  function draw(figure, name) {
    const width = figure.clientWidth;
    figure.querySelectorAll("svg, .values").forEach((old) => old.remove());
    if (!width) return; // it is in details that are closed
    const svg = element("svg", { class: "plot", viewBox: `0 0 ${width} ${HEIGHT}`, role: "img", "aria-label": name });
    const scale = scales(name, width), drawn = [];
    drawGrid(svg, scale, width);
    for (const { run, index } of shown()) {
      const curve = run.curves[name], colour = index % COLOURS;
      if (state.marks) drawMarks(svg, run, colour, scale);
      if (curve) drawn.push({ run, colour, curve, xs: drawCurve(svg, run, colour, curve, scale) });
    }
    figure.append(svg);
    addValues(figure, svg, scale, drawn, width);
  }

  // The values nearest to the pointer.
  function addValues(figure, svg, scale, drawn, width) {
    const box = html("div", "values"), cross = element("path", { class: "cross" });
    box.hidden = true;
    svg.append(cross);
    figure.append(box);
    const leave = () => { box.hidden = true; cross.setAttribute("d", ""); };
    const move = (event) => {
      const at = (event.clientX - svg.getBoundingClientRect().left - LEFT) / (width - LEFT - RIGHT) * (scale.end || 1);
      box.replaceChildren();
      let cut = null;
      for (const { run, colour, curve, xs } of drawn) {
        const after = Math.min(lowerBound(xs, at), xs.length - 1);
        const index = after > 0 && at - xs[after - 1] < xs[after] - at ? after - 1 : after;
        const range = curve.low ? ` (${number(curve.low[index])} to ${number(curve.high[index])})` : "";
        const where = state.axis === "step" ? "" : `, ${position(xs[index])}`;
        const words = `${number(curve.y[index])}${range} at step ${curve.x[index]}${where}`;
        box.append(html("div", `c${colour}`, data.runs.length > 1 ? `${run.name}: ${words}` : words));
        if (cut === null || Math.abs(xs[index] - at) < Math.abs(cut - at)) cut = xs[index];
      }
      if (cut === null) return;
      cross.setAttribute("d", `M${scale.x(cut)} ${TOP}V${HEIGHT - BOTTOM}`);
      box.hidden = false;
      const right = scale.x(cut) < width / 2;
      box.style.left = right ? "auto" : `${LEFT + 4}px`;
      box.style.right = right ? `${RIGHT}px` : "auto";
    };
    svg.addEventListener("pointermove", move);
    svg.addEventListener("pointerdown", move);
    svg.addEventListener("pointerleave", leave);
  }

  const figures = [];
  const drawAll = () => figures.forEach(([figure, name]) => draw(figure, name));

  function addFigure(parent, name) {
    const figure = html("figure"), title = Object.hasOwn(data.titles, name) ? data.titles[name] : name;
    figure.append(html("figcaption", "", title));
    parent.append(figure);
    figures.push([figure, name]);
  }

  function addLegend() {
    if (data.runs.length < 2) return;
    data.runs.forEach((run, index) => {
      const label = html("label"), box = html("input");
      box.type = "checkbox";
      box.checked = true;
      box.addEventListener("change", () => {
        if (box.checked) state.hidden.delete(index); else state.hidden.add(index);
        drawAll();
      });
      label.append(box, html("i", `c${index % COLOURS}`), html("span", "", run.name));
      byId("legend").append(label);
    });
  }

  function addControls() {
    for (const [axis, title] of Object.entries(AXES)) {
      if (!data.runs.every((run) => axis in run.axes)) continue;
      const option = html("option", "", title);
      option.value = axis;
      byId("axis").append(option);
    }
    const controls = [["axis", "value", String], ["log", "checked", Boolean], ["smoothing", "value", Number], ["marks", "checked", Boolean]];
    for (const [id, property, read] of controls) {
      byId(id).addEventListener("input", () => { state[id] = read(byId(id)[property]); drawAll(); });
    }
  }

  const all = [...new Set(data.runs.flatMap((run) => Object.keys(run.curves)))];
  const first = Object.keys(data.titles).filter((name) => all.includes(name));
  const others = all.filter((name) => !first.includes(name)).sort();
  if (!all.length) return;
  byId("curves").hidden = false;
  addControls();
  addLegend();
  first.forEach((name) => addFigure(byId("charts"), name));
  if (others.length) {
    byId("more").hidden = false;
    byId("more").querySelector("summary").textContent = others.length === 1 ? "1 more metric" : `${others.length} more metrics`;
    others.forEach((name) => addFigure(byId("more").querySelector("div"), name));
    byId("more").addEventListener("toggle", drawAll);
  }
  drawAll();
  let waiting = false;
  addEventListener("resize", () => {
    if (waiting) return;
    waiting = true;
    requestAnimationFrame(() => { waiting = false; drawAll(); });
  });
})();
