// The map of layers and heads.

const SIDES = { encoder: "E ", decoder: "D ", "cross-attention": "X " };

// A number that fits into a square: fewer digits, then a power of ten.
function brief(value, digits) {
  for (let count = digits; count > 0; count -= 1) {
    const text = show(value, count);
    if (text.length <= 6) return text;
  }
  return value.toExponential(0).replace(/-/g, "−");
}

function drawMap(width) {
  if (!DATA.heads.length) return "No head was recorded.";
  if (!state.head) return "Nothing was measured of these heads.";
  const columns = Math.max(...DATA.heads.map((head) => head.head)) + 1;
  const rows = DATA.rows;
  const left = 34;
  const side = clamp(Math.floor((width - left - 2) / columns), 12, 46);
  const tall = clamp(Math.floor(620 / rows.length), 14, Math.min(side, 36));
  const values = DATA.heads.map((head) => valueOf(head));
  const range = extent(everyHead().map((head) => valueOf(head))); // one scale for all steps
  const diverges = Boolean(VIEWS[state.view].diverging);
  const most = range ? Math.max(Math.abs(range.low), Math.abs(range.high)) || 1 : 1;
  const ends = !range ? null : diverges ? { low: -most, high: most, below: range.below, above: range.above } : range;
  const ramp = diverges ? diverging() : sequential();
  const share = (value) => (ends.high > ends.low ? (value - ends.low) / (ends.high - ends.low) : 0.5);
  const bottom = 30 + rows.length * tall;
  const wide = Math.max(left + columns * side + 2, Math.min(width, 260));
  const svg = shape("svg", { width: wide, height: bottom + 58, viewBox: `0 0 ${wide} ${bottom + 58}`, role: "group" });
  const every = Math.ceil(18 / side);
  for (let column = 0; column < columns; column += 1) {
    if (column % every) continue;
    svg.append(shape("text", { x: left + (column + 0.5) * side, y: 22, "text-anchor": "middle" }, String(column)));
  }
  svg.append(
    shape("text", { class: "label", x: left, y: 9 }, "head →"),
    shape("text", { class: "label", x: 0, y: 22 }, "layer"),
  );
  rows.forEach((layer, row) => {
    const label = shape("text", { x: left - 8, y: 30 + (row + 0.5) * tall + 4, "text-anchor": "end" }, `${SIDES[layerOf(layer)?.side] ?? ""}${layer}`);
    const { name, kind } = layerOf(layer) ?? {};
    if (name || kind) hint(label, () => [name, kind].filter(Boolean).join("\n"));
    svg.append(label);
  });
  DATA.heads.forEach((head, index) => {
    const [x, y] = [left + head.head * side, 30 + rows.indexOf(head.layer) * tall];
    svg.append(square(head, values[index], x, y, side, tall, known(values[index]) ? ramp(share(values[index])) : null));
  });
  if (ends) svg.append(...legend(ramp, ends, left, bottom + 16, Math.min(260, wide - left - 10)));
  queueMicrotask(markChosen);
  return svg;
}

function square(head, value, x, y, side, tall, colour) {
  const cell = shape("g", {
    class: colour ? "cell" : "cell unknown",
    role: "button",
    tabindex: -1,
    "data-head": `${head.layer}.${head.head}`,
    "aria-label": `${headName(head)}: ${labelOf(state.quantity)} ${show(value)}`,
    onclick: () => set({ head }),
    onkeydown: (event) => moveSelection(event, head),
  });
  cell.append(shape("rect", { x, y, width: side, height: tall, rx: 3, style: colour && `fill:${css(colour)}` }));
  if (side >= 34 && tall >= 18) {
    const style = colour ? `fill:${inkOn(colour)}` : null;
    cell.append(shape("text", { x: x + side / 2, y: y + tall / 2 + 3.5, style }, brief(value, side >= 40 ? 3 : 2)));
  }
  return hint(cell, () => {
    const { count, se: error } = cellOf(head, state.quantity);
    const spread = known(error) && state.view === "mean" ? ` ± ${show(error, 2)}` : "";
    const kind = head.hopfield_class ? `\nclass ${head.hopfield_class}` : "";
    const tokens = known(count) ? `\n${show(count)} tokens` : "";
    return `${headName(head)}\n${labelOf(state.quantity)} ${show(value)}${spread}${tokens}${kind}`;
  });
}

