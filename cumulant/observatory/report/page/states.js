// Statistics of the hidden states, block by block.

function againstGaussian(name, title, label) {
  const null_ = `${name}_null`;
  return { name, title, lines: [[name, label]], against: null_, band: [`${null_}_low`, `${null_}_high`] };
}

const PANELS = [
  {
    name: "expansion",
    title: "Expansion and contraction",
    lines: [
      ["expansion", "expansion"],
      ["contraction", "contraction"],
    ],
    neutral: true,
  },
  { name: "rms", title: "Size of a token", lines: [["rms", "root mean square"]] },
  { name: "pairwise_cosine", title: "Mean cosine between tokens", lines: [["pairwise_cosine", "mean cosine"]] },
  {
    name: "effective_rank",
    title: "Dimensions in use",
    lines: [
      ["effective_rank", "effective rank"],
      ["participation_ratio", "participation ratio"],
    ],
  },
  againstGaussian("sliced_w2", "Distance from a Gaussian", "sliced W₂"),
  againstGaussian("skewness", "Skewness", "Mardia skewness"),
  againstGaussian("kurtosis", "Kurtosis", "Mardia kurtosis"),
  againstGaussian("lle_error", "Error of local linear reconstruction", "relative error"),
];

const stages = () => [...new Set(DATA.states.map((row) => row.stage ?? ""))];

// blocks may be known by their path, of which an axis has room for the number only
const blockNumber = (block) => String(block).match(/\d+(?!.*\d)/)?.[0] ?? String(block);

// rows where one of these is known, in order, the stages of a block inside its unit of depth
function atDepth(keys) {
  const rows = DATA.states.filter((row) => keys.some((key) => known(row[key])));
  const blocks = [...new Set(DATA.states.map((row) => row.block))];
  const counts = new Map();
  return rows.map((row) => {
    const inBlock = rows.filter((other) => other.block === row.block).length;
    const index = counts.get(row.block) ?? 0;
    counts.set(row.block, index + 1);
    return { row, at: blocks.indexOf(row.block) + index / inBlock };
  });
}

// growth factors are positive and neutral at 1, their logarithms take either sign and are neutral at 0
function neutralOf(panel, values) {
  const unit = quantityOf(panel.lines[0][0]).unit ?? "";
  return /log|nat|bit/i.test(unit) || values.some((value) => value <= 0) ? 0 : 1;
}

function drawPanel(panel, width) {
  const rows = atDepth(panel.lines.map(([key]) => key));
  const points = panel.lines.map(([key]) => rows.filter(({ row }) => known(row[key])));
  if (!points.some((list) => list.length)) return "Not recorded.";
  const extra = [panel.against, ...(panel.band ?? [])].filter(Boolean);
  const values = everyRow() // one scale for all steps
    .flatMap((row) => [...panel.lines.map(([key]) => row[key]), ...extra.map((key) => row[key])])
    .filter(known);
  const neutral = panel.neutral ? neutralOf(panel, values) : null;
  const log = Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 60;
  const blocks = [...new Set(DATA.states.map((row) => row.block))];
  const every = Math.ceil(blocks.length / Math.max(4, Math.floor(width / 45)));
  const last = Math.max(...rows.map(({ at }) => at));
  const { svg, x, y, box } = frame({
    width,
    height: 236,
    x: { low: -0.25, high: Math.max(last, 0.5) + 0.25 },
    y: padded([...values, ...(neutral === null ? [] : [neutral])], { log }),
    xTicks: blocks.map((_, index) => index).filter((index) => index % every === 0),
    xName: (index) => blockNumber(blocks[index]),
    xLabel: "block",
  });
  const curve = (list, key) => path(list.map(({ row, at }) => [x(at), y(row[key])]));
  if (panel.band) svg.append(...bandOf(rows, panel.band, x, y));
  if (neutral !== null && (!log || neutral > 0)) svg.append(...neutralLine(box, y(neutral)));
  if (panel.against) {
    const list = rows.filter(({ row }) => known(row[panel.against]) && (!log || row[panel.against] > 0));
    svg.append(shape("path", { class: "nullline", d: curve(list, panel.against) }));
  }
  panel.lines.forEach(([key, label], which) => {
    const kind = which ? "second" : "";
    svg.append(shape("path", { class: `line ${kind}`, d: curve(points[which], key) }));
    const size = blocks.length > 16 ? 2.6 : 3.6;
    svg.append(
      ...points[which].map(({ row, at }) => stageMark(panel, row, label, row[key], x(at), y(row[key]), size, kind)),
    );
  });
  svg.append(...keyOf(panel, width));
  return svg;
}

