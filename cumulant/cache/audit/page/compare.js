// Methods side by side: what the bytes buy, and the table.

function curves({ width, value, label, logarithmic, limit }) {
  const rows = DATA.rows.map((row, index) => ({ row, index, span: value(row) })).filter(({ span }) => known(span[0]));
  if (!rows.length) return "Nothing was asked.";
  const ends = rows.flatMap(({ span }) => span).filter(known);
  const y = padded([...ends, ...(known(limit) ? [limit] : [])], { log: logarithmic, zero: !logarithmic });
  const keeps = rows.map(({ row }) => row.keep);
  const x = padded(keeps, { log: true, share: 0.05 });
  const { svg, x: across, y: up, box } = frame({
    ...{ width, height: 320, x, y, left: 52, yLabel: label, xLabel: "bytes held / bytes of the full cache" },
    xTicks: budgets().filter((keep) => keep >= x.low && keep <= x.high),
    xName: (keep) => percent(keep),
  });
  if (known(limit)) {
    const at = up(limit);
    svg.append(shape("line", { class: "limitline", x1: box.left, x2: box.right, y1: at, y2: at }));
    svg.append(shape("text", { x: box.right, y: at - 4, "text-anchor": "end" }, "full cache"));
  }
  const floor = (v) => (logarithmic ? Math.max(v, y.low) : v);
  const chosen = rowAt(state.row);
  names().forEach((name) => {
    const own = rows.filter(({ row }) => row.name === name).sort((a, b) => a.row.keep - b.row.keep);
    const shift = (names().indexOf(name) - (names().length - 1) / 2) * Math.min(3, 18 / names().length);
    const points = own.map(({ row, span }) => [across(row.keep) + shift, up(floor(span[0]))]);
    const style = name === chosen.name ? " chosen" : "";
    svg.append(shape("path", { class: `series ${toneOf(name)}${style}`, d: path(points) }));
    own.forEach(({ row, index, span }, i) => {
      const [at, height] = points[i];
      const group = shape("g", {
        ...{ class: `pick ${toneOf(name)}${index === state.row ? " chosen" : ""}`, tabindex: 0, role: "button" },
        "aria-label": `${name} at ${percent(row.asked)}`,
        onclick: () => set({ row: index }),
        onkeydown: (event) => ["Enter", " "].includes(event.key) && set({ row: index }),
      });
      if (known(span[1])) group.append(shape("line", { class: "spoke", x1: at, x2: at, y1: up(floor(span[1])), y2: up(floor(span[2])) }));
      group.append(mark(markOf(name), at, height, index === state.row ? 5.5 : 4, { class: "spot" }));
      hint(group, () => `${name}, ${percent(row.keep)} of the bytes\n${label} ${show(span[0], 3)}${known(span[1]) ? `\n95 %: ${within(span)}` : ""}`);
      svg.append(group);
    });
  });
  return svg;
}

function legend() {
  const box = html("div", { class: "legend" });
  const draw = () => {
    const chosen = rowAt(state.row);
    box.replaceChildren(
      ...names().map((name) => {
        const sign = shape("svg", { width: 14, height: 14 }, shape("g", { class: toneOf(name) }, mark(markOf(name), 7, 7, 4.5, { class: "spot" })));
        const index = DATA.rows.findIndex((row) => row.name === name && row.asked === chosen.asked);
        return html("button", { type: "button", "aria-pressed": String(name === chosen.name), onclick: () => set({ row: index }) }, sign, name);
      }),
    );
  };
  watch(["row"], draw);
  draw();
  return box;
}

function horizons(width) {
  const chosen = rowAt(state.row);
  const rows = DATA.rows.filter((row) => row.asked === chosen.asked);
  const all = rows.flatMap((row) => row.kl_at.map(([, value]) => value)).filter((v) => v > 0);
  if (!all.length) return "No prediction has changed.";
  const ends = chosen.kl_at.map(([horizon]) => horizon);
  const { svg, x, y } = frame({
    ...{ width, height: 300, left: 52, yLabel: "KL, nats a token", xLabel: "first tokens after the compressed part" },
    x: padded(ends, { log: true, share: 0.05 }),
    y: padded(all, { log: true }),
    xTicks: ends,
  });
  for (const row of rows) {
    const style = row.name === chosen.name ? " chosen" : "";
    const points = row.kl_at.filter(([, value]) => value > 0).map(([at, value]) => [x(at), y(value)]);
    svg.append(shape("path", { class: `series ${toneOf(row.name)}${style}`, d: path(points) }));
    points.forEach(([at, height], i) => {
      const spot = shape("g", { class: toneOf(row.name) }, mark(markOf(row.name), at, height, 3.5, { class: "spot" }));
      hint(spot, () => `${row.name}, first ${row.kl_at[i][0]} tokens\nKL ${show(row.kl_at[i][1], 3)}`);
      svg.append(spot);
    });
  }
  return svg;
}