function legend(ramp, ends, x, y, width) {
  const steps = 48;
  const good = VIEWS[state.view].diverging || state.view === "std" ? null : quantityOf(state.quantity).good_range;
  const at = (value) => x + clamp((value - ends.low) / (ends.high - ends.low || 1), 0, 1) * width;
  const tiles = Array.from({ length: steps }, (_, i) =>
    shape("rect", {
      x: x + (i * width) / steps,
      y,
      width: width / steps + 0.6,
      height: 9,
      style: `fill:${css(ramp((i + 0.5) / steps))}`,
    }),
  );
  const text = (value, anchor, sign) =>
    shape("text", { x: at(value), y: y + 23, "text-anchor": anchor }, sign + show(value, 3));
  const words = [text(ends.low, "start", ends.below ? "≤ " : ""), text(ends.high, "end", ends.above ? "≥ " : "")];
  if (ends.low < 0 && ends.high > 0 && VIEWS[state.view].diverging) words.push(text(0, "middle", ""));
  for (const edge of good ?? []) {
    if (known(edge) && edge > ends.low && edge < ends.high) {
      words.push(shape("line", { class: "mean", x1: at(edge), x2: at(edge), y1: y - 3, y2: y + 12 }));
    }
  }
  const title = shape(
    "text",
    { class: "label", x, y: y + 39 },
    `${withUnit(state.quantity)}, ${VIEWS[state.view].label.toLowerCase()}`,
  );
  return [...tiles, ...words, title];
}

function moveSelection(event, head) {
  const step = { ArrowLeft: [0, -1], ArrowRight: [0, 1], ArrowUp: [-1, 0], ArrowDown: [1, 0] }[event.key];
  if (event.key === "Enter" || event.key === " ") {
    event.preventDefault();
    set({ head });
  }
  if (!step) return;
  event.preventDefault();
  const row = DATA.rows[DATA.rows.indexOf(head.layer) + step[0]];
  const next = DATA.heads.find((other) => other.layer === row && other.head === head.head + step[1]);
  if (!next) return;
  set({ head: next });
  document.querySelector(`[data-head="${next.layer}.${next.head}"]`).focus();
}

function markChosen() {
  const name = state.head ? `${state.head.layer}.${state.head.head}` : "";
  for (const cell of document.querySelectorAll("#map .cell")) {
    const chosen = cell.dataset.head === name;
    cell.setAttribute("tabindex", chosen ? 0 : -1);
    cell.setAttribute("aria-pressed", String(chosen));
    if (!chosen) continue;
    const [x, y, width, height] = ["x", "y", "width", "height"].map((key) => Number(cell.firstChild.getAttribute(key)));
    const around = { class: "outline", x: x + 0.5, y: y + 0.5, width: width - 1, height: height - 1, rx: 3 };
    cell.parentNode.querySelector(".outline")?.remove();
    cell.parentNode.append(shape("rect", around));
  }
}

function defineQuantity() {
  const { equation, words } = quantityOf(state.quantity);
  const parts = [equation && html("span", { class: "equation" }, equation), words];
  find("quantity-definition").replaceChildren(...parts.filter(Boolean));
}

function startMap() {
  const offered = Object.entries(VIEWS).filter(([view]) =>
    DATA.heads.some((head) => DATA.measured.some((name) => known(valueOf(head, name, view)))),
  );
  if (DATA.measured.length) {
    const options = DATA.measured.map((name) => [name, capital(labelOf(name))]);
    const views = offered.map(([view, { label, why }]) => [view, label, why]);
    find("map-controls").append(
      selector("Quantity", "quantity", options, state.quantity, (quantity) => set({ quantity })),
      choice("Statistic", views, state.view, (view) => set({ view })),
    );
    defineQuantity();
    watch(["quantity"], () => {
      find("quantity").value = state.quantity;
    });
  }
  find("map").append(
    figure({
      title: () => (state.quantity ? `${capital(labelOf(state.quantity))}, head by head${atStep()}` : "Head by head"),
      name: "heads",
      on: ["quantity", "view"],
      draw: drawMap,
      note: () => (DATA.layers.some((layer) => layer.side) ? "E: encoder, D: decoder, X: the decoder looks at the encoder." : ""),
    }),
  );
  watch(["quantity"], defineQuantity);
  watch(["head"], markChosen);
}
