// The data, what is chosen of it, and observers of a change.

let DATA = {};
const state = {};
const watchers = [];

const watch = (keys, act) => watchers.push({ keys, act });

function set(changes) {
  const changed = Object.keys(changes).filter((key) => state[key] !== changes[key]);
  Object.assign(state, changes);
  for (const { keys, act } of watchers) if (keys.some((key) => changed.includes(key))) act();
}

async function readData() {
  const letters = atob(find("data").textContent.trim());
  const bytes = new Uint8Array(letters.length);
  for (let i = 0; i < letters.length; i += 1) bytes[i] = letters.charCodeAt(i);
  return new Response(new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"))).json();
}

const names = () => [...new Set(DATA.rows.map((row) => row.name))];
const budgets = () => [...new Set(DATA.rows.map((row) => row.asked))];
const toneOf = (name) => `k${names().indexOf(name) % 10}`;
const markOf = (name) => MARKS[names().indexOf(name) % MARKS.length];
const rowAt = (index) => DATA.rows[index];
const percent = (value, digits = 3) => (known(value) ? `${show(100 * value, digits)} %` : "–");
const within = ([, low, high], form = (v) => show(v, 2)) => (known(low) && known(high) ? `${form(low)} to ${form(high)}` : "");

// one method at one budget is chosen for all sections but the first
function startChooser() {
  const pick = (name, asked) => {
    const index = DATA.rows.findIndex((row) => row.name === name && row.asked === Number(asked));
    if (index >= 0) set({ row: index });
  };
  const row = () => rowAt(state.row);
  const methods = selector("Method", "choose-method", names().map((name) => [name, name]), row().name, (name) => pick(name, row().asked));
  const keeps = selector("Keep", "choose-keep", budgets().map((keep) => [keep, percent(keep)]), row().asked, (keep) => pick(row().name, keep));
  const said = html("output", { "aria-live": "polite" });
  const draw = () => {
    methods.querySelector("select").value = row().name;
    keeps.querySelector("select").value = row().asked;
    const parts = [["KL", show(row().kl[0], 3)], ["same token", percent(row().agreement[0])], ["missed", percent(row().missed[0])]];
    if (known(row().retrieval[0])) parts.push(["found", percent(row().retrieval[0], 2)]);
    said.replaceChildren(...parts.flatMap(([label, value], i) => [i ? " · " : "", `${label} `, html("b", {}, value)]));
  };
  find("chooser").append(methods, keeps, said);
  watch(["row"], draw);
  draw();
}