const TASK_WIDTH = 300;

function tasks(width) {
  const chosen = rowAt(state.row);
  const rows = DATA.rows.filter((row) => row.asked === chosen.asked && known(row.retrieval[0]));
  if (!rows.length) return "Nothing was asked.";
  const kinds = Object.keys(rows[0].tasks);
  const [left, line] = [width < TASK_WIDTH + 160 ? 74 : 96, 22];
  const cell = (width - left - 8) / kinds.length;
  const svg = shape("svg", { width, height: line * (rows.length + 1) + 8, role: "img" });
  kinds.forEach((kind, i) => svg.append(shape("text", { x: left + cell * (i + 0.5), y: 13, "text-anchor": "middle" }, kind)));
  rows.forEach((row, j) => {
    const top = line * (j + 1);
    svg.append(shape("text", { class: row.name === chosen.name ? "strong" : "", x: left - 8, y: top + 15, "text-anchor": "end" }, row.name));
    kinds.forEach((kind, i) => {
      const value = row.tasks[kind][0];
      const colour = tint()(known(value) ? value : 0);
      const box = shape("g", {}, shape("rect", { x: left + cell * i + 1, y: top + 1, width: cell - 2, height: line - 2, rx: 3, fill: css(colour) }));
      box.append(shape("text", { x: left + cell * (i + 0.5), y: top + 15, "text-anchor": "middle", style: `fill:${inkOn(colour)}` }, known(value) ? show(100 * value, 2) : "–"));
      hint(box, () => `${row.name}, ${kind}: ${percent(value)}${known(row.tasks[kind][1]) ? `\n95 %: ${within(row.tasks[kind], (v) => percent(v, 2))}` : ""}`);
      svg.append(box);
    });
  });
  return svg;
}

function startCompare() {
  const on = ["row"];
  const note = "Lower is better. Both axes are logarithmic.";
  find("compare-figures").append(
    figure({ title: "Predictions: KL to the full cache", note, name: "kl", on, draw: (width) => curves({ width, value: (row) => row.kl, label: "KL, nats a token", logarithmic: true }) }),
    figure({ title: "Hidden facts that are found", note: "Higher is better.", name: "retrieval", on, draw: (width) => curves({ width, value: (row) => row.retrieval, label: "answer tokens that are right", limit: DATA.full[0] }) }),
    figure({ title: () => `Over the tokens that follow, at ${percent(rowAt(state.row).asked)}`, name: "horizons", on, draw: horizons }),
    figure({ title: () => `By question, at ${percent(rowAt(state.row).asked)}`, note: "Percent of answer tokens that are right.", name: "tasks", on, draw: tasks }),
  );
  find("compare-figures").after(legend());
  startTable();
}

const COLUMNS = [
  ["KL", "kl", (v) => show(v, 3)],
  ["ΔNLL", "nll", (v) => show(v, 3)],
  ["same token", "agreement", percent],
  ["|ΔG|", "gap", (v) => show(v, 3)],
  ["missed", "missed", percent],
  ["|ô − o| / |o|", "error", (v) => show(v, 3)],
  ["one by one", "written", (v) => show(v, 2)],
  ["together", "joint", (v) => show(v, 2)],
  ["found", "retrieval", percent],
];

function startTable() {
  const head = html("tr", {}, ["method", "bytes", ...COLUMNS.map(([label]) => label), "lowest KL", "seconds"].map((label) => html("th", { scope: "col" }, label)));
  const body = html("tbody", {});
  const ordered = DATA.rows.map((_, index) => index);
  ordered.sort((a, b) => rowAt(b).asked - rowAt(a).asked || rowAt(a).kl[0] - rowAt(b).kl[0]);
  const draw = () =>
    body.replaceChildren(
      ...ordered.map((index) => {
        const row = rowAt(index);
        const cells = COLUMNS.map(([, key, form]) => html("td", {}, form(row[key][0]), html("small", {}, within(row[key], (v) => (form === percent ? percent(v, 2) : show(v, 2))))));
        const button = html("button", { type: "button", class: "row" }, row.name);
        const ends = [html("td", {}, `${row.lowest} of ${DATA.facts.documents}`), html("td", {}, show(row.seconds, 2))];
        return html("tr", { class: index === state.row ? "link chosen" : "link", onclick: () => set({ row: index }) }, html("td", {}, button), html("td", {}, percent(row.keep)), cells, ends);
      }),
    );
  const saved = () => saveTable("methods", ["method", "keep", ...COLUMNS.map(([, key]) => key)], DATA.rows.map((row) => [row.name, row.keep, ...COLUMNS.map(([, key]) => row[key][0])]));
  find("method-table").append(html("table", {}, html("thead", {}, head), body));
  find("method-table").before(html("header", {}, html("h3", {}, "All numbers"), html("span", { class: "tools" }, saveButton("CSV", saved))));
  watch(["row"], draw);
  draw();
}
