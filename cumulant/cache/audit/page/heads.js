// Where the damage is: a map of heads, layers one by one and together, and the heads by rank.

const QUANTITIES = {
  damage: { label: "Damage", words: "|W_O (ô − o)|² / |x|²: what the head writes wrongly, over the residual stream in front of its block.", log: true },
  error: { label: "Error", words: "|ô − o| / |o|: the output of the head before W_O, in the root mean square." },
  missed: { label: "Missed", words: "Attention with the full cache on tokens that are not held as they were." },
  gap: { label: "ΔG", words: "Ĝ − G: below 0 the head lacks mass and attends more to what is left; above 0 it has too much.", diverging: true },
  on_prefix: { label: "On the prefix", words: "Attention with the full cache on the compressed part: a head that does not look there cannot be damaged." },
};

const mapOf = () => DATA.maps[state.row];

function drawMap(width) {
  const { log, diverging: twoSided } = QUANTITIES[state.quantity];
  const grid = mapOf()[state.quantity];
  const [left, columns] = [34, grid[0].length];
  const size = Math.max(9, Math.min(52, (width - left - 4) / columns));
  const height = Math.max(10, Math.min(size, 19, 700 / grid.length));
  const all = grid.flat().filter(known);
  const positive = sorted(all.filter((v) => v > 0));
  if (log && !positive.length) return "No head has an error.";
  const low = log ? Math.max(positive[0], positive.at(-1) * 1e-4) : 0;
  const high = twoSided ? Math.max(...all.map(Math.abs), 1e-12) : Math.max(...all, 1e-12);
  const place = (v) => (twoSided ? 0.5 + v / (2 * high) : log ? Math.log(Math.max(v, low) / low) / Math.log(high / low || 2) : v / high);
  const colours = twoSided ? diverging() : sequential();
  const svg = shape("svg", { width, height: height * grid.length + 58, role: "img" });
  grid.forEach((row, layer) => {
    if (layer % (height < 14 ? 2 : 1) === 0) svg.append(shape("text", { x: left - 8, y: height * layer + height / 2 + 4, "text-anchor": "end" }, String(layer)));
    row.forEach((value, head) => {
      const cell = shape("g", { class: "cell" }, shape("rect", { x: left + size * head, y: height * layer, width: size, height, fill: css(colours(place(value))) }));
      hint(cell, () => `Layer ${layer}, head ${head}\n${Object.entries(QUANTITIES).map(([key, { label }]) => `${label} ${show(mapOf()[key][layer][head], 3)}`).join("\n")}`);
      svg.append(cell);
    });
  });
  const bottom = height * grid.length;
  svg.append(shape("text", { class: "label", x: left, y: bottom + 16 }, `${columns} heads of ${grid.length} layers, from above`));
  const wide = Math.min(180, width - left - 10);
  for (let i = 0; i < 30; i += 1)
    svg.append(shape("rect", { x: left + (wide / 30) * i, y: bottom + 26, width: wide / 30 + 0.5, height: 9, fill: css(colours(i / 29)) }));
  svg.append(shape("text", { x: left, y: bottom + 48 }, show(twoSided ? -high : low, 2)));
  svg.append(shape("text", { x: left + wide, y: bottom + 48, "text-anchor": "end" }, show(high, 2)));
  return svg;
}

function drawLayers(width) {
  const { apart, joint } = mapOf();
  const values = [...apart, ...joint].filter((v) => v > 0);
  if (!values.length) return "No head has an error.";
  const ends = padded(values, { log: true, share: 0.03 });
  const line = Math.max(10, Math.min(17, 340 / apart.length));
  const height = line * apart.length + 50;
  const { svg, x } = frame({ width, height, x: ends, left: 34, xLabel: "squared error over the squared stream" });
  apart.forEach((value, layer) => {
    const middle = 12 + line * (layer + 0.5);
    const row = shape("g", {}, shape("rect", { class: "target", x: 34, y: middle - line / 2, width: width - 46, height: line }));
    if (layer % (line < 14 ? 2 : 1) === 0) svg.append(shape("text", { x: 26, y: middle + 4, "text-anchor": "end" }, String(layer)));
    if (value > 0 && joint[layer] > 0) {
      const [from, to] = [x(value), x(joint[layer])];
      row.append(shape("line", { class: "axis", x1: from, x2: to, y1: middle, y2: middle }));
      row.append(shape("circle", { class: "apart", cx: from, cy: middle, r: 4 }), shape("circle", { class: "joint", cx: to, cy: middle, r: 3.4 }));
    }
    hint(row, () => `Layer ${layer}\nheads one by one ${show(value, 3)}\ntogether ${show(joint[layer], 3)}${value > 0 ? `\ntogether / one by one ${show(joint[layer] / value, 2)}` : ""}`);
    svg.append(row);
  });
  return svg;
}

function ranked() {
  const { damage } = mapOf();
  return damage
    .flatMap((row, layer) => row.map((value, head) => ({ layer, head, value })))
    .sort((a, b) => b.value - a.value);
}

function startHeads() {
  const choices = Object.entries(QUANTITIES).map(([key, { label, words }]) => [key, label, words]);
  find("map-controls").append(choice("Quantity", choices, state.quantity, (quantity) => set({ quantity })));
  const say = () => find("quantity").replaceChildren(QUANTITIES[state.quantity].words);
  watch(["quantity"], say);
  say();
  const on = ["row", "quantity"];
  const title = () => `${QUANTITIES[state.quantity].label} of every head, ${rowAt(state.row).name} at ${percent(rowAt(state.row).asked)}`;
  find("map").append(figure({ title, name: "heads", on, draw: drawMap }));
  const body = html("tbody", {});
  const sheet = html("div", { class: "sheet" }, html("header", {}, html("h3", {}, "Heads by damage")), html("p", { class: "note" }));
  const header = ["", "head", "damage", "missed", "ΔG", "error"].map((label) => html("th", { scope: "col" }, label));
  sheet.append(html("div", { class: "scroll whole" }, html("table", { class: "ranks" }, html("thead", {}, html("tr", {}, header)), body)));
  const draw = () => {
    const heads = ranked();
    const total = heads.reduce((sum, { value }) => sum + value, 0);
    const ten = heads.slice(0, 10).reduce((sum, { value }) => sum + value, 0);
    sheet.querySelector(".note").textContent = total > 0 ? `The first ten of ${heads.length} have ${percent(ten / total, 2)} of the damage of all.` : "";
    const map = mapOf();
    body.replaceChildren(
      ...heads.slice(0, 10).map(({ layer, head, value }, i) => {
        const cells = [show(value, 2), percent(map.missed[layer][head], 2), show(map.gap[layer][head], 2), show(map.error[layer][head], 2)];
        return html("tr", {}, html("td", {}, String(i + 1)), html("td", {}, `L${layer}H${head}`), cells.map((cell) => html("td", {}, cell)));
      }),
    );
  };
  watch(["row"], draw);
  draw();
  const note = "Squared errors in the residual stream, over its squared norm. Grey: heads one by one; coloured: together. Where that is to the left, errors of heads cancel.";
  find("ranks").append(sheet, figure({ title: "Heads of a layer, one by one and together", note, name: "layers", on: ["row"], draw: drawLayers }));
}
