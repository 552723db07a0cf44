// One figure over the depth of a model: what it would predict, what is added to the stream, how many directions it uses.

const DEPTH_PANELS = [
  { title: "Entropy of the prediction, nats", lines: [["lens_entropy", "entropy"]], zero: true },
  { title: "KL(final ‖ here), nats", lines: [["lens_kl", "KL to the final prediction"]], zero: true },
  {
    title: "Added to the stream, |added| / |stream|",
    lines: [
      ["attention_contribution", "attention"],
      ["mlp_contribution", "MLP"],
      ["cross_attention_contribution", "cross-attention"],
    ],
    heads: true,
  },
  { title: "Effective rank, directions", lines: [["effective_rank", "effective rank"]] },
];
const DEPTH_LINES = ["line", "line second", "line third"];
const DEPTH_POINTS = ["point", "point second", "point third"];

const everyDepth = () => (DATA.series ? DATA.series.parts.flatMap((part) => part.depth ?? []) : DATA.depth);

// stacks of blocks, as of an encoder and a decoder, stand side by side
function depthPositions() {
  const stacks = [...new Set(DATA.depth.map((row) => row.stack))];
  const sizes = stacks.map((stack) => DATA.depth.filter((row) => row.stack === stack).length);
  const start = (stack) => sizes.slice(0, stacks.indexOf(stack)).reduce((a, b) => a + b, 0);
  return { stacks, of: (row) => start(row.stack) + row.depth };
}

function depthLine(rows, key, x, y, stacks, place) {
  const curves = stacks.map((stack) => rows.filter((row) => row.stack === stack && drawable(row[key], y)));
  return curves.filter((list) => list.length).map((list) => path(list.map((row) => [x(place(row)), y(row[key])]))).join("");
}

const drawable = (value, y) => known(value) && (!y.log || value > 0);

function depthKey(panel, width) {
  const lines = panel.lines.map(([key, label], i) => [key, label, DEPTH_LINES[i]]);
  const shown = lines.filter(([key]) => DATA.depth.some((row) => known(row[key])));
  const entries = shown.length > 1 ? shown.map(([, label, kind]) => [label, kind]) : [];
  if (panel.heads && DATA.depth.some((row) => row.heads?.length)) entries.push(["a head", "dot"]);
  if (shown.some(([key]) => DATA.depth.some((row) => known(row[`${key}_null_random`])))) entries.push(["random weights", "nullline"]);
  const long = entries.map(([label]) => label.length * 6.1 + 28);
  const whole = long.reduce((a, b) => a + b, 0);
  const beside = panel.title.length * 6.6 + 24 + whole < width;
  let left = beside ? width - 12 - whole : 0;
  const at = beside ? 10 : 27;
  const shapes = entries.flatMap(([label, kind], i) => {
    const from = left;
    left += long[i];
    const sign =
      kind === "dot"
        ? shape("circle", { class: "headpoint", cx: from + 9, cy: at - 4, r: 2 })
        : shape("line", { class: kind, x1: from + 2, x2: from + 16, y1: at - 4, y2: at - 4 });
    return [sign, shape("text", { x: from + 20, y: at }, label)];
  });
  return { shapes, height: beside || !entries.length ? 16 : 33 };
}

