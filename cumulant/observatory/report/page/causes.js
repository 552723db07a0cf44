// What the model loses without the heads that stand out, beside heads chosen at random.

const REPLACED = {
  removed: { label: "Removed", mark: "circle", style: "point" },
  uniform: { label: "Uniform", mark: "square", style: "point second" },
  gaussian: { label: "Gaussian", mark: "triangle", style: "point third" },
};
const measureOf = () => DATA.causes.measures.find((measure) => measure.name === state.measure);
const effectOf = (head, replacement) => head.effects[state.measure]?.[replacement] ?? [];
const causeOf = (head) =>
  DATA.causes?.heads.find((cause) => !cause.random && cause.layer === head.layer && cause.head === head.head);

const signOf = (verdict) => html("span", { class: `sign ${verdict === "confirmed" ? "yes" : "no"}` }, verdict === "confirmed" ? "✓" : "✕");

// the number that the verdict rests on, whichever measure is shown
function judgedBy(head) {
  const measure = DATA.causes.measures.find(({ name }) => name === head.measure);
  if (!measure) return null;
  const by = head.kind === "broad" ? "uniform" : "removed";
  const [effect, low, high] = head.effects[head.measure]?.[by] ?? [];
  const ends = known(low) && known(high) ? ` (${show(low, 2)} to ${show(high, 2)})` : "";
  return `${measure.label} ${show(effect, 2)}${ends}`;
}

const rounded = (value) => (known(value) ? Number(value.toPrecision(3)) : null);

function effectWords(head, replacement) {
  const [effect, low, high] = effectOf(head, replacement);
  const ends = known(low) && known(high) ? `\n95 %: ${show(low, 3)} to ${show(high, 3)}` : "";
  const { label, unit } = measureOf();
  return `${headName(head)}${head.random ? ", chosen at random" : ""}, ${replacement}\n${label} ${show(effect, 3)} ${unit}${ends}`;
}

function drawCauses(width) {
  const heads = DATA.causes.heads.filter((head) => !head.random && head.effects[state.measure]);
  const random = DATA.causes.heads.filter((head) => head.random && head.effects[state.measure]);
  if (!heads.length) return "No head that stands out has this number.";
  const { replacements } = DATA.causes;
  // removed heads set the scale; what lies beyond it is written at the edge
  const ownScale = [...heads, ...random].flatMap((head) => (head.random ? effectOf(head, "removed").slice(0, 1) : effectOf(head, "removed")));
  const values = ownScale.some(known) ? ownScale : [...heads, ...random].flatMap((head) => replacements.flatMap((name) => effectOf(head, name)));
  const [row, left] = [34, width < 520 ? 92 : 170];
  const height = row * (heads.length + 1) + 54;
  const { label, unit } = measureOf();
  const x = padded(values.filter(known), { zero: true, share: 0.04 });
  const { svg, x: across, box } = frame({ width, height, x, left, xLabel: `change of ${label} (${unit})` });
  const within = (value) => Math.min(Math.max(across(value), box.left), box.right);
  const outside = (value) => known(value) && Math.abs(within(value) - across(value)) > 0.5;
  const zero = across(0);
  svg.append(shape("line", { class: "reference", x1: zero, x2: zero, y1: box.top, y2: box.bottom }));
  const limit = sorted(random.map((head) => effectOf(head, "removed")[0]));
  if (limit.length > 1) {
    const [from, to] = [across(limit[0]), across(limit.at(-1))];
    svg.prepend(
      shape("rect", { class: "band", x: from, y: box.top, width: Math.max(to - from, 1), height: box.bottom - box.top }),
    );
  }
  const { line } = measureOf();
  if (known(line) && !outside(line)) svg.append(shape("line", { class: "limit", x1: across(line), x2: across(line), y1: box.top, y2: box.bottom }));
  const draw = (head, y) =>
    replacements.forEach((name, index) => {
      const [effect, low, high] = effectOf(head, name);
      if (!known(effect)) return;
      const at = y + 8 * (index - (replacements.length - 1) / 2);
      if (!head.random && known(low) && known(high))
        svg.append(shape("line", { class: `whisker ${name}`, x1: within(low), x2: within(high), y1: at, y2: at }));
      const { mark: kind, style } = REPLACED[name];
      const size = head.random ? 2.6 : 4;
      svg.append(mark(kind, within(effect), at, size, { class: style }));
      if (outside(effect)) {
        const right = across(effect) > box.right;
        const words = right ? `${show(effect, 2)} →` : `← ${show(effect, 2)}`;
        svg.append(shape("text", { x: right ? box.right - 8 : box.left + 8, y: at + 3, "text-anchor": right ? "end" : "start", class: "beyond" }, words));
      }
      const target = mark("circle", within(effect), at, 7, { style: "fill:transparent" });
      svg.append(hint(target, () => effectWords(head, name)));
    });
  heads.forEach((head, index) => {
    const y = box.top + row * (index + 0.5);
    const name = width < 520 ? shortName(head) : `Layer ${head.layer}, head ${head.head}`;
    svg.append(shape("text", { class: "strong", x: 0, y: y - 2 }, name));
    svg.append(shape("text", { x: 0, y: y + 11 }, head.kind));
    draw(head, y);
  });
  const y = box.top + row * (heads.length + 0.5);
  svg.append(shape("text", { class: "strong", x: 0, y: y - 2 }, "Random heads"));
  svg.append(shape("text", { x: 0, y: y + 11 }, `${random.length} of them`));
  for (const head of random) draw(head, y);
  return svg;
}

function causesKey() {
  return DATA.causes.replacements.map((name) =>
    html(
      "span",
      { class: "key" },
      shape("svg", { width: 12, height: 12 }, mark(REPLACED[name].mark, 6, 6, 4, { class: REPLACED[name].style })),
      REPLACED[name].label,
    ),
  );
}

function startCauses() {
  if (!DATA.causes?.heads.length) return;
  const { measures, replacements } = DATA.causes;
  state.measure = measures[0].name;
  const options = measures.map(({ name, label, words }) => [name, capital(label), words]);
  find("causes-controls").append(
    choice("Measure of the model", options, state.measure, (measure) => set({ measure })),
    html("div", { class: "keys" }, causesKey()),
  );
  const before = () => (known(measureOf().baseline) ? ` It is ${show(measureOf().baseline, 3)} with all heads.` : "");
  find("causes-figure").append(
    figure({
      title: () => `Change of ${measureOf().label} (${measureOf().unit})`,
      name: "causes",
      on: ["measure"],
      draw: drawCauses,
      note: () => `${measureOf().words}${before()} Bars are intervals of 95 %. The band has all random heads that were removed; beyond the dashed line is what nine in ten of them do not reach, and where a head that should do something is confirmed. An arrow marks what lies beyond the scale, which is that of removed heads.`,
    }),
  );
  find("causes-table").append(
    sheet({
      title: () => `Change of ${measureOf().label}, head by head`,
      name: "causes",
      on: ["measure"],
      wide: false,
      header: ["head", "type", "verdict", "judged by", ...replacements],
      heading: (name) => REPLACED[name]?.label ?? capital(name),
      rows: () =>
        DATA.causes.heads.map((head) => [
          shortName(head),
          head.random ? "random" : head.kind,
          head.verdict,
          judgedBy(head),
          ...replacements.map((name) => rounded(effectOf(head, name)[0])),
        ]),
      pick: (row) => {
        const head = headNamed(row[0]);
        if (head) set({ head });
      },
      chosen: (row) => state.head && row[0] === shortName(state.head),
    }),
  );
}
