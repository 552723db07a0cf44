// Where the chosen head looks: at what kinds of keys, how far, and from which token at which.

const KINDS = [
  ...["first_mass", "previous_mass", "self_mass", "next_mass", "same_token_mass", "induction_mass"],
  ...["repeated_induction", "delimiter_mass"],
];
const percent = (value) => (known(value) ? `${show(100 * value, 3)} %` : "–");

// rows of {label, share, chance, random, shuffled, words} as bars on one axis from 0 to 100 %
function shareBars(width, rows) {
  const [left, tall] = [Math.min(190, Math.floor(width * 0.42)), 26];
  const height = rows.length * tall + 40;
  const domain = { low: 0, high: 100 };
  const svg = shape("svg", { width, height, viewBox: `0 0 ${width} ${height}`, role: "img" });
  const x = scale(domain, left, width - 46);
  const bottom = rows.length * tall + 4;
  for (const tick of [0, 25, 50, 75, 100]) {
    svg.append(shape("line", { class: "gridline", x1: x(tick), x2: x(tick), y1: 0, y2: bottom + 4 }));
    svg.append(shape("text", { x: x(tick), y: bottom + 17, "text-anchor": "middle" }, String(tick)));
  }
  svg.append(shape("text", { class: "label", x: width, y: height - 5, "text-anchor": "end" }, "% of the attention"));
  rows.forEach((row, i) => {
    const y = 4 + i * tall;
    const bar = { class: "bar", x: left, y: y + 3, width: Math.max(x(100 * row.share) - left, 0.5), height: tall - 10 };
    const label = shape("text", { class: "name", x: left - 8, y: y + 15, "text-anchor": "end" }, cut(row.label, left));
    const marks = [row.chance, row.random, row.shuffled].filter(known).map((v) => x(100 * v));
    // after the marks that would stroke it out
    const end = marks.sort((a, b) => a - b).reduce((at, m) => (m > at - 4 && m < at + 48 ? m : at), bar.x + bar.width);
    const value = shape("text", { class: "strong", x: end + 5, y: y + 15 }, percent(row.share));
    const group = shape("g", {}, shape("rect", { x: 0, y, width, height: tall, class: "target" }), label);
    group.append(shape("rect", bar), value);
    for (const [name, style] of [
      ["chance", "reference"],
      ["random", "nullmark"],
      ["shuffled", "nullmark shuffled"],
    ]) {
      const at = x(100 * row[name]);
      if (known(row[name])) group.append(shape("line", { class: style, x1: at, x2: at, y1: y, y2: y + tall - 4 }));
    }
    svg.append(row.words ? hint(group, () => row.words) : group);
  });
  return svg;
}

// a label that fits, as wide as its letters are
const pen = document.createElement("canvas").getContext("2d");
const cut = (text, pixels) => {
  pen.font = `12px ${getComputedStyle(document.body).fontFamily}`;
  const fits = (words) => pen.measureText(words).width <= pixels - 12;
  const letters = [...text];
  while (letters.length && !fits(`${letters.join("")}…`)) letters.pop();
  return fits(text) ? text : `${letters.join("")}…`;
};

function kindsOf(head) {
  return KINDS.filter((name) => known(cellOf(head, name).value)).map((name) => {
    const cell = cellOf(head, name);
    const chance = cellOf(head, `${name}_chance`).value;
    const { null_random: random, null_shuffled: shuffled } = cell;
    const beside = { "by chance": chance, "random weights": random, "shuffled keys": shuffled };
    const lines = Object.entries(beside).filter(([, value]) => known(value));
    const words = [definitionOf(name), ...lines.map(([label, value]) => `${label} ${percent(value)}`)].join("\n");
    const label = labelOf(name).replace(/^mass on (the )?/, "");
    return { label: capital(label), share: cell.value, chance, random, shuffled, words };
  });
}

function drawKinds(width) {
  const rows = kindsOf(state.head);
  return rows.length ? shareBars(width, rows) : "Where this head looks was not recorded.";
}

// of the named parts of the texts: [name, share, chance, random, shuffled]
const partsOf = (head) => DATA.parts?.[`${head.layer}.${head.head}`] ?? [];

function drawParts(width) {
  const rows = partsOf(state.head).map(([label, share, chance, random, shuffled]) => {
    const beside = { "by chance": chance, "random weights": random, "shuffled keys": shuffled };
    const lines = Object.entries(beside).filter(([, value]) => known(value));
    const words = [label, percent(share), ...lines.map(([name, value]) => `${name} ${percent(value)}`)].join("\n");
    return { label, share, chance, random, shuffled, words };
  });
  return rows.length ? shareBars(width, rows) : "No token that this head reads from is in a named part.";
}