function drawDepthPanel(panel, width, last) {
  const { stacks, of: place } = depthPositions();
  const keys = panel.lines.map(([key]) => key);
  const all = everyDepth().flatMap((row) => [
    ...keys.flatMap((key) => [row[key], row[`${key}_null_random`]]),
    ...(panel.heads ? (row.heads ?? []).map(([, , value]) => value) : []),
  ]);
  const values = all.filter(known);
  const positive = values.filter((value) => value > 0);
  const log = !panel.zero && positive.length > 0 && Math.max(...positive) / Math.min(...positive) > 10;
  const every = Math.ceil(DATA.depth.length / Math.max(4, Math.floor(width / 34)));
  const low = sorted(positive)[Math.floor(positive.length * 0.01)]; // a head that adds nothing does not set the scale
  const { svg, x, y } = frame({
    width,
    height: last ? 168 : 150,
    x: { low: -0.4, high: DATA.depth.length - 0.6 },
    y: padded(log ? values.filter((value) => value >= low) : values, { log, zero: !log }),
    xTicks: DATA.depth.map(place).filter((at, i) => DATA.depth[i].depth % every === 0),
    xName: (at) => {
      const row = DATA.depth.find((other) => place(other) === at);
      return row.stage === "in" ? "in" : blockNumber(row.block);
    },
    xLabel: !last ? "" : stacks.length > 1 ? stacks.join(", then ") : "state before the first block, then after each block",
  });
  const within = (value) => drawable(value, y) && value >= y.low;
  if (panel.heads)
    for (const row of DATA.depth)
      for (const [layer, head, value] of row.heads ?? [])
        if (within(value)) {
          const dot = shape("circle", { class: "headpoint", cx: x(place(row)), cy: y(value), r: 2 });
          svg.append(hint(dot, () => `layer ${layer}, head ${head}\nadds ${show(value)} of the stream`));
        }
  panel.lines.forEach(([key, label], i) => {
    const kind = panel.lines.length > 1 ? `nullline ${["first", "second", "third"][i]}` : "nullline";
    svg.append(shape("path", { class: kind, d: depthLine(DATA.depth, `${key}_null_random`, x, y, stacks, place) }));
    svg.append(shape("path", { class: DEPTH_LINES[i], d: depthLine(DATA.depth, key, x, y, stacks, place) }));
    for (const row of DATA.depth.filter((one) => within(one[key])))
      svg.append(hint(mark("circle", x(place(row)), y(row[key]), DATA.depth.length > 16 ? 2.6 : 3.6, { class: DEPTH_POINTS[i] }), () => depthHint(row, key, label)));
  });
  return svg;
}

function depthHint(row, key, label) {
  const where = row.stage === "in" ? `before ${row.block}` : `after ${row.block}`;
  const error = known(row[`${key}_se`]) ? ` ± ${show(row[`${key}_se`], 2)} (${show(row[`${key}_count`])} tokens)` : "";
  const null_ = known(row[`${key}_null_random`]) ? `\nrandom weights ${show(row[`${key}_null_random`])}` : "";
  const agreement = key === "lens_kl" && known(row.lens_agreement) ? `\nsame likeliest token ${show(100 * row.lens_agreement, 3)} %` : "";
  const loss = key === "lens_entropy" && known(row.lens_loss) ? `\nloss of the next token ${show(row.lens_loss)}` : "";
  return `${where}\n${label} ${show(row[key])}${error}${agreement}${loss}${null_}`;
}

// predictions and contributions are of a sample
function depthNote() {
  const tokens = (key) => Math.max(...DATA.depth.map((row) => row[`${key}_count`]).filter(known), 0);
  const samples = [["lens_entropy", "predictions"], ["attention_contribution", "what is added"]].filter(([key]) => tokens(key));
  return samples.length ? `${capital(samples.map(([key, label]) => `${label}: ${show(tokens(key))} tokens`).join("; "))}.` : "";
}

function drawDepth(width) {
  const panels = DEPTH_PANELS.filter(({ lines }) => lines.some(([key]) => DATA.depth.some((row) => known(row[key]))));
  if (!panels.length) return "Nothing was recorded over depth.";
  let top = 0;
  const groups = panels.map((panel, i) => {
    const key = depthKey(panel, width);
    const drawn = drawDepthPanel(panel, width, i === panels.length - 1);
    const inner = shape("g", { transform: `translate(0 ${key.height})` }, ...drawn.childNodes);
    const title = shape("text", { class: "label strong", x: 0, y: 10 }, panel.title);
    const group = shape("g", { transform: `translate(0 ${top})` }, title, ...key.shapes, inner);
    top += key.height + Number(drawn.getAttribute("height")) + 8;
    return group;
  });
  return shape("svg", { width, height: top, viewBox: `0 0 ${width} ${top}`, role: "img" }, ...groups);
}

function startDepth() {
  if (!DATA.depth.length) {
    find("depth-figure").append(nothing("Nothing was recorded over depth."));
    find("depth-table").closest("details").hidden = true;
    return;
  }
  find("depth-figure").append(figure({ title: () => `Depth${atStep()}`, name: "depth", draw: drawDepth, note: depthNote }));
  const keys = [...new Set(DATA.depth.flatMap(Object.keys))].filter((key) => key !== "heads");
  find("depth-table").append(
    sheet({
      title: "Over depth",
      name: "depth",
      header: keys,
      heading: (key) => key.replaceAll("_", " "),
      rows: () => DATA.depth.map((row) => keys.map((key) => row[key] ?? null)),
      first: (value) => String(value ?? "–"),
    }),
  );
}
