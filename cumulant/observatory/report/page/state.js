// The selection, observers of its changes, and lookups in the data.

let DATA = {};
const state = {};
const watchers = [];

const watch = (keys, act) => watchers.push({ keys, act });

function set(changes) {
  const changed = Object.keys(changes).filter((key) => state[key] !== changes[key]);
  Object.assign(state, changes);
  for (const { keys, act } of watchers) if (keys.some((key) => changed.includes(key))) act();
}

const VIEWS = {
  mean: { label: "Mean", of: (cell) => cell.value },
  p50: { label: "Median", of: (cell) => cell.p50 },
  std: { label: "Spread", of: (cell) => cell.std, why: "Standard deviation over tokens" },
  random: {
    label: "− random",
    diverging: true,
    why: "Mean minus the mean of the same architecture at random initialisation",
    of: (cell) => (known(cell.value) && known(cell.null_random) ? cell.value - cell.null_random : null),
  },
  shuffled: {
    label: "− shuffled",
    diverging: true,
    why: "Mean minus the mean with the keys shuffled",
    of: (cell) => (known(cell.value) && known(cell.null_shuffled) ? cell.value - cell.null_shuffled : null),
  },
};

const cellOf = (head, quantity) => head?.values?.[quantity] ?? {};
const valueOf = (head, quantity = state.quantity, view = state.view) => VIEWS[view].of(cellOf(head, quantity)) ?? null;
// whether any head has this number of any quantity
const anywhere = (key) => DATA.heads.some((head) => DATA.measured.some((name) => known(cellOf(head, name)[key])));
const quantityOf = (name) => DATA.quantities.find((q) => q.name === name) ?? { name };
const labelOf = (name) => quantityOf(name).label || name.replaceAll("_", " ");
const withUnit = (name) => (quantityOf(name).unit ? `${labelOf(name)} (${quantityOf(name).unit})` : labelOf(name));

function definitionOf(name) {
  const { equation, words } = quantityOf(name);
  return [capital(labelOf(name)), equation, words].filter(Boolean).join("\n");
}

const layerOf = (index) => DATA.layers.find((layer) => layer.index === index);
const headName = (head) => {
  const side = layerOf(head.layer)?.side;
  return `Layer ${head.layer}, head ${head.head}${side ? ` (${side})` : ""}`;
};
// as in the address of the page, where there is no room for words
const shortName = (head) => `L${head.layer}H${head.head}`;
const CLASSES = ["I", "II", "III", "IV"];
const CLASS_WORDS = {
  I: "very many keys",
  II: "many keys",
  III: "a medium number of keys",
  IV: "few keys",
};
const classOf = (head) => CLASSES.indexOf(head.hopfield_class) + 1;

// the record may name quantities without heads, and heads may have quantities without a name
function prepare(data) {
  DATA = data;
  DATA.heads.sort((a, b) => a.layer - b.layer || a.head - b.head);
  const named = DATA.quantities.map((quantity) => quantity.name);
  const measured = new Set(DATA.heads.flatMap((head) => Object.keys(head.values)));
  DATA.measured = [
    ...named.filter((name) => measured.has(name)),
    ...[...measured].filter((name) => !named.includes(name)),
  ];
  prepareSteps();
  DATA.rows = [...new Set([...DATA.layers.map((layer) => layer.index), ...DATA.heads.map((head) => head.layer)])];
  Object.assign(state, {
    quantity: DATA.measured.includes("entropy") ? "entropy" : DATA.measured[0],
    view: "mean",
    head: DATA.measured.length ? DATA.heads[0] : null,
    text: 0,
    statistic: "value",
    spectrum: "share",
    block: null,
    step: (DATA.series?.steps.length ?? 1) - 1,
  });
}
