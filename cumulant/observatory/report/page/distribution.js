// How a quantity is distributed over the tokens of one head.

// counts of unequal bins spread over equal ones on the drawn axis
function rebinned(histogram, across, box, count) {
  const bars = Array(count).fill(0);
  const width = (box.right - box.left) / count;
  for (const [low, high, number] of histogram) {
    const ends = [low, high].map((v) =>
      clamp((across(clamp(v, across.low, across.high)) - box.left) / width, 0, count),
    );
    const span = ends[1] - ends[0];
    const first = Math.min(Math.floor(ends[0]), count - 1);
    if (span < 1e-6) bars[first] += number;
    else
      for (let i = first; i < Math.min(Math.ceil(ends[1]), count); i += 1) {
        bars[i] += (number * (Math.min(ends[1], i + 1) - Math.max(ends[0], i))) / span;
      }
  }
  return bars;
}

function drawHistogram(width) {
  const cell = cellOf(state.head, state.quantity);
  const bins = (cell.histogram ?? []).filter(([low, high, count]) => known(low) && known(high) && known(count));
  if (!bins.length) return "No distribution was kept for this head.";
  const total = bins.reduce((sum, bin) => sum + bin[2], 0);
  const bulk = withoutTails(bins, total);
  const log = bulk[0][0] > 0 && cell.p05 > 0 && cell.p95 / cell.p05 > 40;
  const nulls = Object.entries({ random: cell.null_random, shuffled: cell.null_shuffled });
  const drawable = nulls.filter(([, value]) => known(value) && (!log || value > 0));
  const ends = [bulk[0][0], bulk.at(-1)[1], ...drawable.map(([, value]) => value)];
  const domain = padded(ends, { log, share: 0.03 });
  const count = Math.min(44, Math.floor((width - 58) / 9));
  const bars = rebinned(bins, scale(domain, 0, count), { left: 0, right: count }, count);
  const most = (100 * Math.max(...bars)) / total || 1;
  const y = { low: 0, high: most * 1.45 }; // the box of quantiles stands above
  const ticks = scale(y, 0, 1).ticks(4).filter((tick) => tick <= most * 1.02);
  const plot = frame({ width, height: 232, x: domain, y, yTicks: ticks, xLabel: withUnit(state.quantity), yLabel: "% of tokens" });
  const { svg, x } = plot;
  const box = { ...plot.box, top: 34 };
  svg.append(...goodRange(x, box), ...columns(bars, total, plot), ...quantiles(cell, x, box.top + 10));
  drawable.forEach(([name, value], row) => svg.append(...nullMark(name, x(value), row, box)));
  return svg;
}

function goodRange(x, box) {
  const range = quantityOf(state.quantity).good_range;
  if (!range || !range.every(known)) return [];
  const [from, to] = range.map((edge) => x(clamp(edge, x.low, x.high)));
  const size = { width: Math.max(to - from, 0), height: box.bottom - box.top };
  return [shape("rect", { class: "good", x: from, y: box.top, ...size })];
}

function columns(bars, total, { box, y }) {
  const step = (box.right - box.left) / bars.length;
  return bars.map((count, i) => {
    const top = y((100 * count) / total);
    const at = { x: box.left + i * step + 0.5, y: top, width: step - 1, height: box.bottom - top };
    return hint(shape("rect", { class: "bar", ...at }), () => `${show((100 * count) / total, 3)} % of ${show(total)}`);
  });
}

function nullMark(name, at, row, box) {
  const end = at > box.right - 80;
  const label = { x: at + (end ? -5 : 5), y: 15 + 12 * row, "text-anchor": end ? "end" : "start" };
  const line = shape("line", { class: `nullmark ${name}`, x1: at, x2: at, y1: 10 + 12 * row, y2: box.bottom });
  return [line, shape("text", { class: "nullmark", ...label }, name)];
}

// without the outermost thousandth on either side
function withoutTails(bins, total) {
  let [first, last] = [0, bins.length - 1];
  let [below, above] = [0, 0];
  while (first < last && (below += bins[first][2]) < total / 1000) first += 1;
  while (last > first && (above += bins[last][2]) < total / 1000) last -= 1;
  return bins.slice(first, last + 1);
}

// whiskers from 5 to 95 %, box from 25 to 75 %, the median and the mean
function quantiles(cell, x, y) {
  const at = (value) => (known(value) && (!x.log || value > 0) ? x(clamp(value, x.low, x.high)) : null);
  const [a, b, c, d, e] = [cell.p05, cell.p25, cell.p50, cell.p75, cell.p95].map(at);
  const made = [];
  if (a !== null && e !== null) made.push(shape("line", { class: "whisker", x1: a, x2: e, y1: y, y2: y }));
  if (b !== null && d !== null) {
    const size = { x: b, y: y - 6, width: Math.max(d - b, 1), height: 12, rx: 2 };
    const words = () => ["05", "25", "50", "75", "95"].map((at) => `${at} %  ${show(cell[`p${at}`])}`).join("\n");
    made.push(hint(shape("rect", { class: "box", ...size }), words));
  }
  if (c !== null) made.push(shape("line", { class: "mean", x1: c, x2: c, y1: y - 6, y2: y + 6 }));
  if (at(cell.value) !== null) made.push(mark("diamond", at(cell.value), y, 3.4, { style: "fill:var(--ink)" }));
  return made;
}
