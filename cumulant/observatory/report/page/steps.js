// Steps of a training: curves against the step, and a slider that changes the step that the page shows.

const CURVES = [
  { name: "entropy", title: "Entropy" },
  { name: "log_normalizer", title: "Log-normalizer" },
  { name: "first_mass", title: "Mass on the first token" },
  { name: "sink_mass", title: "Mass on the sink" },
  { name: "ascent_index", title: "Ascent index", zero: true },
  { name: "gradientness", title: "Gradient-ness", zero: true },
  { name: "link_r2", title: "R² of the link" },
  { name: "gaussian_r2", title: "R² of a Gaussian head", least: -1 }, // a bad fit has no bound
];
const GAUSSIAN = { name: "sliced_w2", title: "Distance from a Gaussian", against: "sliced_w2_null" };

// the last step is the page itself; its parts join those of the others
function prepareSteps() {
  if (!DATA.series) return;
  const { heads, depth, states, spectra, texts } = DATA;
  DATA.series.parts.push({ heads, depth, states, spectra, texts });
  for (const part of DATA.series.parts) part.heads.sort((a, b) => a.layer - b.layer || a.head - b.head);
}

const everyHead = () => (DATA.series ? DATA.series.parts.flatMap((part) => part.heads) : DATA.heads);
const everyRow = () => (DATA.series ? DATA.series.parts.flatMap((part) => part.states) : DATA.states);
const atStep = () => (DATA.series ? `, step ${show(DATA.series.steps[state.step])}` : "");

function goTo(step) {
  if (step === state.step || !DATA.series.parts[step]) return;
  const { heads, depth, states, spectra, texts } = DATA.series.parts[step];
  Object.assign(DATA, { heads, depth, states, spectra, texts });
  const same = (head) => head.layer === state.head?.layer && head.head === state.head?.head;
  set({ step, head: heads.find(same) ?? null });
}

const meanOf = (values) => (values.length ? values.reduce((a, b) => a + b, 0) / values.length : null);

// what a curve needs of one step: all values, the one of the chosen head, and the null
function headsAt(curve, part) {
  const own = part.heads.find((head) => head.layer === state.head?.layer && head.head === state.head?.head);
  const values = sorted(part.heads.map((head) => cellOf(head, curve.name).value));
  return { values, own: own ? cellOf(own, curve.name).value : null, null: null };
}

const inside = (name, block) => name === block || String(name).startsWith(`${block}.`);

function statesAt(curve, part) {
  const rows = part.states.filter((row) => row.stage === "out" && known(row[curve.name]));
  const { name } = layerOf(state.head?.layer) ?? {};
  const own = rows.find((row) => inside(name, row.block));
  const null_ = meanOf(rows.map((row) => row[curve.against]).filter(known));
  return { values: sorted(rows.map((row) => row[curve.name])), own: own ? own[curve.name] : null, null: null_ };
}

const readAt = (curve) => DATA.series.parts.map((part) => (curve.against ? statesAt : headsAt)(curve, part));
const falls = (curve) => known(curve.least) && readAt(curve).some((s) => s.values[0] < curve.least);
const share = (values, part) => values[Math.round(part * (values.length - 1))];

function drawCurve(curve, width) {
  const { steps, log } = DATA.series;
  const values = readAt(curve);
  const raised = (value) => (known(value) ? Math.max(value, curve.least ?? value) : null);
  const all = values.flatMap((s) => [...s.values.map(raised), s.null]).filter(known);
  if (!all.length) return "Not recorded.";
  const at = (step) => (log ? step + 1 : step);
  const domain = { low: at(steps[0]), high: at(steps.at(-1)), log };
  const probe = scale(domain, 46, width - 12);
  const { svg, x, y, box } = frame({
    width,
    height: 226,
    x: domain,
    y: padded(curve.zero ? [...all, 0] : all),
    xTicks: spaced(steps.map(at), probe),
    xName: (value) => show(log ? value - 1 : value, 6),
    xLabel: "step",
  });
  const points = (of) => values.map((s, i) => [x(at(steps[i])), raised(of(s))]).filter(([, v]) => known(v));
  const line = (of, kind) => shape("path", { class: kind, d: path(points(of).map(([a, v]) => [a, y(v)])) });
  const low = points((s) => share(s.values, 0.1));
  const high = points((s) => share(s.values, 0.9)).reverse();
  const edge = [...low, ...high].map(([a, v]) => [a, y(v)]);
  svg.append(shape("path", { class: "band heads", d: `${path(edge)}Z` }));
  if (curve.zero) svg.append(shape("line", { class: "reference", x1: box.left, x2: box.right, y1: y(0), y2: y(0) }));
  if (curve.against) svg.append(line((s) => s.null, "nullline"));
  svg.append(line((s) => meanOf(s.values), "line"), line((s) => s.own, "line second"));
  const now = x(at(steps[state.step]));
  svg.append(shape("line", { class: "now", x1: now, x2: now, y1: box.top, y2: box.bottom }));
  svg.append(...columnsOf(values, (i) => x(at(steps[i])), box));
  const chosen = curve.against ? "its block" : `layer ${state.head?.layer}, head ${state.head?.head}`;
  const lines = [
    ["", curve.against ? "mean over blocks" : "mean over heads"],
    ["", chosen],
  ];
  svg.append(...keyOf({ lines, against: curve.against }, width));
  return svg;
}

