// One head: its mean by position, where it lies among all heads, all its numbers.

function drawPositions(width) {
  const curve = (head) => (cellOf(head, state.quantity).by_position ?? []).filter(([p, v]) => known(p) && known(v));
  const own = curve(state.head);
  if (own.length < 2) return "Not enough positions to draw a curve.";
  const beside = DATA.heads.filter((head) => head.layer === state.head.layer && head !== state.head).map(curve);
  const log = own.at(-1)[0] > 100;
  const at = (position) => (log ? position + 1 : position);
  const ends = { low: at(own[0][0]), high: at(own.at(-1)[0]), log };
  const values = [...own, ...beside.flat()].map(([, v]) => v);
  const { svg, x, y } = frame({ width, height: 220, x: ends, y: padded(values), xLabel: "position in the sequence" });
  const line = (points, kind) => shape("path", { class: kind, d: path(points.map(([p, v]) => [x(at(p)), y(v)])) });
  svg.append(...beside.filter((points) => points.length > 1).map((points) => line(points, "line others")));
  svg.append(line(own, "line"));
  for (const [position, value] of own) {
    const dot = mark("circle", x(at(position)), y(value), own.length > 24 ? 1.6 : 2.8, { class: "point plain" });
    svg.append(dot);
    const target = mark("circle", x(at(position)), y(value), 7, { style: "fill:transparent" });
    svg.append(hint(target, () => `position ${show(position)}\n${labelOf(state.quantity)} ${show(value)}`));
  }
  return svg;
}

function drawScatter(width) {
  const [across, up] = [state.across, state.up];
  const points = DATA.heads
    .map((head) => [head, cellOf(head, across).value, cellOf(head, up).value])
    .filter(([, a, b]) => known(a) && known(b));
  if (!points.length) return "No head has both quantities.";
  const wide = (values) => Math.min(...values) > 0 && Math.max(...values) / Math.min(...values) > 30;
  const [as, bs] = [points.map((p) => p[1]), points.map((p) => p[2])];
  const { svg, x, y } = frame({
    width,
    height: 330,
    x: padded(as, { log: wide(as) }),
    y: padded(bs, { log: wide(bs) }),
    xLabel: withUnit(across),
    yLabel: withUnit(up),
  });
  const chosenLast = points.sort((p, q) => (p[0] === state.head) - (q[0] === state.head));
  for (const [head, a, b] of chosenLast) {
    const kind = classOf(head);
    const chosen = head === state.head;
    const dot = mark(MARKS[Math.max(kind - 1, 0)], x(a), y(b), chosen ? 7 : 4.6, {
      class: `head c${kind}${chosen ? " chosen" : ""}`,
      "data-scatter": `${head.layer}.${head.head}`,
      onclick: () => set({ head }),
    });
    const words = head.hopfield_class
      ? `\nclass ${head.hopfield_class}: ${CLASS_WORDS[head.hopfield_class] ?? ""}`
      : "";
    svg.append(hint(dot, () => `${headName(head)}\n${labelOf(across)} ${show(a)}\n${labelOf(up)} ${show(b)}${words}`));
  }
  return svg;
}

function classKey() {
  const counts = CLASSES.map((name) => DATA.heads.filter((head) => head.hopfield_class === name).length);
  return CLASSES.map((name, i) =>
    counts[i]
      ? html(
          "span",
          { class: "key" },
          shape("svg", { width: 12, height: 12 }, mark(MARKS[i], 6, 6, 4.4, { class: `c${i + 1}` })),
          `${name}: ${CLASS_WORDS[name]}, ${counts[i]}`,
        )
      : null,
  );
}

