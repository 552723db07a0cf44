// Tables that sort by any column and can be saved.

function sheet({
  title,
  name,
  on = [],
  header,
  rows,
  first = (value) => value,
  heading = (text) => text,
  wide = true,
  pick,
  chosen,
}) {
  let order = null;
  const caption = html("h3", {});
  const head = html("tr", {});
  const body = html("tbody", {});
  const plainTitles = () => header.map((text) => (typeof heading(text) === "string" ? heading(text) : text));
  const button = saveButton("CSV", () => saveTable(name, plainTitles(), rows()));
  const card = html(
    "div",
    { class: "sheet", "data-sheet": name },
    html("header", {}, caption, html("span", { class: "tools" }, button)),
    html(
      "div",
      { class: wide ? "scroll" : "scroll whole", tabindex: 0, role: "region", "aria-label": name },
      html("table", {}, html("thead", {}, head), body),
    ),
  );
  const turn = (column) => {
    order = order?.column === column ? { column, sign: -order.sign } : { column, sign: column ? -1 : 1 };
    redraw();
  };
  const redraw = () => {
    caption.textContent = typeof title === "function" ? title() : title;
    head.replaceChildren(...header.map((text, column) => columnTitle(heading(text), column, order, turn)));
    const ordered = order ? [...rows()].sort((a, b) => compare(a[order.column], b[order.column], order.sign)) : rows();
    const inside = body.contains(document.activeElement);
    body.replaceChildren(...ordered.map((row) => line(row, first, pick, chosen)));
    if (inside) body.querySelector(".chosen button")?.focus();
    if (!ordered.length)
      body.append(html("tr", {}, html("td", { colspan: header.length, class: "empty" }, "Nothing was recorded.")));
  };
  redraw();
  watch([...on, "step"], redraw);
  return card;
}

function columnTitle(text, column, order, turn) {
  const sorted = order?.column === column ? (order.sign > 0 ? "ascending" : "descending") : null;
  const sign = sorted ? (order.sign > 0 ? " ↑" : " ↓") : "";
  const label = typeof text === "string" ? text : text.label;
  const button = html("button", { type: "button", onclick: () => turn(column) }, label + sign);
  if (text.words) hint(button, () => text.words);
  return html("th", { scope: "col", "aria-sort": sorted }, button);
}

function line(row, first, pick, chosen) {
  const cells = row.map((value, column) => {
    if (!column)
      return html("td", {}, pick ? html("button", { type: "button", class: "row" }, first(value)) : first(value));
    return html("td", {}, typeof value === "number" || value === null || value === undefined ? show(value) : value);
  });
  const picked = chosen?.(row);
  return html(
    "tr",
    {
      class: [pick && "link", picked && "chosen"].filter(Boolean).join(" ") || null,
      onclick: pick && (() => pick(row)),
    },
    cells,
  );
}

// what is not known comes last whichever way the column is turned
function compare(a, b, sign) {
  const missing = (value) => value === null || value === undefined;
  if (missing(a) || missing(b)) return missing(a) - missing(b);
  return (
    sign *
    (typeof a === "number" && typeof b === "number"
      ? a - b
      : String(a).localeCompare(String(b), "en", { numeric: true }))
  );
}

function startTable() {
  if (!DATA.heads.length) {
    find("heads-table").append(nothing("No head was recorded."));
    return;
  }
  const statistics = [
    ["value", "Mean"],
    ["std", "Spread"],
    ["p05", "5 %"],
    ["p50", "Median"],
    ["p95", "95 %"],
    ["null_random", "Random"],
    ["null_shuffled", "Shuffled"],
    ["count", "Count"],
  ].filter(([key]) => anywhere(key));
  find("table-controls").append(
    choice("Statistic of the table", statistics, state.statistic, (statistic) => set({ statistic })),
  );
  const label = () => (statistics.find(([key]) => key === state.statistic)?.[1] ?? "").toLowerCase();
  find("heads-table").append(
    sheet({
      title: () => `${show(DATA.heads.length)} head${DATA.heads.length === 1 ? "" : "s"}, ${label()}`,
      name: "all-heads",
      on: ["head", "statistic"],
      header: ["layer", "head", "class", ...DATA.measured],
      heading: (name) =>
        DATA.measured.includes(name) ? { label: capital(labelOf(name)), words: definitionOf(name) } : name,
      rows: () =>
        DATA.heads.map((head) => [
          head.layer,
          head.head,
          head.hopfield_class,
          ...DATA.measured.map((name) => cellOf(head, name)[state.statistic] ?? null),
        ]),
      first: (layer) => String(layer),
      pick: (row) => set({ head: DATA.heads.find((head) => head.layer === row[0] && head.head === row[1]) }),
      chosen: (row) => state.head?.layer === row[0] && state.head?.head === row[1],
    }),
  );
}
