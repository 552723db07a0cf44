// Scales, axes and the card around a figure.

function ticksOf(low, high, count) {
  const rough = (high - low) / Math.max(count, 1);
  const power = 10 ** Math.floor(Math.log10(rough));
  const off = (step) => Math.abs(Math.log(step / rough));
  const step = [1, 2, 5, 10].map((m) => m * power).reduce((best, s) => (off(s) < off(best) ? s : best));
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + 1e-9 * step; i += 1) ticks.push(i === 0 ? 0 : i * step);
  return ticks;
}

function powersOf(low, high, count) {
  const ticks = [];
  for (let p = Math.floor(Math.log10(low)); p <= Math.ceil(Math.log10(high)); p += 1) ticks.push(10 ** p);
  const within = (list) => list.filter((t) => t >= low * 0.999 && t <= high * 1.001);
  const plain = within(ticks);
  if (plain.length < 3) {
    const fine = within(ticks.flatMap((t) => [t, 2 * t, 5 * t]));
    return fine.length >= 2 ? fine : ticksOf(low, high, count);
  }
  const stride = Math.ceil(plain.length / Math.max(count, 2));
  return plain.filter((_, index) => index % stride === 0);
}

// {low, high, log} -> a function from values to pixels
function scale({ low, high, log = false }, from, to) {
  if (low === high)
    [low, high] = log ? [low / 2, high * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
  const warp = log ? Math.log : (v) => v;
  const [a, b] = [warp(low), warp(high)];
  const map = (value) => from + ((warp(value) - a) / (b - a)) * (to - from);
  return Object.assign(map, { low, high, log, ticks: (count) => (log ? powersOf : ticksOf)(low, high, count) });
}

// room around the data, so that marks at the ends are whole
function padded(values, { log = false, zero = false, share = 0.06 } = {}) {
  const all = sorted(log ? values.filter((v) => v > 0) : values);
  if (!all.length) return null;
  let [low, high] = [all[0], all.at(-1)];
  if (log) return { low: low / (high / low || 1) ** share / 1.05, high: high * (high / low || 1) ** share * 1.05, log };
  if (zero) [low, high] = [Math.min(low, 0), Math.max(high, 0)];
  const room = (high - low || Math.abs(high) || 1) * share;
  return { low: zero && low === 0 ? 0 : low - room, high: zero && high === 0 ? 0 : high + room, log };
}

function frame({ width, height, x, y, xLabel, yLabel, xTicks, yTicks, xName = show, left = 46 }) {
  const box = { left, right: width - 12, top: 12, bottom: height - (xLabel ? 38 : 24) };
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const across = scale(x, box.left, box.right);
  const up = y ? scale(y, box.bottom, box.top) : null;
  for (const tick of up ? (yTicks ?? up.ticks(4)) : []) {
    const at = up(tick);
    svg.append(shape("line", { class: "gridline", x1: box.left, x2: box.right, y1: at, y2: at }));
    svg.append(shape("text", { x: box.left - 7, y: at + 3.5, "text-anchor": "end" }, show(tick, 3)));
  }
  svg.append(shape("line", { class: "axis", x1: box.left, x2: box.right, y1: box.bottom, y2: box.bottom }));
  for (const tick of xTicks ?? across.ticks(Math.max(3, Math.floor(width / 90)))) {
    const at = across(tick);
    svg.append(shape("line", { class: "axis", x1: at, x2: at, y1: box.bottom, y2: box.bottom + 4 }));
    svg.append(shape("text", { x: at, y: box.bottom + 16, "text-anchor": "middle" }, xName(tick, 3)));
  }
  if (xLabel) svg.append(shape("text", { class: "label", x: box.right, y: height - 5, "text-anchor": "end" }, xLabel));
  if (yLabel) svg.append(shape("text", { class: "label", x: 0, y: 9 }, yLabel));
  return { svg, x: across, y: up, box };
}

function path(points) {
  return points.map(([x, y], index) => `${index ? "L" : "M"}${x.toFixed(1)} ${y.toFixed(1)}`).join("");
}

const MARKS = ["circle", "square", "triangle", "diamond", "down", "ring"];

function mark(kind, x, y, r, attributes) {
  const at = (points) => points.map(([dx, dy]) => `${(x + dx * r).toFixed(1)},${(y + dy * r).toFixed(1)}`).join(" ");
  const corners = {
    square: [
      [-0.9, -0.9],
      [0.9, -0.9],
      [0.9, 0.9],
      [-0.9, 0.9],
    ],
    triangle: [
      [0, -1.2],
      [1.1, 0.85],
      [-1.1, 0.85],
    ],
    diamond: [
      [0, -1.3],
      [1.3, 0],
      [0, 1.3],
      [-1.3, 0],
    ],
    down: [
      [0, 1.2],
      [1.1, -0.85],
      [-1.1, -0.85],
    ],
  }[kind];
  if (corners) return shape("polygon", { ...attributes, points: at(corners) });
  if (kind === "ring") return shape("circle", { ...attributes, class: `${attributes.class} ring`, cx: x, cy: y, r });
  return shape("circle", { ...attributes, cx: x, cy: y, r });
}

const nothing = (words) => html("p", { class: "empty" }, words);

// draw(width) gives an svg, or a string that says why there is none
function figure({ title, note, name, on = [], draw }) {
  const heading = html("h3", {});
  const remark = html("p", { class: "note" });
  const canvas = html("div", { class: "canvas" });
  const drawn = () => canvas.querySelector("svg");
  const button = (label, act) => saveButton(label, () => drawn() && act(drawn(), heading.textContent, name));
  const tools = html("span", { class: "tools" }, button("SVG", saveDrawing), button("PNG", savePicture));
  const card = html(
    "figure",
    { class: "figure", "data-figure": name },
    html("header", {}, heading, tools),
    remark,
    canvas,
  );
  const text = (words) => (typeof words === "function" ? words() : (words ?? ""));
  const redraw = () => {
    const width = Math.floor(canvas.clientWidth);
    if (!width) return;
    heading.textContent = text(title);
    remark.textContent = text(note);
    remark.hidden = !remark.textContent;
    const made = draw(width);
    tools.hidden = typeof made === "string";
    if (typeof made !== "string") made.setAttribute("aria-label", `${heading.textContent}. ${remark.textContent}`);
    canvas.replaceChildren(typeof made === "string" ? nothing(made) : made);
  };
  watch([...on, "theme", "step"], redraw);
  let before = 0;
  new ResizeObserver(() => {
    if (canvas.clientWidth !== before) {
      before = canvas.clientWidth;
      requestAnimationFrame(redraw); // drawn at once it would be a change within the observation
    }
  }).observe(canvas);
  return card;
}