function describeHead(panel) {
  const { head } = state;
  const cell = cellOf(head, state.quantity);
  const { name, kind } = layerOf(head.layer) ?? {};
  const fact = (label, value, style) => html("div", {}, html("dt", {}, label), html("dd", { class: style }, value));
  const error = known(cell.se) ? ` ± ${show(cell.se, 2)}` : "";
  const badge = classOf(head)
    ? html(
        "span",
        { class: "class" },
        html("i", { class: `c${classOf(head)}` }),
        `Hopfield class ${head.hopfield_class}`,
      )
    : null;
  if (badge) hint(badge, () => `It takes ${CLASS_WORDS[head.hopfield_class]} to hold 90 % of the attention.`);
  const facts = [
    fact(`${capital(labelOf(state.quantity))}, mean`, show(cell.value) + error),
    fact("Median", show(cell.p50)),
    fact("Spread", show(cell.std)),
    known(cell.null_random) ? fact("Random weights", show(cell.null_random), "null") : null,
    known(cell.null_shuffled) ? fact("Shuffled keys", show(cell.null_shuffled), "null") : null,
  ];
  const parts = [
    html(
      "div",
      { class: "headline" },
      html("h3", {}, headName(head) + atStep()),
      badge,
      html("small", { class: "code" }, [name, kind].filter(Boolean).join(" · ")),
    ),
    typesOf(head),
    html("dl", { class: "readout", "aria-label": labelOf(state.quantity) }, facts.filter(Boolean)),
    causeOf(head)?.words ? html("p", { class: "cause" }, signOf(causeOf(head).verdict), " ", causeOf(head).words) : null,
  ];
  panel.replaceChildren(...parts.filter(Boolean));
}

// what the head does by the rules of the glossary, a sentence for each type
function typesOf(head) {
  if (!head.types?.length) return null;
  const line = ({ kind, words }) => html("li", {}, html("span", { class: "type" }, kind), ` ${words}`);
  return html("ul", { class: "types" }, head.types.map(line));
}

function startHead() {
  if (!state.head) {
    find("head").append(nothing("Once there are heads, the selected one appears here."));
    return;
  }
  const panel = html("div", { class: "stack", id: "chosen", "aria-live": "polite" });
  describeHead(panel);
  watch(["head", "quantity"], () => describeHead(panel));
  const on = ["head", "quantity"];
  find("head").append(html("div", { class: "stack" }, panel, lookFigures()));
  find("over-tokens").append(
    figure({
      title: () => `${capital(labelOf(state.quantity))} over tokens`,
      name: "distribution",
      on,
      draw: drawHistogram,
      note: () => `${headName(state.head)}. Above: 5 to 95 %, quartiles, median, mean ◆.`,
    }),
    figure({
      title: () => `${capital(labelOf(state.quantity))} against position`,
      name: "positions",
      on,
      draw: drawPositions,
      note: () => `${headName(state.head)}; in grey the other heads of its layer.`,
    }),
  );
  startScatter();
  startHeadTable();
}

function startHeadTable() {
  const offered = { value: "Mean", std: "Spread", p50: "Median", null_random: "Random", null_shuffled: "Shuffled" };
  const columns = [["name", "Quantity"], ...Object.entries(offered).filter(([key]) => anywhere(key))];
  find("head-table").append(
    sheet({
      title: () => `All quantities of ${headName(state.head).toLowerCase()}`,
      name: "head",
      on: ["head"],
      header: columns.map(([, label]) => label),
      rows: () =>
        DATA.measured.map((name) => [name, ...columns.slice(1).map(([key]) => cellOf(state.head, name)[key] ?? null)]),
      first: (name) => term(name),
    }),
  );
}

function startScatter() {
  const has = (name) => DATA.measured.includes(name);
  state.across = has("entropy") ? "entropy" : DATA.measured[0];
  state.up = ["k90", "effective_atoms"].find(has) ?? DATA.measured[1] ?? DATA.measured[0];
  const options = DATA.measured.map((name) => [name, capital(labelOf(name))]);
  const card = figure({
    title: "This head among all heads",
    name: "scatter",
    on: ["head", "across", "up"],
    draw: drawScatter,
    note: () =>
      classKey().some(Boolean) ? "Marks are Hopfield classes: what share of the keys holds 90 % of the attention." : "",
  });
  const keys = html("div", { class: "keys" }, classKey());
  watch(["step"], () => keys.replaceChildren(...classKey().filter(Boolean)));
  const controls = html(
    "div",
    { class: "controls" },
    selector("Across", "across", options, state.across, (across) => set({ across })),
    selector("Up", "up", options, state.up, (up) => set({ up })),
    keys,
  );
  card.append(controls);
  find("scatter").append(card);
}

const term = (name) =>
  hint(html("span", { class: "term", tabindex: 0 }, capital(labelOf(name))), () => definitionOf(name));