const distancesOf = (head) =>
  Object.entries(head.values)
    .filter(([name]) => /^distance_\d/.test(name) && !name.endsWith("_before"))
    .map(([name, cell]) => ({ from: Number(/\d+/.exec(name)[0]), name, cell, before: cellOf(head, `${name}_before`).value }))
    .sort((a, b) => a.from - b.from);

function drawDistances(width) {
  const all = distancesOf(state.head);
  const last = all.findLastIndex(({ cell }) => [cell.value, cell.null_random].some((v) => v > 0));
  const bins = all.slice(0, last + 1);
  if (!bins.length) return "How far this head looks was not recorded.";
  const values = bins.flatMap(({ cell }) => [cell.value, cell.null_random, cell.null_shuffled].filter(known));
  const most = 100 * Math.max(...values);
  const places = bins.map((_, i) => i + 0.5);
  const { svg, x, y, box } = frame({
    width,
    height: 210,
    x: { low: 0, high: bins.length },
    y: { low: 0, high: most * 1.12 },
    xTicks: places,
    xName: (place) => String(bins[Math.floor(place)].from) + (Math.floor(place) === all.length - 1 ? "+" : ""),
    xLabel: width < 420 ? "tokens away, from this number on" : "tokens away; a bar holds distances from its number to the next",
    yLabel: "% of the attention",
  });
  const wide = x(1) - x(0);
  bins.forEach(({ name, cell, before }, i) => {
    const lines = [["random weights", cell.null_random], ["shuffled keys", cell.null_shuffled]];
    const top = y(100 * cell.value);
    const bar = shape("g", {}, shape("rect", { class: "bar", x: x(i) + 2, y: top, width: wide - 4, height: box.bottom - top }));
    if (known(before)) {
      const [edge, after] = [y(100 * before), Math.max(cell.value - before, 0)]; // what comes after stands on what comes before
      bar.append(shape("rect", { class: "bar after", x: x(i) + 2, y: top, width: wide - 4, height: Math.max(edge - top, 0) }));
      lines.push(["before", before], ["after", after]);
    }
    const words = lines.filter(([, v]) => known(v)).map(([label, v]) => `\n${label} ${percent(v)}`);
    svg.append(hint(bar, () => `${capital(labelOf(name))}\n${percent(cell.value)}${words.join("")}`));
    if (wide >= 26) {
      const over = [cell.value, cell.null_random, cell.null_shuffled].filter(known).filter((v) => y(100 * v) > top - 18);
      const at = { class: "strong", x: x(i + 0.5), y: y(100 * Math.max(...over)) - 4, "text-anchor": "middle" };
      svg.append(shape("text", at, show(100 * cell.value, 2)));
    }
    for (const [key, style] of [["null_random", "nullmark"], ["null_shuffled", "nullmark shuffled"]]) {
      const at = y(100 * cell[key]);
      if (known(cell[key])) svg.append(shape("line", { class: style, x1: x(i) + 2, x2: x(i + 1) - 2, y1: at, y2: at }));
    }
  });
  return svg;
}

// where the chosen head looks from a token: [key, percent], the most attention first
function looksOf(text, index) {
  const row = text.looks?.[`${state.head.layer}.${state.head.head}`]?.[index] ?? [];
  return Array.from({ length: row.length / 2 }, (_, i) => [row[2 * i], row[2 * i + 1]]);
}

const tokenName = (token) => (token ?? "").trim() || (/\n/.test(token ?? "") ? "(end of line)" : "(space)");
const nameOf = (text, index) => `${tokenName(text.tokens[index])} (${index})`;