function stageMark(panel, row, label, value, x, y, size, kind) {
  const stage = stages().indexOf(row.stage ?? "");
  const dot = mark(MARKS[stage % MARKS.length], x, y, size, { class: `point ${kind}` });
  const where = [`block ${row.block}`, row.stage].filter(Boolean).join(", ");
  const beside = known(row[panel.against]) ? `\nGaussian null ${show(row[panel.against])}` : "";
  return hint(dot, () => `${where}\n${label} ${show(value)}${beside}`);
}

function neutralLine({ left, right }, at) {
  const line = shape("line", { class: "reference", x1: left, x2: right, y1: at, y2: at });
  return [line, shape("text", { x: left, y: 10 }, "↑ grows")];
}

function bandOf(rows, [lowKey, highKey], x, y) {
  const list = rows.filter(({ row }) => known(row[lowKey]) && known(row[highKey]) && (!y.log || row[lowKey] > 0));
  if (!list.length) return [];
  const edge = (key) => list.map(({ row, at }) => [x(at), y(row[key])]);
  return [shape("path", { class: "band", d: `${path([...edge(lowKey), ...edge(highKey).reverse()])}Z` })];
}

function keyOf(panel, width) {
  const entries =
    panel.lines.length > 1 ? panel.lines.map(([, label], which) => [label, `line ${which ? "second" : ""}`]) : [];
  if (panel.against) entries.push(["Gaussian null", "nullline"]);
  let right = width - 12;
  return entries.reverse().flatMap(([label, kind]) => {
    const long = label.length * 6.1;
    right -= long + 26;
    const at = right + 4;
    return [
      shape("line", { class: kind, x1: at, x2: at + 14, y1: 6, y2: 6 }),
      shape("text", { x: at + 18, y: 10 }, label),
    ];
  });
}

function startStages() {
  const names = stages();
  if (names.length < 2) return;
  const keys = names.map((name, i) => {
    const sign = shape("svg", { width: 12, height: 12 }, mark(MARKS[i % MARKS.length], 6, 6, 4, { class: "point" }));
    return html("span", { class: "key" }, sign, name || "block");
  });
  find("states-key").append(...keys);
}

function startStates() {
  if (!DATA.states.length) {
    find("states-figures").append(nothing("Nothing was recorded of the hidden states."));
    find("states-table").closest("details").hidden = true;
    return;
  }
  startStages();
  const drawable = PANELS.filter(({ lines }) => lines.some(([key]) => DATA.states.some((row) => known(row[key]))));
  find("states-figures").append(
    ...drawable.map((panel) =>
      figure({
        title: () => panel.title + atStep(),
        name: `states-${panel.name}`,
        draw: (width) => drawPanel(panel, width),
      }),
    ),
  );
  const keys = [...new Set(DATA.states.flatMap(Object.keys))];
  find("states-table").append(
    sheet({
      title: "Hidden states, stage by stage",
      name: "states",
      header: keys,
      heading: (key) =>
        DATA.quantities.some((q) => q.name === key)
          ? { label: capital(labelOf(key)), words: definitionOf(key) }
          : key.replaceAll("_", " "),
      rows: () => DATA.states.map((row) => keys.map((key) => row[key] ?? null)),
      first: (value) => String(value ?? "–"),
    }),
  );
}