// as many ticks as have room
function spaced(values, across) {
  const ticks = [];
  for (const value of values) if (!ticks.length || across(value) - across(ticks.at(-1)) > 30) ticks.push(value);
  return ticks;
}

// a hint with the numbers of the step under the pointer; a click goes there
function columnsOf(values, at, box) {
  const { steps } = DATA.series;
  return values.map((s, i) => {
    const left = i ? (at(i - 1) + at(i)) / 2 : box.left;
    const right = i < steps.length - 1 ? (at(i) + at(i + 1)) / 2 : box.right;
    const column = shape("rect", {
      class: "column",
      "data-step": steps[i],
      x: left,
      y: box.top,
      width: Math.max(right - left, 0),
      height: box.bottom - box.top,
      onclick: () => goTo(i),
    });
    return hint(column, () => {
      const ends = s.values.length > 2 ? ` (${show(share(s.values, 0.1), 3)} to ${show(share(s.values, 0.9), 3)})` : "";
      const own = known(s.own) ? `\nchosen ${show(s.own)}` : "";
      const beside = known(s.null) ? `\nGaussian null ${show(s.null)}` : "";
      return `step ${show(steps[i])}\nmean ${show(meanOf(s.values))}${ends}${own}${beside}`;
    });
  });
}

function startSlider() {
  const { steps } = DATA.series;
  const output = html("output", { for: "step" });
  const range = html("input", { type: "range", id: "step", min: 0, max: steps.length - 1, step: 1, "aria-label": "Step" });
  const update = () => {
    range.value = state.step;
    range.setAttribute("aria-valuetext", `step ${steps[state.step]}`);
    output.textContent = `Step ${show(steps[state.step])}`;
  };
  range.addEventListener("input", () => {
    stop();
    goTo(Number(range.value));
  });
  let running = null;
  const play = html("button", { type: "button", id: "play", class: "quiet" }, "Play");
  const stop = () => {
    clearInterval(running);
    running = null;
    play.textContent = "Play";
  };
  const forward = () => (state.step < steps.length - 1 ? goTo(state.step + 1) : stop());
  play.addEventListener("click", () => {
    if (running !== null) return stop();
    if (state.step === steps.length - 1) goTo(0);
    running = setInterval(forward, 700);
    play.textContent = "Stop";
    return null;
  });
  watch(["step"], update);
  update();
  find("slider").append(output, range, play);
}

function startSteps() {
  if (!DATA.series) return;
  startSlider();
  const tall = (selector) => document.querySelector(selector).offsetHeight;
  document.documentElement.style.setProperty("--bar", `${tall(".masthead")}px`);
  document.documentElement.style.scrollPaddingTop = `${tall(".masthead") + tall(".slider") + 8}px`;
  const curves = [...CURVES, GAUSSIAN].filter((curve) => readAt(curve).some((s) => s.values.length));
  find("step-figures").append(
    ...curves.map((curve) =>
      figure({
        title: curve.title,
        name: `step-${curve.name}`,
        on: ["head"],
        draw: (width) => drawCurve(curve, width),
        note: () => (falls(curve) ? `What is below ${show(curve.least)} is drawn there.` : ""),
      }),
    ),
  );
  find("step-table").append(
    sheet({
      title: "Means over heads, or over blocks",
      name: "steps",
      header: ["step", ...curves.map(({ title }) => title)],
      rows: () =>
        DATA.series.steps.map((step, i) => [step, ...curves.map((curve) => meanOf(readAt(curve)[i].values))]),
      first: (step) => show(step),
      pick: (row) => goTo(DATA.series.steps.indexOf(row[0])),
      chosen: (row) => row[0] === DATA.series.steps[state.step],
    }),
  );
}