function drawPattern(width) {
  const text = DATA.texts[state.text];
  const count = text.tokens.length;
  const [left, size] = [40, Math.min(width - 44, 420)];
  const height = size + 38;
  const svg = shape("svg", { width, height, role: "img", viewBox: `0 0 ${width} ${height}` });
  const at = scale({ low: 0, high: count }, 0, size);
  const step = size / Math.max(count, 1);
  const ends = { x1: left, y1: 4, x2: left + size, y2: 4 + size, class: "axis" };
  svg.append(shape("rect", { x: left, y: 4, width: size, height: size, class: "ground" }), shape("line", ends));
  for (const tick of at.ticks(5).filter((t) => t < count)) {
    svg.append(shape("text", { x: left + at(tick + 0.5), y: size + 18, "text-anchor": "middle" }, String(tick)));
    svg.append(shape("text", { x: left - 6, y: 8 + at(tick + 0.5), "text-anchor": "end" }, String(tick)));
  }
  const label = { class: "label", x: left + size, y: height - 4, "text-anchor": "end" };
  svg.append(shape("text", label, "position of the token looked at →"));
  let drawn = 0;
  for (let index = 0; index < count; index++) {
    for (const [key, share] of looksOf(text, index)) {
      if (key >= count) continue;
      drawn += 1;
      const cell = shape("rect", {
        x: left + key * step,
        y: 4 + index * step,
        width: Math.max(step, 1.5),
        height: Math.max(step, 1.5),
        class: "look",
        "fill-opacity": Math.max(share / 100, 0.08),
      });
      svg.append(hint(cell, () => `${nameOf(text, index)} → ${nameOf(text, key)}\n${share} % of the attention`));
    }
  }
  return drawn ? svg : "Where this head looks was not recorded for this text.";
}

// tokens by the attention that they get from all tokens of the text, as far as they are among the three of each
function topKeys(text) {
  const sums = new Map();
  let rows = 0;
  text.tokens.forEach((_, index) => {
    const looks = looksOf(text, index);
    rows += looks.length > 0;
    for (const [key, share] of looks) {
      const own = tokenName(text.tokens[key]);
      const name = key === 0 ? `first token, ${own}` : own;
      const [sum, places] = sums.get(name) ?? [0, new Set()];
      sums.set(name, [sum + share / 100, places.add(key)]);
    }
  });
  const found = [...sums].map(([name, [sum, places]]) => ({ name, share: sum / rows, count: places.size }));
  return found.sort((a, b) => b.share - a.share).slice(0, 8);
}

function drawTopKeys(width) {
  const rows = topKeys(DATA.texts[state.text]).map(({ name, share, count }) => ({
    label: count > 1 ? `${name} × ${count}` : name,
    share,
    words: `${name}\n${percent(share)} of the attention in this text\n${count} ${count > 1 ? "places" : "place"}`,
  }));
  return rows.length ? shareBars(width, rows) : "Where this head looks was not recorded for this text.";
}

function lookFigures() {
  const on = ["head"];
  const nulls = ["random", "shuffled"].filter((name) => anywhere(`null_${name}`));
  const marks = ["chance (grey, dashed)", ...nulls.map((name) => `${name} (${name === "random" ? "full" : "dashed"})`)];
  const figures = [];
  if (DATA.heads.some((head) => kindsOf(head).length)) {
    figures.push(
      figure({
        title: () => `At what ${headName(state.head).toLowerCase()} looks`,
        name: "kinds",
        on,
        draw: drawKinds,
        note: () => `Mean over tokens that have such a key; kinds overlap. Lines: ${marks.join(", ")}.`,
      }),
    );
  }
  if (!DATA.series && DATA.heads.some((head) => partsOf(head).length)) {
    figures.push(
      figure({
        title: "At which part of the text",
        name: "parts",
        on,
        draw: drawParts,
        note: () => `Mean over tokens that see the part. Lines: ${marks.join(", ")}.`,
      }),
    );
  }
  if (DATA.heads.some((head) => distancesOf(head).length)) {
    const mean = () => cellOf(state.head, "mean_distance").value;
    figures.push(
      figure({
        title: "How far it looks",
        name: "distances",
        on,
        draw: drawDistances,
        note: () => {
          const sides = distancesOf(state.head).some(({ before }) => known(before)) ? " Lower part: before, upper: after." : "";
          return (known(mean()) ? `On average ${show(mean(), 3)} tokens away.` : "") + sides;
        },
      }),
    );
  }
  if (DATA.texts.some((text) => Object.keys(text.looks ?? {}).length)) {
    const name = () => DATA.texts[state.text].name ?? `text ${state.text + 1}`;
    figures.push(
      figure({
        title: "Its pattern",
        name: "pattern",
        on: [...on, "text"],
        draw: drawPattern,
        note: () => `${name()}: rows are tokens that look, columns the three that each looks at most; darker is more.`,
      }),
      figure({
        title: "Tokens it looks at most",
        name: "top-keys",
        on: [...on, "text"],
        draw: drawTopKeys,
        note: () => `${name()}: sums over the three keys that each token looks at most.`,
      }),
    );
  }
  return figures;
}
