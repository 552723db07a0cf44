// Colour scales: sequential ones rise in lightness, so that they read without hue; one diverges at zero.

const VIRIDIS = [
  [68, 1, 84],
  [72, 40, 120],
  [62, 73, 137],
  [49, 104, 142],
  [38, 130, 142],
  [31, 158, 137],
  [53, 183, 121],
  [110, 206, 88],
  [181, 222, 43],
  [253, 231, 37],
];

const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

function between(stops, share) {
  const at = clamp(share, 0, 1) * (stops.length - 1);
  const index = Math.min(Math.floor(at), stops.length - 2);
  return stops[index].map((from, i) => Math.round(from + (at - index) * (stops[index + 1][i] - from)));
}

// a colour of the style sheet as numbers, in whichever theme is on
function themed(name) {
  const probe = html("i", { style: `color:var(--${name})` });
  document.body.append(probe);
  const colour = getComputedStyle(probe)
    .color.match(/[\d.]+/g)
    .slice(0, 3)
    .map(Number);
  probe.remove();
  return colour;
}

const sequential = () => (share) => between(VIRIDIS, share);
const diverging = () => {
  const stops = [[33, 102, 172], [103, 169, 207], themed("middle"), [239, 160, 90], [180, 80, 10]];
  return (share) => between(stops, share);
};
const tint = () => {
  const stops = [themed("surface"), themed("accent")];
  return (share) => between(stops, 0.04 + 0.72 * share);
};

const css = (colour) => `rgb(${colour.join(",")})`;

function inkOn(colour) {
  const [r, g, b] = colour.map((part) => {
    const share = part / 255;
    return share <= 0.04045 ? share / 12.92 : ((share + 0.055) / 1.055) ** 2.4;
  });
  return 0.2126 * r + 0.7152 * g + 0.0722 * b > 0.179 ? "#000000" : "#ffffff";
}

function sorted(values) {
  return values.filter(known).sort((a, b) => a - b);
}

// ends of a colour scale: the extremes, or, where a few values lie far out, the bulk with ends marked as open
function extent(values) {
  const all = sorted(values);
  if (!all.length) return null;
  const at = (share) => all[Math.round(share * (all.length - 1))];
  const [low, high] = [all[0], all.at(-1)];
  const [inner, outer] = [at(0.03), at(0.97)];
  const width = outer - inner;
  const from = all.length >= 24 && width > 0 && inner - low > 1.5 * width ? inner : low;
  const to = all.length >= 24 && width > 0 && high - outer > 1.5 * width ? outer : high;
  return { low: from, high: to, below: from > low, above: to < high };
}
